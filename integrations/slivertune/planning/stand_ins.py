"""What engines allocate while a backward makes gradients, as tensors without data, in the moments when they do.

Engines can't run without data; these take their place in a step on one GPU, and the ledger counts them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from slivertune.core.backward import at_end_of_backward
from slivertune.core.ledger import claimed_at_birth
from slivertune.planning.gathered_units import GatheredUnits
from slivertune.planning.methods import planned
from slivertune.planning.request import PlanRequest

ALL_REDUCE_BUCKET_BYTES = 25 * 2**20
"""Of a bucket in which HiFT averages gradients under DDP."""
_MOST_UNDER_WAY = 2


class _AtGradients:
    """Sees each gradient arrive, and backwards end.

    Args:
        model: Its parameters are watched, those that train now or later.
    """

    def __init__(self, model: nn.Module) -> None:
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._is_running = False
        self._handles = [each.register_post_accumulate_grad_hook(self._arrived) for each in self.parameters]

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def begin(self) -> None:
        """The first gradient of a backward is there."""

    def arrive(self, parameter: torch.Tensor) -> None:
        """A gradient is there."""

    def end(self) -> None:
        """The backward is over."""

    def _arrived(self, parameter: torch.Tensor) -> None:
        if not self._is_running:
            self._is_running = True
            at_end_of_backward(self._ended)
            self.begin()
        self.arrive(parameter)

    def _ended(self) -> None:
        self._is_running = False
        self.end()


class AllReduceBuckets(_AtGradients):
    """HiFT under DDP: gradients are copied into buckets of a fixed size, at most two of which are under way.

    Args:
        model: The model.
        bucket_bytes: Bytes of a bucket; None takes `ALL_REDUCE_BUCKET_BYTES`.
    """

    def __init__(self, model: nn.Module, bucket_bytes: int | None = None) -> None:
        super().__init__(model)
        self._bucket_bytes = ALL_REDUCE_BUCKET_BYTES if bucket_bytes is None else bucket_bytes
        self._pending: list[tuple[set[int], int, torch.dtype]] = []
        self._under_way: deque[torch.Tensor] = deque()

    def begin(self) -> None:
        """Share what trains out among buckets, last parameter first."""
        trained = [parameter for parameter in reversed(self.parameters) if parameter.requires_grad]
        self._pending = []
        for dtype in dict.fromkeys(parameter.dtype for parameter in trained):
            self._pending += _filled([each for each in trained if each.dtype == dtype], self._bucket_bytes)

    def arrive(self, parameter: torch.Tensor) -> None:
        """Start the buckets that are full, in their order."""
        for missing, _, _ in self._pending:
            missing.discard(id(parameter))
        while self._pending and not self._pending[0][0]:
            self._start()

    def end(self) -> None:
        """All means have arrived."""
        while self._pending:
            self._start()
        self._under_way.clear()

    def _start(self) -> None:
        _, num_elements, dtype = self._pending.pop(0)
        while len(self._under_way) >= _MOST_UNDER_WAY:
            self._under_way.popleft()
        with claimed_at_birth("gradients"):
            self._under_way.append(torch.empty(num_elements, dtype=dtype))


class ReduceBucket(_AtGradients):
    """ZeRO-1 and 2: one bucket from the first gradient of a backward to its end.

    Args:
        model: The model.
        num_elements: Elements of the bucket.
    """

    def __init__(self, model: nn.Module, num_elements: int) -> None:
        super().__init__(model)
        self._num_elements = num_elements
        self._bucket: torch.Tensor | None = None

    def begin(self) -> None:
        """The bucket is taken."""
        with claimed_at_birth("gradients"):
            self._bucket = torch.empty(self._num_elements, dtype=self.parameters[0].dtype)

    def end(self) -> None:
        """The bucket is given back."""
        self._bucket = None


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
            in_engine = request.layout != "ddp" and not method.steps_itself
            buckets = ReduceBucket(model, bucket_elements) if in_engine else AllReduceBuckets(model)
            stack.callback(buckets.remove)
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


def _filled(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[tuple[set[int], int, torch.dtype]]:
    """Buckets of one dtype: whose gradients they wait for, their elements (one more for each part), the dtype."""
    capacity = max(1, bucket_bytes // parameters[0].dtype.itemsize)
    buckets: list[tuple[set[int], int, torch.dtype]] = []
    parts: set[int] = set()
    filled = 0
    for parameter in parameters:
        left = parameter.numel()
        while left:
            taken = min(left, capacity - filled)
            parts.add(id(parameter))
            filled, left = filled + taken, left - taken
            if filled == capacity:
                buckets.append((parts, filled + len(parts), parameter.dtype))
                parts, filled = set(), 0
    return [*buckets, (parts, filled + len(parts), parameters[0].dtype)] if filled else buckets
