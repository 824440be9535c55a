"""SFT's state in a file of its own, beside what accelerate or the Trainer write: `save_sft`, `load_sft`.

Programs that save the optimizer of a sharded model know states by parameter, and of fixed shapes. The file holds what
`SFT.whole_state` returns, the same on every rank; rank 0 writes it, and any number of ranks read it, under any layout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slivertune.core.atomic import is_partial, recover
from slivertune.core.manifest import MANIFEST_NAME
from slivertune.core.saved_state import load_dictionary
from slivertune.parallel.checkpoint.folder import (
    carry_folder,
    check_by_name,
    check_plain,
    refuse_damage,
    unwrapped,
    write_folder_together,
)
from slivertune.parallel.checkpoint.manifests import check_together
from slivertune.parallel.consistency.heartbeat import check_agreement, world_size
from slivertune.sft import SFT

FOLDER = "sft"
"""Name of the folder inside a checkpoint."""

_FILE = "state.pt"


def keep_sidecar(accelerator: Any, sft: SFT) -> None:
    """Let `accelerator.save_state` and `load_state` carry the folder.

    Args:
        accelerator: `accelerate.Accelerator`.
        sft: Prepared for shards, or for whole weights, where all is in the optimizer's own file and a folder that
            ranks with shards have written is read.
    """
    carry_folder(
        accelerator,
        FOLDER,
        save=lambda folder: save_sft(sft, folder),
        load=lambda folder: read_sft(sft, folder),
        is_kept=lambda: sft.uses_sidecar,
    )


def save_sft(optimizer: torch.optim.Optimizer, folder: str | Path) -> None:
    """Write SFT's state. A collective: every rank calls it with the same folder.

    Args:
        optimizer: SFT, or accelerate's wrapper of it.
        folder: Where the state is to lie; an older folder is replaced once the new one is whole.

    Raises:
        FileExistsError: If the folder holds other things, which would be lost.
        OSError: On every rank, if rank 0 could not write.
    """
    sft = unwrapped(optimizer, SFT)
    _check_own(Path(folder))

    def write(aside: Path) -> None:
        if world_size() == 1 or dist.get_rank() == 0:
            torch.save(sft.whole_state(), aside / _FILE)

    write_folder_together(Path(folder), write)


def load_sft(optimizer: torch.optim.Optimizer, folder: str | Path) -> None:
    """Continue from what `save_sft` wrote, by any number of ranks. A collective: every rank calls it.

    Args:
        optimizer: SFT, or accelerate's wrapper of it; built as in the run that saved.
        folder: As given to `save_sft`, seen by every rank.

    Raises:
        ValueError: If the folder is not whole, or the state is of another model, pretrained value or selection.
    """
    recover(Path(folder))
    check_together(folder)
    read_sft(optimizer, folder)


def read_sft(optimizer: torch.optim.Optimizer, folder: str | Path) -> None:
    """As `load_sft`, from a folder in a checkpoint that was found to be whole.

    Args:
        optimizer: As there.
        folder: As there.

    Raises:
        ValueError: If the state is of another model, pretrained value or selection.
    """
    sft = unwrapped(optimizer, SFT)
    path = Path(folder) / _FILE
    if not path.is_file():
        raise ValueError(f"{path} is not there; the checkpoint must be whole, and seen by every rank")
    saved = load_dictionary(path)
    with refuse_damage(path):
        check_plain(saved["sft"])
        check_by_name(saved["state"])
        sft.load_state_dict(saved)
    check_agreement({"updates of the state that was loaded": sft.updates})


def _check_own(folder: Path) -> None:
    paths = list(folder.iterdir()) if folder.is_dir() else []
    others = [path.name for path in paths if path.name not in (_FILE, MANIFEST_NAME) and not is_partial(path)]
    if others:
        raise FileExistsError(f"{folder} holds {', '.join(sorted(others)[:3])}; name a folder for SFT's state alone")
