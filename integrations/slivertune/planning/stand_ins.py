"""What a layout allocates while a backward makes gradients, as tensors without data, in the moments when it does.

Buckets of ours are the real ones, with no other rank. Engines can't run without data; what is here takes their place in
a step on one GPU. The ledger counts both.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from slivertune.core.ledger import claimed_at_birth
from slivertune.core.torch_internals import at_end_of_backward
from slivertune.parallel.consistency.heartbeat import Heartbeat
from slivertune.parallel.ddp.gradient_sync import BucketedAllReduce
from slivertune.planning.gathered_units import GatheredUnits
from slivertune.planning.methods import planned
from slivertune.planning.request import PlanRequest


class ReduceBucket:
    """ZeRO-1 and 2: one bucket from the first gradient of a backward to its end.

    Args:
        model: The model; its parameters are watched, those that train now or later.
        num_elements: Elements of the bucket.
    """

    def __init__(self, model: nn.Module, num_elements: int) -> None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._num_elements, self._dtype = num_elements, trained[0].dtype
        self._bucket: torch.Tensor | None = None
        self._handles = [each.register_post_accumulate_grad_hook(self._arrived) for each in trained]

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _arrived(self, parameter: torch.Tensor) -> None:
        if self._bucket is None:
            at_end_of_backward(self._ended)
            with claimed_at_birth("gradients"):
                self._bucket = torch.empty(self._num_elements, dtype=self._dtype)

    def _ended(self) -> None:
        self._bucket = None


class _NothingToWaitFor:
    def wait(self) -> None:
        """A mean over the ranks takes no memory."""


class _KeepsInput(torch.autograd.Function):
    """Passes an output on, and keeps an input for as long as the backward may need it."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(kept)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


def _keep_input(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
    apply: Callable[..., torch.Tensor] = _KeepsInput.apply
    return apply(output, inputs[0].detach()) if inputs and output.requires_grad else output


@contextmanager
def standing_in(request: PlanRequest, model: nn.Module, bucket_elements: int) -> Iterator[None]:
    """Put the stand-in of a layout's engine on a model, for a time.

    Args:
        request: The layout, and how the model is trained.
        model: The model.
        bucket_elements: Elements of ZeRO's reduce bucket.
    """
    method = planned(request.method)
    with ExitStack() as stack:
        if method.averages_in_buckets and request.layout in ("ddp", "zero1", "zero2"):
            if request.layout != "ddp" and not method.steps_itself:
                stack.callback(ReduceBucket(model, bucket_elements).remove)
            else:
                alone = Heartbeat("planning")
                nothing = _NothingToWaitFor()
                means = BucketedAllReduce(model, model.parameters(), alone, start_mean=lambda flat: nothing)
                stack.callback(means.remove)
        elif request.layout == "fsdp2":
            units = GatheredUnits(
                model,
                num_gpus=request.num_gpus,
                num_backwards=request.num_backwards,
                offloads=request.offload_parameters,
            )
            stack.callback(units.remove)
        elif request.layout == "zero3":
            # Its matrix products keep their inputs, also those of frozen weights.
            for module in model.modules():
                if isinstance(module, nn.Linear):
                    stack.callback(module.register_forward_hook(_keep_input).remove)
        yield
