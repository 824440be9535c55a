"""TokenTune on a model, which `attach` hooks and `remove` restores."""

import weakref
from typing import Any

import torch
import torch.distributed
from torch import nn
from transformers import PreTrainedModel

from slivertune.core.compiled_blocks import runs_compiled
from slivertune.core.direct_calls import call_through_hooks, may_be_called_directly
from slivertune.core.module_hook import ModelHandle, ModuleHook
from slivertune.core.reentrant import ReentrantBlocks, check_recorded, is_trainable
from slivertune.core.saved_state import is_count
from slivertune.core.token_tiles import runs_in_tiles
from slivertune.core.token_wise import norms_outside
from slivertune.core.transformers_internals import attention_of, find_transformers_model
from slivertune.tokentune.attention import has_registry, intercept, is_hooked
from slivertune.tokentune.call import Call, CallArguments, by_name, check_call, find_real, find_tokens
from slivertune.tokentune.config import Pattern, TokenTune
from slivertune.tokentune.head import (
    NUM_ITEMS,
    HeadKind,
    Targets,
    find_head_kind,
    find_targets,
    replace_loss,
    zero_without_labels,
)
from slivertune.tokentune.model_check import check_run_in_backward, model_check
from slivertune.tokentune.outside_loss import FUSED_HEAD, describe_forward, refuse_unknown_loss, with_selected_labels
from slivertune.tokentune.rows import LayerRows, Rows, SelectionContext, in_backward, mark_passed
from slivertune.tokentune.selection import count_selected, draw_positions, make_generator, segment_starts
from slivertune.tokentune.sentence_models import pools_single_tokens
from slivertune.tokentune.wrapping import (
    TokenWise,
    attends_once,
    attention_modules,
    find_layer_list,
    token_wise_children,
)

_STATE_VERSION = 1


