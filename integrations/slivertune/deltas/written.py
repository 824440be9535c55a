"""Compares a written checkpoint with its base, tensor by tensor from the files, a piece of a tensor at a time."""

from collections.abc import Mapping

import torch

from slivertune.deltas.additions import add_rounded
from slivertune.deltas.delta import SparseDelta
from slivertune.deltas.plain_checkpoint import PlainCheckpoint, StoredTensor

_AGAIN = "nothing was kept; check the disk, and merge again"


def check_written(base: PlainCheckpoint, written: PlainCheckpoint, deltas: Mapping[str, SparseDelta]) -> None:
    """Check that each tensor is the base's plus its delta, added in fp32 and rounded once. Costs one read of both.

    Args:
        base: What deltas were added to.
        written: The result, read anew from its files.
        deltas: What was added to each tensor, by name. All other tensors must have the base's bits.

    Raises:
        ValueError: Naming the first tensor that is another.
    """
    if strange := sorted(base.tensors.keys() ^ written.tensors.keys()):
        raise ValueError(f"{strange[0]!r} is in the base or in what was written alone; {_AGAIN}")
    for name, tensor in base.tensors.items():
        if not is_sum(tensor, written.tensors[name], deltas.get(name)):
            raise ValueError(f"{name!r} was not written as the base's plus its delta; {_AGAIN}")


def is_sum(base: StoredTensor, written: StoredTensor, delta: SparseDelta | None = None) -> bool:
    """Compare a tensor with the base's and its delta: dtype, shape and all bits.

    Args:
        base: The base's.
        written: The result's.
        delta: What was added; None if nothing was.
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
            # In place: the bytes become those that are expected.
            values[at] = add_rounded(base.name, values[at], delta.values[part])
            begin += len(values)
        if before != after:
            return False
    return True
