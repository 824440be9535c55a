"""Overrides of an engine's methods, so that a failed collective inside them names the missing rank."""

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any

from slivertune.core.layout import world_size
from slivertune.core.sliver import Sliver
from slivertune.parallel.accelerate_internals import has_prepared
from slivertune.parallel.consistency.heartbeat import Heartbeat, guard

_COMPARE = "_slivertune_compare"


def explain(owner: Any, method: str, doing: str | Callable[[], str], heartbeat: Heartbeat | None = None) -> None:
    """Override a method on this instance, so that a failed collective in it is explained.

    Other errors stay unchanged.

    Args:
        owner: An engine, an Accelerator or a model.
        method: Name of the method.
        doing: Description of the method, for the message.
        heartbeat: Its notes name the missing ranks; the heartbeat made last by default.
    """
    original = getattr(owner, method)

    @wraps(original)
    def explained(*args: Any, **kwargs: Any) -> Any:
        guarded = guard if heartbeat is None else heartbeat.guard
        with guarded(doing if isinstance(doing, str) else doing(), computes=True):
            return original(*args, **kwargs)

    setattr(owner, method, explained)


def explain_saving(accelerator: Any) -> None:
    """Name the missing ranks when an Accelerator's save or load fails.

    Args:
        accelerator: `accelerate.Accelerator`.
    """
    for method, doing in (
        ("save_state", "saving a checkpoint"),
        ("load_state", "loading a checkpoint"),
        ("save_model", "saving the model"),
        ("get_state_dict", "gathering the model's weights"),
        ("wait_for_everyone", "waiting for everyone"),
    ):
        explain(accelerator, method, doing)


def explain_engine(engine: Any) -> None:
    """Name the missing ranks when one of a DeepSpeed engine's own collectives fails.

    Args:
        engine: The engine; its methods are overridden on this instance.
    """
    for method, doing in (
        ("forward", "in a forward pass"),
        ("backward", "in a backward pass"),
        ("step", "in a step"),
        ("save_checkpoint", "saving a checkpoint"),
        ("load_checkpoint", "loading a checkpoint"),
        ("save_16bit_model", "saving the model"),
    ):
        explain(engine, method, doing)


def call_before(owner: Any, method: str, first: Callable[[], None]) -> None:
    """Override a method on this instance, so that a function is called before it.

    Args:
        owner: An engine or an Accelerator.
        method: Name of the method.
        first: Function to call; if it raises, the method is not called.
    """
    original = getattr(owner, method)

    @wraps(original)
    def call_both(*args: Any, **kwargs: Any) -> Any:
        first()
        return original(*args, **kwargs)

    setattr(owner, method, call_both)


def compare_when_saving(accelerator: Any, optimizer: Sliver, compare: Callable[[], None]) -> None:
    """Compare the ranks before their work is saved: before `save_state` writes, and in `end_training`.

    The ranks are not compared any more once the accelerator has released the optimizer (`free_memory`).

    Args:
        accelerator: `accelerate.Accelerator`; `end_training` is overridden on this instance.
        optimizer: Optimizer of the training. The accelerator's hooks don't keep it alive.
        compare: Method of an object that the optimizer keeps alive. Raises on every rank if the ranks have diverged. A
            collective.
    """
    held, method = weakref.ref(optimizer), weakref.WeakMethod(compare)

    def compare_ranks() -> None:
        kept, call = held(), method()
        if world_size() > 1 and kept is not None and call is not None and has_prepared(accelerator, kept):
            call()

    accelerator.register_save_state_pre_hook(lambda models, weights, output_dir: compare_ranks())
    call_before(accelerator, "end_training", compare_ranks)
    setattr(accelerator, _COMPARE, compare_ranks)


def compare_now(accelerator: Any) -> None:
    """Compare the ranks, if this Accelerator has prepared a comparison. A collective.

    Args:
        accelerator: `accelerate.Accelerator`.
    """
    getattr(accelerator, _COMPARE, lambda: None)()
