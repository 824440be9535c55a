"""Frozen weights that a planned run parks, on fake tensors."""

import torch
from torch import nn
from typing_extensions import override

from slivertune.core.copy_streams import Event
from slivertune.parked.exact_source import ExactSource
from slivertune.parked.park import ParkedLayers
from slivertune.parked.quantized_layers import QuantizedLayers
from slivertune.planning.fake import FakeOverrides
from slivertune.planning.request import PlanRequest
from slivertune.planning.slow_streams import planned_streams

PARKING = frozenset({"waiting", "weights", "device_bytes", "resident_bytes"})
"""Fields of `PlanRequest` that a method reads if it parks frozen weights."""


def park(request: PlanRequest, model: nn.Module) -> ParkedLayers | None:
    """Park the frozen weights of a model, and make all codes.

    Args:
        request: Planned run.
        model: Model of fake tensors, with everything frozen that does not train.

    Returns:
        Handle, or None if the run parks none.
    """
    if not request.parks:
        return None
    with planned_streams(request), FakeOverrides():
        resident_bytes = request.device_bytes if request.resident_bytes is None else request.resident_bytes
        parked = ParkedLayers(model, request.waiting or "exact", request.weights, resident_bytes or 0, _in_files)
        parked.make_codes()
    return parked


def num_streamed(parked: ParkedLayers | None) -> int:
    """Return the number of blocks that each forward loads from the host."""
    return 0 if parked is None else parked.num_streamed


def _in_files(quantized: QuantizedLayers) -> dict[int, ExactSource]:
    return {id(held.parameter): _InFile(held.exact()) for held in quantized.weights}


class _InFile(ExactSource):
    """A weight in the checkpoint from which the run loads its model: it takes no memory.

    Args:
        exact: The weight.
    """

    def __init__(self, exact: torch.Tensor) -> None:
        self._form = exact.to("meta")

    @override
    def read(self) -> torch.Tensor:
        return torch.empty_like(self._form, device="cpu")

    @override
    def write(self, weight: torch.Tensor) -> None:
        raise NotImplementedError

    @override
    def load(self, into: torch.Tensor) -> Event:
        raise NotImplementedError

    @override
    def end_loading(self) -> None:
        """Do nothing."""

    @override
    def store(self, weight: torch.Tensor) -> Event:
        raise NotImplementedError
