"""Chunks of a group: slices of weights that pass through the device and are stepped together.

where:   host --load--> arriving --step--> device (stays) --write back--> leaving (is on the host at its event)
<--drop--          --step, write back-----------------------^
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from slivertune.core.copy_streams import CopyStreams, Event
from slivertune.core.host_tensors import aligned, tensor_at
from slivertune.core.hyperparameters import (
    InnerGroups,
    Pushed,
    find_adapted,
    push_hyperparameters,
    restore_adapted,
)
from slivertune.core.torch_internals import storage_key, with_recompile_limit
from slivertune.hift.base import BaseOptimizer
from slivertune.hift.device_slots import DeviceSlots
from slivertune.hift.offloaded_gradient import OffloadedGradient, norm_of
from slivertune.hift.rotation import LearningRate
from slivertune.hift.stochastic_rounding import StochasticRounding
from slivertune.hift.tiled_steps import step_in_tiles

if TYPE_CHECKING:
    from slivertune.hift.probe import StepMeter

ParamGroups = Sequence[dict[str, Any]]
"""Param groups of the user's optimizer."""

OwnHyperparameters = Mapping[int, dict[str, Any]]
"""Hyperparameters that the base optimizer's instances changed by themselves, by index of the param group."""

MASTER = "master"
"""Key of a master, the fp32 copy of a 16-bit weight, in the state of its weight."""

Copies = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Copies to make: source and target of each."""
StepCopies = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""Copies that bring a stepped slice's state to the host, by key: the tensor on the device, and its place."""
Where = Literal["host", "arriving", "device", "leaving"]
"""Place of a chunk's newest state.

`arriving` is a copy to the device, which the step waits for. `device` is the device alone, since the chunk was stepped
and stays. `leaving` is a copy to the host, which the next load waits for.
"""

RECOMPILE_LIMIT = 8
"""Compilations of a step, in addition to two per instance of the base optimizer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """A weight of the model that a group trains."""

    name: str
    parameter: torch.nn.Parameter
    """Parameter that is stepped."""
    trained: torch.nn.Parameter
    """Parameter of the model, which is frozen and unfrozen. It is `parameter` unless that is sharded."""
    param_group: int
    """Index of the param group that holds its hyperparameters."""
    home: torch.device | None = None
    """Device on which it is stepped, if it is offloaded between its turns."""
    layer: int = 0
    """Index of its layer in the model."""

    @property
    def device(self) -> torch.device:
        """Device on which it is stepped."""
        return self.parameter.device if self.home is None else self.home

    @property
    def first_element(self) -> int:
        """Index of `parameter`'s first element in the flattened whole weight, which may be sharded."""
        return 0

    @property
    def is_quantized(self) -> bool:
        """Whether `parameter` holds one NaN in the weight's form, because the weight is quantised."""
        return self.parameter.dim() > 0 and not any(self.parameter.stride())

    def take_gradient(self) -> None:
        """Give `parameter` the content and the gradient of `trained`, if these are two tensors."""


def drop_gradient(weight: Weight) -> None:
    """Drop the gradient of a stepped weight, and release its host memory."""
    if isinstance(weight.parameter.grad, OffloadedGradient):
        weight.parameter.grad.close()
    weight.parameter.grad = None


