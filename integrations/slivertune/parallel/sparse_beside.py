"""SFT's state in a file of its own, beside what accelerate or the Trainer write: `save_sft`, `load_sft`.

Programs that save the optimizer of a sharded model know states by parameter, and of fixed shapes. The file holds what
`SFT.whole_state` returns, the same on every rank; rank 0 writes it, and any number of ranks read it, under any layout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slivertune.aside import new_file
from slivertune.parallel.agreement import check_agreement, world_size
from slivertune.parallel.folder import carry_folder, unwrapped
from slivertune.sft import SFT

FOLDER = "sft"
"""Name of the folder inside a checkpoint."""

_FILE = "state.pt"


def keep_beside(accelerator: Any, sft: SFT) -> None:
    """Let `accelerator.save_state` and `load_state` carry the folder.

    Args:
        accelerator: `accelerate.Accelerator`.
        sft: Prepared for several ranks.
    """
    carry_folder(
        accelerator, FOLDER, save=lambda folder: save_sft(sft, folder), load=lambda folder: load_sft(sft, folder)
    )


def save_sft(optimizer: torch.optim.Optimizer, folder: str | Path) -> None:
    """Write SFT's state. A collective: every rank calls it with the same folder.

    Args:
        optimizer: SFT, or accelerate's wrapper of it.
        folder: Where the state is to lie; an older one in it is replaced once the new one is whole.

    Raises:
        OSError: On every rank, if rank 0 could not write.
    """
    sft = unwrapped(optimizer, SFT)
    failure = ""
    if world_size() == 1 or dist.get_rank() == 0:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            with new_file(Path(folder) / _FILE) as path:
                torch.save(sft.whole_state(), path)
        except OSError as error:
            failure = str(error)
    failures = [failure]
    if world_size() > 1:
        dist.broadcast_object_list(failures, src=0)
    if failures[0]:
        raise OSError(f"{folder} could not be written ({failures[0]}); it must lie where rank 0 can write")


def load_sft(optimizer: torch.optim.Optimizer, folder: str | Path) -> None:
    """Continue from what `save_sft` wrote, by any number of ranks. A collective: every rank calls it.

    Args:
        optimizer: SFT, or accelerate's wrapper of it; built as in the run that saved.
        folder: As given to `save_sft`, seen by every rank.

    Raises:
        FileNotFoundError: If the file is not there.
        ValueError: If the state is of another model, pretrained value or selection, or is damaged.
    """
    sft = unwrapped(optimizer, SFT)
    path = Path(folder) / _FILE
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there; the checkpoint must be whole, and seen by every rank")
    sft.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    check_agreement({"updates of the state that was loaded": sft.updates})
