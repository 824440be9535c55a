"""FSDP2's buffers in a step, as fake tensors that are allocated and freed when FSDP2 does so.

`fully_shard` works on units: here the units that accelerate makes of a transformers model (its blocks, the embedding,
the final norm with the head, and the rest). In a forward, each unit is gathered into one flat buffer and copied out of
it. The buffer lives until the next unit is copied out. A backward gathers each unit again and prefetches the unit
below it. The gradients of a unit are copied into one buffer, which lives until the next unit is done, and a rank keeps
its shard. The order follows torch 2.13, torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py.
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
    """Modules of the unit, which run one after the other."""
    parameters: tuple[nn.Parameter, ...]
    """Parameters of these modules, without the parameters of units inside them."""
    stays: bool
    """Whether the unit remains gathered between forward and backward."""
    phase: Literal["idle", "forward", "backward", "done"] = "idle"
    """Phase of the unit. `done` lasts from the end of its own backward to the end of the whole backward."""
    num_run: int = 0
    """Number of its modules that ran in this forward."""
    buffer: torch.Tensor | None = None
    """Flat buffer of the gathered weights, until they are copied out."""
    weights: torch.Tensor | None = None
    """Whole weights, copied out of the buffer."""
    shards: list[torch.Tensor] = field(default_factory=list)
    """Shards of the gradients that this rank keeps."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole weights."""
        return sum(parameter.nbytes for parameter in self.parameters)


def units_of(model: Any) -> list[GatheredUnit]:
    """List the units that accelerate makes of a model with its policy by the model's own block classes.

    Classes that contain the input embedding (`RobertaEmbeddings`) are left out, since training refuses them.

    Args:
        model: A transformers model, or a PEFT model around one. Parameters that train beside sharded weights (SFT's
            vectors) and 4-bit codes are in no unit.

    Returns:
        Units; the last one has the rest of the parameters and may be empty.
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
    # `modules()` yields a module before its children, but the children become units first.
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
    """Return whether FSDP2 shards a parameter (it does not shard the codes of 4-bit weights)."""
    return parameter.is_floating_point()


def _final_norm(model: Any) -> nn.Module | None:
    base = getattr(model, getattr(model, "base_model_prefix", "") or "", model)
    norms = [each for each in base.children() if "Norm" in type(each).__name__]
    return norms[-1] if norms else None


class GatheredUnits:
    """Imitates FSDP2 on a model, until `remove`.

    Whole gradients count as freed once they are reduced (they are claimed for a tier other than the device).

    Args:
        model: Model of fake tensors.
        num_gpus: Number of ranks.
        num_backwards: Number of backward passes per update; the last one reduces the gradients.
        offloads: Whether weights and gradients are offloaded to the host.
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
        """Remove the hooks."""
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
        """End a unit's backward: free its weights, and in the update's last backward reduce its gradients."""
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
    """Passes tensors on, and reports when all their gradients are complete."""

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