class TokenTuneHandle(ModelHandle):
    """Handle of a hooked model. Only training forwards (`model.training`, with gradients enabled) are changed.

    As a context manager, it removes the hook at its end.
    """

    refusal_to_copy = (
        "a TokenTuneHandle belongs to one model and is neither copied nor pickled. A copy of the model is not hooked. "
        "Attach handle.settings to it, and load handle.state_dict() there"
    )

    def __init__(self, settings: TokenTune, model: nn.Module) -> None:
        """Attach to a model, as `TokenTune.attach` describes.

        Args:
            settings: Settings of the selection.
            model: The model.

        Raises:
            RuntimeError: If the model is hooked already.
            ValueError: If the model can't be hooked.
        """
        super().__init__()
        self.settings = settings
        self.last_selection: torch.Tensor | None = None
        """Sorted positions that the latest training forward selected, int64, shape (batch, k), or None before it."""
        self.num_draws = 0
        """Number of training forwards so far, each with its own draw."""
        self.returns_selected = False
        """Whether the latest forward returned logits of only the selected tokens: in training, with labels."""
        self.last_targets: Targets | None = None
        """Targets of the latest forward with `is_scored_outside`, until their reader drops them. None without it,
        outside of training, without labels, and after a failed forward."""
        self.is_scored_outside = False
        """Whether a trainer computes its loss from the selected tokens' outputs, and knows of the selection."""
        self._model = find_model(model)
        _check_supported(self._model)
        _check_holder(self._model, model)
        self._layers = find_layer_list(self._model)
        self._head: HeadKind = find_head_kind(self._model)
        self.pattern: Pattern = settings.pattern or ("chunks" if self._head == "causal" else "random")
        """Pattern in use, also if the settings leave it to the model."""
        reads_single = self._head == "pooled" or pools_single_tokens(model)
        self._always = settings.always if settings.always is not None else _ends(self._model) if reads_single else ()
        if settings.prefer_labels and self._head not in ("causal", "token"):
            raise ValueError(f"{type(self._model).__name__} has no label per token. Leave out prefer_labels=True")
        self._arguments_of = CallArguments(self._model)
        self._selection = SelectionContext()
        self._call: Call | None = None
        self._wrapped: list[TokenWise] = []
        self._layer_rows: list[LayerRows] = []
        try:
            self._attach(calls_forward=may_be_called_directly(model))
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Remove the hook and restore the model. A second call does nothing."""
        super().remove()
        self._selection.leave_forward()
        self._selection.leave_backward()
        self._selection.is_removed = True

    def state_dict(self) -> dict[str, int]:
        """Return the state with which a resumed run makes the draws of an uninterrupted one.

        Returns:
            Plain integers, the same on all ranks. `accelerator.register_for_checkpointing(handle)` saves them.
        """
        return {"version": _STATE_VERSION, "seed": self.settings.seed, "num_draws": self.num_draws}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue the draws of a saved run.

        Args:
            state: Result of `state_dict`.

        Raises:
            ValueError: If the state is of another version or another seed, or damaged.
        """
        # A state from a file may be anything.
        said: Any = state
        if not isinstance(said, dict) or any(type(said.get(key)) is not int for key in self.state_dict()):
            raise ValueError(
                f"TokenTune's state must be integers by name (version, seed, num_draws), not {str(state)[:60]}: it is "
                "damaged. Use another checkpoint"
            )
        if state.get("version") != _STATE_VERSION:
            raise ValueError(
                f"TokenTune's state has version {state.get('version')}, and this library reads {_STATE_VERSION}. "
                "Resume with the release that saved it"
            )
        if state["seed"] != self.settings.seed:
            raise ValueError(
                f"TokenTune's state was saved with seed={state['seed']}, and this run has seed={self.settings.seed}. "
                "Set the saved run's seed, or start again"
            )
        if not is_count(state["num_draws"]):
            raise ValueError(
                f"TokenTune's state has num_draws={state['num_draws']}, which must lie in [0, 2^62): it is damaged. "
                "Use another checkpoint"
            )
        self.num_draws = state["num_draws"]

    # ---- attach

    def _attach(self, *, calls_forward: bool) -> None:
        model = self._model
        attentions: dict[nn.Module, LayerRows] = {}
        depth = getattr(model.config.get_text_config(), "num_hidden_layers", None)
        for index, layer in enumerate(self._layers):
            # If a layer is used more than once, the last of the list is not the last to run.
            is_last = index == len(self._layers) - 1 == (depth or 0) - 1 and attends_once(layer)
            layer_rows = LayerRows(self._selection, is_last=is_last)
            attentions |= dict.fromkeys(attention_modules(layer), layer_rows)
            self._wrap_layer(layer, layer_rows)
        if self.settings.checkpoint_mlp and not any(each.checkpointed for each in self._wrapped):
            raise ValueError(
                f"checkpoint_mlp=True, but {type(self._layers[0]).__name__} has no module for its feed-forward part. "
                "Use the model's own gradient checkpointing instead"
            )
        for parent, name in norms_outside(model, self._layers):
            self._wrap(parent, name, None)
        intercepted = {module: layer_rows for module, layer_rows in attentions.items() if has_registry(module)}
        undo, has_attention = intercept(intercepted, attention_of(model.config))
        self._undo.append(undo)
        configs = {id(each.config): each.config for each in intercepted if hasattr(each, "config")}
        _hooked_models.add(model)
        self._undo.append(lambda: _hooked_models.discard(model))
        self._reentrant = ReentrantBlocks(model)
        self._undo.append(self._reentrant.remove)
        parent = next(module for module in model.modules() if self._layers in list(module.children()))
        self._check = model_check(self._layers, parent, self._wrapped, (model.config, *configs.values()), has_attention)
        self._undo.append(parent.register_forward_hook(ModuleHook(self._leave_layers)).remove)
        self._undo.append(
            model.register_forward_pre_hook(ModuleHook(self._begin), with_kwargs=True, prepend=True).remove
        )
        self._undo.append(model.register_forward_hook(ModuleHook(self._end), always_call=True).remove)
        if calls_forward:
            self._undo.append(call_through_hooks(model, lambda: self._selection.in_forward))
        if self._head == "causal":
            self._undo.append(replace_loss(model, lambda: None if self._call is None else self._call.targets))

    def _wrap_layer(self, layer: nn.Module, layer_rows: LayerRows) -> None:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._enter_layer(module, layer_rows, args[0] if args else kwargs.get("hidden_states"))
            layer_rows.enter(is_compiled=runs_compiled(module))

        # Such as SFT's layers under ZeRO-3, whose deltas the engine must not see.
        layer_rows.has_other_forwards = any(
            "forward" in vars(module) and not runs_compiled(module) and not runs_in_tiles(module)
            for module in layer.modules()
        )
        self._layer_rows.append(layer_rows)
        self._undo.append(layer.register_forward_pre_hook(ModuleHook(enter), with_kwargs=True).remove)
        for parent, name, in_attention in token_wise_children(layer):
            is_composite = any(True for _ in getattr(parent, name).children())
            checkpointed = self.settings.checkpoint_mlp and not in_attention and is_composite
            self._wrap(parent, name, layer_rows, checkpointed=checkpointed)

    def _wrap(self, parent: nn.Module, name: str, layer_rows: LayerRows | None, *, checkpointed: bool = False) -> None:
        self._wrapped.append(TokenWise(parent, name, self._selection, layer_rows, checkpointed=checkpointed))
        self._undo.append(self._wrapped[-1].remove)

    # ---- one forward

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        selection = self._selection
        selection.in_forward, selection.of_forward, self._call = True, None, None
        self.last_targets, self.returns_selected = None, False
        if not (model.training and torch.is_grad_enabled()):
            return None
        if in_backward():
            check_run_in_backward(
                model, shrinks=self._head in ("causal", "token"), is_awaited=selection.awaits_backward
            )
        self._check()
        self._reentrant.prepare()
        is_scored_outside = bool(kwargs.get(FUSED_HEAD))
        if is_scored_outside and not self.is_scored_outside:
            refuse_unknown_loss(model)
        bound = self._arguments_of(args, {name: value for name, value in kwargs.items() if name != FUSED_HEAD})
        if bound is None:
            return None  # the model's own error says what is wrong with the call
        arguments = by_name(bound)
        is_checkpointed = any(each.training and getattr(each, "gradient_checkpointing", False) for each in self._layers)
        check_call(model, self._head, arguments, is_checkpointed=is_checkpointed)
        self._call = call = Call(arguments, is_checkpointed, is_scored_outside)
        tokens = find_tokens(self._head, arguments)
        if tokens is None:  # as with pixels: the first layer makes the draw
            return None
        call.targets = find_targets(self._head, arguments, (tokens.shape[0], tokens.shape[1]))
        self.returns_selected = call.targets is not None
        self.last_targets = call.targets if self.is_scored_outside else None
        rows = self._draw(tokens, call)
        if call.targets is None:
            return None
        rows.is_shrunk = True
        # Both kinds of heads see k logits; a causal one is scored through its loss function.
        labels = call.targets.select(rows)
        if is_scored_outside:
            return args, with_selected_labels(kwargs, labels)
        if self._head == "token" and kwargs.get(NUM_ITEMS) is not None:
            # Such a head divides by itself; a causal one's loss function is replaced.
            kwargs = {**kwargs, NUM_ITEMS: call.targets.selected_items(kwargs[NUM_ITEMS])}
        if "labels" in kwargs:
            return args, {**kwargs, "labels": labels}
        place = list(bound.signature.parameters).index("labels")
        return (*args[:place], labels, *args[place + 1 :]), kwargs

    def _draw(self, tokens: torch.Tensor, call: Call) -> Rows:
        settings, batch, length = self.settings, tokens.shape[0], tokens.shape[1]
        k = count_selected(settings.ratio, settings.num_tokens, length, len(self._always))
        labelled = call.targets.is_labelled if settings.prefer_labels and call.targets is not None else None
        positions = draw_positions(
            find_real(self._model, self._head, call.arguments, (batch, length), tokens.device),
            k,
            pattern=self.pattern,
            generator=make_generator(settings.seed, _rank(), self.num_draws),
            chunk_size=settings.chunk_size,
            always=self._always,
            preferred=labelled,
            starts=segment_starts(call.arguments.get("position_ids"), batch),
        )
        self.num_draws += 1
        self.last_selection = positions
        rows = Rows(positions, length, is_checkpointed=call.is_checkpointed)
        self._selection.of_forward = rows
        return rows

    def _enter_layer(self, layer: nn.Module, layer_rows: LayerRows, hidden: Any) -> None:
        selection = self._selection
        if not selection.in_forward and layer.training and torch.is_grad_enabled() and not in_backward():
            raise RuntimeError(
                f"{type(layer).__name__} runs outside of a call of {type(self._model).__name__}, where TokenTune draws "
                "its selection. Call the model that was hooked, not its forward, or attach to the part that you call"
            )
        if not selection.in_forward or self._call is None:
            return
        rows = selection.of_forward or self._draw(hidden, self._call)
        rows.forget_parts()
        trains = is_trainable(layer)
        if trains:
            check_recorded(type(layer).__name__)
        if hidden.requires_grad or trains or layer_rows.has_other_forwards:
            rows.live_layers.add(id(layer_rows))

    def _leave_layers(self, module: nn.Module, args: Any, output: Any) -> Any:
        rows = self._selection.of_forward
        if not self._selection.in_forward or rows is None:
            return None
        hidden = output if isinstance(output, torch.Tensor) else output[0]
        if rows.is_shrunk:
            if getattr(output, "hidden_states", None) is not None:
                raise ValueError(
                    f"{type(self._model).__name__} reads the hidden states of all layers by itself, and TokenTune "
                    "skips the last one for tokens that are not selected. Train it without TokenTune"
                )
            hidden = rows.split(hidden, "tokens")[0]
            if isinstance(output, torch.Tensor):
                output = hidden
            elif isinstance(output, tuple):
                output = (hidden, *output[1:])
            else:
                output[next(iter(output))] = hidden
        return mark_passed(output, self._selection, rows)

    def _end(self, model: nn.Module, args: Any, output: Any) -> Any:
        call, rows = self._call, self._selection.of_forward
        self._selection.leave_forward()
        for layer_rows in self._layer_rows:
            layer_rows.leave_forward()
        self._call = None
        if rows is not None:
            rows.forget_parts()
        if output is None:
            self.last_targets, self.returns_selected = None, False
        if output is None or call is None or call.targets is None or call.is_scored_outside:
            return None
        if self._head == "causal":
            if not call.targets.was_scored:
                raise RuntimeError(
                    f"{type(model).__name__} computes its loss without model.loss_function{describe_forward(model)}, "
                    "so TokenTune can't score the selected tokens on their next ones. Train it without TokenTune"
                )
            return None
        loss = zero_without_labels(output[0], call.targets)
        if isinstance(output, tuple):
            return (loss, *output[1:])
        output["loss"] = loss
        return output


