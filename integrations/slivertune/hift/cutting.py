"""Where a group's weights are cut into pieces that fit a number of bytes, by what their steps cost."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from slivertune.hift.base import CUT_MULTIPLE, BaseOptimizer, Slicing
from slivertune.hift.config import HiFTConfig
from slivertune.hift.offload_buffer import aligned
from slivertune.hift.piece import Piece, Slice, Weight
from slivertune.hift.probe import StepMeter

_GAPS_BYTES = 512
"""The gaps between a weight's tensors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSize:
    """What a weight costs while it is stepped."""

    num_elements: int
    bytes_per_element: float
    """Master, state and temporaries."""
    cuttable: bool = True
    """Whether its elements lie one after the other in memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """Elements [start, stop) of a weight, flattened."""

    weight: int
    """Position of the weight in the group."""
    start: int
    stop: int


# Slices begin at aligned addresses of their piece: room for the gaps of a few state tensors.
_SLICE_OVERHEAD_BYTES = 256


def cut_pieces(
    weights: Sequence[WeightSize], stream_bytes: int, slicing: Slicing, *, by_weight: bool = False
) -> list[list[Cut]]:
    """Fill pieces of at most `stream_bytes` with slices of the weights, in order.

    A piece is larger where it has to be: a whole tensor that must not be cut, or the smallest slice allowed.

    Args:
        weights: The group's weights.
        stream_bytes: Bytes of one piece; 0 makes one piece of the whole group.
        slicing: Where the base optimizer allows a cut.
        by_weight: Whether no piece may hold slices of two weights; 0 bytes then make one piece of a weight.

    Returns:
        The pieces; together they hold every element once.
    """
    if by_weight:
        return [
            [replace(cut, weight=index) for cut in piece]
            for index, weight in enumerate(weights)
            for piece in cut_pieces([weight], stream_bytes, slicing)
            if piece
        ]
    whole = [Cut(weight=index, start=0, stop=weight.num_elements) for index, weight in enumerate(weights)]
    if stream_bytes == 0 or slicing.unit == "group":
        return [whole]
    pieces: list[list[Cut]] = [[]]
    room = float(stream_bytes)
    for index, weight in enumerate(weights):
        start = 0
        while start < weight.num_elements:
            cuttable = slicing.unit == "elements" and weight.cuttable
            rest = weight.num_elements - start
            num_taken = _num_taken(rest, (room - _SLICE_OVERHEAD_BYTES) / weight.bytes_per_element, cuttable, slicing)
            if num_taken == 0 and pieces[-1]:
                pieces.append([])
                room = float(stream_bytes)
                continue
            num_taken = num_taken or _smallest(rest, cuttable, slicing)
            pieces[-1].append(Cut(weight=index, start=start, stop=start + num_taken))
            room -= num_taken * weight.bytes_per_element + _SLICE_OVERHEAD_BYTES
            start += num_taken
    return pieces


def _num_taken(rest: int, room: float, cuttable: bool, slicing: Slicing) -> int:
    """Elements to take of the `rest`, given `room` for so many; 0 where not even the smallest slice fits."""
    if rest <= room:
        return rest
    if not cuttable:
        return 0
    most = min(int(room), rest - slicing.minimum)
    num_taken = most // CUT_MULTIPLE * CUT_MULTIPLE
    return num_taken if num_taken >= slicing.minimum else 0


def _smallest(rest: int, cuttable: bool, slicing: Slicing) -> int:
    aligned = -(-slicing.minimum // CUT_MULTIPLE) * CUT_MULTIPLE
    return aligned if cuttable and rest - aligned >= slicing.minimum else rest


class PieceCutter:
    """Cuts one group into pieces, and tells how many bytes wait between its steps.

    Args:
        weights: What the group trains.
        base: The base optimizer; one instance a piece.
        meter: Measures its steps.
        config: HiFT's settings.
    """

    def __init__(self, weights: Sequence[Weight], base: BaseOptimizer, meter: StepMeter, config: HiFTConfig) -> None:
        self._weights = weights
        self._base = base
        self._meter = meter
        self._config = config

    def cut(self) -> list[Piece]:
        """New pieces, which together hold every element once."""
        sizes = [self._size(weight) for weight in self._weights]
        by_weight = self._config.step_in_backward
        cuts_of = cut_pieces(sizes, self._config.piece_bytes, self._base.slicing, by_weight=by_weight)
        # A rank may hold nothing of the whole group.
        return [Piece([self._slice(cut) for cut in cuts]) for cuts in cuts_of if cuts]

    def waiting_bytes(self) -> Counter[torch.dtype]:
        """Bytes of the masters and the state that will wait, by dtype.

        Without `state="disk"`, whose files are allocated whole, state is left out where counting it would take an extra
        step on a dummy weight.
        """
        num_bytes: Counter[torch.dtype] = Counter()
        for weight in self._weights:
            if self._on_master(weight):
                dtype = torch.int16 if self._config.master == "split" else torch.float32
                num_bytes[dtype] += aligned(weight.parameter.numel() * dtype.itemsize)
            if self._meter.is_elementwise or self._config.state == "disk":
                needs = self._meter.needs(weight, self._stepped_dtype(weight))
                for dtype, state_bytes in needs.state_bytes.items():
                    num_bytes[dtype] += aligned(math.ceil(state_bytes)) + _GAPS_BYTES
        return num_bytes

    def _slice(self, cut: Cut) -> Slice:
        weight = self._weights[cut.weight]
        scalars_on_device = self._meter.scalars_on_device(weight, self._stepped_dtype(weight))
        on_master = self._on_master(weight)
        return Slice(weight, cut.start, cut.stop, on_master=on_master, scalars_on_device=scalars_on_device)

    def _size(self, weight: Weight) -> WeightSize:
        parameter = weight.parameter
        bytes_per_element = 0.0
        if self._base.slicing.unit != "group" and self._config.piece_bytes:
            needs = self._meter.needs(weight, self._stepped_dtype(weight))
            bytes_per_element = (sum(needs.state_bytes.values()) + needs.temporary_bytes) / max(1, parameter.numel())
        if self._on_master(weight):
            bytes_per_element += 4 + 4  # the master, and the gradient cast to fp32
            if self._config.master == "split":
                bytes_per_element += 2 + 4  # the lower bits, and the same widened to 32
        return WeightSize(
            num_elements=parameter.numel(),
            bytes_per_element=max(bytes_per_element, 1.0),
            cuttable=parameter.is_contiguous(),
        )

    def _on_master(self, weight: Weight) -> bool:
        return self._config.master != "none" and weight.has_master

    def _stepped_dtype(self, weight: Weight) -> torch.dtype:
        return torch.float32 if self._on_master(weight) else weight.parameter.dtype
