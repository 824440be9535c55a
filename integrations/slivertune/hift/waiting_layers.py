"""Quantised idle layers of HiFT: the weights, their turns, and the storage of the exact ones.

The linear weights of the blocks are on the device as block codes, except for those of the active group. Embeddings,
norms, biases and heads are always exact. Parameters that HiFT does not train (a PEFT model's base) never get a turn.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D
from typing_extensions import override

from slivertune.core.activation_room import read_memory
from slivertune.core.copy_streams import CopyStreams, Event
from slivertune.core.host_tensors import claimed_host_memory, tensor_at
from slivertune.core.layers import find_blocks
from slivertune.core.refused_pairs import attach_feature
from slivertune.core.setting_checks import check_choice
from slivertune.core.torch_internals import FakeTensor
from slivertune.hift.block_codes import check_available
from slivertune.hift.config import WaitingForm
from slivertune.hift.device_slots import DeviceSlots
from slivertune.hift.parts import Part, Turn, Update
from slivertune.hift.piece import Weight
from slivertune.hift.prefetch import Prefetcher
from slivertune.hift.streamed import StreamedGroup
from slivertune.hift.waiting_weight import ExactSource, WaitingWeight, held_by, waiting_weight_on


class WaitingLayers(Part):
    """Holds a model's idle layers as codes, and loads each group's exact weights for its turn.

    Args:
        model: Model to quantise.
        form: Kind of codes.
        prefetcher: Owner of the devices' slots and copy streams.
        home: Device on which the model computes, if its codes are offloaded with the rest of their blocks. None for
            codes on the device of the weights.
        groups: Owners of all groups' state, by index; none if the weights only wait.

    Raises:
        ImportError: If the library of the codes is not installed.
        ValueError: If no weight can be quantised, or one can't, with its name and the way out.
    """

    def __init__(
        self,
        model: nn.Module,
        form: WaitingForm,
        prefetcher: Prefetcher,
        home: torch.device | None = None,
        groups: Sequence[StreamedGroup] = (),
    ) -> None:
        check_available(form)
        self._model = model
        self._home = home
        self._slots_of = prefetcher.slots_of
        self._by_parameter = {
            id(module.weight): waiting_weight_on(module, name, form)
            for name, module in linear_modules(model, [block for _, block in find_blocks(model)]).items()
        }
        self._groups = groups
        self._active: Sequence[WaitingWeight] = ()
        self._is_attached = False
        self._leaving: list[tuple[torch.Tensor, Event]] = []
        """Exact weights whose turn has ended, until their copies to the host are complete."""

    @override
    def attach(self, model: nn.Module) -> Callable[[], None]:
        """Offload the exact weights, and hold all as codes.

        Raises:
            RuntimeError: If the model or a part of it is compiled.
        """
        if self._is_attached:
            return self.remove  # which could not release them
        layers = [
            each
            for each in self._model.modules()
            if any(id(own) in self._by_parameter for own in each.parameters(recurse=False))
        ]
        self._end_feature = attach_feature(self._model, "waiting", layers)
        self._is_attached = True
        sources: dict[int, ExactSource] = {}
        for group in self._groups:
            held = [weight for weight in group.weights if id(weight.parameter) in self._by_parameter]
            for weight in group.on_master(held):
                group.place_master(weight, self._by_parameter[id(weight.parameter)].exact())
                sources[id(weight.parameter)] = _Master(group, weight)
        for key, waiting in self._by_parameter.items():
            hold(waiting, self._slots_of, sources.get(key), self._home)
        return self.remove

    def weight_of(self, parameter: torch.Tensor) -> WaitingWeight | None:
        """Return the holder of a parameter that is quantised between its turns, or None if it is always exact."""
        return self._by_parameter.get(id(parameter))

    @override
    def begin_turn(self, turn: Turn) -> None:
        """Quantise the exact weights of other groups, and begin to load those of this group."""
        found = [self._by_parameter.get(id(weight.parameter)) for weight in turn.state.weights]
        self._active = [each for each in found if each is not None]
        self._let_go()
        for each in self._by_parameter.values():
            if each in self._active:
                continue
            each.cancel_turn()
            if not each.is_waiting:
                self._end_turn(each)
        for each in self._active:
            each.begin_turn()

    @override
    def begin_step(self, update: Update) -> None:
        """Make the group's parameters hold their exact weights from the next operator on."""
        for each in self._active:
            each.arrive()

    @override
    def begin_forward(self, inputs: Any) -> None:
        """Release the exact weights of ended turns."""
        self._let_go()

    def make_codes(self) -> None:
        """Make the codes now that the next forward would make."""
        for each in self._by_parameter.values():
            each.make_codes()

    @override
    def after_load(self) -> None:
        """Drop the codes, since the exact weights were replaced on the host."""
        for each in self._by_parameter.values():
            if each.is_waiting:
                each.forget_codes()

    def remove(self) -> None:
        """Restore the exact weights of all parameters, and remove everything from the model.

        If the device has no room for them, the layers stay quantised, and a warning says so. If the codes are
        offloaded to the host, the exact weights are restored there.
        """
        if isinstance(next(iter(self._by_parameter.values())).parameter, FakeTensor):
            return  # the mode in which they compute is over
        self._let_go()
        if self._home is None and not self._has_room():
            return
        for each in self._by_parameter.values():
            each.restore()
            each.remove()
        self._end_feature()
        self._is_attached = False

    def _has_room(self) -> bool:
        """Return whether the device has room for the exact weights, and warn if not."""
        waiting = [each for each in self._by_parameter.values() if each.is_waiting]
        num_bytes = sum(each.parameter.numel() * each.parameter.element_size() for each in waiting)
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

    def _end_turn(self, waiting: WaitingWeight) -> None:
        assert waiting.source is not None
        left = waiting.source.store(waiting.parameter.data)
        if left is not None:
            self._leaving.append((waiting.parameter.data, left))
        waiting.hold(waiting.quantized())

    def _let_go(self) -> None:
        """Release exact weights that are copied to the host. The next user of their memory waits for the copies."""
        for exact, left in self._leaving:
            self._slots_of(exact.device).streams.compute_after(left)
        self._leaving.clear()


