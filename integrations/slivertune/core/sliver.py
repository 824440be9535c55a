"""What a method that trains a sliver of a model owes to the layouts, the checkpoints and the Trainer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import nn


class Sliver(torch.optim.Optimizer, ABC):
    """An optimizer that trains some of a model's weights, and says by itself what trains; `HiFT` and `SFT` are such.

    Whatever prepares, saves or resumes a run asks for no more than this, and finds by `method` what one method alone
    needs (`slivertune.parallel.adapters`, `slivertune.parallel.checkpoint.sidecar`).
    """

    method: ClassVar[str]
    """Name of the method: of its modules in the layouts' folders, and of its folder in a checkpoint."""

    @property
    @abstractmethod
    def updates(self) -> int:
        """Updates applied so far."""

    @property
    @abstractmethod
    def uses_sidecar(self) -> bool:
        """Whether `state_dict` is a placeholder, and the state is saved in a folder of its own."""

    @abstractmethod
    def check_built_over(self, model: nn.Module) -> None:
        """Check that this trains weights of a model.

        Raises:
            ValueError: If it was built over another one.
        """

    @abstractmethod
    def detach(self) -> None:
        """Take everything off the model."""