def refresh_master(master: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Copy the elements of a weight that others have written into its master.

    An element was written if its master does not round to it. Others keep their master to the bit, so that loading the
    same weights changes nothing. It compares values: writes to `weight.data` (averaging libraries) change no version.

    Takes 5 bytes of temporaries per element (`torch.where` casts the weight first), fewer than the step after it.

    Args:
        master: Master in fp32; changed in place.
        weight: Weight of the same shape and device, in 16 bits or in fp32, which a master equals.

    Returns:
        The master.
    """
    bits = torch.int32 if weight.dtype == torch.float32 else torch.int16
    written = master.to(weight.dtype).view(bits) != weight.view(bits)
    return torch.where(written, weight, master, out=master)


class Slice:
    """Elements [start, stop) of a weight, and the leaf tensor that the base optimizer steps in their place.

    The leaf is the weight itself if the slice is whole and stepped in its own dtype. Else it is a placeholder, set in
    every step.

    Args:
        weight: Weight of the slice.
        start: First element of the flattened weight.
        stop: One past the last element.
        meter: Meter of the base optimizer's steps, with HiFT's settings.
    """

    def __init__(self, weight: Weight, start: int, stop: int, meter: "StepMeter") -> None:
        in_fp32 = meter.steps_copy(weight)
        self.weight = weight
        self.start = start
        self.stop = stop
        self.on_master = meter.steps_master(weight)
        """Whether the leaf is a master: a copy in fp32 of a 16-bit weight, which lasts."""
        self.is_rounded = in_fp32 and not self.on_master
        """Whether the leaf is a copy in fp32 that is made for one step, and rounded stochastically."""
        self.rule = meter.rule_of(weight)
        """Rule by which the whole weight is stepped in tiles. None if the base optimizer steps the slice at once."""
        self.scalars_on_device = meter.scalars_on_device(weight)
        """Keys of state without dimensions that is on the weight's device in a step, not on the host."""
        self.is_whole = stop - start == weight.parameter.numel()
        self.is_weight = self.is_whole and not in_fp32
        empty = torch.empty(0, dtype=torch.float32, device="cpu")
        self.leaf = weight.parameter if self.is_weight else torch.nn.Parameter(empty)
        self.tensors: dict[str, torch.Tensor] = {}
        """Offloaded tensors by key, as they were loaded to the memory of the chunk."""
        self.gradient: torch.Tensor | None = None
        """Part of an offloaded gradient, as it was loaded there."""

    def part_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this slice's part of a tensor of the weight's shape: in that shape if whole, else in one dimension."""
        return tensor if self.is_whole else tensor.view(-1)[self.start : self.stop]

    def part_of_weight(self) -> torch.Tensor:
        """Return this slice's part of the weight's data."""
        return self.part_of(self.weight.parameter.data)

    def is_on_device(self, key: str, value: Any) -> bool:
        """Return whether a step needs a value of the slice's state on the device, not on the host."""
        return isinstance(value, torch.Tensor) and (value.dim() > 0 or key == MASTER or key in self.scalars_on_device)

    def place_leaf(self, data: torch.Tensor) -> None:
        """Point the leaf to `data`: the weight's part, its fp32 copy, or an empty tensor to release the old data."""
        if not self.is_weight:
            self.leaf.grad = None
            self.leaf.data = data

    def write_weight(self, rounding: StochasticRounding | None) -> None:
        """Write the stepped copy to this slice's part of the weight, if there is a copy.

        Args:
            rounding: Rounding of the update, for copies that are no masters; None if there are none.
        """
        if self.on_master:
            self.part_of_weight().copy_(self.leaf.data)
        elif self.is_rounded:
            assert rounding is not None
            start = self.weight.first_element + self.start
            rounding.of(self.weight.name).round_into(self.part_of_weight(), self.leaf.data, start)

    def moved_to_slot(self, copies: StepCopies) -> Copies | None:
        """Copy new tensors of a step over the loaded ones, so that they are written back from there.

        Returns:
            Copies out of the chunk's memory. None if a tensor has no place there.
        """
        places, new = {key: _place_of(tensor) for key, tensor in self.tensors.items()}, []
        for key, (value, _) in copies.items():
            own, place = self.tensors.get(key), _place_of(value)
            if own is None or (own.shape, own.dtype) != (value.shape, value.dtype):
                return None
            if place != places[key]:
                if place in places.values():
                    return None  # the optimizer has exchanged the places of two tensors
                new.append((own, value))
        for own, value in new:
            own.copy_(value)
        return [(self.tensors[key], target) for key, (_, target) in copies.items()]

    def attach_gradient(self) -> None:
        """Give the leaf its part of the weight's gradient, in the leaf's dtype. An offloaded one is loaded if need be.

        Raises:
            ValueError: If the gradient is sparse, and the leaf is not the weight.
        """
        gradient = self.weight.parameter.grad
        if isinstance(gradient, OffloadedGradient):
            stop = None if self.is_whole else self.stop
            if self.gradient is None:
                part = gradient.copy_on_device(self.start, stop)
            else:
                part = gradient.complete(self.gradient, self.start, stop)
            gradient.part_norms.append(norm_of(part))  # the whole will never be on the device
            if self.is_weight:
                drop_gradient(self.weight)  # replaced by the part
        elif self.is_weight or gradient is None:
            return
        elif gradient.is_sparse:
            raise ValueError(
                f"{self.weight.name} has a sparse gradient, which can't be cut or cast to fp32. "
                "Set sparse=False on its embedding, or train fp32 weights with stream_bytes=0"
            )
        else:
            part = gradient if self.is_whole else gradient.reshape(-1)[self.start : self.stop]
        self.leaf.grad = part.to(self.leaf.dtype)


def _place_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return a tensor's storage and address. Without data, addresses count from the beginning of the storage."""
    return storage_key(tensor.untyped_storage()), tensor.data_ptr()


class Chunk:
    """Slices that are on the device together, and an instance of the base optimizer that steps them.

    Args:
        slices: Slices to step, in the order of the model's parameters.
        base: The base optimizer.
        own: Hyperparameters that an earlier instance in its place had changed; empty for none.
    """

    _num_made: ClassVar[int] = 0
    """Instances made so far."""

    def __init__(self, slices: Sequence[Slice], base: BaseOptimizer, own: OwnHyperparameters) -> None:
        self.slices = slices
        self.base = base
        self._own = own
        self._pushed: Pushed = defaultdict(dict)
        self._param_groups = sorted({one.weight.param_group for one in slices})
        """For each param group of the instance, the index of the user's."""
        self.optimizer: torch.optim.Optimizer | None = None
        """Instance, built when the leaves first have their data: some constructors create their state at once."""
        self.where: Where = "host"
        """Place of the newest state."""
        self.event: Event = None
        """Event after which it has arrived, was stepped, or has left."""
        self.memory: torch.Tensor | None = None
        """Memory of the device that holds the chunk, uint8."""
        self.num_bytes = 0
        """Bytes of the memory that the loaded tensors take. Parts of gradients follow."""
        self.tables: list[torch.Tensor] = []
        """Tensors that a plan keeps in place of an instance's own, if it does not step the chunk."""
        self.owed: Copies = ()
        """Write back to make once the chunk, which was stepped and stays, has to leave."""

    def build(self, param_groups: ParamGroups) -> torch.optim.Optimizer:
        """Build the instance, with the hyperparameters of these param groups of the user."""
        groups = [
            {
                **{key: value for key, value in param_groups[index].items() if key != "params"},
                "params": [one.leaf for one in self.slices if one.weight.param_group == index],
            }
            for index in self._param_groups
        ]
        self.optimizer = self.base.build(groups, [(one.leaf, one.weight.parameter) for one in self.slices])
        Chunk._num_made += 1
        restore_adapted(self._inner_groups(self.optimizer), self._pushed, param_groups, self._own)
        return self.optimizer

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        param_groups: ParamGroups,
        learning_rates: Sequence[LearningRate],
        rounding: StochasticRounding | None,
    ) -> None:
        """Step the leaves, which have their data, state and gradients. Slices with a rule are stepped in tiles.

        A class with a compiled step compiles it for each instance and each size of a chunk. If each step needs a new
        compilation, as in torch's own optimizers whose state moves, torch stops at its limit.

        Args:
            optimizer: Instance of the chunk.
            param_groups: Param groups of the user.
            learning_rates: Learning rates to apply in place of theirs.
            rounding: Rounding of the update, if bf16 weights that are stepped in tiles are rounded stochastically.
        """
        groups = self._inner_groups(optimizer)
        push_hyperparameters(groups, self._pushed, param_groups, learning_rates)
        tiled = []
        for one in self.slices:
            gradient = one.leaf.grad
            if one.rule is not None and gradient is not None and not gradient.is_sparse:  # which the optimizer refuses
                tiled.append((one, one.rule, gradient))
        try:
            for one, _, _ in tiled:
                one.leaf.grad = None
            with with_recompile_limit(RECOMPILE_LIMIT + 2 * Chunk._num_made):
                optimizer.step()
            for one, rule, gradient in tiled:
                group = next(inner for inner, index in groups if index == one.weight.param_group)
                is_rounded = one.leaf.dtype == torch.bfloat16
                of_weight = rounding.of(one.weight.name) if rounding is not None and is_rounded else None
                step_in_tiles(rule, optimizer.state[one.leaf], group, one.leaf.data, gradient, of_weight)
        finally:
            for one, _, gradient in tiled:
                one.leaf.grad = gradient

    def adapted(self) -> OwnHyperparameters | None:
        """Return hyperparameters that the instance changed itself, or None if there is no instance."""
        if self.optimizer is None:
            return None
        return find_adapted(self._inner_groups(self.optimizer), self._pushed)

    def _inner_groups(self, optimizer: torch.optim.Optimizer) -> InnerGroups:
        return list(zip(optimizer.param_groups, self._param_groups, strict=True))

    def load(
        self,
        sources: Sequence[Mapping[str, Any]],
        memory: torch.Tensor,
        free_after: Event,
        streams: CopyStreams,
    ) -> None:
        """Queue the copies of the offloaded tensors to the device, where parts of gradients may follow.

        Args:
            sources: Offloaded state of each slice, by key.
            memory: Memory of the device, with room for all.
            free_after: Event after which it may be written.
            streams: Copy streams of the device.
        """
        start = 0
        with streams.on("inbound", free_after, self.event):
            for one, of_slice in zip(self.slices, sources, strict=True):
                one.tensors = {}
                for key, source in of_slice.items():
                    if one.is_on_device(key, source):
                        one.tensors[key] = tensor_at(memory, start, source).copy_(source, non_blocking=True)
                        start += aligned(source.nbytes)
            self.event = streams.record("inbound")
        self.memory, self.num_bytes, self.where = memory, start, "arriving"

    def load_gradients(self, streams: CopyStreams) -> None:
        """Queue the copies of the offloaded gradients, if the chunk is loaded."""
        start = self.num_bytes
        for one in self.slices:
            gradient = one.weight.parameter.grad
            if self.memory is not None and isinstance(gradient, OffloadedGradient):
                source = gradient.part_on_host(one.start, None if one.is_whole else one.stop)
                one.gradient = tensor_at(self.memory, start, source)
                start += aligned(source.nbytes)
                # The gradient was made after the last step, which has read the previous content.
                with streams.on("inbound", gradient.stored):
                    one.gradient.copy_(source, non_blocking=True)
                    self.event = streams.record("inbound")

    def stay(self, owed: Copies, streams: CopyStreams) -> None:
        """Stay on the device after a step, with a write back to make later."""
        self.where, self.owed, self.event = "device", owed, streams.record()
        for one in self.slices:
            one.gradient = None

    def give_up(self, slots: DeviceSlots) -> None:
        """Leave the device: write back what was stepped there, and drop what was only loaded or is half stepped."""
        if self.where == "device":
            self.write_back(self.owed, slots)
        elif self.where == "arriving":
            slots.streams.compute_after(self.event)
            self._leave(slots, slots.streams.record())
            self.where, self.event = "host", None

    def write_back(self, copies: Copies, slots: DeviceSlots, *, is_from_slot: bool = True) -> None:
        """Queue the write back behind the computation queued so far, and give the memory back behind it.

        Args:
            copies: Copies that write the state back.
            slots: Slots of the device.
            is_from_slot: Whether all sources are in the chunk's memory.
        """
        streams = slots.streams
        with streams.on("outbound", streams.record(), self.event):
            for source, target in copies:
                target.copy_(source, non_blocking=True)
            self.event = streams.record("outbound")
        if not is_from_slot:
            streams.compute_after(self.event)  # before the memory of new tensors is used again
        self._leave(slots, self.event)
        self.where = "leaving"

    def _leave(self, slots: DeviceSlots, free_after: Event) -> None:
        if self.memory is not None:
            slots.give_back(self.memory, free_after)
        self.memory, self.owed = None, ()
        for one in self.slices:
            one.tensors, one.gradient = {}, None
