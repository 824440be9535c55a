"""Prefetch chunks of a group's state: the bytes of the device that they may hold, and when they are loaded."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import nn
from typing_extensions import override

from slivertune.core.outputs import tensors_of
from slivertune.core.peak_memory import PeakMemory
from slivertune.hift.device_slots import DeviceSlots
from slivertune.hift.parts import Part, Turn

PrefetchBytes = int | Literal["auto"]


def has_own_memory(device: torch.device) -> bool:
    """Return whether the free memory of a device is worth a measurement."""
    return device.type == "cuda"


class PrefetchBudget:
    """Budget of bytes that may be prefetched, set before each forward.

    A number holds for every forward that is no larger than its group has seen before. A larger one, whose activations
    may need the memory, gets no chunks before its first gradient. `auto` does the same with the bytes that were unused
    in all cycles so far, and so prefetches nothing in the first.

    Args:
        setting: Setting `prefetch_bytes` of `HiFTConfig`.
    """

    def __init__(self, setting: PrefetchBytes) -> None:
        self._setting = setting
        self._seen: dict[int, tuple[int, int]] = {}
        self._num_bytes = 0 if setting == "auto" else setting
        self._peak = PeakMemory()

    def note_peak(self, devices: Iterable[torch.device]) -> None:
        """Note the peak of memory since the last call, from which `auto` is computed."""
        if self._setting == "auto":
            for device in devices:
                self._peak.note(device)

    @property
    def num_bytes(self) -> int:
        """Bytes that may be prefetched for a forward of a known size."""
        return self._num_bytes

    def begin_forward(self, group: int, inputs: Any) -> int:
        """Note a forward that trains.

        Args:
            group: Index of the active group.
            inputs: Inputs of the forward, in any nest.

        Returns:
            Bytes that may be prefetched before the group's first gradient.
        """
        shapes = [tensor.shape for tensor in tensors_of(inputs)]
        # Attention grows with the longest dimension, everything else with the number of elements.
        size = (sum(shape.numel() for shape in shapes), max((max(shape, default=1) for shape in shapes), default=0))
        seen = self._seen.get(group, (0, 0))
        self._seen[group] = (max(seen[0], size[0]), max(seen[1], size[1]))
        return self._num_bytes if self._seen[group] == seen else 0

    def fail(self) -> None:
        """Note that a forward or backward ran out of memory: `auto` is 0 until the end of the next cycle."""
        self._seen.clear()
        self._peak = PeakMemory()
        self._num_bytes = 0 if self._setting == "auto" else self._setting

    def end_cycle(self, held_bytes: Mapping[torch.device, int]) -> None:
        """Measure the unused bytes for `auto`: the least of all devices, since the number holds for each.

        Args:
            held_bytes: Bytes allocated for chunks, by device.
        """
        if self._setting == "auto":
            unused = {device: self._peak.unused_bytes(device) for device in held_bytes}
            room = [unused[device] + held_bytes[device] if unused[device] else 0 for device in unused]
            self._num_bytes = min(room, default=0)


class Prefetcher(Part):
    """Loads the active group's chunks as early as there is room, and evicts them when there is none.

    Args:
        setting: Setting `prefetch_bytes` of `HiFTConfig`.
        shares_bus: Whether a forward loads weights. Chunks are then loaded in the backward, which takes longer and
            needs fewer weights.
    """

    def __init__(self, setting: PrefetchBytes, *, shares_bus: bool = False) -> None:
        self._setting = setting
        self._shares_bus = shares_bus
        self._turn: Turn | None = None
        self._room_in_backward = 0
        """Bytes that chunks may hold from the end of the forward on, if they share the bus."""
        self.slots: dict[torch.device, DeviceSlots] = {}
        """Slots by device, made with the state of the device's first group."""
        self._budget: PrefetchBudget | None = None

    def slots_of(self, device: torch.device) -> DeviceSlots:
        """Return the slots of a device, which all groups on it share."""
        if device not in self.slots:
            self.slots[device] = DeviceSlots(device)
            has_room = has_own_memory(device) if self._setting == "auto" else self._setting > 0
            if self._budget is None and has_room:
                self._budget = PrefetchBudget(self._setting)
        return self.slots[device]

    @override
    def attach(self, model: nn.Module) -> Callable[[], None]:
        return self._forget_turn

    def _forget_turn(self) -> None:
        """Forget the group, whose state knows the slots: neither may keep the other in memory."""
        self._turn = None

    @override
    def begin_turn(self, turn: Turn) -> None:
        self._turn = turn

    @override
    def begin_forward(self, inputs: Any) -> None:
        """Prefetch as much as the forward leaves room for, which is all if it does not train."""
        if self._budget is None or self._turn is None:
            return
        room = 0
        if inputs is not None:
            self._budget.note_peak(self.slots)
            room = self._budget.begin_forward(self._turn.group, inputs)
        self._room_in_backward = room if self._shares_bus else 0
        if not self._room_in_backward:
            self._load_ahead(room)

    @override
    def end_forward(self, *, has_succeeded: bool) -> None:
        if has_succeeded and self._room_in_backward:
            self._load_ahead(self._room_in_backward)

    def _load_ahead(self, num_bytes: int) -> None:
        """Set the bytes that chunks of the active group may hold, and begin to load them. Do nothing out of a turn."""
        if self._turn is None:
            return
        state = self._turn.state
        if any(num_bytes < slots.prefetch_bytes for slots in self.slots.values()):
            state.release(num_bytes)  # may add the slots of a group that has no state yet
        for slots in self.slots.values():
            slots.prefetch_bytes = num_bytes
        if num_bytes:
            state.prefetch()

    @override
    def out_of_memory(self) -> None:
        """Evict all prefetched chunks, and measure again."""
        if self._budget is not None:
            self._budget.fail()
            self._load_ahead(0)

    @override
    def before_load(self) -> None:
        for slots in self.slots.values():
            slots.streams.synchronize()

    @override
    def detach(self) -> None:
        self._load_ahead(0)

    @override
    def end_step(self, *, ends_cycle: bool) -> bool:
        """Begin to load the chunks of the next update, unless they share the bus with a forward to come."""
        if self._budget is None:
            return False
        self._budget.note_peak(self.slots)
        if ends_cycle:
            self._budget.end_cycle(
                {device: slots.held_bytes for device, slots in self.slots.items() if has_own_memory(device)}
            )
        if not self._shares_bus:
            self._load_ahead(self._budget.num_bytes)
        return False