_hooked_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def find_model(model: nn.Module) -> Any:
    """Find the transformers model that a model is, or holds.

    Args:
        model: A transformers model, or a PEFT model around one.

    Returns:
        The `PreTrainedModel`.

    Raises:
        ValueError: If there is no such model.
    """
    found = find_transformers_model(model)
    if found is None:
        raise ValueError(
            f"{type(model).__name__} holds no transformers model (PreTrainedModel), which TokenTune hooks. Pass a "
            "model of transformers"
        )
    return found


def _ends(model: Any) -> tuple[int, ...]:
    """Positions that a head or a pooling may read as the whole sequence, of which a distilled model has one more."""
    is_distilled = any(name.endswith("distillation_token") for name, _ in model.named_parameters())
    return (0, 1, -1) if is_distilled else (0, -1)


_OTHER_ADAPTERS = {
    "AdaptedAttention": "AdaptionPrompt",
    "AdaptedAttentionGPT": "AdaptionPrompt",
    "CPTEmbedding": "CPT",
    "XLoraClassifier": "X-LoRA",
}
"""PEFT's methods that add, score or weigh tokens by themselves, by the class of a module."""


def _check_holder(hooked: Any, holder: nn.Module) -> None:
    """Refuse a module that holds more than the model to hook."""
    inside = set(hooked.modules())
    for path, other in holder.named_modules():
        adapter = _OTHER_ADAPTERS.get(type(other).__name__)
        if adapter is not None:
            raise ValueError(
                f"{path} is of PEFT's {adapter}, which adds, scores or weighs tokens by itself, past TokenTune's "
                "selection. Use LoRA, or train without TokenTune"
            )
        trains = isinstance(other, PreTrainedModel) and any(each.requires_grad for each in other.parameters())
        if trains and other not in inside:
            raise ValueError(
                f"{type(holder).__name__} holds another transformers model that trains, {path} ({type(other).__name__})"
                f", and TokenTune hooks one: {type(hooked).__name__}. Freeze the other before, or attach to each of "
                "them by itself"
            )


def _check_supported(model: Any) -> None:
    name = type(model).__name__
    if any(is_hooked(each) or each in _hooked_models for each in model.modules()):
        raise RuntimeError(f"{name} has TokenTune attached already. Call remove() on that handle first")
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(
            f"{name} is an encoder-decoder: encoder and decoder have tokens of their own, and one selection can't "
            "serve both. Train it without TokenTune"
        )
    if getattr(model.config, "add_cross_attention", False):
        raise ValueError(
            f"{name} attends to another model's tokens (add_cross_attention), which TokenTune can't select. Train it "
            "without TokenTune"
        )


def _rank() -> int:
    ready = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if ready else 0
