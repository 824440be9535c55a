"""Cuts a group's weights into pieces by what their steps cost, and tells how many bytes wait between steps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch

from slivertune.hift.base import BaseOptimizer
from slivertune.hift.config import MasterKind
from slivertune.hift.cutting import WeightSize, cut_pieces
from slivertune.hift.offload_buffer import aligned
from slivertune.hift.piece import Piece, Slice, Weight
from slivertune.hift.probe import StepMeter

_GAPS_BYTES = 512
"""The gaps between a weight's tensors."""


class PieceCutter:
    """Sizes of one group.

    Args:
        weights: What the group trains.
        base: The base optimizer; one instance a piece.
        meter: Measures its steps.
        master: What stands behind 16-bit weights.
        stream_bytes: Bytes of a piece on the device; 0 for the whole group.
        by_weight: Whether no piece may hold slices of two weights.
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        base: BaseOptimizer,
        meter: StepMeter,
        *,
        master: MasterKind,
        stream_bytes: int,
        by_weight: bool,
    ) -> None:
        self._weights = weights
        self._base = base
        self._meter = meter
        self._master = master
        self._stream_bytes = stream_bytes
        self._by_weight = by_weight

    def cut(self) -> list[Piece]:
        """New pieces, which together hold every element once."""
        pieces = []
        sizes = [self._size(weight) for weight in self._weights]
        for cuts in cut_pieces(sizes, self._stream_bytes, self._base.slicing, by_weight=self._by_weight):
            slices = []
            for cut in cuts:
                weight = self._weights[cut.weight]
                slices.append(Slice(weight, cut.start, cut.stop, on_master=self._on_master(weight)))
            if slices:  # a rank may hold nothing of the whole group
                pieces.append(Piece(slices, self._base))
        return pieces

    def waiting_bytes(self, measures_all: bool) -> Counter[torch.dtype]:
        """Bytes of the masters and the state that will wait, by dtype.

        Args:
            measures_all: Whether state is counted even where that takes an extra step on a dummy weight.
        """
        num_bytes: Counter[torch.dtype] = Counter()
        for weight in self._weights:
            if self._on_master(weight):
                dtype = torch.int16 if self._master == "split" else torch.float32
                num_bytes[dtype] += aligned(weight.parameter.numel() * dtype.itemsize)
            if self._meter.is_elementwise or measures_all:
                needs = self._meter.needs(weight, self._stepped_dtype(weight))
                for dtype, state_bytes in needs.state_bytes.items():
                    num_bytes[dtype] += aligned(math.ceil(state_bytes)) + _GAPS_BYTES
        return num_bytes

    def scalars_on_device(self, weight: Weight) -> frozenset[str]:
        """Keys of a weight's state without dimensions that lie beside it in a step, and not on the host."""
        return self._meter.scalars_on_device(weight, self._stepped_dtype(weight))

    def _size(self, weight: Weight) -> WeightSize:
        parameter = weight.parameter
        bytes_per_element = 0.0
        if self._base.slicing.unit != "group" and self._stream_bytes:
            needs = self._meter.needs(weight, self._stepped_dtype(weight))
            bytes_per_element = (sum(needs.state_bytes.values()) + needs.temporary_bytes) / max(1, parameter.numel())
        if self._on_master(weight):
            bytes_per_element += 4 + 4  # the master, and the gradient cast to fp32
            if self._master == "split":
                bytes_per_element += 2 + 4  # the lower bits, and the same widened to 32
        return WeightSize(
            num_elements=parameter.numel(),
            bytes_per_element=max(bytes_per_element, 1.0),
            cuttable=parameter.is_contiguous(),
        )

    def _on_master(self, weight: Weight) -> bool:
        return self._master != "none" and weight.has_master

    def _stepped_dtype(self, weight: Weight) -> torch.dtype:
        return torch.float32 if self._on_master(weight) else weight.parameter.dtype
