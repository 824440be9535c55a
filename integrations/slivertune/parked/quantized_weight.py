"""A linear layer's weight that is exact in its group's turn, and on the device as block codes otherwise.

Quantised weights take part in forwards and in the gradients of inputs. Their layer's forward finds a dense weight, made
of the codes for as long as the product lasts. Autograd does not keep it, but makes it again in the backward. Between
forwards the parameter's data is one NaN in the weight's shape: any other reader notices at once, and any other writer
gets torch's error.

The exact weight is offloaded to the host (`ExactSource`): saving reads it there, and loading writes it there.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from typing_extensions import override

from slivertune.core.copy_streams import CopyStreams, Event
from slivertune.core.ledger import claim, claimed_at_birth
from slivertune.core.module_hook import ModuleHook, StandIn, put_stand_in
from slivertune.core.refused_pairs import Feature
from slivertune.core.torch_internals import apply_of, is_without_data, storage_key
from slivertune.parked.block_codes import BlockCodes, quantize
from slivertune.parked.exact_source import ExactSource, StreamsOf
from slivertune.parked.exact_tensor import ExactTensor
from slivertune.parked.forms import CodesForm


class QuantizedWeight:
    """Owner of one weight's codes, and of the stand-ins and hooks on its module.

    Args:
        module: Linear layer; its forward must be its class's own.
        name: Name of the weight in the model.
        form: Kind of codes.
    """

    def __init__(self, module: nn.Module, name: str, form: CodesForm) -> None:
        self.name = name
        """Name of the weight in the model."""
        self.form = form
        """Kind of codes."""
        self.source: ExactSource | None = None
        """Storage of the exact weight."""
        self._module = module
        self._streams_of: StreamsOf = CopyStreams
        self._home: torch.device | None = None
        self._keep: Callable[[BlockCodes], BlockCodes] = _claimed
        parameter: Any = module.weight
        self.parameter: nn.Parameter = parameter
        """Weight of the layer."""
        self.is_quantized = False
        """Whether the device holds codes, or nothing yet, in place of the exact weight."""
        self._codes: BlockCodes | None = None
        self._stand_in: torch.Tensor | None = None
        """NaN that the parameter holds while it is quantised. None while its module loads a state dict into it."""
        self._is_running = False
        """Whether the layer's forward runs, and the parameter holds the dense weight."""
        self._arriving: tuple[torch.Tensor, Event] | None = None
        self._undo: list[Callable[[], None]] = []

    @property
    def device(self) -> torch.device:
        """Device on which the layer computes."""
        return self._home or self.parameter.device

    @property
    def exact_device(self) -> torch.device:
        """Device of the exact weight in a copy of the model, or once it is restored."""
        return self.parameter.device if self._home is None else torch.device("cpu")

    def attach(
        self,
        source: ExactSource,
        streams_of: StreamsOf,
        home: torch.device | None = None,
    ) -> None:
        """Put the stand-ins and hooks on the module, unless they are there, and hold the weight as codes.

        Args:
            source: Storage that has the exact weight.
            streams_of: Function that returns the copy streams of a device.
            home: Device on which the layer computes, if its codes are offloaded; None for that of its weight.
        """
        self.source, self._streams_of, self._home = source, streams_of, home
        if not self._undo:
            self._put_on(self._module)
        if self.is_quantized:
            self.follow()
        else:
            self.hold()

    def keep_codes(self, keep: Callable[[BlockCodes], BlockCodes], kept: BlockCodes) -> None:
        """Let another object store the codes from now on.

        Args:
            keep: Function that takes new codes, and returns codes that stand for them.
            kept: Codes that stand for the present ones.
        """
        self._keep, self._codes = keep, kept

    def _put_on(self, module: nn.Module) -> None:
        stand_ins = {"forward": _Forward(module.forward, self), "_apply": _Apply(apply_of(module), self)}
        for name, stand_in in stand_ins.items():
            self._undo.append(put_stand_in(module, name, stand_in))
        for handle in (
            module.register_state_dict_post_hook(ModuleHook(self._show_exact)),
            module.register_load_state_dict_pre_hook(ModuleHook(self._begin_loading)),
            module.register_load_state_dict_post_hook(ModuleHook(self._end_loading)),
        ):
            self._undo.append(handle.remove)

    def remove(self) -> None:
        """Remove the stand-ins and hooks. The weight must be exact."""
        while self._undo:
            self._undo.pop()()

    def hold(self, codes: BlockCodes | None = None) -> None:
        """Hold the weight as codes: the source has the exact weight, and the device frees it.

        Args:
            codes: Codes of the weight; None lets the next forward make them from the exact weight.
        """
        self._codes, self._arriving = codes, None
        self.is_quantized = True
        self._leave()

    def quantized(self) -> BlockCodes:
        """Return new codes of the weight, which must be exact."""
        return self._keep(quantize(self.parameter.data, self.form))

    def begin_loading(self) -> None:
        """Begin to load the exact weight to the device. The first forward, or `arrive`, waits for it."""
        assert self.source is not None
        if not self.is_quantized or self._arriving is not None:
            return
        dense = self._empty()
        self._arriving = dense, self.source.load(dense)

    def arrive(self) -> None:
        """Make the parameter hold the exact weight from the next operator on, if `begin_loading` was called."""
        dense = self._arrived()
        if dense is not None:
            self.parameter.data = dense
            self._codes, self._stand_in, self.is_quantized = None, None, False

    def cancel_loading(self) -> None:
        """Stay quantised: the turn is over before the weight has arrived."""
        self._arrived()  # the computation gets its memory next

    def _arrived(self) -> torch.Tensor | None:
        """Return the exact weight in flight, for which the computation waits now, or None if there is none."""
        if self._arriving is None:
            return None
        (dense, ready), self._arriving = self._arriving, None
        self._streams_of(dense.device).compute_after(ready)
        assert self.source is not None
        self.source.end_loading()
        return dense

    def restore(self) -> None:
        """Make the parameter hold the exact weight now: on the device or, if its codes are offloaded, on the host."""
        if self._home is None:
            self.begin_loading()
            self.arrive()
            return
        self.cancel_loading()
        self.parameter.data = self.exact().to("cpu")
        self._codes, self.is_quantized, self._keep = None, False, _claimed

    def forget_codes(self) -> None:
        """Drop everything made from the source, to which others have written."""
        if not is_without_data():  # a plan's codes have no values
            self._codes = None
        if self._arriving is not None:
            self.cancel_loading()
            self.begin_loading()

    def make_codes(self) -> None:
        """Make the codes now that the next forward would make, unless the exact weight is loaded or in flight."""
        if self.is_quantized and self._arriving is None:
            self.codes()

    def codes(self) -> BlockCodes:
        """Return the codes of a quantised weight, made from the exact weight if there are none."""
        self._take_over()
        if self._codes is None:
            assert self.source is not None
            with torch.no_grad():
                self._codes = self._keep(quantize(self.source.read().to(self.device), self.form))
        return self._codes

    def dense(self) -> torch.Tensor:
        """Return the dense weight for a product: that of the running forward or turn, or a new one from the codes."""
        if not self.is_quantized or self._is_running:
            return self.parameter.data
        return self.codes().dense().to(self.parameter.dtype)

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the layer's own forward over the dense weight."""
        device = self.parameter.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.parameter.dtype
        # A backward that comes later than the next turn still belongs to the weights of this moment.
        codes = self.codes()
        dense = codes.dense().to(dtype)
        own = storage_key(dense.untyped_storage())

        def pack(saved: torch.Tensor) -> Any:
            if storage_key(saved.untyped_storage()) == own:
                return saved.size(), saved.stride(), saved.storage_offset()
            return saved

        def unpack(packed: Any) -> torch.Tensor:
            return packed if isinstance(packed, torch.Tensor) else codes.dense().to(dtype).as_strided(*packed)

        stand_in = self.parameter.data if self._stand_in is None else self._stand_in.expand(self.parameter.shape)
        self.parameter.data, self._is_running = dense, True
        try:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            with saved_tensors_hooks(pack, unpack):
                return forward(*args, **kwargs)
        finally:
            self.parameter.data, self._is_running = stand_in, False

    def exact(self) -> torch.Tensor:
        """Return the exact weight in its own dtype, on the host while it is quantised."""
        if not self.is_quantized:
            return self.parameter.detach()
        self._take_over()
        assert self.source is not None
        return self.source.read()

    def write(self, exact: torch.Tensor) -> None:
        """Replace the exact weight.

        Args:
            exact: New weight of the same shape, on any device.
        """
        assert self.source is not None
        self.source.write(exact)
        if self.is_quantized:
            self.forget_codes()
        else:
            self.parameter.data.copy_(exact)

    def kept_tensors(self) -> Iterator[torch.Tensor]:
        """Return the tensors of the codes, if there are any."""
        return iter(()) if self._codes is None else self._codes.tensors()

    def tensors(self) -> Iterator[torch.Tensor]:
        """Return the tensors that the device holds: the codes, or the exact weight."""
        return self.codes().tensors() if self.is_quantized else iter((self.parameter.detach(),))

    def follow(self) -> None:
        """Follow a move or a cast of the parameter: one NaN in its new form, and codes that the next forward makes."""
        if self.is_quantized:
            if self._codes is not None and next(self._codes.tensors()).device != self.device:
                self._codes = None
            self._leave()

    def _empty(self) -> torch.Tensor:
        with claimed_at_birth("parameters"):
            dense = torch.empty(self.parameter.shape, dtype=self.parameter.dtype, device=self.device)
        claim(dense, "parameters")
        return dense

    def _leave(self) -> None:
        form = self.parameter
        self._stand_in = torch.full((), torch.nan, dtype=form.dtype, device=self.device)
        self.parameter.data = self._stand_in.expand(form.shape)

    def _take_over(self) -> None:
        """Take values that others have assigned to the parameter's `data` while it is quantised."""
        data = self.parameter.data
        if is_without_data() or self._stand_in is None or data.data_ptr() == self._stand_in.data_ptr():
            return
        assert self.source is not None
        self.source.write(data)
        self.hold()

    # Hooks of the module's state dict.

    def _show_exact(self, module: nn.Module, state_dict: Any, prefix: str, local_metadata: Any) -> None:
        key = f"{prefix}weight"
        was_quantized = self.is_quantized
        self.arrive()
        if was_quantized and not isinstance(state_dict.get(key, self.parameter), nn.Parameter):
            exact = ExactTensor.of(self.parameter, self.exact) if self.is_quantized else self.parameter.detach()
            state_dict[key] = exact

    def _begin_loading(self, module: nn.Module, state_dict: Any, prefix: str, *others: Any) -> None:
        self.arrive()
        if self.is_quantized and f"{prefix}weight" in state_dict:
            self.parameter.data = self.exact().to(self.parameter.device, copy=True)
            self._stand_in = None

    def _end_loading(self, module: nn.Module, incompatible_keys: Any) -> None:
        if self.is_quantized and module.weight is self.parameter and self.parameter.is_contiguous():
            assert self.source is not None
            self.source.write(self.parameter.data)
            self.hold()


