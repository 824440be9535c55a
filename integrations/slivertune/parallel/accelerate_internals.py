"""What the library relies on of accelerate that it does not document, in accelerate 1.13 to 1.15.

Everything else of the library reaches these through this file. `RELIED_ON` says where each lies and what for, so that a
test can tell with a clear word which has moved.
"""

from collections.abc import Mapping
from typing import Any, cast

from accelerate.state import AcceleratorState, GradientState

RELIED_ON: Mapping[str, str] = {
    "accelerate.Accelerator()._optimizers": "which optimizers a checkpoint has",
    "accelerate.Accelerator()._load_model_state_pre_hook": "weights are read before what trains them",
    "accelerate.state.AcceleratorState._reset_state": "a second run in one process",
}
"""By dotted name: what for. `Class()` is an instance."""


def prepared_optimizers(accelerator: Any) -> list[Any]:
    """The optimizers that an Accelerator has prepared; the living list."""
    return cast(list[Any], accelerator._optimizers)


def mark_prepared(*objects: Any) -> None:
    """Let accelerate leave these as they are when it is given them again."""
    for each in objects:
        each._is_accelerate_prepared = True


def is_on_last_batch() -> bool | None:
    """Return whether the loader of an Accelerator that is being read has given its last batch.

    None if none is being read, or if its ranks may get different numbers of batches (`even_batches=False`).
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
        hook: What `register_load_state_pre_hook` returned.
    """
    accelerator._load_model_state_pre_hook.move_to_end(hook.id, last=False)


def forget_state() -> None:
    """Forget what accelerate keeps of an earlier run in this process."""
    AcceleratorState._reset_state(reset_partial_state=True)
