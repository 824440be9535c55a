"""The route of the active group's gradients from the backward to the step. Others override what differs.

`HostGradients` offloads them until the step, and `SteppedGradients` steps each weight inside the backward.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from typing_extensions import override

from slivertune.hift.chunk import Weight, drop_gradient
from slivertune.hift.parts import Part, Turn


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """Functions by which a route updates the active group."""

    begin: Callable[[], None]
    """Begin an update, before its first weight is stepped. If it fails, nothing was updated."""
    begin_change: Callable[[], None]
    """Note that all weights of the group change from here to the end of the update."""
    step: Callable[[Sequence[Weight]], None]
    """Step weights of the group from their gradients, and drop the gradients."""
    stepping: Callable[[], AbstractContextManager[None]]
    """Mark steps of trained parameters inside the context as HiFT's own."""


class DeviceGradients(Part):
    """Gradients stay on the device until `step` (`gradients="device"`).

    Args:
        steps: Functions that a route calls.
        max_norm: Largest norm, to which gradients are clipped. None does not clip.
    """

    refusal_of_scaler: str | None = None
    """Text of the error of a GradScaler, which unscales gradients after the backward. None lets it."""
    takes_closures = True
    """Whether the backward may run inside `step`."""
    _turn: Turn

    def __init__(self, steps: Steps, max_norm: float | None) -> None:
        self._steps = steps
        self._max_norm = max_norm
        self.norm: torch.Tensor | None = None
        """2-norm of the last update's gradients before clipping, if they are clipped."""

    @override
    def begin_turn(self, turn: Turn) -> None:
        self._turn = turn

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory for gradients."""
        return 0

    @property
    def beside(self) -> Sequence[Weight]:
        """Weights of other groups that have gradients in this turn, too. An update needs none of them."""
        return ()

    def begin_backward(self) -> None:
        """Note that a backward of the model begins."""

    def on_gradient(self, parameter: torch.Tensor) -> None:
        """Note that the gradient of a parameter is complete."""
        self._turn.state.prefetch(in_backward=True)

    def close(self) -> None:
        """Check, before `collect`, that gradients came from whole backward passes.

        Raises:
            RuntimeError: If the update is half done, or a gradient did not come from a backward.
        """

    def collect(self) -> bool:
        """Step what has a gradient and was not stepped yet. Return whether there was an update."""
        weights = self._turn.state.weights
        for weight in weights:
            if weight.trained is not weight.parameter:
                weight.take_gradient()
        if all(weight.parameter.grad is None for weight in weights):
            return False
        self._steps.begin()
        self._steps.begin_change()
        for weight in weights:
            if weight.trained is not weight.parameter:
                weight.trained.grad = None  # so that it is freed as soon as its last chunk is stepped
        if self._max_norm is not None:
            self.norm = nn.utils.clip_grad_norm_([weight.parameter for weight in weights], self._max_norm)
        with self._steps.stepping():
            self._steps.step(weights)
        return True

    def end(self) -> None:
        """End an update that was stepped or skipped, before the turn is passed on."""

    def check_closed(self) -> None:
        """Check that no update is open or half done.

        Raises:
            RuntimeError: If one is.
        """

    def drop(self, weights: Sequence[Weight]) -> None:
        """Drop the gradients of an update that is given up."""
        for weight in weights:
            drop_gradient(weight)
            weight.trained.grad = None

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Mark backward passes inside the context as not the last of their update."""
        yield

    def wait_for_means(self) -> Callable[[nn.Parameter], None]:
        """Let stepped gradients wait until they are the mean over all ranks.

        Returns:
            Function to call, inside the backward, with each parameter whose gradient is the mean. It does nothing if
            gradients are not stepped.
        """
        return lambda parameter: None
