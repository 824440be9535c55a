"""Attention for the selected queries: the one place where tokens mix (TokenTune, section 3.3).

A dispatcher replaces the function that transformers registers for an implementation. For a hooked model it computes the
attention of the selected queries with gradients, over the keys and values of all tokens, and that of the others by the
registered function without gradients. For any other model it calls the registered function.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from slivertune.core.transformers_internals import has_own, shared_entry
from slivertune.tokentune.compiled_rows import CompiledRows
from slivertune.tokentune.rows import LayerRows, Rows, uncompiled

_IMPLEMENTATIONS = ("sdpa", "eager")
_REGISTRY_NAME = "ALL_ATTENTION_FUNCTIONS"

AttentionFunction = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


_dispatched: dict[tuple[int, str], _Dispatcher] = {}


class _Hook:
    """Attribute of a hooked model's attention module, without effect in a copy of the model, deep or pickled.

    It is an attribute of the module, since torch.compile would have to look up an entry elsewhere by identity.
    """

    name = "_slivertune_token_selection"

    def __init__(self, layer: LayerRows | None, eager: AttentionFunction | None = None) -> None:
        self.layer = layer
        self.eager = eager
        """Eager attention, a function beside the module's class and no entry of the registry."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return _Hook(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_Hook, (None,))


def is_hooked(module: nn.Module) -> bool:
    """Return whether an attention module belongs to a hooked model."""
    hook = vars(module).get(_Hook.name)
    return hook is not None and hook.layer is not None


def intercept(
    modules: Mapping[nn.Module, LayerRows], implementation: str
) -> tuple[Callable[[], None], Callable[[], bool]]:
    """Put the dispatcher in front of the functions that attention modules call.

    Args:
        modules: Attention modules, each with its layer.
        implementation: Value of their `config._attn_implementation`.

    Returns:
        Two functions. The first undoes it: the registry is then as it was, unless another hooked model still uses it.
        The second returns whether it still works, with no other function registered since.

    Raises:
        ValueError: If only a dedicated kernel of the implementation could compute it.
        RuntimeError: If a function was registered over the dispatcher of another hooked model.
    """
    if implementation not in _IMPLEMENTATIONS:
        raise ValueError(
            f"attn_implementation={implementation!r} takes no mask for single queries, which the selected tokens need. "
            'Load the model with attn_implementation="sdpa"'
        )
    registries = {id(registry): registry for module in modules for registry in _registries(module)}
    dispatchers = [_Dispatcher.of(registry, implementation) for registry in registries.values()]
    for module, layer in modules.items():
        setattr(module, _Hook.name, _Hook(layer, _eager_function(module)))

    def undo() -> None:
        for module in modules:
            vars(module).pop(_Hook.name, None)
        for dispatcher in dispatchers:
            dispatcher.release()

    return undo, lambda: all(dispatcher.is_in_place() for dispatcher in dispatchers)


def has_registry(module: nn.Module) -> bool:
    """Return whether an attention module looks its function up in a registry that can hold the dispatcher."""
    return bool(_registries(module))


def _modeling_files(module: nn.Module) -> Iterable[Any]:
    # FSDP2 gives modules a class of its own, defined elsewhere, in front of the model's.
    return (sys.modules[kind.__module__] for kind in type(module).__mro__ if kind.__module__ in sys.modules)


def _registries(module: nn.Module) -> list[Any]:
    return [vars(file)[_REGISTRY_NAME] for file in _modeling_files(module) if _REGISTRY_NAME in vars(file)]


def _eager_function(module: nn.Module) -> AttentionFunction | None:
    files = _modeling_files(module)
    return next((each.eager_attention_forward for each in files if hasattr(each, "eager_attention_forward")), None)


