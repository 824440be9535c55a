"""Modules that treat each token for itself: the selected rows with gradients, then the others without."""

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
    """Its `run` stands in for the `forward` of a module that treats each token for itself.

    A bound method, since torch.compile would compile again for every other callable that is a module's forward. A copy
    of the model, deep or pickled, runs the module's own forward: it is not hooked.
    """

    def __init__(
        self, parent: nn.Module, name: str, selection: SelectionContext, layer: LayerRows | None, *, checkpointed: bool
    ) -> None:
        """Wrap a child module.

        Args:
            parent: The module that holds it.
            name: Under which name.
            selection: Tells the selection.
            layer: The layer that it is in, or None if it is in none.
            checkpointed: Whether its selected rows keep their input alone and are computed again in the backward.
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
        """Give the module its own forward back, unless something else has wrapped it since, which then stays."""
        if not self._is_forward():
            return
        if self.was_wrapped:
            self.module.forward = self.function
        else:
            del self.module.forward

    def is_in_place(self) -> bool:
        """Whether the module is still where it was wrapped, and still runs through this."""
        return getattr(self.parent, self.name, None) is self.module and self._is_forward()

    def __deepcopy__(self, memo: dict[int, Any]) -> "TokenWise":
        return _of_a_copy(copy.deepcopy(self.function, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return _of_a_copy, (self.function,)

    def _is_forward(self) -> bool:
        return getattr(vars(self.module).get("forward"), "__self__", None) is self

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, in two runs if it is given all tokens of a batch in training."""
        if self.is_copy:
            return self.function(*args, **kwargs)
        rows = self.selection.current() if self.layer is None else self.layer.live_rows()
        if rows is None:
            return self.function(*args, **kwargs)
        # By their places: torch.compile would compile again for every tensor that was looked up by its identity.
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
            # What autocast casts and keeps has to be cast under autograd.
            selected = self._run_selected(selected_parts, names)
            others = self._run_others(other_parts, names)
        else:
            # A module inside that runs without a graph last is never released in ZeRO-3's backward (DeepSpeed 0.19.8),
            # which counts from zero in each run what its backward has to wait for.
            others = self._run_others(other_parts, names)
            selected = self._run_selected(selected_parts, names)
        return _merge_results(rows, selected, others, given)

    # Methods, not functions inside of the call: torch.compile would compile those again in every step.

    def _run_selected(self, values: Sequence[Any], names: tuple[str, ...]) -> Any:
        is_recomputed = self.checkpointed and torch.is_grad_enabled()
        return _call(self._recomputed if is_recomputed else self.function, values, names)

    def _run_others(self, values: Sequence[Any], names: tuple[str, ...]) -> Any:
        with torch.no_grad():
            return _call(self.function, values, names)

    def _recomputed(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.function, *args, use_reentrant=False, **kwargs)

    def _skips_others(self, rows: Rows | CompiledRows) -> bool:
        # Compiled, the last layer is as any other: its graph serves them all.
        return isinstance(rows, Rows) and self.layer is not None and self.layer.is_last and rows.skips_others(self)

    def _find_layout(self, rows: Rows | CompiledRows, tensor: Any) -> TokenLayout | None:
        """Norms of heads and projections of latents get (batch, n, heads, size) or (batch, heads, n, size).

        Dropout gets attention weights.
        """
        if not isinstance(tensor, torch.Tensor) or tensor.dim() != 4:
            return rows.layout(tensor) if isinstance(tensor, torch.Tensor) else None
        by_token = tensor.shape[:2] == (rows.batch, rows.length)
        by_head = tensor.shape[0] == rows.batch and tensor.shape[2] == rows.length
        if not self.has_parameters or by_token == by_head or not self.works_on_last_dimension:
            # Run whole. That is right for what lies before the attention, such as queries and keys of as many heads as
            # tokens: the attention drops what the other rows' would get.
            return None
        return "tokens" if by_token else "heads"


def _of_a_copy(function: Callable[..., Any]) -> TokenWise:
    """What a copy of a module has where the module has one."""
    unhooked = object.__new__(TokenWise)
    unhooked.function, unhooked.is_copy = function, True
    return unhooked


def _call(forward: Callable[..., Any], values: Sequence[Any], names: tuple[str, ...]) -> Any:
    """Call with values of which the last belong to names."""
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
    """The list of a model's transformer layers.

    Args:
        model: A transformers model.

    Raises:
        ValueError: If there is none, if there are several, or if a layer mixes tokens by other means than attention.
    """
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleList) and any(map(_is_layer, each))]
    if len(lists) != 1:
        raise ValueError(
            f"{type(model).__name__} has {len(lists) or 'no'} lists of transformer layers with attention; TokenTune "
            "hooks models with one, in which every layer checks in with transformers' GradientCheckpointingLayer"
        )
    others = [type(layer).__name__ for layer in lists[0] if not _is_layer(layer)]
    if others:
        raise ValueError(
            f"{type(model).__name__} has layers without attention ({', '.join(sorted(set(others)))}), which mix tokens "
            "in a way that TokenTune does not know"
        )
    return lists[0]


def _is_layer(module: nn.Module) -> bool:
    return isinstance(module, GradientCheckpointingLayer) and holds_attention(module)


def attention_modules(layer: nn.Module) -> list[nn.Module]:
    """The attention modules of a layer."""
    return [each for each in layer.modules() if is_attention(each)]


def attends_once(layer: nn.Module) -> bool:
    """Whether a layer has one attention, after which none of its modules needs the other rows."""
    return sum(not any(map(holds_attention, each.children())) for each in attention_modules(layer)) == 1


def token_wise_children(layer: nn.Module) -> Iterator[tuple[nn.Module, str, bool]]:
    """The largest modules of a layer that hold no attention.

    Args:
        layer: A layer.

    Yields:
        The module that holds it, its name there, and whether it is a part of an attention module.

    Raises:
        ValueError: If one mixes tokens: a convolution, or what is given positions or a mask.
    """
    for child in children_beside_attention(layer):
        if child.convolution is not None:
            raise ValueError(
                f"{child.convolution} in {child.name} mixes tokens inside a layer, and TokenTune can't split what "
                "mixes them"
            )
        if child.places:
            raise ValueError(
                f"{child.name} ({type(child.module).__name__}) is given {', '.join(child.places)}, so it sees which "
                "tokens stand where, and is no attention that TokenTune knows; it can't be split by token: train this "
                "model without TokenTune"
            )
        yield child.parent, child.name, child.in_attention
