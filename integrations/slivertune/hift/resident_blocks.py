"""Choose the blocks that stay on the device with `weights="host"`, and offload the others of a model."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import nn
from typing_extensions import override

from slivertune.core.layers import find_blocks
from slivertune.core.refused_pairs import refuse_at
from slivertune.core.torch_internals import is_without_data, set_buffer
from slivertune.hift.host_weights import HostWeights, Movable, WaitingBlock
from slivertune.hift.parts import Part, Turn, Update
from slivertune.hift.prefetch import PeakMemory
from slivertune.hift.rotation import Group
from slivertune.hift.streamed_blocks import StreamedBlocks
from slivertune.hift.streamed_codes import StreamedCodes
from slivertune.hift.waiting_layers import WaitingLayers


def choose_resident(num_bytes: Sequence[int], resident_bytes: int) -> frozenset[int]:
    """Choose the blocks that stay resident: as many as fit, with the others spread over the depth of the model.

    The load of each streamed block overlaps with the computation of the blocks around it. If streamed blocks were
    neighbours, the computation would wait for their loads, and the bus would stand still beside all other blocks.

    Args:
        num_bytes: Bytes of each block, from the bottom up.
        resident_bytes: Bytes of blocks that may stay.

    Returns:
        Indices of the resident blocks.
    """
    count = len(num_bytes)
    for num_streamed in range(count):
        streamed = {(2 * place + 1) * count // (2 * num_streamed) for place in range(num_streamed)}
        stays = frozenset(range(count)) - streamed
        if sum(num_bytes[index] for index in stays) <= resident_bytes:
            return stays
    return frozenset()


class StreamedModel(Part):
    """A model whose blocks are offloaded to the host, except for resident ones, with all else on the device.

    Args:
        model: Model on any device; moved by `attach`.
        groups: Groups of layers that train together.
        resident_bytes: Setting `resident_bytes` of `HiFTConfig`.

    Raises:
        ValueError: If there are no blocks, they share weights with each other or with modules around them, or hold
            weights that are not floating-point.
        RuntimeError: If the model or a block is compiled.
    """

    blocks: StreamedBlocks
    """Hooks of the blocks, set by `attach`."""
    quantised: WaitingLayers | None = None
    """Holder of the weights that are codes, which are moved in their place."""
    state_bytes: Callable[[], int]
    """Function that returns the bytes of the device to leave for a group's state."""

    def __init__(self, model: nn.Module, groups: Sequence[Group], resident_bytes: int | Literal["auto"]) -> None:
        self._found = find_blocks(model)
        refuse_at(model, "weights='host'", [each for _, block in self._found for each in block.modules()])
        _check(model, self._found)
        self.device = compute_device(model)
        """Device on which the model computes."""
        self._trained = [blocks_of(group, self._found) for group in groups]
        self._active: Sequence[int] = ()
        self._budget = ResidentBudget(resident_bytes)

    @override
    def attach(self, model: nn.Module) -> Callable[[], None]:
        """Move the model's weights to their places, and hook the blocks.

        Raises:
            RuntimeError: If host memory can't be pinned.
        """
        self._move_the_rest(model)
        is_new = self.quantised is not None or not hasattr(self, "blocks")  # codes are made anew
        if is_new or not self.blocks.weights.take_over():
            self.blocks = self._make_blocks(self.quantised)
        self.blocks.attach(model)
        return self.blocks.release

    def attach_for_inference(self, model: nn.Module) -> Callable[[], None]:
        """Load the blocks for forwards of a detached model, with exact weights and without gradients.

        Args:
            model: The detached model, with exact weights.

        Returns:
            Function that leaves the blocks on the host again. A move or cast of the model calls it, too.
        """
        self._move_the_rest(model)
        if self.quantised is not None or not self.blocks.weights.take_over():
            del self.blocks  # before the exact weights take as much memory
            self.blocks = self._make_blocks(None)
        self.blocks.weights.keep(())
        self.blocks.attach(model, self.blocks.release)
        return self.blocks.release

    def _move_the_rest(self, model: nn.Module) -> None:
        """Move all parameters and buffers to the device but the blocks' parameters."""
        in_blocks = {id(parameter) for _, block in self._found for parameter in block.parameters()}
        for parameter in model.parameters():
            if id(parameter) not in in_blocks:
                parameter.data = parameter.data.to(self.device)
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                set_buffer(module, name, buffer.to(self.device))

    def _make_blocks(self, waiting: WaitingLayers | None) -> StreamedBlocks:
        return StreamedBlocks([module for _, module in self._found], self._offload(waiting))

    def _offload(self, waiting: WaitingLayers | None) -> HostWeights:
        num_trained = max((len(indices) for indices in self._trained), default=0)
        if waiting is None:
            blocks = [WaitingBlock(name, tuple(dict.fromkeys(block.parameters()))) for name, block in self._found]
            resident = choose_resident([block.num_bytes for block in blocks], self._budget.num_bytes)
            return HostWeights(blocks, self.device, num_trained=num_trained, resident=resident)
        # The bytes of codes are known when they are made, one block after the other.
        weights = HostWeights(self._blocks_of_codes(waiting), self.device, num_trained=num_trained)
        weights.stay(choose_resident(weights.block_bytes, self._budget.num_bytes))
        return weights

    def _blocks_of_codes(self, waiting: WaitingLayers) -> Iterator[WaitingBlock]:
        own = weakref.proxy(self)
        for index, (name, block) in enumerate(self._found):
            exact, codes = list[Movable](), list[Movable]()
            for parameter in dict.fromkeys(block.parameters()):
                held = waiting.weight_of(parameter)
                if held is None:
                    exact.append(parameter)
                else:
                    codes.append(StreamedCodes(held, lambda: own.blocks.weights, index))
            yield WaitingBlock(name, (*exact, *codes))

    @override
    def begin_turn(self, turn: Turn) -> None:
        self._active = self._trained[turn.group]
        self.blocks.weights.keep(self._active)

    @override
    def begin_forward(self, inputs: Any) -> None:
        self.blocks.begin_forward()

    @override
    def end_forward(self, *, has_succeeded: bool) -> None:
        self.blocks.end_forward()

    @override
    def begin_step(self, update: Update) -> None:
        """Load the blocks to step, if no forward has done so."""
        self._budget.note_peak(self.device)
        for index in self._active:
            self.blocks.weights.bring(index)

    @override
    def end_step(self, *, ends_cycle: bool) -> bool:
        """With `auto`, measure at the end of the first cycle, and let more blocks stay."""
        return ends_cycle and self._budget.end_cycle(self.device, self.state_bytes) and self._stay()

    @override
    def out_of_memory(self) -> None:
        """With `auto`, evict all blocks."""
        if self._budget.fail():
            self._stay()

    def _stay(self) -> bool:
        weights = self.blocks.weights
        before = weights.streamed
        weights.stay(choose_resident(weights.block_bytes, self._budget.num_bytes))
        return weights.streamed != before