class _Forward(StandIn):
    """Forward of the layer. In a deep copy of the model the weight is exact, and pickling is refused."""

    def __init__(self, function: Callable[..., Any], weight: QuantizedWeight) -> None:
        super().__init__(function)
        self.weight = weight

    @property
    @override
    def feature(self) -> Feature:
        return "quantised layers"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.weight.arrive()
        if not self.weight.is_quantized:
            return self.function(*args, **kwargs)
        return self.weight.run(self.function, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self.weight.parameter))
        # A copy without values, such as one on the meta device, gets none.
        if copied is not None and self.weight.is_quantized and copied.device == self.weight.parameter.device:
            copied.data = self.weight.exact().to(self.weight.exact_device, copy=True)
        return super().__deepcopy__(memo)

    def __reduce__(self) -> Any:
        raise TypeError(
            f"a model with quantised layers can't be pickled ({self.weight.name}). Save model.state_dict(), "
            "or model.save_pretrained(folder), which hold the exact weights, or restore them first (HiFT's detach(), "
            "the layers' remove())"
        )


class _Apply(StandIn):
    """`_apply` of the layer, which `to` and others call to change its parameters."""

    def __init__(self, function: Callable[..., Any], weight: QuantizedWeight) -> None:
        super().__init__(function)
        self.weight = weight

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.weight.arrive()
        result = self.function(*args, **kwargs)
        self.weight.follow()
        return result

    def kept_tensors(self) -> Iterable[torch.Tensor]:
        return self.weight.kept_tensors()


def held_by(module: nn.Module) -> QuantizedWeight | None:
    """Return the holder of a layer's weight that is quantised already, or None if it is not.

    Args:
        module: Linear layer.
    """
    apply = vars(module).get("_apply")  # others may wrap the forward
    return apply.weight if isinstance(apply, _Apply) else None


def quantized_weight_on(module: nn.Module, name: str, form: CodesForm) -> QuantizedWeight:
    """Return the holder of a layer's weight, a new one if there is none.

    Args:
        module: Linear layer.
        name: Name of the weight in the model.
        form: Kind of codes.

    Raises:
        ValueError: If the weight is held in another form already.
    """
    held = held_by(module)
    if held is not None and held.form != form:
        raise ValueError(
            f"{name} is quantised as {held.form} already, and {form!r} was asked for. Use the same, or load "
            "the model again"
        )
    return held or QuantizedWeight(module, name, form)


def _claimed(codes: BlockCodes) -> BlockCodes:
    for tensor in codes.tensors():
        claim(tensor, "parameters")
    return codes
