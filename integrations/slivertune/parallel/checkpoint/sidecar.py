"""A method's state in a folder of its own, beside what accelerate or the Trainer write; any number of ranks read it.

Programs that save an optimizer know states by parameter and of fixed shapes, gather them on one rank, or load all of
them onto the GPU, where they have no room. So several ranks show them a placeholder, and keep the state here.
"""

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slivertune.core.atomic import atomic_folder, explain_write_errors, is_partial, recover
from slivertune.core.manifest import MANIFEST_NAME, write_manifest
from slivertune.core.saved_state import load_dictionary, refuse_damage
from slivertune.core.sliver import Sliver
from slivertune.parallel.accelerate_internals import prepared_optimizers
from slivertune.parallel.checkpoint.manifests import check_together, failing_together
from slivertune.parallel.consistency.heartbeat import check_agreement, gather_objects, world_size

_FILE = "state.pt"


class Sidecar:
    """How the state of a method lies in its folder, which has the method's name inside a checkpoint.

    This one: what `Sliver.whole_state` returns, the same on every rank, in a file that rank 0 writes.

    Args:
        optimizer: Of a method whose state is not shared out.
    """

    def __init__(self, optimizer: Sliver) -> None:
        self._optimizer: Any = optimizer

    def check_target(self, folder: Path) -> None:
        """Check that nothing of others' would be lost if the folder were replaced.

        Raises:
            FileExistsError: If the folder holds other things.
        """
        paths = folder.iterdir() if folder.is_dir() else ()
        others = [path.name for path in paths if path.name not in (_FILE, MANIFEST_NAME) and not is_partial(path)]
        if others:
            raise FileExistsError(
                f"{folder} holds {', '.join(sorted(others)[:3])}; name a folder for {type(self._optimizer).__name__}'s "
                "state alone"
            )

    def write(self, folder: Path) -> None:
        """Write what this rank has to write; called on every rank. Here: the state, on rank 0."""
        if world_size() == 1 or dist.get_rank() == 0:
            torch.save(self._optimizer.whole_state(), folder / _FILE)

    def read(self, folder: Path) -> None:
        """Continue from what is there.

        Raises:
            ValueError: If the state is of another model, pretrained value or setting, or is damaged.
        """
        path = folder / _FILE
        if not path.is_file():
            raise ValueError(f"{path} is not there; the checkpoint must be whole, and seen by every rank")
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
    """The sidecar of a method.

    Args:
        optimizer: HiFT or SFT, or accelerate's wrapper of it.

    Raises:
        TypeError: If it is another optimizer.
    """
    inner = unwrapped(optimizer)
    return _sidecars.get(inner.method, Sidecar)(inner)


def register_sidecar(method: str, sidecar: Callable[[Any], Sidecar]) -> None:
    """Let a method of another package write its state in another way than `Sidecar` itself does.

    Args:
        method: `Sliver.method`.
        sidecar: Makes the sidecar of an optimizer of that method.
    """
    _sidecars[method] = sidecar


def keep_sidecar(accelerator: Any, optimizer: Sliver) -> None:
    """Let `accelerator.save_state` and `load_state` carry the folder.

    Args:
        accelerator: `accelerate.Accelerator`.
        optimizer: Writes it where several ranks need it; elsewhere all is in the optimizer's own file, and a folder
            that such ranks have written is read. The accelerator's hooks don't keep it alive.
    """
    held = weakref.ref(optimizer)

    def before_saving(models: Any, weights: Any, output_dir: str) -> None:
        kept = held()
        name = _folder_name(accelerator, kept)
        if kept is not None and name is not None and kept.uses_sidecar:
            save_state(kept, Path(output_dir) / name)

    def before_loading(models: Any, input_dir: str) -> None:
        kept = held()
        name = _folder_name(accelerator, kept)
        if kept is None or name is None:
            return
        folder = Path(input_dir) / name
        recover(folder)
        if folder.is_dir():
            read_state(kept, folder)

    accelerator.register_save_state_pre_hook(before_saving)
    accelerator.register_load_state_pre_hook(before_loading)


