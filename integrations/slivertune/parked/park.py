"""Park the frozen weights of a model's blocks: as codes, on the host, or both, for any way to train the others.

A LoRA's base, the lower blocks of a model of which the upper ones train, and all blocks of a model that is evaluated
are read in forwards and backwards, and never written. The device needs them one block at a time.
"""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary
from typing_extensions import override

from slivertune.core.layers import find_blocks, modules_in_blocks
from slivertune.core.module_hook import ModelHandle, ModuleHook
from slivertune.core.parameters import owner_of
from slivertune.core.setting_checks import check_choice, read_bytes
from slivertune.core.torch_internals import NO_BACKWARD, is_called, leave_to_each_rank, running_backward
from slivertune.parked.adapters import adapter_modules, adapters_of, move_adapters, refuse_adapters, refuse_merges
from slivertune.parked.checkpoint_source import CheckpointFiles
from slivertune.parked.exact_source import ExactSource
from slivertune.parked.forms import WeightForm, WeightPlace
from slivertune.parked.parked_blocks import ParkedBlocks, SourcesOf
from slivertune.parked.quantized_layers import QuantizedLayers

_handles = WeakTensorKeyDictionary()
"""Handles by parked parameter, weakly."""
_BACKWARDS_TO_MEASURE = 2
"""Backward passes before `resident_bytes="auto"` is measured: the second runs beside the optimizer's state."""


@dataclass(frozen=True, slots=True)
class _Parked:
    """A parameter as it was when it was parked."""

    name: str
    module: nn.Module
    attribute: str
    parameter: nn.Parameter
    dtype: torch.dtype
    shape: torch.Size

    def check(self) -> None:
        """Check that the module still holds the parameter, frozen and in its form.

        Raises:
            RuntimeError: If not, with the way out.
        """
        own = self.module._parameters.get(self.attribute)
        if own is not self.parameter:
            change = "was replaced by another parameter"
        elif own.requires_grad:
            change = "requires a gradient now, and its layer would not be trained"
        elif own.dtype != self.dtype or own.shape != self.shape:
            change = f"is {own.dtype} of shape {tuple(own.shape)} now, and was {self.dtype} of {tuple(self.shape)}"
        else:
            return
        raise RuntimeError(
            f"{self.name} {change}, while it is parked. Call remove() on what park_layers returned first, and park the "
            "layers again afterwards"
        )


class _Copied(ModuleHook):
    """A hook that does nothing, and warns if its model is copied."""

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleHook:
        warnings.warn(
            "the copy of a model with parked layers has exact weights of its own, on the device of the model or, if "
            "they were parked on the host, in host memory",
            UserWarning,
            stacklevel=2,
        )
        return super().__deepcopy__(memo)


