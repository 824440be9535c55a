"""A model whose blocks are offloaded to the host, but for those that have room on the device."""

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Literal

import torch
from torch import nn

from slivertune.core.layers import find_blocks
from slivertune.core.peak_memory import PeakMemory
from slivertune.core.refused_pairs import refuse_at
from slivertune.core.torch_internals import is_without_data, set_buffer
from slivertune.parked.host_weights import HostWeights, Movable, OffloadedBlock
from slivertune.parked.quantized_layers import QuantizedLayers
from slivertune.parked.streamed_blocks import StreamedBlocks
from slivertune.parked.streamed_codes import StreamedCodes


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


def room_for_blocks(num_bytes: int, state_bytes: int) -> int:
    """Return the bytes of resident blocks, given all that may be held: state comes first."""
    return max(0, num_bytes - state_bytes)


class StreamedModel:
    """A model whose blocks are offloaded to the host, except for resident ones, with all else on the device.

    Args:
        model: Model on any device; moved by `attach`.
        resident_bytes: Bytes of blocks that stay on the device, or "auto" for those that are free after `end_cycle`.
        trained: Indices of the blocks that train together, by group. All parameters of blocks are offloaded, but for
            the turn of their group.
        parked: `id`s of the parameters to offload, if only some of the blocks' are. The others stay on the device.

    Raises:
        ValueError: If there are no blocks, they share weights with each other or with modules around them, or hold
            weights that are not floating-point.
        RuntimeError: If the model or a block is compiled.
    """

    blocks: StreamedBlocks
    """Hooks of the blocks, set by `attach`."""
    quantized: QuantizedLayers | None = None
    """Holder of the weights that are codes, which are moved in their place."""

    def __init__(
        self,
        model: nn.Module,
        resident_bytes: int | Literal["auto"],
        trained: Sequence[Sequence[int]] = (),
        parked: Collection[int] | None = None,
    ) -> None:
        self._parked = parked
        self._found = [each for each in find_blocks(model) if parked is None or self._parameters_of(each[1])]
        refuse_at(model, "blocks on the host", [each for _, block in self._found for each in block.modules()])
        _check(model, [(path, self._parameters_of(block)) for path, block in self._found])
        self.device = compute_device(model)
        """Device on which the model computes."""
        self._trained = trained
        self._active: Sequence[int] = ()
        self._budget = ResidentBudget(resident_bytes)

    def _parameters_of(self, block: nn.Module) -> list[nn.Parameter]:
        """Return the parameters of a block to offload, each once."""
        each_once = dict.fromkeys(block.parameters())
        return [each for each in each_once if self._parked is None or id(each) in self._parked]

    def attach(self, model: nn.Module) -> None:
        """Move the model's weights to their places, and hook the blocks.

        Raises:
            RuntimeError: If host memory can't be pinned.
        """
        self._move_the_rest(model)
        is_new = self.quantized is not None or not hasattr(self, "blocks")  # codes are made anew
        if is_new or not self.blocks.weights.take_over():
            self.blocks = self._make_blocks(self.quantized)
        self.blocks.attach(model)

    def attach_for_inference(self, model: nn.Module) -> Callable[[], None]:
        """Load the blocks for forwards of a detached model, with exact weights and without gradients.

        Args:
            model: The detached model, with exact weights.

        Returns:
            Function that leaves the blocks on the host again. A move or cast of the model calls it, too.
        """
        self._move_the_rest(model)
        if self.quantized is not None or not self.blocks.weights.take_over():
            del self.blocks  # before the exact weights take as much memory
            self.blocks = self._make_blocks(None)
        self.blocks.weights.keep(())
        self.blocks.attach(model, self.blocks.release)
        return self.blocks.release

    def _move_the_rest(self, model: nn.Module) -> None:
        """Move all parameters and buffers to the device but those to offload."""
        offloaded = {id(parameter) for _, block in self._found for parameter in self._parameters_of(block)}
        for parameter in model.parameters():
            if id(parameter) not in offloaded:
                parameter.data = parameter.data.to(self.device)
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                set_buffer(module, name, buffer.to(self.device))

    def _make_blocks(self, quantized: QuantizedLayers | None) -> StreamedBlocks:
        return StreamedBlocks([module for _, module in self._found], self._offload(quantized))

    def _offload(self, quantized: QuantizedLayers | None) -> HostWeights:
        num_trained = max((len(indices) for indices in self._trained), default=0)
        if quantized is None:
            blocks = [OffloadedBlock(name, tuple(self._parameters_of(block))) for name, block in self._found]
            resident = choose_resident([block.num_bytes for block in blocks], self._budget.num_bytes)
            return HostWeights(blocks, self.device, num_trained=num_trained, resident=resident)
        # The bytes of codes are known when they are made, one block after the other.
        weights = HostWeights(self._blocks_of_codes(quantized), self.device, num_trained=num_trained)
        weights.stay(choose_resident(weights.block_bytes, self._budget.num_bytes))
        return weights

    def _blocks_of_codes(self, quantized: QuantizedLayers) -> Iterator[OffloadedBlock]:
        own = weakref.proxy(self)
        for index, (name, block) in enumerate(self._found):
            exact, codes = list[Movable](), list[Movable]()
            for parameter in self._parameters_of(block):
                held = quantized.weight_of(parameter)
                if held is None:
                    exact.append(parameter)
                else:
                    codes.append(StreamedCodes(held, lambda: own.blocks.weights, index))
            yield OffloadedBlock(name, (*exact, *codes))

    def activate(self, group: int) -> None:
        """Begin the turn of a group, whose blocks stay on the device once they are loaded."""
        self._active = self._trained[group]
        self.blocks.weights.keep(self._active)

    def arrive(self) -> None:
        """Load the blocks to step, if no forward has done so."""
        self.note_peak()
        for index in self._active:
            self.blocks.weights.bring(index)

    def note_peak(self) -> None:
        """Note the peak of memory since the last call, from which "auto" is computed."""
        self._budget.note_peak(self.device)

    def end_cycle(self, state_bytes: Callable[[], int]) -> bool:
        """With "auto", measure once, and let more blocks stay.

        Args:
            state_bytes: Function that returns the bytes of the device to leave for a group's state.

        Returns:
            Whether other blocks stay now.
        """
        return self._budget.end_cycle(self.device, state_bytes) and self._stay()

    def out_of_memory(self) -> None:
        """With `auto`, evict all blocks."""
        if self._budget.fail():
            self._stay()

    def _stay(self) -> bool:
        weights = self.blocks.weights
        before = weights.streamed
        weights.stay(choose_resident(weights.block_bytes, self._budget.num_bytes))
        return weights.streamed != before


