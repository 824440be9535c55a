"""What an optimizer of this library trains, and another one is about to step: an error before anything has moved."""

import weakref
from collections.abc import Mapping
from functools import cache
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook


class Guard(Protocol):
    """What is asked before every step of any optimizer."""

    def refuse_foreign_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if the optimizer would step what this guards.

        Args:
            optimizer: About to step.
        """


_guards: weakref.WeakSet[Any] = weakref.WeakSet()
"""Those that are on; they may go with their models."""


def watch_steps(guard: Guard) -> None:
    """Have a guard asked from now on, until it is gone.

    Args:
        guard: Is held weakly.
    """
    _register_hook()
    _guards.add(guard)


def forget_steps(guard: Guard) -> None:
    """End what `watch_steps` began; a second call does nothing."""
    _guards.discard(guard)


def refuse_step_of_other(
    optimizer: torch.optim.Optimizer, own: object | None, names: Mapping[int, str], title: str
) -> None:
    """Refuse the step of an optimizer that holds a parameter of another one.

    Args:
        optimizer: About to step; may be accelerate's wrapper of `own`.
        own: Trains the parameters.
        names: Of the parameters, by identity.
        title: Name of the optimizer that trains them.

    Raises:
        RuntimeError: Naming the optimizer, the parameter and the way out.
    """
    inner: Any = optimizer
    while inner is not None:
        if inner is own:
            return
        inner = getattr(inner, "optimizer", None)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) in names:
                raise RuntimeError(
                    f"{type(optimizer).__name__} would step {names[id(parameter)]}, which {title} trains while it is "
                    f"attached; call detach() of the {title} (or of what slivertune.attach returned) before anything "
                    "else trains the model, and build that optimizer afterwards"
                )


@cache
def _register_hook() -> None:
    """Let every optimizer's step be seen, once and for good.

    Optimizers' hooks are global: one that went with its model would be taken out of their dictionary by the garbage
    collector, which may run while a step goes through it.
    """
    register_optimizer_step_pre_hook(_before_step)


def _before_step(*args: Any) -> None:
    for guard in _guards:
        guard.refuse_foreign_step(args[0])
