"""Quantised layers: linear weights of blocks that are on the device as codes while they do not train.

Embeddings, norms, biases and heads are always exact. HiFT makes the weights of its active group exact for a turn.
Weights that nobody trains are quantised for good.
"""

import inspect
import re
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from slivertune.core.activation_room import read_memory
from slivertune.core.copy_streams import Event, copy_streams
from slivertune.core.module_hook import ReadsWeight, has_other_forward
from slivertune.core.refused_pairs import attach_feature
from slivertune.core.torch_internals import FakeTensor
from slivertune.parked.adapters import adapter_modules
from slivertune.parked.block_codes import check_available
from slivertune.parked.exact_source import ExactSource, HostCopy, StreamsOf
from slivertune.parked.forms import CodesForm
from slivertune.parked.quantized_weight import QuantizedWeight, held_by, quantized_weight_on

_CONVOLUTIONS = (nn.Conv1d, nn.ConvTranspose1d)
"""Classes whose weights have three dimensions, and are no stacks of experts."""


class QuantizedLayers:
    """Linear weights of a model that are codes on the device, and their exact weights.

    Args:
        model: Model that holds the layers.
        layers: Linear layers to quantise, by their weight's name in the model (`linear_modules`).
        form: Kind of codes.
        streams_of: Function that returns the copy streams of a device; by default streams of its own.
        home: Device on which the model computes, if its codes are offloaded with the rest of their blocks. None for
            codes on the device of the weights.

    Raises:
        ImportError: If the library of the codes is not installed.
        ValueError: If a weight is held in another form already.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, nn.Module],
        form: CodesForm,
        *,
        streams_of: StreamsOf | None = None,
        home: torch.device | None = None,
    ) -> None:
        check_available(form)
        self._model = model
        self._home = home
        self.streams_of = streams_of or cache(copy_streams)
        """Function that returns the copy streams of a device."""
        self._by_parameter = {
            id(layer.weight): quantized_weight_on(layer, name, form) for name, layer in layers.items()
        }
        self._active: Sequence[QuantizedWeight] = ()
        self._is_attached = False
        self._leaving: list[tuple[torch.Tensor, Event]] = []
        """Exact weights whose turn has ended, until their copies to the host are complete."""

    def attach(self, sources: Mapping[int, ExactSource] | None = None) -> None:
        """Offload the exact weights, and hold all as codes. `remove` undoes it.

        Args:
            sources: Storage of exact weights by the parameter's `id`; for all others a copy in host memory is made.

        Raises:
            RuntimeError: If the model or a part of it is compiled.
        """
        if self._is_attached:
            return  # `remove` could not release them
        layers = [
            each
            for each in self._model.modules()
            if any(id(own) in self._by_parameter for own in each.parameters(recurse=False))
        ]
        self._end_feature = attach_feature(self._model, "quantised layers", layers)
        self._is_attached = True
        try:
            for key, held in self._by_parameter.items():
                hold(held, self.streams_of, None if sources is None else sources.get(key), self._home)
        except BaseException:
            self._restore()
            raise

    @property
    def weights(self) -> Collection[QuantizedWeight]:
        """Holders of all weights."""
        return self._by_parameter.values()

    @property
    def copied_bytes(self) -> int:
        """Bytes of host memory that hold copies of exact weights."""
        return sum(each.parameter.nbytes for each in self.weights if isinstance(each.source, HostCopy))

    def device_of(self, held: QuantizedWeight) -> torch.device:
        """Return the device on which a layer computes."""
        return self._home or held.parameter.device

    @property
    def is_attached(self) -> bool:
        """Whether the weights are held as codes, even those that `remove` could not release."""
        return self._is_attached

    def weight_of(self, parameter: torch.Tensor) -> QuantizedWeight | None:
        """Return the holder of a parameter that is quantised while it does not train, or None."""
        return self._by_parameter.get(id(parameter))

    def activate(self, parameters: Iterable[torch.Tensor]) -> None:
        """Quantise the exact weights of all others, and begin to load those of these parameters.

        Args:
            parameters: Parameters that train from now on, those that are never quantised included.
        """
        found = [self.weight_of(parameter) for parameter in parameters]
        self._active = [each for each in found if each is not None]
        self.let_go()
        for each in self._by_parameter.values():
            if each in self._active:
                continue
            each.cancel_loading()
            if not each.is_quantized:
                self._end_turn(each)
        for each in self._active:
            each.begin_loading()

    def arrive(self) -> None:
        """Make the active parameters hold their exact weights from the next operator on."""
        for each in self._active:
            each.arrive()

    def make_codes(self) -> None:
        """Make the codes now that the next forward would make."""
        for each in self._by_parameter.values():
            each.make_codes()

    def forget_codes(self) -> None:
        """Drop the codes, since the exact weights were replaced on the host."""
        for each in self._by_parameter.values():
            if each.is_quantized:
                each.forget_codes()

    def remove(self) -> None:
        """Restore the exact weights of all parameters, and remove everything from the model.

        If the device has no room for them, the layers stay quantised, and a warning says so. If the codes are
        offloaded to the host, the exact weights are restored there.
        """
        if not self._by_parameter or isinstance(next(iter(self._by_parameter.values())).parameter, FakeTensor):
            return  # the mode in which they compute is over
        self.let_go()
        if self._home is None and not self._has_room():
            return
        self._restore()

    def _restore(self) -> None:
        """Restore the exact weights that are held as codes, and remove everything from the model."""
        for each in self._by_parameter.values():
            if each.source is not None:
                each.restore()
            each.remove()
        self._end_feature()
        self._is_attached = False

    def let_go(self) -> None:
        """Release exact weights that are copied to the host. The next user of their memory waits for the copies."""
        for exact, left in self._leaving:
            self.streams_of(exact.device).compute_after(left)
        self._leaving.clear()

    def _has_room(self) -> bool:
        """Return whether the device has room for the exact weights, and warn if not."""
        held = [each.parameter for each in self._by_parameter.values() if each.is_quantized]
        num_bytes = sum(each.numel() * each.element_size() for each in held)
        device = next(iter(self._by_parameter.values())).parameter.device
        room = free_bytes(device)
        if room is None or num_bytes <= room:
            return True
        warnings.warn(
            f"{num_bytes:,} bytes of exact weights do not fit on {device}, which has {room:,} bytes free. The layers "
            "stay quantised, and checkpoints are exact",
            UserWarning,
            stacklevel=5,
        )
        return False

    def _end_turn(self, held: QuantizedWeight) -> None:
        assert held.source is not None
        left = held.source.store(held.parameter.data)
        if left is not None:
            self._leaving.append((held.parameter.data, left))
        held.hold(held.quantized())


def hold(
    held: QuantizedWeight,
    streams_of: StreamsOf,
    source: ExactSource | None = None,
    home: torch.device | None = None,
) -> None:
    """Hold a weight as codes from now on.

    Args:
        held: Holder of the weight, which may hold codes already, with another source.
        streams_of: Function that returns the copy streams of a device.
        source: Storage of the exact weight; None for a copy in host memory.
        home: Device, as in `QuantizedLayers`.
    """
    source = source or HostCopy(held.exact(), home or held.parameter.device, streams_of)
    held.attach(source, streams_of, home)


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes of a device that new tensors may take, or None if it has no memory of its own."""
    if device.type != "cuda":
        return None
    memory = read_memory(device)
    return memory.limit - memory.allocated


