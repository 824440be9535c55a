"""Comparison of a written checkpoint with its base, tensor by tensor, in chunks read from the files."""

from collections.abc import Mapping

import torch

from slivertune.deltas.additions import add_rounded
from slivertune.deltas.delta import SparseDelta
from slivertune.deltas.plain_checkpoint import PlainCheckpoint, StoredTensor

_AGAIN = "Nothing was saved. Check the disk, and merge again"


def check_written(base: PlainCheckpoint, written: PlainCheckpoint, deltas: Mapping[str, SparseDelta]) -> None:
    """Check that each tensor is the base's plus its delta, added in fp32 and rounded once. Costs one read of both.

    Args:
        base: The checkpoint that deltas were added to.
        written: The result, read again from its files.
        deltas: Sum of the deltas of each tensor, by name. All other tensors must have the base's bits.

    Raises:
        ValueError: If a tensor differs; names the first one.
    """
    if strange := sorted(base.tensors.keys() ^ written.tensors.keys()):
        raise ValueError(f"{strange[0]!r} is only in the base or only in the written files. {_AGAIN}")
    for name, tensor in base.tensors.items():
        if not is_sum(tensor, written.tensors[name], deltas.get(name)):
            raise ValueError(f"{name!r} was not written as the base's plus its delta. {_AGAIN}")


def is_sum(base: StoredTensor, written: StoredTensor, delta: SparseDelta | None = None) -> bool:
    """Return whether a tensor equals the base's plus its delta: dtype, shape and all bits.

    Args:
        base: Tensor of the base.
        written: Tensor of the result.
        delta: Delta that was added; None if there is none.
    """
    if (base.dtype, base.shape, base.num_bytes) != (written.dtype, written.shape, written.num_bytes):
        return False
    begin = 0
    for before, after in zip(base.pieces(), written.pieces(), strict=True):
        if delta is not None:
            values = torch.frombuffer(before, dtype=base.dtype)
            bounds = torch.tensor([begin, begin + len(values)], dtype=torch.int32, device="cpu")
            part = slice(*torch.searchsorted(delta.indices, bounds).tolist())
            at = delta.indices[part].long() - begin
            # In place: the bytes become the expected ones.
            values[at] = add_rounded(base.name, values[at], delta.values[part])
            begin += len(values)
        if before != after:
            return False
    return True
