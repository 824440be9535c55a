"""HiFT's state in a sidecar folder. Any number of ranks under DDP or FSDP2 can read it, and so can one process."""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from slivertune.core.layout import world_size
from slivertune.core.saved_state import StateMismatchError, check_loadable, is_count, load_dictionary, refuse_damage
from slivertune.hift import HiFT
from slivertune.hift.chunk import Weight
from slivertune.parallel.checkpoint.sidecar import Sidecar, check_by_name, check_plain
from slivertune.parallel.fsdp2.sharding import ShardedWeight

_HEADER = "header.pt"
_FIRST_ROWS = "first_rows"
"""Key in a file's metadata: the first row of each tensor within its weight, as JSON. It names all tensors. Files that
earlier versions have linked to those of `state="disk"` contain gaps beside the tensors."""


class HiFTSidecar(Sidecar):
    """Stores HiFT's state as one safetensors file per group and rank, and a header.

    Args:
        optimizer: HiFT on one process, under DDP (rank 0 writes everything), or under FSDP2 (every rank writes its
            rows).
    """

    def check_target(self, folder: Path) -> None:
        """Accept any folder: whatever it contains is replaced."""

    def write(self, folder: Path) -> None:
        """Write this rank's tensors, one group after another."""
        hift: HiFT = self._optimizer
        rank = dist.get_rank() if world_size() > 1 else 0
        is_sharded = any(isinstance(weight, ShardedWeight) for weight in hift.trained_weights)
        if rank and not is_sharded:
            return
        scalars: dict[str, dict[str, Any]] = {}
        for group, state in zip(hift.groups, hift.state_by_group(), strict=True):
            tensors, first_rows = {}, {}
            for weight in hift.weights_of(group.index):
                for key, value in state.get(weight.name, {}).items():
                    if not _has_rows(value) and key != "master":
                        continue
                    name = f"{weight.name}/{key}"
                    tensors[name] = value.detach().cpu().contiguous()
                    first_rows[name] = weight.first_row if isinstance(weight, ShardedWeight) else 0
            save_file(tensors, _file(folder, group.index, rank), {_FIRST_ROWS: json.dumps(first_rows)})
            for name, values in state.items():
                scalars[name] = {key: each for key, each in values.items() if not _has_rows(each) and key != "master"}
        if rank == 0:
            header = {**hift.state_header(scalars), "scalars": scalars, "num_ranks": world_size() if is_sharded else 1}
            torch.save(header, folder / _HEADER)
            check_loadable(folder / _HEADER)

    def read(self, folder: Path) -> None:
        """Continue from the state in a folder.

        Raises:
            ValueError: If the state is of another model, grouping or optimizer, or is damaged.
        """
        hift: HiFT = self._optimizer
        header = load_dictionary(folder / _HEADER)
        with refuse_damage(folder):
            check_plain({key: value for key, value in header["hift"].items() if key != "held_lr"})
            check_by_name(header["scalars"])
            scalars, num_ranks = header.pop("scalars"), header.pop("num_ranks")
            num_files = len(list(folder.glob("group-*.rank-*.safetensors")))
            if type(num_ranks) is not int or not 1 <= num_ranks <= max(1, num_files):
                raise StateMismatchError(
                    f"{folder / _HEADER} names {str(num_ranks)[:40]} ranks, and {num_files} files are there. Use "
                    "another checkpoint"
                )
            # This rank's part of all tensors, and all values without rows, by weight and key.
            state: dict[str, dict[str, Any]] = {name: dict(values) for name, values in scalars.items()}
            for group in hift.groups:
                files = [_file(folder, group.index, rank) for rank in range(num_ranks)]
                _read_group(files, {weight.name: weight for weight in hift.weights_of(group.index)}, state)
            for weight in hift.trained_weights:
                if isinstance(weight, ShardedWeight):
                    weight.follow()
            hift.load_whole_state({**header, "state": state})


def _file(folder: Path, group: int, rank: int) -> Path:
    return folder / f"group-{group:05d}.rank-{rank:05d}.safetensors"


def _read_group(files: Sequence[Path], weights: Mapping[str, Weight], state: dict[str, dict[str, Any]]) -> None:
    """Read this rank's rows of a group's tensors into `state`, by weight and key."""
    found: dict[str, dict[int, Any]] = {}
    with ExitStack() as opened:
        for path in files:
            if not path.is_file():
                raise StateMismatchError(f"{path} is not there. Name a whole folder that every rank can read")
            file = opened.enter_context(safe_open(path, "pt"))
            for name, first_row in _first_rows(path, file.metadata()).items():
                rows = file.get_slice(name)
                found.setdefault(name, {})[first_row] = rows if rows.get_shape() else file.get_tensor(name)
        for name, parts in found.items():
            weight_name, _, key = name.rpartition("/")
            if weight_name not in weights:
                raise StateMismatchError(
                    f"the saved state has {weight_name}, which this model does not train in that group. Build the "
                    "model and HiFT as the saved run did"
                )
            state.setdefault(weight_name, {})[key] = _rows(name, parts, weights[weight_name])


def _first_rows(path: Path, metadata: Mapping[str, str] | None) -> dict[str, int]:
    """Read the first row of each tensor of a file from its metadata."""
    try:
        rows = json.loads((metadata or {}).get(_FIRST_ROWS, ""))
    except (ValueError, RecursionError):  # a number of 5,000 digits raises ValueError, too
        rows = None
    if not isinstance(rows, dict) or not all(map(is_count, rows.values())):
        raise StateMismatchError(
            f"{path} does not name the first row of each of its tensors ({_FIRST_ROWS}): it is damaged or was not "
            "written by slivertune. Use another checkpoint"
        )
    return rows


def _rows(name: str, parts: Mapping[int, Any], weight: Weight) -> torch.Tensor:
    """Concatenate the rows of a tensor that this rank stores of a weight."""
    if isinstance(parts[0], torch.Tensor):
        return parts[0]
    if isinstance(weight, ShardedWeight):
        start, stop = weight.first_row, weight.first_row + weight.parameter.shape[0]
    else:
        start, stop = 0, max(first + part.get_shape()[0] for first, part in parts.items())
    if start == 0 and parts[0].get_shape()[0] == stop:
        return _lying_as(parts[0][:], weight)  # read on first use
    pieces, reached = [parts[0][:0]], start
    for first, part in sorted(parts.items()):
        last = first + part.get_shape()[0]
        if first <= reached < min(stop, last):
            pieces.append(part[reached - first : min(stop, last) - first])
            reached = min(stop, last)
    if reached < stop:
        raise StateMismatchError(
            f"the saved state of {name} ends at row {reached}, and this weight at row {stop}. Build the model as the "
            "saved run did, or use another checkpoint"
        )
    return _lying_as(torch.cat(pieces), weight)


def _lying_as(rows: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Restore the memory layout: the order in memory decides the last bits of vectorized loops."""
    if rows.shape == weight.parameter.shape and not weight.parameter.is_contiguous():
        return torch.empty_like(weight.parameter, dtype=rows.dtype, device="cpu").copy_(rows)
    return rows


def _has_rows(value: Any) -> bool:
    # A tensor subclass (torchao's) goes into the header, because it can't be cut by rows.
    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.dim() > 0
