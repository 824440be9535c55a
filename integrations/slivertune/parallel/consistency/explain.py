"""Lets the collectives of engines, in the midst of their own methods, say which rank is missing when they fail."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from slivertune.parallel.consistency.heartbeat import Heartbeat, guard, world_size

_COMPARE = "_slivertune_compare"


def explain(owner: Any, method: str, doing: str | Callable[[], str], heartbeat: Heartbeat | None = None) -> None:
    """Override a method, on this instance: a collective that fails in it is explained, other errors stay as they are.

    Args:
        owner: An engine, an Accelerator, a model.
        method: Its name.
        doing: What it does, for the message.
        heartbeat: Its notes tell who is missing; those of whatever was prepared last, by default.
    """
    original = getattr(owner, method)

    @wraps(original)
    def explained(*args: Any, **kwargs: Any) -> Any:
        guarded = guard if heartbeat is None else heartbeat.guard
        with guarded(doing if isinstance(doing, str) else doing(), computes=True):
            return original(*args, **kwargs)

    setattr(owner, method, explained)


def explain_saving(accelerator: Any) -> None:
    """Name who is missing when a save or load of an Accelerator fails.

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
    """Name who is missing when one of a DeepSpeed engine's own collectives fails.

    Args:
        engine: Its methods are overridden, on this instance.
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
    """Override a method, on this instance: something is called before it.

    Args:
        owner: An engine, an Accelerator.
        method: Its name.
        first: What is called; an error of it keeps the method from being called.
    """
    original = getattr(owner, method)

    @wraps(original)
    def call_both(*args: Any, **kwargs: Any) -> Any:
        first()
        return original(*args, **kwargs)

    setattr(owner, method, call_both)


def compare_when_saving(accelerator: Any, compare: Callable[[], None]) -> None:
    """Compare the ranks where their work is kept: before `save_state` writes, and in `end_training`.

    Args:
        accelerator: `accelerate.Accelerator`; `end_training` is overridden, on this instance.
        compare: Raises on every rank where they have drifted apart. A collective.
    """

    def compare_ranks() -> None:
        if world_size() > 1:
            compare()

    accelerator.register_save_state_pre_hook(lambda models, weights, output_dir: compare_ranks())
    call_before(accelerator, "end_training", compare_ranks)
    setattr(accelerator, _COMPARE, compare_ranks)


def compare_now(accelerator: Any) -> None:
    """Compare the ranks, if this Accelerator has prepared what is to be compared. A collective.

    Args:
        accelerator: `accelerate.Accelerator`.
    """
    getattr(accelerator, _COMPARE, lambda: None)()
