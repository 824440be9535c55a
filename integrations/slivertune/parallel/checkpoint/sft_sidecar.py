"""SFT's state in a sidecar folder, read by any number of ranks under any layout."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from slivertune.core.atomic import is_partial
from slivertune.core.manifest import MANIFEST_NAME
from slivertune.core.saved_state import load_dictionary
from slivertune.parallel.checkpoint.folder import (
    check_by_name,
    check_plain,
    refuse_damage,
)
from slivertune.parallel.consistency.heartbeat import world_size
from slivertune.sft import SFT

FOLDER = "sft"
"""Name of the folder inside a checkpoint."""

_FILE = "state.pt"


class SFTSidecar:
    """SFT's state: what `SFT.whole_state` returns, the same on every rank, in a file that rank 0 writes.

    Args:
        sft: Under any layout.
    """

    folder_name = FOLDER
    without_state = "its deltas can't be told from pretrained weights"

    def __init__(self, sft: SFT) -> None:
        self._sft = sft

    def check_target(self, folder: Path) -> None:
        """Check that nothing of others' would be lost.

        Raises:
            FileExistsError: If the folder holds other things.
        """
        paths = list(folder.iterdir()) if folder.is_dir() else []
        others = [path.name for path in paths if path.name not in (_FILE, MANIFEST_NAME) and not is_partial(path)]
        if others:
            raise FileExistsError(
                f"{folder} holds {', '.join(sorted(others)[:3])}; name a folder for SFT's state alone"
            )

    def write(self, folder: Path) -> None:
        """Write the state, on rank 0."""
        if world_size() == 1 or dist.get_rank() == 0:
            torch.save(self._sft.whole_state(), folder / _FILE)

    def read(self, folder: Path) -> None:
        """Continue from what is there.

        Raises:
            ValueError: If the state is of another model, pretrained value or selection, or is damaged.
        """
        path = folder / _FILE
        if not path.is_file():
            raise ValueError(f"{path} is not there; the checkpoint must be whole, and seen by every rank")
        saved = load_dictionary(path)
        with refuse_damage(path):
            check_plain(saved["sft"])
            check_by_name(saved["state"])
            self._sft.load_state_dict(saved)
