"""Weights of a model's blocks in a form and at a place: as codes, on the host, or both."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch import nn

from slivertune.core.layers import find_blocks
from slivertune.parked.exact_source import ExactSource, StreamsOf
from slivertune.parked.forms import WeightForm, WeightPlace
from slivertune.parked.quantized_layers import QuantizedLayers, linear_modules
from slivertune.parked.quantized_weight import QuantizedWeight
from slivertune.parked.streamed_model import StreamedModel

SourcesOf = Callable[[QuantizedLayers], Mapping[int, ExactSource]]
"""Function that returns the storage of exact weights by the parameter's `id`."""


class ParkedBlocks:
    """Weights of blocks, of which some may be exact and on the device for a while.

    Args:
        model: Model that holds the blocks.
        form: Form of the weights of linear layers. All others are exact.
        place: Place of all weights.
        resident_bytes: As in `StreamedModel`.
        parked: `id`s of the parameters to park; None for all.
        trained: As in `StreamedModel`.
        streams_of: As in `QuantizedLayers`.

    Raises:
        ImportError: If the library of the codes is not installed.
        RuntimeError: If the model or a block is compiled.
        ValueError: If a weight can't be parked, with its name and the way out.
    """

    def __init__(
        self,
        model: nn.Module,
        form: WeightForm,
        place: WeightPlace,
        resident_bytes: int | Literal["auto"],
        *,
        parked: Collection[int] | None = None,
        trained: Sequence[Sequence[int]] = (),
        streams_of: StreamsOf | None = None,
    ) -> None:
        self.streamed = StreamedModel(model, resident_bytes, trained, parked) if place == "host" else None
        """Owner of the blocks on the host."""
        self.device = None if self.streamed is None else self.streamed.device
        """Device on which blocks compute whose weights are on the host."""
        self.quantized: QuantizedLayers | None = None
        """Owner of the codes."""
        if form != "exact":
            layers = linear_modules(model, [block for _, block in find_blocks(model)], parked)
            self.quantized = QuantizedLayers(model, layers, form, streams_of=streams_of, home=self.device)
        if self.streamed is not None:
            self.streamed.quantized = self.quantized

    def attach(self, model: nn.Module, sources_of: SourcesOf) -> None:
        """Park the weights. After an error none is parked.

        Args:
            model: Model that holds the blocks.
            sources_of: Function that returns the storage of exact weights; others get a copy in host memory.

        Raises:
            RuntimeError: If the model or a part of it is compiled, or host memory can't be pinned.
        """
        if self.quantized is not None and not self.quantized.is_attached:
            self.quantized.attach(sources_of(self.quantized))
        try:
            if self.streamed is not None:
                self.streamed.attach(model)
        except BaseException:
            if self.quantized is not None:
                self.quantized.remove()
            raise

    def remove(self) -> None:
        """Restore the exact weights, on the host if they were parked there."""
        if self.streamed is not None:
            self.streamed.blocks.release()
        if self.quantized is not None:
            self.quantized.remove()

    def attach_for_inference(self, model: nn.Module) -> Callable[[], None]:
        """Load the blocks of a detached model for its forwards. Return the function that ends this."""
        return (lambda: None) if self.streamed is None else self.streamed.attach_for_inference(model)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that hold offloaded weights or codes."""
        return 0 if self.streamed is None else self.streamed.blocks.weights.offloaded_bytes

    @property
    def copied_bytes(self) -> int:
        """Bytes of host memory that hold copies of the exact weights of quantised layers."""
        return 0 if self.quantized is None else self.quantized.copied_bytes

    @property
    def num_streamed(self) -> int:
        """Number of blocks that each forward loads from the host."""
        return 0 if self.streamed is None else len(self.streamed.blocks.weights.streamed)

    def quantized_weight(self, parameter: torch.Tensor) -> QuantizedWeight | None:
        """Return the holder of a parameter that is codes while it does not train, or None."""
        return None if self.quantized is None else self.quantized.weight_of(parameter)

    def make_codes(self) -> None:
        """Make the codes now that the next forward would make."""
        if self.quantized is not None:
            self.quantized.make_codes()

    def activate(self, group: int, parameters: Iterable[torch.Tensor]) -> None:
        """Begin the turn of a group: its weights are exact and stay on the device, all others are parked.

        Args:
            group: Index of the group in `trained`.
            parameters: Parameters that the group trains.
        """
        if self.quantized is not None:
            self.quantized.activate(parameters)
        if self.streamed is not None:
            self.streamed.activate(group)

    def arrive(self) -> None:
        """Make the weights of the group exact and resident from the next operator on."""
        if self.quantized is not None:
            self.quantized.arrive()
        if self.streamed is not None:
            self.streamed.arrive()

    def begin_forward(self) -> None:
        """Begin to load the blocks of a forward."""
        if self.quantized is not None:
            self.quantized.let_go()
        if self.streamed is not None:
            self.streamed.blocks.begin_forward()

    def end_forward(self) -> None:
        """End a forward, also one that failed."""
        if self.streamed is not None:
            self.streamed.blocks.end_forward()

    def out_of_memory(self) -> None:
        """Let fewer blocks stay on the device."""
        if self.streamed is not None:
            self.streamed.out_of_memory()

    def end_cycle(self, state_bytes: Callable[[], int]) -> bool:
        """Let more blocks stay on the device if there is room. Return whether others stay now.

        Args:
            state_bytes: As in `StreamedModel.end_cycle`.
        """
        return self.streamed is not None and self.streamed.end_cycle(state_bytes)

    def forget_codes(self) -> None:
        """Drop the codes, since the exact weights were replaced on the host."""
        if self.quantized is not None:
            self.quantized.forget_codes()