class _Dispatcher:
    """Replaces a registry's function as long as any hooked model needs it."""

    def __init__(self, registry: Any, implementation: str) -> None:
        self.registry, self.implementation = registry, implementation
        self.had_own = has_own(registry, implementation)
        self.function: AttentionFunction | None = registry.get(implementation)
        self.num_users = 0

    @classmethod
    def of(cls, registry: Any, implementation: str) -> _Dispatcher:
        """Return the dispatcher of a registry for one more user, and install it if need be."""
        key = (id(registry), implementation)
        if key not in _dispatched:
            _dispatched[key] = cls(registry, implementation)
            registry[implementation] = _dispatched[key]
        dispatcher = _dispatched[key]
        if not dispatcher.is_in_place():
            raise RuntimeError(
                f"{registry.get(implementation)!r} was registered for attn_implementation={implementation!r} while a "
                "selection of tokens was attached to another model, so this model's attention would bypass it. "
                "Register a function of your own before the first TokenTune.attach"
            )
        dispatcher.num_users += 1
        return dispatcher

    def is_in_place(self) -> bool:
        """Return whether the registry still holds the dispatcher, over the function that it replaces."""
        if self.registry.get(self.implementation) is not self:
            return False
        # transformers registers for all registries at once, below a registry's own entries.
        return self.had_own or shared_entry(self.registry, self.implementation) is self.function

    def release(self) -> None:
        """Count one user less. After the last one, restore the registry, except for entries that others set since."""
        self.num_users -= 1
        if self.num_users:
            return
        del _dispatched[(id(self.registry), self.implementation)]
        if self.registry.get(self.implementation) is not self:
            return
        if self.had_own:
            self.registry[self.implementation] = self.function
        else:
            del self.registry[self.implementation]

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        hook: _Hook | None = getattr(module, _Hook.name, None)
        layer = None if hook is None else hook.layer
        function = self.function
        if function is None:
            function = hook.eager if hook is not None and layer is not None else _eager_function(module)
        assert function is not None
        rows = None if layer is None else layer.live_rows()
        if layer is None or rows is None:
            return function(module, query, key, value, attention_mask, **kwargs)
        if query.shape[2] != rows.length or key.shape[2] != rows.length:
            raise RuntimeError(
                f"{type(module).__name__} attends from {query.shape[2]} to {key.shape[2]} positions, and the batch "
                f"has {rows.length}. Train without past_key_values, prefixes and cross-attention under TokenTune"
            )
        attend = _attend if layer.is_compiled else _attend_uncompiled
        return attend(rows, layer, function, module, query, key, value, attention_mask, kwargs)


def _attend(
    rows: Rows | CompiledRows,
    layer: LayerRows,
    function: AttentionFunction,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, None]:
    """Compute the attention of all queries: (batch, heads, n, head size) in, (batch, n, heads, head size) out."""
    selected = _attend_selected(rows, function, module, query, key, value, mask, kwargs)
    others = None
    is_skipped = isinstance(rows, Rows) and layer.is_last and rows.pass_last_attention()
    if not is_skipped and not rows.is_all:
        with torch.no_grad():
            full, _ = function(module, query.detach(), key.detach(), value.detach(), mask, **kwargs)
            others = full.flatten(0, 1).index_select(0, rows.others).unflatten(0, (rows.batch, -1))
    return rows.merge(selected, others, "tokens"), None


_attend_uncompiled = uncompiled(_attend)