class ParkedLayers(ModelHandle):
    """Handle of parked weights, made by `park_layers`. `remove()` restores the exact weights.

    Args:
        model: Model whose frozen weights are parked.
        form: As in `park_layers`.
        place: As in `park_layers`.
        resident_bytes: As in `park_layers`.
        sources_of: Function that returns the storage of exact weights; by default the model's checkpoint, as far as it
            has their bits.
    """

    refusal_to_copy = (
        "parked layers belong to one model, and the handle can't be copied. A copy of the model has exact weights of "
        "its own"
    )

    def __init__(
        self,
        model: nn.Module,
        form: WeightForm,
        place: WeightPlace,
        resident_bytes: int | Literal["auto"],
        sources_of: SourcesOf | None = None,
    ) -> None:
        super().__init__()
        self.device: torch.device | None = None
        """Device on which the blocks compute, if their weights are on the host."""
        self._outermost: nn.Module | None = None
        self._thread = 0
        """Thread that runs the outermost forward."""
        self._blocks: ParkedBlocks | None = None
        self._above_blocks: list[nn.Module] = []
        """The model and the modules in it that hold blocks."""
        refuse_parked(model, "park the model again")
        self._adapters = adapters_of(model.modules())
        refuse_adapters(self._adapters)
        self._parked = list(_frozen_in_blocks(model))
        self._model = weakref.ref(model)
        if not self._parked:
            raise ValueError(
                f"no weight in the blocks of {type(model).__name__} is frozen, so none can be parked. Attach adapters "
                "first, freeze a part of the model, or all of it for evaluation (model.requires_grad_(False))"
            )
        self.names = tuple(each.name for each in self._parked)
        """Names of the parked parameters in the model."""
        parked = {id(each.parameter) for each in self._parked}
        blocks = [block for _, block in find_blocks(model)]
        parked_blocks = ParkedBlocks(model, form, place, resident_bytes, parked=parked)
        parked_blocks.attach(model, sources_of or partial(_sources_in_checkpoint, model))
        try:
            self._blocks, self.device = parked_blocks, parked_blocks.device
            self._put_on(model, blocks)
            for each in self._parked:
                _handles[each.parameter] = weakref.ref(self)
        except BaseException:
            self.remove()
            raise

    def _put_on(self, model: nn.Module, blocks: list[nn.Module]) -> None:
        in_blocks = set(map(id, blocks))
        entries = [each for each in model.modules() if any(id(other) in in_blocks for other in each.modules())]
        self._above_blocks = [each for each in entries if id(each) not in in_blocks]
        self.on_remove(model.register_forward_pre_hook(_Copied(None)).remove)
        for module in entries:
            self.on_remove(module.register_forward_pre_hook(ModuleHook(self._before_forward), prepend=True).remove)
            self.on_remove(module.register_forward_hook(ModuleHook(self._after_forward), always_call=True).remove)
        self.on_remove(refuse_merges(model, {id(each.module) for each in self._parked}))
        self.on_remove(leave_to_each_rank(model, self.names))

    @override
    def remove(self) -> None:
        """Restore the exact weights, on the host if they were parked there. A second call does nothing."""
        if self._blocks is not None:
            self._blocks.remove()
        super().remove()
        for each in self._parked:
            if each.parameter in _handles:
                del _handles[each.parameter]
        self._blocks = None
        self._parked.clear()
        self._above_blocks.clear()

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that hold offloaded weights or codes."""
        return 0 if self._blocks is None else self._blocks.host_bytes

    @property
    def num_streamed(self) -> int:
        """Number of blocks that each forward loads from the host."""
        return 0 if self._blocks is None else self._blocks.num_streamed

    def make_codes(self) -> None:
        """Make the codes now that the next forward would make."""
        if self._blocks is not None:
            self._blocks.make_codes()

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling() or running_backward() != NO_BACKWARD:
            return  # refused by another hook, or recomputed
        thread = threading.get_ident()
        # After Ctrl-C torch does not call `_after_forward`.
        if self._outermost is not None and is_called(self._outermost, self._thread, beside=module):
            if self._thread != thread:
                raise RuntimeError(
                    "a second thread runs the model, and parked layers are loaded for one forward at a time. Let the "
                    "threads take turns, or call remove() on what park_layers returned"
                )
            return
        self._outermost, self._thread = module, thread
        for each in self._parked:
            each.check()
        self._meet_adapters()
        if vars(module).get("_is_replica"):
            raise RuntimeError(
                "nn.DataParallel copies a model for each forward, which parked layers can't follow. Use one device, or "
                "one process for each (DDP)"
            )
        streamed = None if self._blocks is None else self._blocks.streamed
        if streamed is None:
            return
        if streamed.blocks.was_broken_off:
            streamed.out_of_memory()  # of which no backward tells
        if torch.is_grad_enabled():
            streamed.note_peak()
            if streamed.blocks.num_backwards >= _BACKWARDS_TO_MEASURE:
                streamed.end_cycle(lambda: 0)
        streamed.blocks.begin_forward()

    def _meet_adapters(self) -> None:
        """Check adapters that were attached since the weights were parked, and move them to where the blocks compute.

        PEFT has put them beside the weights, which may lie on the host.
        """
        adapters = adapters_of(self._above_blocks)
        if adapters.keys() <= self._adapters.keys():
            return
        refuse_adapters(adapters, self._adapters.keys())
        model = self._model()
        if model is not None:
            self.on_remove(refuse_merges(model, {id(each.module) for each in self._parked}))
            if self.device is not None:
                move_adapters(model, self.device)
        self._adapters |= adapters

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._outermost is not module or running_backward() != NO_BACKWARD:
            return
        self._outermost = None
        if self._blocks is None:
            return
        if isinstance(sys.exception(), torch.OutOfMemoryError):
            self._blocks.out_of_memory()
        self._blocks.end_forward()


def park_layers(
    model: nn.Module,
    *,
    form: WeightForm = "exact",
    place: WeightPlace = "host",
    resident_bytes: int | str = "auto",
) -> ParkedLayers:
    """Park the frozen weights of a model's blocks, so that they take less memory of the device, or nearly none.

    Call it when adapters are attached and everything is frozen that does not train, before the optimizer is built or
    the model is given to a Trainer. Weights that require a gradient, adapters, embeddings, norms outside of blocks and
    heads stay on the device. On the host the blocks are loaded one by one, ahead of their forward and backward; two
    blocks are on the device at a time. Quantised layers compute with dense weights that are made from the codes for
    each product. Saved models are exact.

    Args:
        model: Model in fp32, bf16 or fp16, in host memory or on its device.
        form: Form of the weights of linear layers. Codes ("int8": 8.25 bits a weight in bf16, "nf4": 4.13 bits) are
            slightly rounded; the exact weights stay in host memory. All other weights of blocks stay exact.
        place: Place of the parked weights. On the "host" they are in pinned memory.
        resident_bytes: With `place="host"`, bytes of blocks that stay on the device, such as "4GiB". "auto" measures
            what is free after two backward passes; it is 0 without a GPU.

    Returns:
        Handle. `remove()` restores the exact weights. It is also a context manager.

    Raises:
        ImportError: If the library of the codes is not installed.
        OSError: If host memory can't be mapped.
        RuntimeError: If a block is compiled.
        ValueError: If no weight of the blocks is frozen, nothing would change, or a weight can't be parked, with its
            name and the way out.

    Example:
        >>> model = get_peft_model(AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16), lora)
        >>> slivertune.park_layers(model, form="nf4")
        >>> trainer = Trainer(model, ...)
    """
    check_choice("form", form, get_args(WeightForm))
    check_choice("place", place, get_args(WeightPlace))
    if form == "exact" and place == "device":
        raise ValueError(
            "form='exact' with place='device' leaves all weights as they are. Set place='host', or form='int8' or 'nf4'"
        )
    num_bytes = read_bytes("resident_bytes", resident_bytes, may_be_auto=True)
    return ParkedLayers(model, form, place, num_bytes)


def _frozen_in_blocks(model: nn.Module) -> Iterator[_Parked]:
    """Yield the frozen parameters of a model's blocks, without those of adapters and of HiFT's idle groups."""
    in_adapters = adapter_modules(model)
    in_blocks = modules_in_blocks(model)
    seen: set[int] = set()
    for path, module in model.named_modules():
        if id(module) not in in_blocks or id(module) in in_adapters:
            continue
        for attribute, parameter in module.named_parameters(recurse=False):
            name = f"{path}.{attribute}"
            if isinstance(parameter, DTensor) or hasattr(parameter, "ds_id"):
                raise ValueError(f"{name} is sharded (FSDP2 or ZeRO), and can't be parked. Use one device, or DDP")
            may_train = parameter.requires_grad or getattr(owner_of(parameter), "trains_frozen_weights", False)
            if may_train or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            yield _Parked(name, module, attribute, parameter, parameter.dtype, parameter.shape)


def _sources_in_checkpoint(model: nn.Module, quantized: QuantizedLayers) -> dict[int, ExactSource]:
    """Return the storage of exact weights that are the same in the model's checkpoint, by the parameter's `id`."""
    files = CheckpointFiles.of(model)
    sources: dict[int, ExactSource] = {}
    for held in quantized.weights if files.files else ():
        source = files.source_of(held.name, held.exact(), quantized.device_of(held), quantized.streams_of)
        if source is not None:
            sources[id(held.parameter)] = source
    return sources


def compute_device_of(parameter: torch.Tensor) -> torch.device:
    """Return the device on which a weight is used, wherever it is parked."""
    handle = _handles.get(parameter)
    holder = None if handle is None else handle()
    return parameter.device if holder is None or holder.device is None else holder.device


def refuse_parked(model: nn.Module, action: str) -> None:
    """Refuse what would move or write parked weights by itself.

    Args:
        model: The model.
        action: Words after "before you" in the error.

    Raises:
        ValueError: If weights of the model are parked, with the name of one and the way out.
    """
    for name, parameter in model.named_parameters():
        handle = _handles.get(parameter)
        if handle is not None and handle() is not None:
            raise ValueError(
                f"{name} is parked already. Call remove() on what park_layers returned before you {action}"
            )