def _folder_name(accelerator: Any, optimizer: Sliver | None) -> str | None:
    """Name the folder of an optimizer: its method, and a number from the accelerator's second of that method on.

    Args:
        accelerator: `accelerate.Accelerator`.
        optimizer: Was prepared with it; None if it is gone.

    Returns:
        None if the accelerator has let it go (`free_memory`).
    """
    prepared = [getattr(each, "optimizer", each) for each in prepared_optimizers(accelerator)]
    if optimizer is None:
        return None
    if not prepared:  # while a checkpoint of several ranks is read on one
        return optimizer.method
    alike = [each for each in prepared if isinstance(each, Sliver) and each.method == optimizer.method]
    place = next((index for index, each in enumerate(alike) if each is optimizer), None)
    return f"{optimizer.method}_{place}" if place else optimizer.method if place == 0 else None


def save_state(optimizer: torch.optim.Optimizer, folder: str | Path) -> None:
    """Write the state of HiFT or SFT. A collective: every rank calls it with the same folder, which all ranks see.

    Args:
        optimizer: HiFT or SFT, or accelerate's wrapper of it.
        folder: Where the state is to lie; an older folder is replaced once the new one is whole.

    Raises:
        FileExistsError: If the folder holds other things, which would be lost (SFT).
        OSError: On every rank, if one could not write.
        ValueError: If the state holds objects that could not be loaded again.
        TypeError: If it is another optimizer.
    """
    sidecar = sidecar_of(optimizer)
    sidecar.check_target(Path(folder))
    write_folder_together(Path(folder), sidecar.write)


def load_state(optimizer: torch.optim.Optimizer, folder: str | Path) -> None:
    """Continue from what `save_state` wrote, by any number of ranks. A collective: every rank calls it.

    Args:
        optimizer: HiFT or SFT, or accelerate's wrapper of it; built as in the run that saved.
        folder: As given to `save_state`, seen by every rank.

    Raises:
        ValueError: If the folder is not whole, or the state is of another model, grouping, selection or optimizer.
        TypeError: If it is another optimizer.
    """
    recover(Path(folder))
    check_together(folder)
    read_state(optimizer, folder)


def read_state(optimizer: torch.optim.Optimizer, folder: str | Path) -> None:
    """As `load_state`, from a folder in a checkpoint that was found to be whole."""
    sidecar_of(optimizer).read(Path(folder))
    check_agreement({"updates of the state that was loaded": unwrapped(optimizer).updates})


def unwrapped(optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer] = Sliver) -> Any:
    """The optimizer itself, out of accelerate's wrapper.

    Args:
        optimizer: What `slivertune.prepare` returned, or what it was given.
        kind: What it has to be.

    Raises:
        TypeError: If it is another optimizer.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(inner, kind):
        method = "HiFT's or SFT's" if kind is Sliver else f"{kind.__name__}'s"
        raise TypeError(f"the state of a {type(inner).__name__} is not {method}; pass what slivertune.prepare returned")
    return inner


def check_plain(value: Any) -> None:
    """Refuse tensors where plain values belong, whose comparison would fail or give tensors.

    Raises:
        TypeError: If there is one.
    """
    if isinstance(value, torch.Tensor):
        raise TypeError("a tensor instead of a plain value")
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
        check_plain(each)


def check_by_name(value: Any) -> None:
    """Refuse what is no state by name of the weight, of values by key: a tensor there raises errors of many types.

    Raises:
        TypeError: If it is something else.
    """
    for each in [value, *value.values()] if isinstance(value, dict) else [value]:
        if not isinstance(each, dict):
            raise TypeError(f"a {type(each).__name__} instead of a weight's values by name")


def write_folder_together(target: Path, write: Callable[[Path], None]) -> None:
    """Let every rank write into one folder, which takes its name, with its manifest, when all are done. A collective.

    Args:
        target: The folder; an older one is replaced.
        write: Called by every rank with the folder to write into.

    Raises:
        OSError: On every rank, if one failed; what was at `target` is as before. See `failing_together`.
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
        # Inside: a folder without its manifest must not take the older one's place.
        with failing_together(target), explain_write_errors(target):
            if is_first:
                write_manifest(folder)
        with failing_together(target):
            opened.close()
