"""What FSDP2 gathers and reduces in a step, as tensors without data, in the moments when it does.

`fully_shard` works on units: here those that accelerate makes of a transformers model (its blocks, the embedding, the
final norm with the head, and what is left). In a forward each unit comes in one flat buffer and is copied out of it;
the buffer lives until the next unit is copied out. A backward gathers each unit again, and the one below it ahead of
time; the gradients of a unit are copied into one buffer, which lives until the next unit is done, and a rank keeps its
share. The order of all this is that of torch 2.13, torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py.
"""

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from slivertune.core.ledger import Kind, claim, claimed_at_birth
from slivertune.core.outputs import tensors_of
from slivertune.core.torch_internals import at_end_of_backward


@dataclass(kw_only=True, eq=False)
class GatheredUnit:
    """Modules whose parameters are gathered together."""

    modules: tuple[nn.Module, ...]
    """They run one after the other."""
    parameters: tuple[nn.Parameter, ...]
    """Theirs, but for those of units inside of them."""
    stays: bool
    """Whether it stays gathered between forward and backward."""
    phase: Literal["idle", "forward", "backward", "done"] = "idle"
    """What the unit does; done until the backward is over."""
    num_run: int = 0
    """Modules that ran in this forward."""
    buffer: torch.Tensor | None = None
    """The flat buffer that the weights came in, until they are copied out."""
    weights: torch.Tensor | None = None
    """The whole weights."""
    shards: list[torch.Tensor] = field(default_factory=list)
    """This rank's share of the gradients."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole weights."""
        return sum(parameter.nbytes for parameter in self.parameters)


def units_of(model: Any) -> list[GatheredUnit]:
    """The units that accelerate makes of a model with its policy by the model's own classes of blocks.

    Training refuses such a class if it holds the input embedding (`RobertaEmbeddings`), so those are left out.

    Args:
        model: A transformers model, or a PEFT model around one. What trains beside sharded weights (SFT's vectors) and
            codes of 4 bits are in no unit.

    Returns:
        The units; the last is what is left, and may be empty.
    """
    taken: set[int] = set()
    units: list[GatheredUnit] = []

    def add(*modules: nn.Module | None, stays: bool) -> None:
        found = [module for module in dict.fromkeys(modules) if module is not None]
        own = {id(each): each for module in found for each in module.parameters() if can_be_shared(each)}
        parameters = tuple(each for key, each in own.items() if key not in taken)
        taken.update(own)
        if parameters:
            units.append(GatheredUnit(modules=tuple(found), parameters=parameters, stays=stays))

    bottom, head = model.get_input_embeddings(), model.get_output_embeddings()
    blocks = set(getattr(model, "_no_split_modules", None) or ())
    blocks -= {type(module).__name__ for module in model.modules() if any(each is bottom for each in module.children())}
    # The children of a module come after it; they are units before it is.
    for module in reversed([each for each in model.modules() if type(each).__name__ in blocks]):
        add(module, stays=False)
    if head is not None and head.weight is bottom.weight:
        add(_final_norm(model), bottom, head, stays=True)
    else:
        add(bottom, stays=False)
        add(_final_norm(model), head, stays=True)
    left = tuple(each for each in model.parameters() if id(each) not in taken and can_be_shared(each))
    return [*units, GatheredUnit(modules=(model,), parameters=left, stays=True)]


def can_be_shared(parameter: nn.Parameter) -> bool:
    """Whether FSDP2 cuts a parameter: not the codes of 4-bit weights."""
    return parameter.is_floating_point()


def _final_norm(model: Any) -> nn.Module | None:
    base = getattr(model, getattr(model, "base_model_prefix", "") or "", model)
    norms = [each for each in base.children() if "Norm" in type(each).__name__]
    return norms[-1] if norms else None