def quantize_layers(model: nn.Module, waiting: WaitingForm) -> WaitingLayers:
    """Quantise the linear weights of a model's blocks before HiFT is built, with the exact ones on the host.

    Use this if the device has no room for the exact weights. Load the model in host memory, call this, then move the
    model to the device, or give it to a Trainer, which does. Only codes move. `HiFT(model, ...)` with the same
    `waiting` in its settings then trains it.

    Args:
        model: Model in bf16 or fp32, in host memory or on a device.
        waiting: Kind of codes, as in `HiFTConfig`.

    Returns:
        Handle of the quantised layers; `remove()` restores the model's exact weights.

    Raises:
        ImportError: If the library of the codes is not installed.
        ValueError: If no weight can be quantised, or one can't, with its name and the way out.

    Example:
        >>> model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        >>> slivertune.quantize_layers(model, "nf4")
        >>> trainer = Trainer(model, ...)
        >>> slivertune.attach(trainer, slivertune.HiFTConfig(waiting="nf4"))
    """
    check_choice("waiting", waiting, get_args(WaitingForm))
    layers = WaitingLayers(model, waiting, Prefetcher(0))
    layers.attach(model)
    return layers


def hold(
    waiting: WaitingWeight,
    slots_of: Callable[[torch.device], DeviceSlots],
    source: ExactSource | None = None,
    home: torch.device | None = None,
) -> None:
    """Hold a weight as codes from now on.

    Args:
        waiting: Holder of the weight, which may hold codes already, with another source.
        slots_of: Function that returns the slots of a device, with its copy streams.
        source: Storage of the exact weight; None for a copy in host memory.
        home: Device, as in `WaitingLayers`.
    """
    source = source or _HostCopy(waiting.exact(), home or waiting.parameter.device, slots_of)
    waiting.attach(source, lambda device: slots_of(device).streams, home)


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes of a device that new tensors may take, or None if it has no memory of its own."""
    if device.type != "cuda":
        return None
    memory = read_memory(device)
    return memory.limit - memory.allocated


def linear_modules(model: nn.Module, blocks: Sequence[nn.Module]) -> Mapping[str, nn.Module]:
    """Return the linear layers of a model's blocks whose weights can be quantised.

    Args:
        model: Model that holds them.
        blocks: Blocks of the model.

    Returns:
        Layers by their weight's name in the model.

    Raises:
        ValueError: If there are none, or a weight is tied, in neither bf16 nor fp32, or in a stack of experts.
    """
    in_blocks = {id(module) for block in blocks for module in block.modules()} - _in_adapters(model)
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    found: dict[str, nn.Module] = {}
    stacked: dict[str, nn.Parameter] = {}
    for path, module in model.named_modules():
        if id(module) not in in_blocks:
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() == 3:
                stacked[f"{path}.{name}"] = parameter
        if type(module) in (nn.Linear, Conv1D):
            _check_weight(f"{path}.weight", module, names)
            found[f"{path}.weight"] = module
    if stacked:
        num_bytes = sum(parameter.nbytes for parameter in stacked.values())
        raise ValueError(
            f"{next(iter(stacked))} and {len(stacked) - 1} more are stacks of experts of {num_bytes:,} bytes, which "
            "can't be quantised: their forward reads single matrices out of them. Leave out waiting="
        )
    if not found:
        raise ValueError(f"{type(model).__name__} has no torch.nn.Linear in its blocks to quantise. Leave out waiting=")
    return found


def _in_adapters(model: nn.Module) -> set[int]:
    """Return the `id`s of modules that PEFT has put beside the layers that it wraps, its `base_layer`s."""
    return {
        id(module)
        for wrapper in model.modules()
        if isinstance(getattr(wrapper, "base_layer", None), nn.Module)
        for name, child in wrapper.named_children()
        if name != "base_layer"
        for module in child.modules()
    }


def _check_weight(name: str, module: nn.Module, names: Mapping[int, Sequence[str]]) -> None:
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    if len(names[id(weight)]) > 1:
        raise ValueError(
            f"{name} is tied to {next(each for each in names[id(weight)] if each != name)}, and a tied weight can't be "
            "quantised. Untie them, or leave out waiting="
        )
    if weight.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"{name} is {weight.dtype}. Load the model in bfloat16 or float32 to use waiting=")
    if "forward" in vars(module) and held_by(module) is None:
        raise ValueError(
            f"the forward of the layer of {name} was replaced (by TokenTune, SFT or offloading), and would read the "
            "quantised weight. Build HiFT first, then attach that"
        )


class _Master(ExactSource):
    """A weight whose fp32 master is offloaded with its group's state."""

    def __init__(self, group: StreamedGroup, weight: Weight) -> None:
        self._group = group
        self._weight = weight

    def read(self) -> torch.Tensor:
        return self._group.waiting_master(self._weight).to(self._weight.parameter.dtype)

    def write(self, weight: torch.Tensor) -> None:
        self._group.write_master(self._weight, weight)

    def load(self, into: torch.Tensor) -> Event:
        return self._group.load_weight(self._weight, into)

    def end_loading(self) -> None:
        self._group.end_loading(self._weight)

    def store(self, weight: torch.Tensor) -> Event:
        return None  # the step has stored its master