def compute_device(model: nn.Module) -> torch.device:
    """Return the device on which a model computes: that of its weights off the CPU, else CUDA's, else the CPU."""
    lies = {parameter.device for parameter in model.parameters() if parameter.device.type != "cpu"}
    if len(lies) > 1:
        raise ValueError(
            f"the model is on {sorted(map(str, lies))}, and offloaded blocks are loaded to one device. Load the model "
            "on the CPU, or on one device"
        )
    if lies:
        return lies.pop()
    if torch.cuda.is_available() and not is_without_data():  # a plan's weights report the CPU, and pin nothing
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _check(model: nn.Module, blocks: Sequence[tuple[str, Sequence[nn.Parameter]]]) -> None:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    within: dict[int, str] = {}
    for path, parameters in blocks:
        for parameter in parameters:
            name = names[id(parameter)]
            if not parameter.is_floating_point():
                raise ValueError(
                    f"{name} is {parameter.dtype} (quantised codes), and only floating-point weights can be offloaded "
                    "to the host. Load the model without quantisation, or leave the weights on the device"
                )
            if parameter.device.type == "meta":
                raise ValueError(f"{name} is on meta, without values. Load the model on the CPU")
            if within.setdefault(id(parameter), path) != path:
                raise ValueError(
                    f"{path} shares {name} with another block, and offloaded blocks are loaded one by one. Leave the "
                    "weights on the device"
                )
    for name, parameter in model.named_parameters(remove_duplicate=False):
        holder = within.get(id(parameter), "")
        if holder and not name.startswith(f"{holder}."):
            raise ValueError(
                f"{name} is a weight of the block {holder} and is also read outside of it, and an offloaded block is "
                "loaded for its own forward only. Leave the weights on the device"
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
        self.num_bytes = room_for_blocks(self._peak.unused_bytes(device), state_bytes())
        return self.num_bytes > 0

    def fail(self) -> bool:
        """Begin again with `auto`, after a lack of memory. Return whether the number is another one now."""
        if not self._is_auto:
            return False
        had, self.num_bytes = self.num_bytes, 0
        self._is_to_measure, self._peak = True, PeakMemory()
        return had > 0
