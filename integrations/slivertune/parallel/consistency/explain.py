"""Lets the collectives of engines, in the midst of their own methods, say which rank is missing when they fail."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from slivertune.parallel.consistency.heartbeat import guard, world_size

_COMPARE = "_slivertune_compare"


def explain(owner: Any, method: str, doing: str | Callable[[], str]) -> None:
    """Override a method, on this instance: a collective that fails in it is explained, other errors stay as they are.

    Args:
        owner: An engine, an Accelerator, a model.
        method: Its name.
        doing: What it does, for the message.
    """
    original = getattr(owner, method)

    @wraps(original)
    def explained(*args: Any, **kwargs: Any) -> Any:
        with guard(doing if isinstance(doing, str) else doing(), computes=True):
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


def compare_before_saving(engine: Any, compare: Callable[[], None]) -> None:
    """Compare the ranks before a DeepSpeed engine saves a checkpoint.

    Args:
        engine: `save_checkpoint` is overridden, on this instance.
        compare: Raises on every rank where they have drifted apart. A collective.
    """
    save = engine.save_checkpoint

    @wraps(save)
    def compare_and_save(*args: Any, **kwargs: Any) -> Any:
        compare()
        return save(*args, **kwargs)

    engine.save_checkpoint = compare_and_save


def compare_when_saving(accelerator: Any, compare: Callable[[], None]) -> None:
    """Compare the ranks where their work is kept: before `save_state` writes, and in `end_training`.

    Args:
        accelerator: `accelerate.Accelerator`; `end_training` is overridden, on this instance.
        compare: Raises on every rank where they have drifted apart. A collective.
    """
    end_training = accelerator.end_training

    @wraps(end_training)
    def compare_and_end() -> None:
        if world_size() > 1:
            compare()
        end_training()

    accelerator.register_save_state_pre_hook(lambda models, weights, output_dir: compare())
    accelerator.end_training = compare_and_end
    setattr(accelerator, _COMPARE, compare)


def compare_now(accelerator: Any) -> None:
    """Compare the ranks, if this Accelerator has prepared what is to be compared. A collective.

    Args:
        accelerator: `accelerate.Accelerator`.
    """
    if world_size() > 1:
        getattr(accelerator, _COMPARE, lambda: None)()
