"""HiFT's optimizer for a planned run, over a model of fake tensors."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from slivertune.core.torch_internals import apply_function
from slivertune.hift import HiFT
from slivertune.planning.fake import FakeOverrides
from slivertune.planning.optimizers import optimizer_of
from slivertune.planning.request import PlanRequest
from slivertune.planning.step import Forward


def hift_over(
    model: nn.Module,
    request: PlanRequest,
    *,
    updates_a_turn: int = 1,
    max_grad_norm: float | None = None,
) -> HiFT:
    """Make the optimizer, with host memory in place of `state="disk"`, since both are copied in the same way.

    Args:
        model: Model of fake tensors.
        request: Run, with HiFT's settings and the base optimizer.
        updates_a_turn: Updates per turn of a group, as many as the plan runs. `steps_per_group` and `order` are not
            used.
        max_grad_norm: As in `HiFTConfig`.
    """
    optimizer_class, arguments = optimizer_of(request.optimizer, request.kernels)
    # A turn is begun by its group's number.
    config = request.hift_config(steps_per_group=updates_a_turn, order="bottom2up", max_grad_norm=max_grad_norm)
    if config.state == "disk":
        config = replace(config, state="host", state_dir=None, state_ram_bytes=0)
    with FakeOverrides():
        return HiFT(model, optimizer_class, config=config, **arguments)


def meet_gradients(optimizer: HiFT, model: nn.Module, forward: Forward) -> None:
    """Prepare an optimizer for its step without the model's slow forward and backward.

    Args:
        optimizer: HiFT's optimizer; all parameters of its active group get a gradient.
        model: Model that the optimizer trains.
        forward: Forward of the model, of which only the beginning runs.
    """
    begin_forward(model, forward)
    passed: torch.Tensor = torch.empty(())
    for weight in optimizer.weights_of(optimizer.active_group):
        passed = apply_function(_GivesGradient, passed, weight.parameter)
    with FakeOverrides():
        passed.backward()


def begin_forward(model: nn.Module, forward: Forward) -> None:
    """Run a forward until HiFT has seen the model's inputs.

    Args:
        model: Model that HiFT trains.
        forward: Forward of the model.
    """

    def stop(*ignored: Any) -> None:
        raise _EnoughSeenError

    handle = model.register_forward_pre_hook(stop)
    try:
        forward()
    except _EnoughSeenError:
        pass
    finally:
        handle.remove()


class _GivesGradient(torch.autograd.Function):
    """Gives a parameter its gradient, after those that were passed later."""

    @staticmethod
    def forward(ctx: Any, passed: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        ctx.form = parameter.dtype, parameter.shape
        return passed.view_as(passed)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        dtype, shape = ctx.form
        # An expanded scalar, so that the accumulated copy is the only one that takes memory.
        return gradient, gradient.new_empty((), dtype=dtype).expand(shape)


class _EnoughSeenError(Exception):
    """Stops a forward."""
