"""Undocumented interfaces of accelerate 1.13 to 1.15 that the library uses.

The rest of the library reaches them through this file. `RELIED_ON` lists each interface and its purpose, so that a
test can name the one that has moved.
"""

import weakref
from collections.abc import Mapping
from typing import Any, cast

from accelerate.state import AcceleratorState, GradientState

from slivertune.core.sliver import Sliver

RELIED_ON: Mapping[str, str] = {
    "accelerate.Accelerator()._optimizers": "which optimizers a checkpoint has",
    "accelerate.Accelerator()._load_model_state_pre_hook": "weights are read before what trains them",
    "accelerate.state.AcceleratorState._reset_state": "a second run in one process",
}
"""Purpose of each interface, by dotted name. `Class()` stands for an instance."""


def prepared_optimizers(accelerator: Any) -> list[Any]:
    """Return the optimizers that an Accelerator has prepared: its own list, not a copy."""
    return cast(list[Any], accelerator._optimizers)


def has_prepared(accelerator: Any, optimizer: Sliver) -> bool:
    """Return whether an Accelerator has prepared an optimizer, and has not released it since."""
    return any(getattr(each, "optimizer", each) is optimizer for each in prepared_optimizers(accelerator))


def mark_prepared(*objects: Any) -> None:
    """Mark objects as prepared, so that accelerate leaves them unchanged."""
    for each in objects:
        each._is_accelerate_prepared = True


class _WhileAttached:
    """Mark of a model that accelerate leaves as it is while an optimizer trains it. A copy's mark is False.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: Sliver) -> None:
        self._optimizer = weakref.ref(optimizer)

    def __bool__(self) -> bool:
        optimizer = self._optimizer()
        return optimizer is not None and optimizer.is_attached

    def __reduce__(self) -> tuple[Any, ...]:
        return bool, (False,)


def mark_while_attached(model: Any, optimizer: Sliver) -> None:
    """Let accelerate leave a model as it is while an optimizer is attached, and wrap it in DDP afterwards.

    Args:
        model: Model that DDP has not wrapped.
        optimizer: Optimizer that synchronises its gradients.
    """
    model._is_accelerate_prepared = _WhileAttached(optimizer)


def is_on_last_batch() -> bool | None:
    """Return whether the Accelerator's active loader has given its last batch.

    None if no loader is active, or if ranks may get different numbers of batches (`even_batches=False`).
    """
    state = GradientState()
    if not state.in_dataloader:
        return None
    sampler = getattr(state.active_dataloader, "batch_sampler", None)
    return bool(state.end_of_dataloader) if getattr(sampler, "even_batches", True) else None


def load_first(accelerator: Any, hook: Any) -> None:
    """Call a hook before all others when a checkpoint is loaded.

    Args:
        accelerator: The Accelerator.
        hook: Handle that `register_load_state_pre_hook` returned.
    """
    accelerator._load_model_state_pre_hook.move_to_end(hook.id, last=False)


def forget_state() -> None:
    """Clear the state that accelerate keeps of an earlier run in this process."""
    AcceleratorState._reset_state(reset_partial_state=True)