def linear_modules(
    model: nn.Module, blocks: Sequence[nn.Module], parked: Collection[int] | None = None
) -> Mapping[str, nn.Module]:
    """Return the linear layers of a model's blocks whose weights can be quantised.

    Args:
        model: Model that holds them.
        blocks: Blocks of the model.
        parked: `id`s of the parameters that may be quantised; None for all. Stacks of experts among them stay exact,
            which a warning says, as for weights that other code than their layer's forward reads.

    Returns:
        Layers by their weight's name in the model.

    Raises:
        ValueError: If there are none, or a weight is tied, in neither bf16 nor fp32, or in a stack of experts.
    """
    in_blocks = {id(module) for block in blocks for module in block.modules()} - adapter_modules(model)
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    found: dict[str, nn.Module] = {}
    stacked: dict[str, nn.Parameter] = {}
    read: dict[str, nn.Parameter] = {}
    modules = dict(model.named_modules())
    for path, module in modules.items():
        if id(module) not in in_blocks:
            continue
        for name, parameter in module.named_parameters(recurse=False):
            is_stack = parameter.dim() == 3 and not isinstance(module, _CONVOLUTIONS)
            if is_stack and (parked is None or id(parameter) in parked):
                stacked[f"{path}.{name}"] = parameter
        if type(module) in (nn.Linear, Conv1D) and (parked is None or id(module.weight) in parked):
            if _is_read_by_parent(path, modules):
                read[f"{path}.weight"] = module.weight
                continue
            _check_weight(f"{path}.weight", module, names, trains=parked is None)
            found[f"{path}.weight"] = module
    if stacked and parked is None:
        raise ValueError(
            f"{_described(stacked, 'stacks of experts')}, which can't be quantised: their forward reads single "
            "matrices out of them. Leave the weights exact"
        )
    for weights, what in ((stacked, "stacks of experts"), (read, "read past the forward of their layers")):
        if weights:
            warnings.warn(f"{_described(weights, what)}, and stay exact", UserWarning, stacklevel=5)
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no torch.nn.Linear in its blocks to quantise. Leave the weights exact"
        )
    return found


