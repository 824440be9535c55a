"""Cut a group's weights into chunks of a number of bytes, by the memory that their steps need."""

import math
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

from slivertune.hift.base import CUT_MULTIPLE, Slicing
from slivertune.hift.chunk import Chunk, OwnHyperparameters, Slice, Weight
from slivertune.hift.probe import StepMeter
from slivertune.hift.stochastic_rounding import BYTES_PER_ELEMENT


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSize:
    """Memory that a weight needs while it is stepped."""

    num_elements: int
    bytes_per_element: float
    """Bytes of master weight, optimizer state, temporaries and offloaded gradient."""
    cuttable: bool = True
    """Whether its elements are contiguous in memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """Elements [start, stop) of a flattened weight."""

    weight: int
    """Index of the weight in the group."""
    start: int
    stop: int


# Slices begin at aligned addresses of their chunk. This is room for the gaps of a few state tensors.
_SLICE_OVERHEAD_BYTES = 256


def cut_chunks(
    weights: Sequence[WeightSize],
    stream_bytes: int,
    slicing: Slicing,
    *,
    by_weight: bool = False,
    begins: Container[int] = (),
) -> list[list[Cut]]:
    """Fill chunks of at most `stream_bytes` with slices of the weights, in order.

    A chunk is larger only for a whole tensor that must not be cut, or for the smallest slice allowed.

    Args:
        weights: Weights of the group.
        stream_bytes: Bytes per chunk; 0 makes one chunk of the whole group.
        slicing: Cuts that the base optimizer allows.
        by_weight: Whether each chunk holds slices of one weight only. 0 bytes then make one chunk per weight.
        begins: Indices of weights that begin a chunk.

    Returns:
        Chunks that together hold every element once.
    """
    if by_weight:
        return [
            [replace(cut, weight=index) for cut in chunk]
            for index, weight in enumerate(weights)
            for chunk in cut_chunks([weight], stream_bytes, slicing)
            if chunk
        ]
    if stream_bytes == 0 or slicing.unit == "group":
        return [[Cut(weight=index, start=0, stop=weight.num_elements) for index, weight in enumerate(weights)]]
    chunks: list[list[Cut]] = [[]]
    room = float(stream_bytes)
    for index, weight in enumerate(weights):
        if index in begins and chunks[-1]:
            chunks.append([])
            room = float(stream_bytes)
        start = 0
        while start < weight.num_elements:
            cuttable = slicing.unit == "elements" and weight.cuttable
            rest = weight.num_elements - start
            num_taken = _num_taken(rest, (room - _SLICE_OVERHEAD_BYTES) / weight.bytes_per_element, cuttable, slicing)
            if num_taken == 0 and chunks[-1]:
                chunks.append([])
                room = float(stream_bytes)
                continue
            num_taken = num_taken or _smallest(rest, cuttable, slicing)
            chunks[-1].append(Cut(weight=index, start=start, stop=start + num_taken))
            room -= num_taken * weight.bytes_per_element + _SLICE_OVERHEAD_BYTES
            start += num_taken
    return chunks


def _num_taken(rest: int, room: float, cuttable: bool, slicing: Slicing) -> int:
    """Return how many elements of `rest` to take into `room` elements, or 0 if the smallest slice does not fit."""
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


def cut_group(weights: Sequence[Weight], meter: StepMeter, own: OwnHyperparameters) -> list[Chunk]:
    """Cut one group into new chunks, which together hold every element once, in the order of their steps.

    Args:
        weights: Trained weights of the group.
        meter: Meter of the memory that steps need, with HiFT's settings.
        own: Hyperparameters that earlier instances of the base optimizer had changed.
    """
    config = meter.config
    meter.compile_steps(weights)
    sizes = [_size(weight, meter) for weight in weights]
    # Copies in fp32 of a whole group would take more than its gradients and state.
    has_copies = config.state == "device" and config.master == "stochastic" and meter.base.slicing.unit != "group"
    by_weight = config.steps_in_backward or has_copies
    begins = _large_layers(weights, sizes, config.chunk_bytes)
    cuts_of = cut_chunks(sizes, config.chunk_bytes, meter.base.slicing, by_weight=by_weight, begins=begins)
    cuts_of = [cuts for cuts in cuts_of if cuts]  # a rank may hold no part of a group
    if config.state != "device" and config.gradients == "host":
        # A backward makes the gradients of the last weights first, so these are stepped first.
        cuts_of.sort(key=lambda cuts: -cuts[0].weight)
    slices_of = [[Slice(weights[cut.weight], cut.start, cut.stop, meter) for cut in cuts] for cuts in cuts_of]
    return [Chunk(slices, meter.base, own) for slices in slices_of]


def _large_layers(weights: Sequence[Weight], sizes: Sequence[WeightSize], chunk_bytes: int) -> set[int]:
    """Return the indices of weights that begin a layer of more than one chunk. Equal layers are then cut alike."""
    num_bytes: Counter[int] = Counter()
    for weight, size in zip(weights, sizes, strict=True):
        num_bytes[weight.layer] += math.ceil(size.num_elements * size.bytes_per_element)
    begins: dict[int, int] = {}
    for index, weight in enumerate(weights):
        begins.setdefault(weight.layer, index)
    return {index for layer, index in begins.items() if num_bytes[layer] > chunk_bytes}


def _size(weight: Weight, meter: StepMeter) -> WeightSize:
    parameter = weight.parameter
    bytes_per_element = 0.0
    if meter.base.slicing.unit != "group" and meter.config.chunk_bytes:
        needs, num_elements = meter.needs(weight), max(1, parameter.numel())
        temporary_bytes = needs.temporary_bytes / num_elements
        if meter.steps_copy(weight) and not meter.steps_master(weight):
            temporary_bytes = max(temporary_bytes, BYTES_PER_ELEMENT)  # rounding comes after the step
        bytes_per_element = sum(needs.state_bytes.values()) / num_elements + temporary_bytes
    if meter.steps_copy(weight):
        bytes_per_element += 4 + 4  # the copy in fp32, and the gradient cast to fp32
    if meter.config.gradients != "device":
        bytes_per_element += parameter.itemsize  # the offloaded gradient, loaded again
    return WeightSize(
        num_elements=parameter.numel(),
        bytes_per_element=max(bytes_per_element, 1.0),
        cuttable=parameter.is_contiguous() or weight.is_quantized,  # an offloaded exact weight is loaded contiguous
    )
