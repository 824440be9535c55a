"""A method's state in its own folder, beside the files of accelerate or the Trainer. Any number of ranks can read it.

Programs that save an optimizer expect state per parameter in fixed shapes. They gather it on one rank, or load all of
it onto the GPU, where it does not fit. On several ranks they see a placeholder instead, and the state is stored here.
"""

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slivertune.core.atomic import atomic_folder, explain_write_errors, is_partial, recover
from slivertune.core.layout import world_size
from slivertune.core.manifest import MANIFEST_NAME, write_manifest
from slivertune.core.saved_state import load_dictionary, refuse_damage
from slivertune.core.sliver import Sliver
from slivertune.parallel.accelerate_internals import prepared_optimizers
from slivertune.parallel.checkpoint.manifests import check_together, failing_together
from slivertune.parallel.consistency.heartbeat import check_agreement, gather_objects

_FILE = "state.pt"


class Sidecar:
    """Form of a method's state in its folder. A checkpoint has this folder under the method's name.

    This class stores the result of `Sliver.whole_state`, the same on every rank, in one file that rank 0 writes.

    Args:
        optimizer: Optimizer of a method whose state is not sharded.
    """

    def __init__(self, optimizer: Sliver) -> None:
        self._optimizer: Any = optimizer

    def check_target(self, folder: Path) -> None:
        """Check that replacing the folder would lose no files of others.

        Raises:
            FileExistsError: If the folder holds other files.
        """
        paths = folder.iterdir() if folder.is_dir() else ()
        others = [path.name for path in paths if path.name not in (_FILE, MANIFEST_NAME) and not is_partial(path)]
        if others:
            raise FileExistsError(
                f"{folder} holds {', '.join(sorted(others)[:3])}. Name a folder for {type(self._optimizer).__name__}'s "
                "state alone"
            )

    def write(self, folder: Path) -> None:
        """Write this rank's part. Every rank calls it, and this class writes the state on rank 0."""
        if world_size() == 1 or dist.get_rank() == 0:
            torch.save(self._optimizer.whole_state(), folder / _FILE)

    def read(self, folder: Path) -> None:
        """Continue from the state in a folder.

        Raises:
            ValueError: If the state is of another model, pretrained value or setting, or is damaged.
        """
        path = folder / _FILE
        if not path.is_file():
            raise ValueError(f"{path} is not there. Name a whole checkpoint that every rank can read")
        saved = load_dictionary(path)
        with refuse_damage(path):
            check_plain({key: value for key, value in saved.items() if key not in ("state", "param_groups")})
            check_by_name(saved["state"])
            self._optimizer.load_whole_state(saved)


def _hift_sidecar(hift: Any) -> Sidecar:
    from slivertune.parallel.checkpoint.hift_sidecar import HiFTSidecar

    return HiFTSidecar(hift)


_sidecars: dict[str, Callable[[Any], Sidecar]] = {"hift": _hift_sidecar}


def sidecar_of(optimizer: torch.optim.Optimizer) -> Sidecar:
    """Return the sidecar of a method.

    Args:
        optimizer: HiFT or SFT, or accelerate's wrapper of it.

    Raises:
        TypeError: If it is another optimizer.
    """
    inner = unwrapped(optimizer)
    return _sidecars.get(inner.method, Sidecar)(inner)


def register_sidecar(method: str, sidecar: Callable[[Any], Sidecar]) -> None:
    """Register a sidecar for another package's method whose state `Sidecar` itself can't store.

    Args:
        method: `Sliver.method`.
        sidecar: Function that makes the sidecar of an optimizer of that method.
    """
    _sidecars[method] = sidecar


def keep_sidecar(accelerator: Any, optimizer: Sliver) -> None:
    """Let `accelerator.save_state` and `load_state` save and load the sidecar folder.

    Args:
        accelerator: `accelerate.Accelerator`.
        optimizer: Writes the folder if several ranks need it. Otherwise its own file holds everything, and a folder of
            several ranks is still read. The accelerator's hooks don't keep it alive.
    """
    held = weakref.ref(optimizer)

    def before_saving(models: Any, weights: Any, output_dir: str) -> None:
        kept = held()
        if kept is not None and kept.uses_sidecar and (name := _folder_name(accelerator, kept)):
            save_state(kept, Path(output_dir) / name)

    def before_loading(models: Any, input_dir: str) -> None:
        kept = held()
        if kept is not None and (name := _folder_name(accelerator, kept)):
            folder = Path(input_dir) / name
            recover(folder)
            if folder.is_dir():
                read_state(kept, folder)

    accelerator.register_save_state_pre_hook(before_saving)
    accelerator.register_load_state_pre_hook(before_loading)


