"""A rank's file in a checkpoint of HiFT on DeepSpeed: its name, and the checks of its content before any use.

A manifest shows damage, but a file that matches its manifest may still have another origin, and its values become
sizes, slices and attributes. So the whole form is checked first, and errors name the part that is wrong.
"""

from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch

from slivertune.core.saved_state import StateMismatchError, describe_damage, is_count, load_dictionary
from slivertune.core.saved_values import check_hyperparameters, fits_sign, is_finite, is_rate, is_step
from slivertune.hift import HiFT
from slivertune.hift.checkpoint import check_accepted
from slivertune.parallel.checkpoint.sidecar import check_plain

PARAM_GROUP = "slivertune_param_group"
"""Key, in a param group of a ZeRO optimizer, of the index of HiFT's param group that holds its hyperparameters."""

VERSION = 3
"""Version of the saved form."""


def file_name(rank: int, num_ranks: int) -> str:
    """Name a rank's file in the folder of a checkpoint."""
    return f"slivertune_hift_rank_{rank}_of_{num_ranks}.pt"


def saved_ranks(folder: Path) -> int | None:
    """Count the ranks that have saved a checkpoint of HiFT on DeepSpeed. Return None if it is no such checkpoint."""
    counts = [path.stem.rpartition("_")[2] for path in folder.glob("slivertune_hift_rank_*_of_*.pt")]
    return max((int(each) for each in counts if each.isdecimal()), default=None)


def read_rank_file(folder: Path, rank: int, num_ranks: int, *, mmap: bool = False) -> dict[str, Any]:
    """Read a rank's file.

    Args:
        folder: Folder of the checkpoint.
        rank: The rank that wrote it.
        num_ranks: Number of ranks that saved.
        mmap: Whether tensors are read only on use.

    Raises:
        ValueError: If the file is missing, of another version, or of another content.
    """
    path = folder / file_name(rank, num_ranks)
    if not path.is_file():
        raise ValueError(f"{path} is not there: the checkpoint is damaged. Use another checkpoint")
    saved = load_dictionary(path, mmap=mmap)
    version = saved.get("version")
    if type(version) is not int or version != VERSION:
        raise ValueError(
            f"{path} has version {version!r}, and this library reads {VERSION}. Resume with the version that wrote it"
        )
    try:
        for key, check in _PARTS.items():
            check(saved[key], key)
        _check_groups(saved)
    except (KeyError, TypeError) as error:
        raise ValueError(
            describe_damage(path, f"it has no {error}" if isinstance(error, KeyError) else str(error))
        ) from error
    return saved


