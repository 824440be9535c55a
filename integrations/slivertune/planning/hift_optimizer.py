"""HiFT as a request asks for it, over a model without data."""

from typing import Any

import torch
from torch import nn

from slivertune.core.layers import layers_in
from slivertune.hift import HiFT, HiFTConfig
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
    """Make the optimizer. State that would be stored in files lies in host memory, from which it is copied alike.

    Args:
        model: The model.
        request: HiFT's settings and the base optimizer.
        updates_a_turn: As many as are run; the request's own number changes nothing that is seen of one.
        max_grad_norm: As in `HiFTConfig`.
    """
    optimizer_class, arguments = optimizer_of(request.optimizer, request.kernels)
    config = HiFTConfig(
        layers_per_group=request.layers_per_group,
        layers=layers_in(request.layers),
        steps_per_group=updates_a_turn,
        state="host" if request.state == "disk" else request.state,
        master=request.master_kind,
        stream_bytes=request.stream_bytes,
        gradients=request.gradients,
        waiting=request.waiting,
        weights=request.weights,
        resident_bytes=request.resident_bytes,
        prefetch_bytes=0 if request.state == "device" else request.prefetch_bytes,
        max_grad_norm=max_grad_norm,
    )
    with FakeOverrides():
        return HiFT(model, optimizer_class, config=config, **arguments)


def meet_gradients(optimizer: HiFT, model: nn.Module, forward: Forward) -> None:
    """Bring an optimizer to its step without the model's forward and backward, which take long.

    Args:
        optimizer: All parameters of its active group get a gradient.
        model: The model.
        forward: Its forward, which ends once HiFT has seen its inputs.
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
    parameters = [weight.parameter for weight in optimizer.weights_of(optimizer.active_group)]
    # Expanded, so that what is accumulated is a copy, and the only one.
    gradients = [parameter.new_empty(()).expand_as(parameter) for parameter in parameters]
    with FakeOverrides():
        torch.autograd.backward(parameters, gradients)


class _EnoughSeenError(Exception):
    """Ends a forward."""
