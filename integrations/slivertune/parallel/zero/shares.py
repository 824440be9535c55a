"""Shares: a rank's part of a ZeRO optimizer, recorded by the elements of each parameter, so that others can read it.

ZeRO-1 and 2 concatenate a param group's parameters and split the result; ZeRO-3 splits each parameter. Both split flat
tensors, so fragments of flattened parameters describe a share, and all saved shares together give any other split.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from slivertune.core.manifest import check_whole
from slivertune.hift import HiFT
from slivertune.hift.checkpoint import check_identity
from slivertune.parallel.checkpoint.sidecar import unwrapped
from slivertune.parallel.zero.rank_file import file_name, read_rank_file, saved_ranks


class ShareFragment(NamedTuple):
    """A contiguous run of elements of one parameter in a rank's share."""

    name: str
    """Name of the parameter."""
    first: int
    """Index of its first element in the flattened parameter."""
    offset: int
    """Index of its first element in the share."""
    length: int


def pieces_of(optimizer: Any, stage: int, names: Mapping[int, str]) -> list[list[ShareFragment]]:
    """List the fragments of this rank's masters, one list per master. No fragment holds padding.

    Args:
        optimizer: DeepSpeed's ZeRO optimizer.
        stage: Stage of ZeRO: 1, 2 or 3.
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
    return [
        [
            ShareFragment(names[id(parameter)], first, offset, count)
            for parameter, first, offset, count, _ in _shards_of(parameters)
            if count
        ]
        for parameters in optimizer.fp16_groups
    ]


def _shards_of(parameters: Iterable[Any]) -> Iterator[tuple[Any, int, int, int, int]]:
    """Yield each parameter, its first element here, its offset in the share, and its size without and with padding."""
    offset = 0
    for parameter in parameters:
        size = int(parameter.partition_numel())
        first = size * dist.get_rank(parameter.ds_process_group)
        yield parameter, first, offset, max(0, min(size, int(parameter.ds_numel) - first)), size
        offset += size


def clear_padding(optimizer: Any) -> None:
    """Set the padding of stage 3's weights and masters to zero, which DeepSpeed leaves uninitialized.

    It would be saved with the masters, and read by base optimizers that take a norm of their weights.

    Args:
        optimizer: DeepSpeed's ZeRO optimizer of stage 3; changed in place.
    """
    flats = optimizer.fp16_partitioned_groups_flat, optimizer.fp32_partitioned_groups_flat
    for parameters, *shares in zip(optimizer.fp16_groups, *flats, strict=True):
        for _, _, offset, count, size in _shards_of(parameters):
            for share in shares:
                share.data[offset + count : offset + size].zero_()


class SavedShares:
    """All ranks' files of a checkpoint. Tensors are read on use.

    Args:
        folder: Folder of the checkpoint.
        num_ranks: Number of ranks that saved.

    Raises:
        ValueError: If a file is missing or can't be read, or files are of different checkpoints.
    """

    def __init__(self, folder: Path, num_ranks: int) -> None:
        self._files = [read_rank_file(folder, rank, num_ranks, mmap=True) for rank in range(num_ranks)]
        self.first = self._files[0]
        """Rank 0's file, for all values that ranks have in common."""
        if any(saved["shapes"] != self.first["shapes"] for saved in self._files):
            raise ValueError(f"{folder} has files of different models. Use another checkpoint")
        for group, sizes in self.first["shapes"].items():
            runs: dict[str, list[tuple[int, int]]] = {name: [] for name in sizes}
            for saved in self._files:
                for name, first, _, length in chain.from_iterable(saved["pieces"][group]):
                    runs[name].append((first, length))
            for name, shape in sizes.items():
                reached = 0
                for first, length in sorted(runs[name]):
                    if first != reached:
                        break
                    reached += length
                if reached != prod(shape):
                    raise ValueError(f"{folder} does not hold each element of {name} once. Use another checkpoint")

    def fill(self, group: int, own: Sequence[ShareFragment], master: torch.Tensor) -> dict[str, Any]:
        """Assemble a share.

        Args:
            group: Index of the group.
            own: Fragments of the share.
            master: fp32 on the host, shape (n,); the fragments are written into it, padding stays.

        Returns:
            The share's optimizer state: tensors of shape (n,), and values without elements; empty if the group was
            never stepped.

        Raises:
            ValueError: If the files lack elements of a fragment, or disagree about the form of a state.
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
                        begin = max(piece.first, theirs.first)
                        end = min(piece.first + piece.length, theirs.first + theirs.length)
                        if piece.name != theirs.name or begin >= end:
                            continue
                        to = slice(piece.offset + begin - piece.first, piece.offset + end - piece.first)
                        out = slice(theirs.offset + begin - theirs.first, theirs.offset + end - theirs.first)
                        master[to] = masters[index][out]
                        _copy_state(state, kept, masters[index].shape, master.shape, to, out)
                        reached[piece] += end - begin
        for piece, count in reached.items():
            if count != piece.length:
                raise ValueError(
                    f"{piece.length - count} elements of {piece.name} are in no rank's file. Build the model as the "
                    "saved run did, or use another checkpoint"
                )
        return state

    def whole(self, group: int, name: str, shape: Sequence[int]) -> tuple[torch.Tensor, dict[str, Any]]:
        """Assemble a parameter's fp32 weight and its state. See `fill`.

        Args:
            group: Index of the parameter's group.
            name: Name of the parameter.
            shape: Shape of the parameter.
        """
        master = torch.empty(shape, dtype=torch.float32, device="cpu")
        return master, self.fill(group, [ShareFragment(name, 0, 0, master.numel())], master.view(-1))


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
            raise ValueError(f"the ranks' files hold {key!r} of one group in different forms. Use another checkpoint")
        if has_elements:
            if key not in state:
                state[key] = torch.zeros(shape, dtype=value.dtype, device="cpu")
            state[key][to] = value[out]
        else:
            state[key] = value.clone() if isinstance(value, torch.Tensor) else value


def open_shares(folder: Path) -> SavedShares:
    """Open all ranks' files of an unchecked checkpoint.

    Args:
        folder: Folder of the checkpoint.

    Raises:
        ValueError: If the folder is incomplete, or was not saved by HiFT on DeepSpeed.
    """
    check_whole(folder)
    num_ranks = saved_ranks(folder)
    if num_ranks is None:
        raise ValueError(
            f"{folder} has no {file_name(0, 1)} or the like: it was not saved by HiFT on DeepSpeed. Name another"
        )
    return SavedShares(folder, num_ranks)


def fp32_weights(folder: str | Path) -> dict[str, torch.Tensor]:
    """Read the exact fp32 weights of all HiFT groups from a checkpoint of ZeRO-1, 2 or 3, in one process.

    DeepSpeed's `zero_to_fp32` finds only the active group's masters. The result leaves out parameters that HiFT does
    not train. Reads none of DeepSpeed's files.

    Args:
        folder: Folder of the ranks' files: `SAVE_DIR/global_step12`, or `pytorch_model` in a checkpoint of accelerate.

    Returns:
        fp32 tensors on the host, by the parameters' names.

    Raises:
        ValueError: If the folder is incomplete, or was not saved by HiFT on DeepSpeed.

    Example:
        >>> model.load_state_dict(fp32_weights("out/checkpoint-500/global_step500"), strict=False)
    """
    shares = open_shares(Path(folder))
    return {
        name: shares.whole(int(group), name, shape)[0]
        for group, shapes in shares.first["shapes"].items()
        for name, shape in shapes.items()
    }


def load_zero(optimizer: torch.optim.Optimizer, folder: str | Path) -> None:
    """Continue in one process from a checkpoint of HiFT under ZeRO-1, 2 or 3: weights, masters, state, turn.

    Schedules and weights that HiFT does not train stay unchanged. Reads none of DeepSpeed's files.

    Args:
        optimizer: HiFT, or accelerate's wrapper of it, on one process; built with the settings of the saved run.
        folder: Folder of the ranks' files: `SAVE_DIR/global_step12`, or `pytorch_model` in a checkpoint of accelerate.

    Raises:
        ValueError: If the folder is incomplete, or is of another run.

    Example:
        >>> load_zero(optimizer, "out/checkpoint-500/global_step500")
    """
    hift: HiFT = unwrapped(optimizer, HiFT)
    folder = Path(folder)
    shares = open_shares(folder)
    saved = shares.first
    check_identity(folder, saved["identity"], identity(hift))
    changed = [index for index, groups in saved["own"].items() if any(groups)]
    if changed:
        raise ValueError(
            f"the base optimizer of group {changed[0]} has changed its own hyperparameters, and only DeepSpeed's "
            "layouts load these. Resume there"
        )
    now = hift.whole_state()
    weights: dict[str, torch.Tensor] = {}
    states: dict[str, dict[str, Any]] = {}
    for group in hift.groups:
        for weight in hift.weights_of(group.index):
            master, state = shares.whole(group.index, weight.name, weight.parameter.shape)
            weights[weight.name] = master
            if state:
                for key, value in state.items():
                    if isinstance(value, torch.Tensor) and value.shape == (master.numel(),):
                        state[key] = value.view(master.shape)
                own = {"master": master.clone()} if weight.parameter.dtype != torch.float32 else {}
                states[weight.name] = {**own, **state}
    for mine, theirs in zip(now["param_groups"], saved["param_groups"], strict=True):
        mine.update(theirs)
    header = {**now["hift"], "updates": saved["updates"], "held_lr": saved["held_lr"], "weights": list(states)}
    hift.load_whole_state({**now, "hift": header, "state": states, "own": {}})
    with torch.no_grad():
        for weight in hift.trained_weights:
            weight.parameter.copy_(weights[weight.name])


def identity(optimizer: HiFT) -> dict[str, object]:
    """Collect the facts that a checkpoint of any stage shares with every HiFT that it fits."""
    return {**optimizer.identity(), "number of param groups": len(optimizer.param_groups)}