def _folder_name(accelerator: Any, optimizer: Sliver) -> str | None:
    """Name the folder of an optimizer: its method, with a number from the second optimizer of that method on.

    Args:
        accelerator: `accelerate.Accelerator`.
        optimizer: Optimizer prepared by the accelerator.

    Returns:
        The name; None if the accelerator has released the optimizer (`free_memory`).
    """
    prepared = [getattr(each, "optimizer", each) for each in prepared_optimizers(accelerator)]
    if not prepared:  # while one process reads a checkpoint of several ranks
        return optimizer.method
    alike = [each for each in prepared if isinstance(each, Sliver) and each.method == optimizer.method]
    if all(each is not optimizer for each in alike):
        return None
    place = alike.index(optimizer)
    return f"{optimizer.method}_{place}" if place else optimizer.method


def save_state(optimizer: torch.optim.Optimizer, folder: str | Path) -> None:
    """Write the state of HiFT or SFT. A collective: every rank passes the same folder, visible to all ranks.

    Args:
        optimizer: HiFT or SFT, or accelerate's wrapper of it.
        folder: The folder of the state; an older folder is replaced once the new one is complete.

    Raises:
        FileExistsError: If the folder holds other files, which would be lost (SFT).
        OSError: On every rank, if one could not write.
        ValueError: If the state holds objects that could not be loaded again.
        TypeError: If it is another optimizer.

    Example:
        >>> save_state(optimizer, "checkpoint/hift")
    """
    sidecar = sidecar_of(optimizer)
    sidecar.check_target(Path(folder))
    write_folder_together(Path(folder), sidecar.write)


def load_state(optimizer: torch.optim.Optimizer, folder: str | Path) -> None:
    """Continue from a folder of `save_state`, on any number of ranks. A collective: every rank calls it.

    Args:
        optimizer: HiFT or SFT, or accelerate's wrapper of it; built as in the run that saved.
        folder: The folder given to `save_state`, visible to every rank.

    Raises:
        ValueError: If the folder is incomplete, or the state is of another model, grouping, selection or optimizer.
        TypeError: If it is another optimizer.

    Example:
        >>> optimizer = HiFT(model, torch.optim.AdamW, lr=2e-5)
        >>> load_state(optimizer, "checkpoint/hift")
    """
    recover(Path(folder))
    check_together(folder)
    read_state(optimizer, folder)


def read_state(optimizer: torch.optim.Optimizer, folder: str | Path) -> None:
    """Continue as `load_state` does, from a folder in a checkpoint that was already checked."""
    sidecar_of(optimizer).read(Path(folder))
    check_agreement({"updates of the state that was loaded": unwrapped(optimizer).updates})


def unwrapped(optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer] = Sliver) -> Any:
    """Unwrap the optimizer from accelerate's wrapper.

    Args:
        optimizer: The optimizer before or after `slivertune.prepare`.
        kind: Required type.

    Raises:
        TypeError: If it is another optimizer.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(inner, kind):
        method = "HiFT's or SFT's" if kind is Sliver else f"{kind.__name__}'s"
        raise TypeError(f"the state of a {type(inner).__name__} is not {method}. Pass slivertune.prepare's result")
    return inner


def check_plain(value: Any) -> None:
    """Refuse tensors in place of plain values. Comparing them would fail or return tensors.

    Raises:
        TypeError: If there is a tensor.
    """
    if isinstance(value, torch.Tensor):
        raise TypeError("a tensor instead of a plain value")
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
        check_plain(each)


def check_by_name(value: Any) -> None:
    """Refuse a state that is no dictionary of dictionaries (weight, key).

    A tensor there raises errors of many types.

    Raises:
        TypeError: If it is something else.
    """
    for each in [value, *value.values()] if isinstance(value, dict) else [value]:
        if not isinstance(each, dict):
            raise TypeError(f"a {type(each).__name__} instead of a weight's values by name")


def write_folder_together(target: Path, write: Callable[[Path], None]) -> None:
    """Let every rank write into one folder, which gets its name and its manifest when all are done. A collective.

    Args:
        target: The folder; an older one is replaced.
        write: Function that every rank calls with the folder to write into.

    Raises:
        OSError: On every rank, if one failed; `target` is then unchanged. See `failing_together`.
    """
    is_first = world_size() == 1 or dist.get_rank() == 0
    partial: Path | None = None
    with ExitStack() as opened:
        with failing_together(target):
            if is_first:
                partial = opened.enter_context(atomic_folder(target))
        folder = next(each for each in gather_objects(partial, "saving a checkpoint") if each is not None)
        with failing_together(target), explain_write_errors(target):
            write(folder)
        # Inside the block: a folder without its manifest must not replace the older one.
        with failing_together(target), explain_write_errors(target):
            if is_first:
                write_manifest(folder)
        with failing_together(target):
            opened.close()