class GatheredUnits:
    """Stands in for FSDP2 on a model, until `remove`.

    Whole gradients that a rank has handed on count as gone (for a place that is not the device).

    Args:
        model: The model, among tensors without data.
        num_gpus: Ranks.
        num_backwards: Backwards of an update; gradients are reduced in the last.
        offloads: Whether weights and gradients wait on the host.
    """

    def __init__(self, model: nn.Module, *, num_gpus: int, num_backwards: int, offloads: bool) -> None:
        self._units = units_of(model)
        self._num_gpus, self._num_backwards, self._offloads = num_gpus, num_backwards, offloads
        self._order: list[GatheredUnit] = []
        self._last_buffer: torch.Tensor | None = None
        self._reduced: torch.Tensor | None = None
        self._backwards = 0
        self._is_running = False
        self._handles = [model.register_forward_hook(self._end_forward)]
        for unit in self._units:
            for module in unit.modules:
                before, after = partial(self._before, unit), partial(self._after, unit)
                self._handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
                self._handles.append(module.register_forward_hook(after))

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    # ---- forward

    def _before(self, unit: GatheredUnit, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if unit.phase == "backward":  # a recomputation
            self._gather(unit)
            self._copy_out(unit)
            return args, kwargs
        if unit is self._units[-1] and self._backwards % self._num_backwards == 0:  # a new update
            self._backwards = 0
            for each in self._units:
                each.shards.clear()
        if unit.phase == "forward":
            return args, kwargs
        unit.phase, unit.num_run = "forward", 0
        self._gather(unit)
        if unit.weights is None:
            self._last_buffer = self._copy_out(unit)
        return self._watch_inputs(unit, args, kwargs)

    def _after(self, unit: GatheredUnit, module: nn.Module, inputs: Any, output: Any) -> None:
        if unit.phase != "forward":
            return
        unit.num_run += 1
        if unit.num_run < len(unit.modules):
            return
        if not unit.stays:
            unit.weights = None
        unit.phase = "idle"
        self._order.append(unit)
        for tensor in _that_need_gradients(output):
            tensor.register_hook(partial(self._before_backward, unit))

    def _end_forward(self, model: nn.Module, inputs: Any, output: Any) -> None:
        self._last_buffer = None

    def _watch_inputs(self, unit: GatheredUnit, args: Any, kwargs: Any) -> Any:
        tensors = _that_need_gradients((args, kwargs))
        if not tensors or not torch.is_grad_enabled():
            return args, kwargs
        watch: Any = _AfterBackward.apply
        seen = dict(zip(map(id, tensors), watch(self, unit, *tensors), strict=True))
        return (
            tuple(seen.get(id(each), each) for each in args),
            {name: seen.get(id(each), each) for name, each in kwargs.items()},
        )

    # ---- backward

    def _before_backward(self, unit: GatheredUnit, gradient: torch.Tensor) -> None:
        if unit.phase == "backward":
            return
        if not self._is_running:
            self._is_running = True
            at_end_of_backward(self._end_backward)
        unit.phase = "backward"
        self._gather(unit)
        self._copy_out(unit)
        place = self._order.index(unit)
        if place:
            self._gather(self._order[place - 1])

    def after_backward(self, unit: GatheredUnit) -> None:
        """The gradients of all that a unit got are there, and its own."""
        unit.phase, unit.weights, self._reduced = "done", None, None
        whole = [each.grad for each in unit.parameters if each.grad is not None and each.requires_grad]
        if not whole or self._backwards + 1 < self._num_backwards:
            return
        num_bytes = sum(each.nbytes for each in whole)
        self._reduced = _bytes(num_bytes, "gradients")
        for each in whole:
            claim(each, "gradients", "disk")
        shard = _bytes(math.ceil(num_bytes / self._num_gpus), "gradients")
        if not self._offloads:
            unit.shards.append(shard)

    def _end_backward(self) -> None:
        for unit in self._units:
            if unit.phase != "done":
                self.after_backward(unit)
        for unit in self._units:
            unit.phase, unit.buffer = "idle", None
        self._order.clear()
        self._reduced, self._is_running = None, False
        self._backwards += 1

    # ---- weights

    def _gather(self, unit: GatheredUnit) -> None:
        if unit.buffer is None and unit.weights is None and unit.parameters:
            own = _bytes(math.ceil(unit.num_bytes / self._num_gpus), "parameters") if self._offloads else None
            unit.buffer = _bytes(unit.num_bytes, "parameters")
            del own

    def _copy_out(self, unit: GatheredUnit) -> torch.Tensor | None:
        if unit.buffer is None:
            return None
        unit.weights = _bytes(unit.num_bytes, "parameters")
        buffer, unit.buffer = unit.buffer, None
        return buffer


class _AfterBackward(torch.autograd.Function):
    """Passes tensors on, and says when all their gradients are there."""

    @staticmethod
    def forward(ctx: Any, stand_in: GatheredUnits, unit: GatheredUnit, *tensors: torch.Tensor) -> Any:
        ctx.stand_in, ctx.unit = stand_in, unit
        return tuple(each.view_as(each) for each in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.stand_in.after_backward(ctx.unit)
        return (None, None, *gradients)


def _that_need_gradients(values: Any) -> list[torch.Tensor]:
    return [each for each in tensors_of(values) if each.requires_grad]


def _bytes(num_bytes: int, kind: Kind) -> torch.Tensor:
    with claimed_at_birth(kind):
        return torch.empty(num_bytes, dtype=torch.uint8)