def check_fits(path: Path, saved: Mapping[str, Any], optimizer: HiFT) -> None:
    """Check the hyperparameters in a rank's file by those of the optimizer that is to load them.

    Args:
        path: The file.
        saved: Its content.
        optimizer: HiFT over the model and the groups of the saved run.

    Raises:
        ValueError: If one is of another kind, or the base optimizer does not take it.
    """
    outer = optimizer.param_groups
    given = [("param_groups", saved["param_groups"], outer)]
    try:
        for name, adapted in saved["own"].items():
            inner = saved["groups"].get(name, saved["active"])["optimizer"]["param_groups"]
            indices = [each[PARAM_GROUP] for each in inner]
            is_known = all(is_count(index) and index < len(outer) for index in indices)
            _require(is_known, f"groups[{name!r}]['optimizer']['param_groups']", f"list for {len(outer)} param groups")
            own = [outer[index] for index in indices]
            given += [(f"groups[{name!r}]['optimizer']['param_groups']", inner, own), (f"own[{name!r}]", adapted, own)]
        for what, theirs, ours in given:
            _require(len(theirs) == len(ours), what, f"list of {len(ours)} param groups")
            check_hyperparameters(theirs, ours)
            check_accepted(theirs, ours, optimizer.base)
    except StateMismatchError as error:
        raise ValueError(f"{path}: {error}") from error
    except (KeyError, TypeError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(describe_damage(path, reason)) from error


_Check = Callable[[Any, str], None]


def _require(holds: bool, what: str, is_what: str) -> None:
    if not holds:
        raise TypeError(f"{what} is no {is_what}")


def _count(value: Any, what: str) -> None:
    _require(is_count(value), what, "count")


def _number(value: Any, what: str) -> None:
    _require(type(value) in (bool, int, float), what, "number")
    _require(is_finite(value), what, "finite number")


def _rate(value: Any, what: str) -> None:
    _require(is_rate(value), what, "learning rate")


def _scale(value: Any, what: str) -> None:
    """Check one number of the loss scaler. Gradients are divided by a scale, and scales by the factor."""
    _number(value, what)
    _require(value > 0 or not what.endswith(("['cur_scale']", "['scale_factor']")), what, "positive number")


def _mapping(value: Any, what: str) -> None:
    _require(isinstance(value, Mapping) and all(type(key) is str for key in value), what, "mapping by name")


def _hyperparameters(value: Any, what: str) -> None:
    _mapping(value, what)
    for key in value.keys() & {"lr", "initial_lr"}:
        _rate(value[key], f"{what}[{key!r}]")


def _plain(value: Any, what: str) -> None:
    _mapping(value, what)
    check_plain(value)


def _list_of(check: _Check) -> _Check:
    def check_all(value: Any, what: str) -> None:
        _require(isinstance(value, (list, tuple)), what, "list")
        for index, each in enumerate(value):
            check(each, f"{what}[{index}]")

    return check_all


def _by_name(check: _Check) -> _Check:
    def check_all(value: Any, what: str) -> None:
        _mapping(value, what)
        for key, each in value.items():
            check(each, f"{what}[{key!r}]")

    return check_all


def _counts_by_index(value: Any, what: str) -> None:
    _require(all(is_count(count) for _, count in _indexed(value, what)), what, "mapping of counts")


def _piece(value: Any, what: str) -> None:
    is_one = isinstance(value, (list, tuple)) and len(value) == 4 and type(value[0]) is str
    _require(is_one and all(map(is_count, value[1:])), what, "piece of a parameter")


def _master(value: Any, what: str) -> None:
    is_master = isinstance(value, torch.Tensor) and value.dim() == 1 and value.dtype == torch.float32
    _require(is_master, what, "fp32 master")
    _require(is_finite(value), what, "master without NaN and infinity")


def _group(value: Any, what: str) -> None:
    _mapping(value, what)
    _list_of(_master)(value["masters"], f"{what}['masters']")
    optimizer, name = value["optimizer"], f"{what}['optimizer']"
    _mapping(optimizer, name)
    _list_of(_hyperparameters)(optimizer["param_groups"], f"{name}['param_groups']")
    for index, values in _indexed(optimizer["state"], f"{name}['state']"):
        where = f"{name}['state'][{index}]"
        _mapping(values, where)
        for key, each in values.items():
            is_number = is_step(each) if key == "step" else is_finite(each)
            _require(is_number, f"{where}[{key!r}]", "finite state")
            _require(_is_real(each) and fits_sign(key, each), f"{where}[{key!r}]", "state of its kind")


def _is_real(value: Any) -> bool:
    """Return whether a value, if it is a tensor with elements, has real numbers or codes of a byte each."""
    has_elements = isinstance(value, torch.Tensor) and value.dim() > 0
    return not has_elements or value.is_floating_point() or value.dtype in (torch.uint8, torch.int8)


def _indexed(value: Any, what: str) -> Any:
    _require(isinstance(value, Mapping) and all(map(is_count, value)), what, "mapping by index")
    return value.items()


_OF_BLOCKS = ("absmax", "qmap")
"""Beginnings of the names of 8-bit state that has a value per block or code."""

_PARTS: dict[str, _Check] = {
    "identity": _plain,
    "updates": _count,
    "held_lr": _list_of(_rate),
    "skipped_turns": _counts_by_index,
    "skipped_in_cycle": _counts_by_index,
    "param_groups": _list_of(_hyperparameters),
    "groups": _by_name(_group),
    "active": _group,
    "pieces": _by_name(_list_of(_list_of(_piece))),
    "shapes": _by_name(_by_name(_list_of(_count))),
    "scaler": _by_name(_scale),
    "own": _by_name(_list_of(_hyperparameters)),
}


def _check_groups(saved: Mapping[str, Any]) -> None:
    """Check that all parts have the same groups, and that fragments are inside parameters and masters."""
    names = [str(index) for index in range(len(saved["pieces"]))]
    for key in ("pieces", "shapes", "own"):
        _require(sorted(saved[key]) == sorted(names), key, f"mapping of {len(names)} groups")
    are_all_but_one = set(saved["groups"]) < set(names) and len(saved["groups"]) == len(names) - 1
    _require(are_all_but_one, "groups", "mapping of all groups but the active one")
    for name in names:
        exported, what = saved["groups"].get(name, saved["active"]), f"pieces[{name!r}]"
        masters, sizes = exported["masters"], saved["shapes"][name]
        _require(len(saved["pieces"][name]) == len(masters), what, "list for each master")
        for pieces, master in zip(saved["pieces"][name], masters, strict=True):
            for parameter, first, offset, length in pieces:
                is_within = parameter in sizes and first + length <= prod(sizes[parameter])
                _require(is_within and offset + length <= master.numel(), what, f"list of pieces within {parameter!r}")
        for index, values in exported["optimizer"]["state"].items():
            _require(index < len(masters), f"the state of group {name}", f"state of {len(masters)} masters")
            for key, value in values.items():
                has_elements = isinstance(value, torch.Tensor) and value.dim() and not key.startswith(_OF_BLOCKS)
                is_whole = not has_elements or value.shape == masters[index].shape
                _require(is_whole, f"{key!r} of group {name}", f"state of {masters[index].numel()} elements")
