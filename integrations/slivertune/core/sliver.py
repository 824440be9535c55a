"""What a method that trains a sliver of a model owes to the layouts, the checkpoints and the Trainer."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar

import torch
from torch import nn

from slivertune.core.layout import Layout


class Sliver(torch.optim.Optimizer, ABC):
    """An optimizer that trains some of a model's weights, and says by itself what trains; `HiFT` and `SFT` are such.

    Whatever prepares, saves or resumes a run asks for no more than this, and finds by `method` what one method alone
    needs (`slivertune.parallel.adapters`).
    """

    method: ClassVar[str]
    """Name of the method: of its modules in the layouts' folders, and of its folder in a checkpoint."""
    without_state: ClassVar[str] = "its state would start from zero in the middle of a run"
    """What a run would do that has lost this method's state, for messages."""
    may_differ: ClassVar[frozenset[str]] = frozenset()
    """Names of settings that may differ between ranks."""

    @property
    @abstractmethod
    def config(self) -> Any:
        """The settings, a dataclass; fixed for the run."""

    @property
    @abstractmethod
    def updates(self) -> int:
        """Updates applied so far."""

    @property
    @abstractmethod
    def uses_sidecar(self) -> bool:
        """Whether `state_dict` is a placeholder, and the state is saved in a folder of its own."""

    @abstractmethod
    def identity(self) -> dict[str, object]:
        """What a saved state has in common with every optimizer that it fits; plain containers."""

    @abstractmethod
    def check_built_over(self, model: nn.Module) -> None:
        """Check that this trains weights of a model.

        Raises:
            ValueError: If it was built over another one.
        """

    @abstractmethod
    def unsupported(self, layout: Layout) -> str | None:
        """Why this can't be trained under a layout, and the way out; None if it can."""

    @abstractmethod
    def whole_state(self) -> dict[str, Any]:
        """Everything that continues the run at this step, where `state_dict` may be a placeholder.

        Returns:
            Plain containers, and tensors by parameter name; where weights are sharded, this rank's shards.
        """

    @abstractmethod
    def load_whole_state(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from what `whole_state` returned; tensors are copied.

        Raises:
            ValueError: If the state is of another run, or is damaged; nothing is changed.
        """

    @abstractmethod
    def detach(self) -> None:
        """Take everything off the model."""

    def clip_(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients down where their norm is larger, as `torch.nn.utils.clip_grad_norm_` does.

        Args:
            max_norm: The largest norm; infinity only measures.

        Returns:
            The norm before, without dimensions.
        """
        return nn.utils.clip_grad_norm_([each for group in self.param_groups for each in group["params"]], max_norm)

    def facts(self) -> dict[str, object]:
        """What every rank must have been given alike, by the names that messages use: settings and hyperparameters.

        A method adds what identifies its run.
        """
        facts: dict[str, object] = {"updates": self.updates}
        for field in fields(self.config):
            if field.name not in self.may_differ:
                facts[f"config.{field.name}"] = getattr(self.config, field.name)
        for index, param_group in enumerate(self.param_groups):
            for key, value in param_group.items():
                if key != "params":
                    facts[f"{key} of param group {index}"] = value
        return facts
