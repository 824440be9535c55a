"""Modules that treat each token by itself, run on selected rows with gradients and on the others without."""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from slivertune.core.token_wise import children_beside_attention, holds_attention, is_attention, is_norm
from slivertune.tokentune.compiled_rows import CompiledRows
from slivertune.tokentune.numbered_rows import TokenLayout
from slivertune.tokentune.rows import LayerRows, Rows, SelectionContext


class TokenWise:
    """Wrapper whose `run` replaces the `forward` of a module that treats each token by itself.

    `run` is a bound method, since torch.compile would recompile for any other callable that is a module's forward. A
    copy of the model, deep or pickled, is not hooked and runs the module's own forward.
    """

    def __init__(
        self, parent: nn.Module, name: str, selection: SelectionContext, layer: LayerRows | None, *, checkpointed: bool
    ) -> None:
        """Wrap a child module.

        Args:
            parent: Module that holds the child.
            name: Name of the child in its parent.
            selection: Source of the selection.
            layer: Layer that contains the child, or None if none does.
            checkpointed: Whether its selected rows save only their input and are recomputed in the backward.
        """
        self.parent, self.name = parent, name
        self.module: nn.Module = getattr(parent, name)
        self.function: Callable[..., Any] = self.module.forward
        self.selection, self.layer = selection, layer
        self.checkpointed = checkpointed
        # A linear layer, in 4 bits or not, or PEFT's layer around one.
        is_linear = isinstance(getattr(self.module, "base_layer", self.module), nn.Linear)
        self.works_on_last_dimension = is_linear or is_norm(self.module)
        self.has_parameters = any(True for _ in self.module.parameters())
        self.was_wrapped = "forward" in vars(self.module)
        self.module.forward = self.run
        self.is_copy = False

    def remove(self) -> None:
        """Restore the module's own forward, unless other code has wrapped it since: that wrapper stays."""
        if not self._is_forward():
            return
        if self.was_wrapped:
            self.module.forward = self.function
        else:
            del self.module.forward

    def is_in_place(self) -> bool:
        """Return whether the module is still where it was wrapped, and still runs through this wrapper."""
        return getattr(self.parent, self.name, None) is self.module and self._is_forward()

    def __deepcopy__(self, memo: dict[int, Any]) -> "TokenWise":
        return _of_a_copy(copy.deepcopy(self.function, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return _of_a_copy, (self.function,)

    def _is_forward(self) -> bool:
        return getattr(vars(self.module).get("forward"), "__self__", None) is self

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward, in two parts if it gets all tokens of a batch in training."""
        if self.is_copy:
            return self.function(*args, **kwargs)
        rows = self.selection.current() if self.layer is None else self.layer.live_rows()
        if rows is None:
            return self.function(*args, **kwargs)
        # Values are looked up by place: torch.compile would recompile for every tensor that was looked up by identity.
        values = (*args, *kwargs.values())
        layouts = [self._find_layout(rows, each) for each in values]
        given = next((layout for layout in layouts if layout is not None), None)
        if given is None:
            return self.function(*args, **kwargs)
        pairs = zip(values, layouts, strict=True)
        parts = [(each, each) if layout is None else rows.split(each, layout) for each, layout in pairs]
        selected_parts, other_parts = zip(*parts, strict=True)
        names = tuple(kwargs)
        others = None
        if self._skips_others(rows) or rows.is_all:
            selected = self._run_selected(selected_parts, names)
        elif any(torch.is_autocast_enabled(each.device.type) for each in other_parts if isinstance(each, torch.Tensor)):
            # Autocast keeps its casts, so they have to be made under autograd.
            selected = self._run_selected(selected_parts, names)
            others = self._run_others(other_parts, names)
        else:
            # ZeRO-3 (DeepSpeed 0.19.8) counts anew in each run what its backward has to wait for. It would never
            # release an inner module whose last run had no graph.
            others = self._run_others(other_parts, names)
            selected = self._run_selected(selected_parts, names)
        return _merge_results(rows, selected, others, given)

    # Methods, not local functions, which torch.compile would recompile in every step.

    def _run_selected(self, values: Sequence[Any], names: tuple[str, ...]) -> Any:
        is_recomputed = self.checkpointed and torch.is_grad_enabled()
        return _call(self._recomputed if is_recomputed else self.function, values, names)

    def _run_others(self, values: Sequence[Any], names: tuple[str, ...]) -> Any:
        with torch.no_grad():
            return _call(self.function, values, names)

    def _recomputed(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.function, *args, use_reentrant=False, **kwargs)

    def _skips_others(self, rows: Rows | CompiledRows) -> bool:
        # A compiled last layer skips nothing, since it shares the graph of all layers.
        return isinstance(rows, Rows) and self.layer is not None and self.layer.is_last and rows.skips_others(self)

    def _find_layout(self, rows: Rows | CompiledRows, tensor: Any) -> TokenLayout | None:
        """Return the layout of an argument, or None if it has none.

        Norms of heads and projections of latents get (batch, n, heads, size) or (batch, heads, n, size). Dropout gets
        attention weights.
        """
        if not isinstance(tensor, torch.Tensor) or tensor.dim() != 4:
            return rows.layout(tensor) if isinstance(tensor, torch.Tensor) else None
        by_token = tensor.shape[:2] == (rows.batch, rows.length)
        by_head = tensor.shape[0] == rows.batch and tensor.shape[2] == rows.length
        if not self.has_parameters or by_token == by_head or not self.works_on_last_dimension:
            # Run whole. This is right before the attention, such as for queries and keys of as many heads as tokens:
            # the attention drops the gradients of the other rows.
            return None
        return "tokens" if by_token else "heads"


def _of_a_copy(function: Callable[..., Any]) -> TokenWise:
    """Make the wrapper of a module's copy, which runs the module's own forward."""
    unhooked = object.__new__(TokenWise)
    unhooked.function, unhooked.is_copy = function, True
    return unhooked


def _call(forward: Callable[..., Any], values: Sequence[Any], names: tuple[str, ...]) -> Any:
    """Call a function with values, the last of which belong to names."""
    num_positional = len(values) - len(names)
    return forward(*values[:num_positional], **dict(zip(names, values[num_positional:], strict=True)))


def _merge_results(rows: Rows | CompiledRows, selected: Any, others: Any, given: TokenLayout) -> Any:
    if isinstance(selected, torch.Tensor):
        layout = rows.output_layout(selected, given)
        return selected if layout is None else rows.merge(selected, others, layout)
    if isinstance(selected, tuple | list):
        pairs = zip(selected, [None] * len(selected) if others is None else others, strict=True)
        return type(selected)(_merge_results(rows, each, other, given) for each, other in pairs)
    return selected


def find_layer_list(model: nn.Module) -> nn.ModuleList:
    """Find the list of a model's transformer layers.

    Args:
        model: A transformers model.

    Raises:
        ValueError: If there is none, if there are several, or if a layer mixes tokens by other means than one
            attention over all of them.
    """
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleList) and any(map(_is_layer, each))]
    if len(lists) != 1:
        raise ValueError(
            f"{type(model).__name__} has {len(lists) or 'no'} lists of transformer layers with attention. TokenTune "
            "hooks models with one, in which every layer is a GradientCheckpointingLayer of transformers"
        )
    others = [type(layer).__name__ for layer in lists[0] if not _is_layer(layer)]
    if others:
        raise ValueError(
            f"{type(model).__name__} has layers without attention ({', '.join(sorted(set(others)))}), which mix tokens "
            "in a way that TokenTune does not support. Train it without TokenTune"
        )
    if any(hasattr(layer, "temporal_attention") for layer in lists[0]):
        raise ValueError(
            f"the layers of {type(model).__name__} attend over time and over space apart, in two orders of "
            "tokens, which TokenTune can't split. Train it without TokenTune"
        )
    return lists[0]


def _is_layer(module: nn.Module) -> bool:
    return isinstance(module, GradientCheckpointingLayer) and holds_attention(module)


def attention_modules(layer: nn.Module) -> list[nn.Module]:
    """List the attention modules of a layer."""
    return [each for each in layer.modules() if is_attention(each)]


def attends_once(layer: nn.Module) -> bool:
    """Return whether a layer has one attention, after which none of its modules needs the other rows."""
    return sum(not any(map(holds_attention, each.children())) for each in attention_modules(layer)) == 1


def token_wise_children(layer: nn.Module) -> Iterator[tuple[nn.Module, str, bool]]:
    """Find the largest modules of a layer that hold no attention.

    Args:
        layer: A layer.

    Yields:
        Module that holds the child, the child's name in it, and whether it is a part of an attention module.

    Raises:
        ValueError: If a module mixes tokens (a convolution, a norm over tokens), draws once for all of them, or gets
            positions or a mask.
    """
    for child in children_beside_attention(layer):
        if child.mixer is not None:
            raise ValueError(
                f"{child.mixer} in {child.name} mixes tokens inside a layer, or draws once for all of them, so "
                "selected and other tokens can't run apart. Train this model without TokenTune"
            )
        if child.places:
            raise ValueError(
                f"{child.name} ({type(child.module).__name__}) is given {', '.join(child.places)}, so it sees the "
                "positions of tokens, and is no attention that TokenTune knows, so it can't be split by token. Train "
                "this model without TokenTune"
            )
        yield child.parent, child.name, child.in_attention
