"""Contract between a method that trains a sliver of a model and the layouts, the checkpoints and the Trainer.

`Sliver` is the contract. `CheckpointedSliver` implements its part on saved states. An optimizer's `state_dict` returns
its whole state, the same state packed, or a placeholder. Programs that gather, cut up or reshape an optimizer's state
know it by parameter alone. `torch.distributed.checkpoint` gets the whole state packed (see `pack_state`). If the state
is saved beside their files, in a sidecar folder, they get a placeholder with the number of updates.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, ClassVar, NoReturn

import torch
from torch import nn

from slivertune.core.hyperparameters import load_hyperparameters
from slivertune.core.layout import Layout
from slivertune.core.saved_state import (
    StateMismatchError,
    is_count,
    is_initialising_step,
    pack_state,
    refuse_damage,
    unpack_state,
)
from slivertune.core.saved_values import check_hyperparameters
from slivertune.core.sealed_state import SealedState

RECOVERY = "Load the last checkpoint, first into the model, then into the optimizer (load_state_dict), or start again"
"""Way out of a change that is half done, for messages."""

IDLE_STEPS = 20
"""Number of successive steps without a gradient that cause a warning."""
OWN_GRADIENTS = (
    "the gradients are those of this rank alone, as no backward ended while the Accelerator was to synchronise "
    "gradients. Step the optimizer that slivertune.prepare returned, or only if accelerator.sync_gradients is true, "
    "and drop the gradients of a backward that raised with zero_grad()"
)
"""Error of a step whose gradients are not averaged."""


class Sliver(torch.optim.Optimizer, ABC):
    """An optimizer that trains some of a model's weights and selects them itself, such as `HiFT` and `SFT`.

    Code that prepares, saves or resumes a run relies on this contract alone. It finds the parts that only one method
    needs by `method` (`slivertune.parallel.adapters`).
    """

    method: ClassVar[str]
    """Name of the method, of its modules in the layouts' folders, and of its folder in a checkpoint."""
    without_state: ClassVar[str] = "its state would start from zero in the middle of a run"
    """Consequence for a run that has lost this method's state, for messages."""
    may_differ: ClassVar[frozenset[str]] = frozenset()
    """Names of settings that may differ between ranks."""
    trains_frozen_weights: ClassVar[bool] = False
    """Whether weights of the model that are frozen now may train later."""

    @property
    @abstractmethod
    def config(self) -> Any:
        """Settings, as a dataclass. They are fixed for the run."""

    @property
    @abstractmethod
    def updates(self) -> int:
        """Number of updates applied so far."""

    @property
    @abstractmethod
    def uses_sidecar(self) -> bool:
        """Whether `state_dict` is a placeholder, and the state is saved in its own folder."""

    @property
    def is_attached(self) -> bool:
        """Whether it trains the model, until `detach`."""
        return True

    @abstractmethod
    def identity(self) -> dict[str, object]:
        """Return the values that a saved state shares with every optimizer that it fits, in plain containers."""

    @abstractmethod
    def check_built_over(self, model: nn.Module) -> None:
        """Check that this trains weights of a model.

        Raises:
            ValueError: If it was built over another model.
        """

    @abstractmethod
    def unsupported(self, layout: Layout) -> str | None:
        """Explain why this can't be trained under a layout, and the way out. Return None if it can."""

    @abstractmethod
    def whole_state(self) -> dict[str, Any]:
        """Return everything that continues the run at this step, even if `state_dict` is a placeholder.

        Returns:
            Plain containers, and tensors by parameter name. If weights are sharded, this rank's shards.

        Raises:
            RuntimeError: If an update has failed, or is open (weights were stepped in a backward, and `step` was not
                called yet).
        """

    @abstractmethod
    def load_whole_state(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from the result of `whole_state`. Tensors are copied.

        Raises:
            ValueError: If the state is of another run, or is damaged. Nothing is changed then.
        """

    @property
    def applied_lr(self) -> float | None:
        """Learning rate of the first param group in the last update. None if it was the schedule's rate then."""
        return None

    def metrics(self) -> dict[str, float]:
        """Return numbers about the last update for logs and trackers, by short names. Nothing waits for the device."""
        return {"updates": self.updates}

    @abstractmethod
    def detach(self) -> None:
        """Take everything off the model."""

    def clip_(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients down if their norm is larger, as `torch.nn.utils.clip_grad_norm_` does.

        Args:
            max_norm: Largest allowed norm. Infinity only measures.

        Returns:
            Norm before scaling, a 0-dimensional tensor.
        """
        return nn.utils.clip_grad_norm_([each for group in self.param_groups for each in group["params"]], max_norm)

    def facts(self) -> dict[str, object]:
        """Return the settings and hyperparameters that must be equal on every rank, by their names in messages.

        A method adds the facts that identify its run.
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


class CheckpointedSliver(Sliver):
    """A sliver that hands its state out in each of the three forms. It can't be copied, nor given more param groups.

    Args:
        params: Parameters, as torch's optimizers take them.
        defaults: Default hyperparameters.
    """

    title: ClassVar[str]
    """Name in messages. `method` is the key of the saved state, and begins that of the placeholder."""
    refusal_to_add: ClassVar[str]
    """Text of the error of a param group that is added later."""
    refusal_to_copy: ClassVar[str]
    """Text of the error of a copy."""

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._is_built = False
        self._sealed_state = SealedState({}, self.title)
        super().__init__(params, defaults)
        self._is_built = True
        self._note_param_groups()
        self._is_placeholder = False
        self._packs_next = False
        self._layout: str | None = None
        self._awaited: int | None = None
        """Number of updates in a loaded placeholder, until the state that belongs to it has been checked."""
        self._half_done: str | None = None
        """Text of the error of the next use, if a change of weights and state has begun and not ended."""

    @abstractmethod
    def _parameters_of_state(self) -> Iterable[torch.Tensor]:
        """Return the parameters that a placeholder is made for."""

    @property
    def has_own_files(self) -> bool:
        """Whether the state is too large for one file of a checkpoint, and is therefore saved in its own folder."""
        return False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a param group after construction, since the trained parameters of a run are fixed.

        Raises:
            RuntimeError: Always, once the optimizer is built.
        """
        if self._is_built:
            raise RuntimeError(self.refusal_to_add)
        super().add_param_group(param_group)

    @property  # type: ignore[override]
    def state(self) -> dict[Any, Any]:
        """Placeholder, or an empty dictionary. It can be read but not changed, since steps read none of it."""
        return self._sealed_state

    @state.setter
    def state(self, state: Any) -> None:
        if self._is_built:  # torch's constructor sets an empty state
            self._sealed_state.update(state)  # raises

    def _note_param_groups(self) -> None:
        """Record the parameters of the param groups. A layout that replaces parameters calls it again."""
        self._held = self._held_parameters()

    def _held_parameters(self) -> list[tuple[int, int]]:
        return [(index, id(each)) for index, group in enumerate(self.param_groups) for each in group["params"]]

    def _check_param_groups(self) -> None:
        """Refuse to step if parameters were added, removed or moved to another group.

        Raises:
            RuntimeError: If they were. The message names the first group that differs.
        """
        held = self._held_parameters()
        if held != self._held:
            known, found = set(self._held), set(held)
            index = min((index for index, _ in known ^ found), default=0)
            raise RuntimeError(
                f"the parameters of param_groups[{index}] were changed after {self.title} was built. "
                f"{self.refusal_to_add}. To stop training some, call detach() and build a new {self.title}"
            )

    def _refuse_state_hook(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse a hook on states: checkpoints are written past `state_dict`, and would lack the hook's changes.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            f"{self.title} runs no hooks on its state_dict() and load_state_dict(): checkpoints bypass them. Change "
            "the dictionary that state_dict() returns or load_state_dict() gets"
        )

    register_state_dict_pre_hook = register_state_dict_post_hook = _refuse_state_hook
    register_load_state_dict_pre_hook = register_load_state_dict_post_hook = _refuse_state_hook

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse `copy` and `pickle`, since a copy would train the same model without its hooks.

        Raises:
            TypeError: Always.
        """
        raise TypeError(self.refusal_to_copy)

    @property
    def uses_sidecar(self) -> bool:
        """Whether `state_dict` is a placeholder, and the state is saved in its own folder (see `use_sidecar`)."""
        return self._is_placeholder

    def use_sidecar(self, layout: str | None = None) -> None:
        """Have the state saved in its own folder from now on, beside other programs' checkpoints.

        `state_dict` then returns a placeholder: hyperparameters and the number of updates in torch's own form. Programs
        that know states by parameter alone may save, cut up and load it as they like. After a placeholder was loaded,
        `step` raises until `load_whole_state` has loaded the state that belongs to it.

        Args:
            layout: Layout that synchronizes the gradients of several ranks, if the optimizer does not do so itself.
        """
        self._layout = layout
        self._is_placeholder = True
        self._fill_placeholder()

    def state_dict(self) -> dict[str, Any]:
        """Return everything that continues the run at this step (`whole_state`), or a placeholder after `use_sidecar`.

        `slivertune.prepare` and `attach` call `use_sidecar` if checkpoints keep the state in a folder of its own.

        Returns:
            Plain containers, and tensors by parameter name. The tensors are the live ones if possible, as in torch.
            Save or copy them before the next step. `torch.distributed.checkpoint` gets the state packed.
        """
        if self._is_placeholder:
            self._fill_placeholder()
            placeholder = super().state_dict()
            # `torch.load(weights_only=True)` knows plain dictionaries.
            return {**placeholder, "state": {key: dict(each) for key, each in placeholder["state"].items()}}
        packs, self._packs_next = self._packs_next, False
        whole = self.whole_state()
        return pack_state(whole, self.param_groups, self.updates) if packs else whole

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from the result of `state_dict` or `whole_state`, in any form. Tensors are copied.

        A placeholder gives only its hyperparameters. Its state has still to be loaded.

        Args:
            state_dict: Result of `state_dict`, of the same method over the same model and base optimizer.

        Raises:
            ValueError: If the state is of another model or optimizer, or is damaged. Nothing is changed then.
        """
        self._packs_next = False
        unpacked = unpack_state(state_dict)
        whole = state_dict if unpacked is None else unpacked
        with refuse_damage("the given state"):
            updates = self._updates_in_placeholder(whole)
            if updates is None:
                self.load_whole_state(whole)
                return
            check_hyperparameters(whole["param_groups"], self.param_groups)
        load_hyperparameters(self.param_groups, whole["param_groups"])
        # No state belongs to a placeholder without updates, such as the one that accelerate's new wrapper loads.
        self._awaited = updates or None

    def _begin_change(self, name: str) -> None:
        """Note that weights and state change from here to `_end_change`.

        If an error or Ctrl-C ends the change early, steps and states are refused until a state is loaded.

        Args:
            name: Name of the change in the message.
        """
        self._half_done = (
            f"{name} did not end (an error, or Ctrl-C), with {self.updates} updates done before. Weights and state may "
            f"be half changed. {RECOVERY}"
        )

    def _end_change(self) -> None:
        """Note that weights and state are whole."""
        self._half_done = None

    def _check_whole(self) -> None:
        """Refuse to continue from a change that is half done.

        Raises:
            RuntimeError: If an error, or Ctrl-C, has left one.
        """
        if self._half_done is not None:
            raise RuntimeError(self._half_done)

    def _is_initialising(self) -> bool:
        """Return whether a step is torch's own, which only fills the state of optimizers that have none yet.

        If so, the next state is saved packed.
        """
        is_initialising = is_initialising_step(self.param_groups)
        self._packs_next = self._packs_next or is_initialising
        return is_initialising

    def _fill_placeholder(self) -> None:
        """Put the placeholder into torch's `state`, since programs that find it empty step with zeros to fill it."""

        # Each weight has one, or torch.distributed.checkpoint misses the state of a weight that requires a gradient.
        # It has a dimension, or torch.distributed.checkpoint can't tell its device.
        def count(device: torch.device | None = None) -> SealedState:
            return SealedState({f"{self.method}_updates": torch.tensor([self.updates], device=device)}, self.title)

        entries: dict[Any, Any] = {each: count(each.device) for each in self._parameters_of_state()}
        self._sealed_state = SealedState(entries or {"released": count()}, self.title)

    def _updates_in_placeholder(self, state_dict: Mapping[str, Any]) -> int | None:
        """Return the number of updates in a placeholder. None for any other state."""
        if self.method in state_dict:
            return None
        key = f"{self.method}_updates"
        found = [state[key] for state in state_dict.get("state", {}).values() if key in state]
        counts: list[Any] = [
            each.item() if isinstance(each, torch.Tensor) and each.numel() == 1 else each for each in found
        ]
        for each in counts:
            if not is_count(each):
                raise StateMismatchError(f"the saved state is damaged: {key}={str(each)[:60]}. Use another checkpoint")
        return counts[0] if counts else None

    def _check_awaited(self) -> None:
        """Refuse to continue from a placeholder alone.

        Raises:
            RuntimeError: If a placeholder of another number of updates was loaded.
        """
        if self._awaited not in (None, self.updates):
            raise RuntimeError(
                f"the loaded checkpoint was made after {self._awaited} updates, but {self.title}'s own state, which "
                f"is saved in a folder beside it, after {self.updates}. Load the whole checkpoint with "
                "accelerator.load_state or the Trainer's resume_from_checkpoint, or the folder with "
                "slivertune.parallel.checkpoint.load_state"
            )
        self._awaited = None
