"""A group's state while it waits: whole tensors by weight and key in a buffer, of which slices take their parts.

Here state is flat: a value with tensors inside is a `Structure` under its key, its tensors have keys of their own.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from slivertune.hift.base import CUT_MULTIPLE
from slivertune.hift.masters import join_master, refresh_master, split_master
from slivertune.hift.nested_state import empty_objects, flatten_state, unflatten_state
from slivertune.hift.offload_buffer import OffloadBuffer, aligned, small_copy
from slivertune.hift.piece import Slice, Weight
from slivertune.hift.residency import MASTER, WeightState

LOW = "master_low"
"""Key of the lower 16 bits that complete a bf16 weight to its master."""
TIES = "master_ties"
"""Key of the rounding ties that `LOW` leaves open; few, so they travel with the scalars."""


class OffloadedState:
    """What waits of one group.

    Args:
        buffer: Where tensors with dimensions wait.
        split: Whether masters wait as their lower 16 bits.
    """

    def __init__(self, buffer: OffloadBuffer, *, split: bool) -> None:
        self._buffer = buffer
        self._split = split
        self._tensors: dict[str, dict[str, torch.Tensor]] = {}
        self._scalars: dict[tuple[str, int], dict[str, Any]] = {}
        self._received: dict[tuple[str, int], frozenset[str]] = {}
        """Keys of the tensors that each slice has left here; a weight's other slices may have none yet."""

    def tensors_of(self, one: Slice) -> dict[str, torch.Tensor]:
        """A slice's parts of the waiting tensors, by key."""
        name = one.weight.name
        keys = self._received.get((name, one.start), self._received.get((name, _WHOLE), frozenset()))
        return {key: _part(whole, one, key) for key, whole in self._tensors.get(name, {}).items() if key in keys}

    def scalars_of(self, one: Slice) -> dict[str, Any]:
        """Copies of a slice's state without dimensions, each where it lies in a step."""
        name = one.weight.name
        scalars = self._scalars.get((name, one.start))
        if scalars is None:  # restored: every slice starts from the weight's
            scalars = dict(self._scalars.get((name, _WHOLE), {}))
            if TIES in scalars:
                ties = scalars[TIES]
                scalars[TIES] = ties[(ties >= one.start) & (ties < one.stop)] - one.start
        device = one.weight.parameter.device
        return {
            key: value.to(device if key in one.scalars_on_device else "cpu", non_blocking=True, copy=True)
            if isinstance(value, torch.Tensor)
            else value
            for key, value in scalars.items()
        }

    def receive(self, one: Slice, state: WeightState) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Take a slice's state after its step; tensors are to be copied by the caller.

        Args:
            one: The slice.
            state: By key; its master under `MASTER`.

        Returns:
            The copies to make: tensors on the device, and where each is to wait.
        """
        state = flatten_state(state)
        if self._split and MASTER in state:
            low, ties = split_master(state.pop(MASTER))
            state = {**state, LOW: low, TIES: ties}
        known = self._tensors.get(one.weight.name, {})
        tensors = self._keep_scalars(one.weight, one.start, state)
        copies = []
        for key, value in tensors.items():
            if not (_is_table(key) and key in known):  # it never changes, and the next piece may be loading it
                whole = self._whole(one.weight, key, _like_whole(value, one, key))
                copies.append((value, _part(whole, one, key)))
        empty_objects(state)
        return copies

    def export(self, weights: Sequence[Weight]) -> dict[str, WeightState]:
        """The state of a group's weights: living tensors, masters whole and following what others have written."""
        exported: dict[str, WeightState] = {}
        for weight in weights:
            kept = {key for (name, _), keys in self._received.items() if name == weight.name for key in keys}
            tensors: WeightState = {k: v for k, v in self._tensors.get(weight.name, {}).items() if k in kept}
            starts = sorted(start for name, start in self._scalars if name == weight.name)
            # What was restored for the whole weight is out of date once its slices were stepped.
            slices = [start for start in starts if start != _WHOLE] or starts
            scalars = dict(self._scalars[weight.name, slices[0]]) if slices else {}
            scalars.pop(TIES, None)
            if LOW in tensors:
                ties = [self._scalars[weight.name, start][TIES] + max(start, 0) for start in slices]
                tensors[MASTER] = join_master(weight.parameter.detach().cpu(), tensors.pop(LOW), torch.cat(ties))
            if MASTER in tensors:
                refresh_master(tensors[MASTER], weight.parameter.detach().to(tensors[MASTER].device))
            if tensors or scalars:
                exported[weight.name] = unflatten_state({**tensors, **scalars}, copy_objects=True)
        return exported

    def restore(self, weights: Sequence[Weight], state: Mapping[str, WeightState]) -> None:
        """Take copies of what `export` returned."""
        arriving: dict[str, WeightState] = {}
        num_bytes: Counter[torch.dtype] = Counter()
        for weight in weights:
            values = flatten_state(state.get(weight.name, {}), copy_objects=True)
            if self._split and MASTER in values:
                values[LOW], values[TIES] = split_master(values.pop(MASTER).to("cpu", torch.float32))
            arriving[weight.name] = self._keep_scalars(weight, _WHOLE, values)
            for value in arriving[weight.name].values():
                num_bytes[value.dtype] += aligned(value.nbytes)
        self._buffer.reserve(num_bytes)
        for weight in weights:
            for key, value in arriving[weight.name].items():
                self._whole(weight, key, value).copy_(value)

    def _keep_scalars(self, weight: Weight, start: int, state: WeightState) -> dict[str, torch.Tensor]:
        """Keep what has no dimensions of a slice's state, and the keys of the others, which are returned."""
        tensors = {key: value for key, value in state.items() if _has_extent(key, value)}
        self._received[weight.name, start] = frozenset(tensors)
        self._scalars[weight.name, start] = {
            key: small_copy(value) if isinstance(value, torch.Tensor) else value
            for key, value in state.items()
            if key not in tensors
        }
        return tensors

    def _whole(self, weight: Weight, key: str, model: torch.Tensor) -> torch.Tensor:
        """Where all of a weight's state under `key` waits; made like `model` if it is new or has changed."""
        tensors = self._tensors.setdefault(weight.name, {})
        known = tensors.get(key)
        if known is None or known.shape != model.shape or known.dtype != model.dtype:
            tensors[key] = self._buffer.empty_like(model)
        return tensors[key]


