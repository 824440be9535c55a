"""Which elements of which parameters a rank's share of a ZeRO optimizer holds, and reading shares by other ranks.

ZeRO-1 and 2 lay a param group's parameters end to end and cut that; ZeRO-3 cuts each parameter. What is cut is flat, so
a share is told by pieces of flattened parameters, and any other cut can be put together from all saved shares.
"""

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from slivertune.core.manifest import check_whole
from slivertune.parallel.zero.rank_file import file_name, read_rank_file, saved_ranks


class ShareFragment(NamedTuple):
    """A run of elements of one parameter in a rank's share."""

    name: str
    """The parameter's."""
    first: int
    """Where it begins in the flattened parameter."""
    offset: int
    """Where it begins in the share."""
    length: int


def pieces_of(optimizer: Any, stage: int, names: Mapping[int, str]) -> list[list[ShareFragment]]:
    """What this rank's masters hold, one list a master; padding is in none.

    Args:
        optimizer: DeepSpeed's ZeRO optimizer.
        stage: 1, 2 or 3.
        names: The parameters' names by their `id`.
    """
    return _pieces_of_each(optimizer, names) if stage == 3 else _pieces_end_to_end(optimizer, names)


def _pieces_end_to_end(optimizer: Any, names: Mapping[int, str]) -> list[list[ShareFragment]]:
    found = []
    for index, parameters in enumerate(optimizer.round_robin_bit16_groups):
        size = int(optimizer.partition_size[index])
        left = size * dist.get_rank(optimizer.real_dp_process_group[index])
        pieces = []
        for parameter, offset in zip(parameters, optimizer.round_robin_bit16_offsets[index], strict=True):
            start, stop = max(offset, left), min(offset + parameter.numel(), left + size)
            if start < stop:
                pieces.append(ShareFragment(names[id(parameter)], start - offset, start - left, stop - start))
        found.append(pieces)
    return found


def _pieces_of_each(optimizer: Any, names: Mapping[int, str]) -> list[list[ShareFragment]]:
    found = []
    for parameters in optimizer.fp16_groups:
        pieces, offset = [], 0
        for parameter in parameters:
            size = int(parameter.partition_numel())
            first = size * dist.get_rank(parameter.ds_process_group)
            count = min(size, int(parameter.ds_numel) - first)
            if count > 0:
                pieces.append(ShareFragment(names[id(parameter)], first, offset, count))
            offset += size
        found.append(pieces)
    return found


class SavedShares:
    """All ranks' files of a checkpoint; tensors are read when they are needed.

    Args:
        folder: The checkpoint's.
        num_ranks: That saved.

    Raises:
        ValueError: If a file is missing or can't be read, or files are of different checkpoints.
    """

    def __init__(self, folder: Path, num_ranks: int) -> None:
        self._files = [read_rank_file(folder, rank, num_ranks, mmap=True) for rank in range(num_ranks)]
        self._check_cover(folder)

    def _check_cover(self, folder: Path) -> None:
        """Every element of every parameter is in one file, once."""
        shapes = self.first["shapes"]
        if any(saved["shapes"] != shapes for saved in self._files):
            raise ValueError(f"{folder} has files of different models; use another checkpoint")
        for group, sizes in shapes.items():
            runs: dict[str, list[tuple[int, int]]] = {name: [] for name in sizes}
            for name, first, _, length in (
                each for saved in self._files for pieces in saved["pieces"][group] for each in pieces
            ):
                runs[name].append((first, first + length))
            for name, shape in sizes.items():
                reached = 0
                for first, last in sorted(runs[name]):
                    if first != reached:
                        break
                    reached = last
                if reached != prod(shape):
                    raise ValueError(f"{folder} does not hold all of {name}, once; use another checkpoint")

    @property
    def first(self) -> dict[str, Any]:
        """Rank 0's file, for what all ranks have in common."""
        return self._files[0]

    def fill(self, group: int, own: Sequence[ShareFragment], master: torch.Tensor) -> dict[str, Any]:
        """Put a share together.

        Args:
            group: Index of the group.
            own: What the share holds.
            master: On the host, fp32, shape (n,); the pieces are written into it, padding stays.

        Returns:
            The optimizer's state that belongs to it: tensors of shape (n,), and what has no elements; nothing where
            the group was never stepped.

        Raises:
            ValueError: If a piece is of no parameter in the files, or of another size, or files disagree.
        """
        state: dict[str, Any] = {}
        reached = dict.fromkeys(own, 0)
        for saved in self._files:
            exported = saved["groups"].get(str(group), saved["active"])
            masters = exported["masters"]
            for index, pieces in enumerate(saved["pieces"][str(group)]):
                kept = exported["optimizer"]["state"].get(index, {})
                for theirs in (ShareFragment(*each) for each in pieces):
                    for piece in own:
                        begin, end = _overlap(piece, theirs)
                        if begin >= end:
                            continue
                        to = slice(piece.offset + begin - piece.first, piece.offset + end - piece.first)
                        out = slice(theirs.offset + begin - theirs.first, theirs.offset + end - theirs.first)
                        master[to] = masters[index][out]
                        _copy_state(state, kept, masters[index].shape, master.shape, to, out)
                        reached[piece] += end - begin
        for piece, count in reached.items():
            if count != piece.length:
                raise ValueError(
                    f"{piece.length - count} elements of {piece.name} are in no rank's file; build the model as the "
                    "saved run did, or use another checkpoint"
                )
        return state


