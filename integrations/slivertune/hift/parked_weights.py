"""The part of HiFT that tells parked weights whose turn it is."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from slivertune.core.copy_streams import Event
from slivertune.core.layers import find_blocks
from slivertune.hift.chunk import Weight
from slivertune.hift.offloaded_state import OffloadedState
from slivertune.hift.parts import Part, Turn, Update
from slivertune.hift.rotation import Group
from slivertune.parked.exact_source import ExactSource
from slivertune.parked.parked_blocks import ParkedBlocks
from slivertune.parked.quantized_layers import QuantizedLayers


class ParkedWeights(Part):
    """Makes the weights of the active group exact and resident for its turn, and parks the others.

    Args:
        blocks: Weights of the model's blocks.
        groups: Owners of the state of groups whose masters are offloaded, by index.
        state_bytes: Function that returns the bytes of the device to leave for a group's state.
    """

    def __init__(
        self,
        blocks: ParkedBlocks,
        groups: Sequence[OffloadedState],
        state_bytes: Callable[[], int],
    ) -> None:
        self.blocks = blocks
        """Weights of the model's blocks."""
        self._groups = groups
        self._state_bytes = state_bytes

    @override
    def attach(self, model: nn.Module) -> Callable[[], None]:
        """Park all weights.

        Raises:
            RuntimeError: If the model or a part of it is compiled, or host memory can't be pinned.
        """
        self.blocks.attach(model, self._masters)
        return self.blocks.remove

    def _masters(self, quantized: QuantizedLayers) -> dict[int, ExactSource]:
        """Move exact weights into their masters. Return the masters by the parameter's `id`."""
        sources: dict[int, ExactSource] = {}
        for group in self._groups:
            held = {weight: quantized.weight_of(weight.parameter) for weight in group.weights}
            for weight in group.on_master([weight for weight, holder in held.items() if holder is not None]):
                holder = held[weight]
                assert holder is not None
                group.place_master(weight, holder.exact())
                sources[id(weight.parameter)] = _Master(group, weight)
        return sources

    @override
    def begin_turn(self, turn: Turn) -> None:
        self.blocks.activate(turn.group, (weight.parameter for weight in turn.state.weights))

    @override
    def begin_forward(self, inputs: Any) -> None:
        self.blocks.begin_forward()

    @override
    def end_forward(self, *, has_succeeded: bool) -> None:
        self.blocks.end_forward()

    @override
    def begin_step(self, update: Update) -> None:
        self.blocks.arrive()

    @override
    def end_step(self, *, ends_cycle: bool) -> bool:
        """Let more blocks stay on the device after the first cycle, with `resident_bytes="auto"`."""
        return ends_cycle and self.blocks.end_cycle(self._state_bytes)

    @override
    def out_of_memory(self) -> None:
        self.blocks.out_of_memory()

    @override
    def after_load(self) -> None:
        self.blocks.forget_codes()


def blocks_by_group(model: nn.Module, groups: Sequence[Group]) -> list[list[int]]:
    """Return the indices of the blocks in which each group trains parameters.

    Args:
        model: Model that holds the blocks.
        groups: Groups of layers.
    """
    paths = [f"{path}." for path, _ in find_blocks(model)]
    return [
        [index for index, path in enumerate(paths) if any(name.startswith(path) for name in group.parameter_names)]
        for group in groups
    ]


class _Master(ExactSource):
    """A weight whose fp32 master is offloaded with its group's state."""

    def __init__(self, group: OffloadedState, weight: Weight) -> None:
        self._group = group
        self._weight = weight

    def read(self) -> torch.Tensor:
        return self._group.offloaded_master(self._weight).to(self._weight.parameter.dtype)

    def write(self, weight: torch.Tensor) -> None:
        self._group.write_master(self._weight, weight)

    def load(self, into: torch.Tensor) -> Event:
        return self._group.load_weight(self._weight, into)

    def end_loading(self) -> None:
        self._group.end_loading(self._weight)

    def store(self, weight: torch.Tensor) -> Event:
        return None  # the step has stored its master