_WHOLE = -1
"""In place of a slice's start: the scalars restored for the whole weight."""


def _has_extent(key: str, value: Any) -> bool:
    # A master counts even of a weight without dimensions.
    return isinstance(value, torch.Tensor) and key != TIES and (value.dim() > 0 or key in (MASTER, LOW))


def _part(whole: torch.Tensor, one: Slice, key: str) -> torch.Tensor:
    if _counts_blocks(key) and not one.is_whole:
        return whole[one.start // CUT_MULTIPLE : -(-one.stop // CUT_MULTIPLE)]
    return whole if _is_table(key) else one.part_of(whole)


def _like_whole(value: torch.Tensor, one: Slice, key: str) -> torch.Tensor:
    """A tensor without memory in the form of a weight's state, given that of one slice."""
    if one.is_whole or _is_table(key):
        return value
    if _counts_blocks(key):
        return value.new_empty(-(-one.weight.parameter.numel() // CUT_MULTIPLE), device="meta")
    if value.numel() != one.stop - one.start:
        raise ValueError(
            f"the state {key!r} of {one.weight.name} has {value.numel()} elements for {one.stop - one.start} of the "
            "weight, so the base optimizer is not element-wise; set elementwise=False"
        )
    return value.new_empty(one.weight.parameter.shape, device="meta")


# bitsandbytes' 8-bit state: one scale a block of CUT_MULTIPLE elements, and the code book.
def _counts_blocks(key: str) -> bool:
    return key in ("absmax1", "absmax2")


def _is_table(key: str) -> bool:
    return key in ("qmap1", "qmap2")
