"""Refuse another optimizer's step on parameters that an optimizer of this library trains, before it changes any."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from slivertune.core.weak_members import WeakMembers, add_member, discard_member, living


class Guard(Protocol):
    """An object that is asked before every step of any optimizer."""

    def refuse_foreign_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if the optimizer would step a guarded parameter.

        Args:
            optimizer: The optimizer that is about to step.
        """


_guards: WeakMembers[Guard] = {}
"""Active guards. They are held weakly, and may end with their models."""


def watch_steps(guard: Guard) -> None:
    """Ask a guard before every step from now on, as long as it exists.

    Args:
        guard: The guard. It is held weakly.
    """
    _register_hook()
    add_member(_guards, guard)


def forget_steps(guard: Guard) -> None:
    """Stop asking a guard. A second call does nothing."""
    discard_member(_guards, guard)


def refuse_step_of_other(
    optimizer: torch.optim.Optimizer, own: object | None, names: Callable[[], Mapping[int, str]], title: str
) -> None:
    """Refuse the step of an optimizer that holds a parameter of another one.

    Args:
        optimizer: The optimizer that is about to step. It may be accelerate's wrapper of `own`.
        own: The optimizer that trains the parameters.
        names: Returns the names of the parameters, by identity. It is not called for a step of `own`.
        title: Name of the optimizer that trains them.

    Raises:
        RuntimeError: If `optimizer` is not `own` and holds one of the parameters.
    """
    inner: Any = optimizer
    while inner is not None:
        if inner is own:
            return
        inner = getattr(inner, "optimizer", None)
    name_of = names()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) in name_of:
                raise RuntimeError(
                    f"{type(optimizer).__name__} would step {name_of[id(parameter)]}, which {title} trains while it is "
                    f"attached. Call detach() on the {title} (or on the handle that slivertune.attach returned) before "
                    "anything else trains the model, and build that optimizer afterwards"
                )


@cache
def _register_hook() -> None:
    """Register the hook on every optimizer's step, once and for good.

    The hooks are global. The garbage collector would take a hook that ended with its model out of their dictionary,
    maybe while a step iterates over it.
    """
    register_optimizer_step_pre_hook(_before_step)


def _before_step(*args: Any) -> None:
    for guard in living(_guards):
        guard.refuse_foreign_step(args[0])
