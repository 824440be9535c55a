"""What HiFT puts on a model: weights are frozen until their turn, and the model's forward and backward are watched."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from slivertune.core.layers import Layer
from slivertune.hift.backward_watch import BackwardWatch
from slivertune.hift.freezing import Freezer
from slivertune.hift.in_backward import BackwardSteps
from slivertune.hift.model_check import ModelCheck
from slivertune.hift.piece import Weight
from slivertune.hift.residency import Residency


class ModelHooks:
    """The hooks, until `release`. Nothing here holds the optimizer, which the model's hooks must not keep alive.

    Args:
        model: The model.
        layers: Its layers.
        weights: What is trained; frozen here until its turn.
        check: Raises before a training forward if the model has changed.
        in_backward: Steps weights inside the backward, if that is where they are stepped.
        listeners: Called inside of each backward of the model when it begins, once.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        weights: Iterable[Weight],
        check: ModelCheck | None,
        in_backward: BackwardSteps | None,
        listeners: Sequence[Callable[[], None]],
    ) -> None:
        self.model = model
        """The model."""
        self._freezer = freezer = Freezer(model, [weight.trained for weight in weights])
        self.in_backward = in_backward
        """Steps weights inside the backward."""
        self._arrived: list[weakref.ref[torch.Tensor]] = []
        """The gradient that a backward brought last."""

        def before_forward() -> None:
            if check is not None:
                check()
            freezer.settle()

        def before_backward() -> None:
            freezer.settle()
            for listener in listeners:
                listener()

        self.watch = BackwardWatch(model, layers, on_forward=before_forward, on_backward=before_backward)
        """Whether a backward has run, and has reached the group."""
        if in_backward is not None:
            in_backward.attach(model)

    def activate(self, weights: Sequence[Weight], residency: Residency) -> None:
        """Begin the turn of a group: it alone has gradients.

        Args:
            weights: The group's.
            residency: Where its state is; told when gradients begin to arrive.
        """
        parameters = [weight.trained for weight in weights]
        steps, watch, arrived = self.in_backward, self.watch, self._arrived

        def on_gradient(parameter: torch.Tensor) -> None:
            watch.note_gradient()
            arrived[:] = [weakref.ref(parameter.grad)] if parameter.grad is not None else []
            if steps is not None:
                steps.on_gradient(parameter)
            else:
                residency.prefetch()

        watch.watch(parameters)
        self._freezer.only(parameters, on_gradient)

    def has_brought(self, weights: Iterable[Weight]) -> bool:
        """Whether a gradient of these weights came from a backward, and was not set by hand.

        Args:
            weights: Those of the active group.
        """
        arrived = [gradient() for gradient in self._arrived]
        return any(w.trained.grad is not None and w.trained.grad is one for w in weights for one in arrived)

    def release(self) -> None:
        """Let every parameter have gradients again, and take the hooks off the model."""
        self._freezer.release()
        self.watch.release()
        if self.in_backward is not None:
            self.in_backward.release()