def _overlap(one: ShareFragment, other: ShareFragment) -> tuple[int, int]:
    if one.name != other.name:
        return 0, 0
    return max(one.first, other.first), min(one.first + one.length, other.first + other.length)


def _copy_state(
    state: dict[str, Any],
    kept: Mapping[str, Any],
    kept_shape: torch.Size,
    shape: torch.Size,
    to: slice,
    out: slice,
) -> None:
    for key, value in kept.items():
        has_elements = isinstance(value, torch.Tensor) and value.shape == kept_shape
        if key in state and has_elements != (isinstance(state[key], torch.Tensor) and state[key].shape == shape):
            raise ValueError(f"the ranks' files hold {key!r} of one group in different forms; use another checkpoint")
        if has_elements:
            if key not in state:
                state[key] = torch.zeros(shape, dtype=value.dtype)
            state[key][to] = value[out]
        else:
            state[key] = value.clone() if isinstance(value, torch.Tensor) else value


def open_shares(folder: Path) -> SavedShares:
    """All ranks' files of a checkpoint that nothing has read yet.

    Args:
        folder: The checkpoint's.

    Raises:
        ValueError: If the folder is not whole, or was not saved by HiFT on DeepSpeed.
    """
    check_whole(folder)
    num_ranks = saved_ranks(folder)
    if num_ranks is None:
        raise ValueError(f"{folder} has no {file_name(0, 1)} or the like: it was not saved by HiFT on DeepSpeed")
    return SavedShares(folder, num_ranks)


def fp32_weights(folder: str | Path) -> dict[str, torch.Tensor]:
    """The exact fp32 weights of all groups of HiFT, out of a checkpoint of ZeRO-1, 2 or 3, in one process.

    DeepSpeed's `zero_to_fp32` finds the masters of the active group alone. Parameters that HiFT does not train are not
    in the result. Reads no file of DeepSpeed's.

    Args:
        folder: With the ranks' files: `SAVE_DIR/global_step12`, or `pytorch_model` in what accelerate has saved.

    Returns:
        fp32 tensors on the host, by the parameters' names.

    Raises:
        ValueError: If the folder is not whole, or was not saved by HiFT on DeepSpeed.

    Example:
        >>> model.load_state_dict(fp32_weights("out/checkpoint-500/global_step500"), strict=False)
    """
    shares = open_shares(Path(folder))
    found = {}
    for group, shapes in shares.first["shapes"].items():
        for name, shape in shapes.items():
            whole = torch.empty(shape, dtype=torch.float32)
            shares.fill(int(group), [ShareFragment(name, 0, 0, whole.numel())], whole.view(-1))
            found[name] = whole
    return found