class _HostCopy(ExactSource):
    """A weight without a master, offloaded in its own dtype. One that is not trained is only read.

    Args:
        exact: Exact weight, which is copied.
        device: Device on which it computes.
        slots_of: Function that returns the slots of a device, with its copy streams.
    """

    def __init__(
        self, exact: torch.Tensor, device: torch.device, slots_of: Callable[[torch.device], DeviceSlots]
    ) -> None:
        self._slots_of = slots_of
        self._device = device
        self._copy = self._like(exact)
        self._copy.copy_(exact)
        self._stored: Event = None

    def read(self) -> torch.Tensor:
        self._streams.synchronize()
        return self._copy

    def write(self, weight: torch.Tensor) -> None:
        self._streams.synchronize()
        self._copy.copy_(weight.detach())

    def load(self, into: torch.Tensor) -> Event:
        self._follow(into.device)
        streams = self._streams
        with streams.on("inbound", streams.record(), self._stored):
            into.copy_(self._copy, non_blocking=True)
            return streams.record("inbound")

    def end_loading(self) -> None:
        """Do nothing: no memory of the device was taken beside the weight."""

    def store(self, weight: torch.Tensor) -> Event:
        self._follow(weight.device)
        streams = self._streams
        with streams.on("outbound", streams.record()):
            self._copy.copy_(weight, non_blocking=True)
            self._stored = streams.record("outbound")
        return self._stored

    @property
    def _streams(self) -> CopyStreams:
        return self._slots_of(self._device).streams

    def _follow(self, device: torch.device) -> None:
        """Move the copy along if the model has moved: its memory is right for one device only."""
        if device != self._device:
            before = self.read()
            self._device, self._stored = device, None
            self._copy = self._like(before)
            self._copy.copy_(before)

    def _like(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor_at(claimed_host_memory(self._streams, tensor.nbytes, "parameters"), 0, tensor)