def _attend_selected(
    rows: Rows | CompiledRows,
    function: AttentionFunction,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """Compute the attention of the selected queries over all keys, shape (batch, k, heads, head size)."""
    # Keys and values of the others are constants. The projections ensure that. This also cuts gradients through modules
    # between them and the attention, such as a norm of the keys.
    key, value = rows.constant_others(key), rows.constant_others(value)
    chosen, _ = rows.split(query, "heads")
    is_causal = _is_causal(function, module, kwargs)
    bias = kwargs.get("position_bias")
    kwargs = {**kwargs, "is_causal": False}
    if bias is not None:
        kwargs["position_bias"] = _selected_queries(bias, rows)
    groups: int = query.shape[1] // key.shape[1]
    is_plain = groups == 1 or bias is not None or function is not sdpa_attention_forward
    folds = not is_plain and not takes_grouped_mask(query.device)
    selected_mask = _selected_mask(rows, mask, is_causal, query.dtype, groups=groups if folds else 1)
    if is_plain:
        return function(module, chosen, key, value, selected_mask, **kwargs)[0]
    # The registered function would repeat keys and values for the queries that share them, and save the copies.
    options = {"dropout_p": kwargs.get("dropout", 0.0), "scale": kwargs.get("scaling"), "is_causal": False}
    if not folds:
        out = F.scaled_dot_product_attention(chosen, key, value, selected_mask, enable_gqa=True, **options)
        return out.transpose(1, 2)
    # Queries that share a head of keys become further rows of it.
    folded = torch.unflatten(chosen, 1, (-1, groups)).flatten(2, 3)
    out = F.scaled_dot_product_attention(folded, key, value, selected_mask, **options)
    return torch.unflatten(out, 2, (groups, -1)).flatten(1, 2).transpose(1, 2)


def takes_grouped_mask(device: torch.device) -> bool:
    """Return whether torch has a kernel for both grouped queries and a mask, without copies of keys and values.

    On CUDA only the slow path that keeps all scores does this, as of torch 2.13.

    Args:
        device: Device of the tensors.
    """
    return device.type == "cpu"


def _is_causal(function: AttentionFunction, module: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Return whether the function masks the future if it gets no mask, which eager attention never does."""
    if function is not sdpa_attention_forward:
        return False
    asked = kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", True) if asked is None else asked)


def _selected_queries(per_query: torch.Tensor, rows: Rows | CompiledRows) -> torch.Tensor:
    """Take the selected rows of a mask or bias: (batch or 1, heads or 1, n, n) -> (batch, heads or 1, k, n)."""
    full = per_query.expand(rows.batch, *per_query.shape[1:])
    index = rows.positions[:, None, :, None].expand(-1, full.shape[1], -1, full.shape[3])
    return full.gather(2, index)


def _selected_mask(
    rows: Rows | CompiledRows, mask: torch.Tensor | None, is_causal: bool, dtype: torch.dtype, groups: int
) -> torch.Tensor | None:
    """Return the term that is added to the scores of the selected queries, or None."""

    def make(full: torch.Tensor | None) -> torch.Tensor | None:
        return _make_selected_mask(rows, full, is_causal, dtype, groups)

    return rows.mask((is_causal, dtype, groups), mask, make)


def _make_selected_mask(
    rows: Rows | CompiledRows, mask: torch.Tensor | None, is_causal: bool, dtype: torch.dtype, groups: int
) -> torch.Tensor | None:
    if mask is None and not is_causal:
        return None
    if mask is None:
        chosen = torch.arange(rows.length, device=rows.positions.device) <= rows.positions[:, None, :, None]
    elif mask.dim() == 4 and mask.shape[2] == rows.length:
        chosen = _selected_queries(mask, rows)
    elif mask.dim() == 4 and mask.shape[2] == 1:  # the same keys for all queries, as LayoutLM masks padding
        chosen = mask.expand(-1, -1, rows.num_selected, -1)
    else:
        raise RuntimeError(
            f"an attention mask of shape {tuple(mask.shape)} has no row for each of the {rows.length} queries. "
            "Pass a mask of shape (batch or 1, heads or 1, length or 1, length)"
        )
    if chosen.dtype == torch.bool:
        nothing = torch.zeros(chosen.shape, dtype=dtype, device=chosen.device)
        chosen = nothing.masked_fill_(~chosen, -math.inf)  # as kernels convert a bool mask, once for all layers
    if groups == 1:
        return chosen
    if chosen.shape[1] == 1:
        chosen = chosen.expand(-1, groups, -1, -1)
    return torch.unflatten(chosen, 1, (-1, groups)).flatten(2, 3)
