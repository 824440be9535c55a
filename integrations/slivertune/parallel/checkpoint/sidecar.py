"""A method's state in a folder of its own, beside what accelerate or the Trainer write; any number of ranks read it.

Programs that save an optimizer know states by parameter and of fixed shapes, gather them on one rank, or load all of
them onto the GPU, where they have no room. So several ranks show them a placeholder, and keep the state here.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from slivertune.core.atomic import is_partial, recover
from slivertune.core.manifest import MANIFEST_NAME
from slivertune.core.saved_state import load_dictionary
from slivertune.core.sliver import Sliver
from slivertune.parallel.checkpoint.folder import (
    carry_folder,
    check_by_name,
    check_plain,
    refuse_damage,
    unwrapped,
    write_folder_together,
)
from slivertune.parallel.checkpoint.hift_sidecar import HiFTSidecar
from slivertune.parallel.checkpoint.manifests import check_together
from slivertune.parallel.consistency.heartbeat import check_agreement, world_size


class Sidecar(Protocol):
    """How the state of one method lies in its folder, which has the method's name inside a checkpoint."""

    def check_target(self, folder: Path) -> None:
        """Check that nothing of others' would be lost if the folder were replaced."""

    def write(self, folder: Path) -> None:
        """Write what this rank has to write; called on every rank."""

    def read(self, folder: Path) -> None:
        """Continue from what is there."""


class WholeStateSidecar:
    """What `Sliver.whole_state` returns, the same on every rank, in a file that rank 0 writes.

    Args:
        optimizer: Of a method whose state is not shared out.
    """

    def __init__(self, optimizer: Sliver) -> None:
        self._optimizer = optimizer

    def check_target(self, folder: Path) -> None:
        """Check that nothing of others' would be lost.

        Raises:
            FileExistsError: If the folder holds other things.
        """
        paths = list(folder.iterdir()) if folder.is_dir() else []
        others = [path.name for path in paths if path.name not in (_FILE, MANIFEST_NAME) and not is_partial(path)]
        if others:
            name = type(self._optimizer).__name__
            raise FileExistsError(
                f"{folder} holds {', '.join(sorted(others)[:3])}; name a folder for {name}'s state alone"
            )

    def write(self, folder: Path) -> None:
        """Write the state, on rank 0."""
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


_FILE = "state.pt"
_sidecars: dict[str, Callable[[Any], Sidecar]] = {"hift": HiFTSidecar}


def sidecar_of(optimizer: torch.optim.Optimizer) -> Sidecar:
    """The sidecar of a method.

    Args:
        optimizer: HiFT or SFT, or accelerate's wrapper of it.

    Raises:
        TypeError: If it is another optimizer.
    """
    inner = unwrapped(optimizer)
    return _sidecars.get(inner.method, WholeStateSidecar)(inner)


def register_sidecar(method: str, sidecar: Callable[[Any], Sidecar]) -> None:
    """Let a method of another package write its state in another way than `WholeStateSidecar`.

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
            that such ranks have written is read.
    """
    carry_folder(
        accelerator,
        optimizer.method,
        save=lambda folder: save_state(optimizer, folder),
        load=lambda folder: read_state(optimizer, folder),
        is_kept=lambda: optimizer.uses_sidecar,
    )


def save_state(optimizer: torch.optim.Optimizer, folder: str | Path) -> None:
    """Write the state of HiFT or SFT. A collective: every rank calls it with the same folder, which all ranks see.

    Args:
        optimizer: HiFT or SFT, or accelerate's wrapper of it.
        folder: Where the state is to lie; an older folder is replaced once the new one is whole.

    Raises:
        FileExistsError: If the folder holds other things, which would be lost (SFT).
        OSError: On every rank, if one could not write.
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