def _described(weights: Mapping[str, nn.Parameter], what: str) -> str:
    """Name the first of some weights, with what they are and the bytes of all."""
    num_bytes = sum(parameter.nbytes for parameter in weights.values())
    first, *others = weights
    which = f"{first} and {len(others)} more are" if others else f"{first} is"
    return f"{which} {what} ({num_bytes:,} bytes)"


def _is_read_by_parent(path: str, modules: Mapping[str, nn.Module]) -> bool:
    """Return whether the class of the module that holds a layer names the layer's weight, beside its dtype and shape.

    Such a class multiplies by the weight itself, sometimes on a GPU alone (the state space models), or writes to it.
    """
    parent, _, name = path.removesuffix(".base_layer").rpartition(".")
    kind: Any = type(modules[parent])
    return _names_weight_of(kind, name)


@cache
def _names_weight_of(kind: type, name: str) -> bool:
    reads = re.compile(rf"(?<!isinstance\()\bself\.{name}\.weight\b(?!\.(?:dtype|device|shape|ndim|size)\b)")
    return any(reads.search(_source_of(each)) for each in kind.__mro__ if each is not nn.Module)


@cache
def _source_of(kind: type) -> str:
    """Return the source of a class, empty if there is none."""
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return ""


def _check_weight(name: str, module: nn.Module, names: Mapping[int, Sequence[str]], *, trains: bool) -> None:
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    if len(names[id(weight)]) > 1:
        raise ValueError(
            f"{name} is tied to {next(each for each in names[id(weight)] if each != name)}, and a tied weight can't be "
            "quantised. Untie them, or leave the weights exact"
        )
    is_frozen_fp16 = weight.dtype == torch.float16 and not trains
    if weight.dtype not in (torch.float32, torch.bfloat16) and not is_frozen_fp16:
        raise ValueError(f"{name} is {weight.dtype}. Load the model in bfloat16 or float32 to quantise its layers")
    reader = getattr(vars(module).get("forward"), "__self__", None)
    if has_other_forward(module) and held_by(module) is None and not isinstance(reader, ReadsWeight):
        raise ValueError(
            f"the forward of the layer of {name} was replaced (by TokenTune, SFT or offloading), and would read the "
            "quantised weight. Quantise the layers first (build HiFT, or park them), then attach that"
        )