def blocks_of(group: Group, blocks: Sequence[tuple[str, nn.Module]]) -> list[int]:
    """Return the indices of the blocks in which a group trains parameters.

    Args:
        group: Group of layers.
        blocks: All blocks, with their paths.
    """
    return [
        index
        for index, (path, _) in enumerate(blocks)
        if any(name.startswith(f"{path}.") for name in group.parameter_names)
    ]


def compute_device(model: nn.Module) -> torch.device:
    """Return the device on which a model computes: that of its weights off the CPU, else CUDA's, else the CPU."""
    lies = {parameter.device for parameter in model.parameters() if parameter.device.type != "cpu"}
    if len(lies) > 1:
        raise ValueError(
            f"the model lies on {sorted(map(str, lies))}, and weights='host' loads its blocks to one device. Load the "
            "model on the CPU, or on one device"
        )
    if lies:
        return lies.pop()
    if torch.cuda.is_available() and not is_without_data():  # a plan's weights report the CPU, and pin nothing
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _check(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]) -> None:
    within: dict[int, str] = {}
    for path, block in blocks:
        for name, parameter in block.named_parameters():
            if not parameter.is_floating_point():
                raise ValueError(
                    f"{path}.{name} is {parameter.dtype} (quantised codes), and weights='host' streams only "
                    "floating-point weights. Load the model without quantisation, or set weights='device'"
                )
            if parameter.device.type == "meta":
                raise ValueError(f"{path}.{name} is on meta, without values. Load the model on the CPU")
            if within.setdefault(id(parameter), path) != path:
                raise ValueError(
                    f"{path}.{name} is also a weight of {within[id(parameter)]}, and weights='host' loads each block "
                    "separately. Set weights='device'"
                )
    for name, parameter in model.named_parameters(remove_duplicate=False):
        holder = within.get(id(parameter), "")
        if holder and not name.startswith(f"{holder}."):
            raise ValueError(
                f"{name} is a weight of the block {holder} and is also read outside of it, and weights='host' loads a "
                "block's weights for its own forward only. Set weights='device'"
            )


class ResidentBudget:
    """Budget of the bytes of blocks that stay on the device: a number, or the bytes that the first cycle left free.

    Args:
        setting: Setting `resident_bytes` of `HiFTConfig`.
    """

    def __init__(self, setting: int | Literal["auto"]) -> None:
        self._is_to_measure = setting == "auto"
        self._is_auto = setting == "auto"
        self.num_bytes = 0 if setting == "auto" else setting
        """Bytes of blocks that stay."""
        self._peak = PeakMemory()

    def note_peak(self, device: torch.device) -> None:
        """Note the peak of memory since the last call, from which `auto` is computed."""
        if self._is_to_measure:
            self._peak.note(device)

    def end_cycle(self, device: torch.device, state_bytes: Callable[[], int]) -> bool:
        """Measure the free bytes once for `auto`. Return whether the number is another one now."""
        if not self._is_to_measure:
            return False
        self._is_to_measure = False
        self.num_bytes = max(0, self._peak.unused_bytes(device) - state_bytes())
        return self.num_bytes > 0

    def fail(self) -> bool:
        """Begin again with `auto`, after a lack of memory. Return whether the number is another one now."""
        if not self._is_auto:
            return False
        had, self.num_bytes = self.num_bytes, 0
        self._is_to_measure, self._peak = True, PeakMemory()
        return had > 0
