"""Chunked cross-entropy under an unmodified causal LM of transformers, attached and removed by a handle."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.loss.loss_utils import ForCausalLMLoss

from slivertune.chunked_loss.absent_logits import READ, AbsentLogits, ChunkedLossError
from slivertune.chunked_loss.function import CHUNK_BYTES, IGNORED, chunked_cross_entropy
from slivertune.chunked_loss.trial import why_not_equal
from slivertune.core.direct_calls import call_through_hooks, may_be_called_directly
from slivertune.core.module_hook import ModelHandle, ModuleHook, StandIn, has_other_forward
from slivertune.core.setting_checks import check_integer
from slivertune.core.transformers_internals import find_transformers_model


def attach_chunked_cross_entropy(
    model: nn.Module, *, evaluation: bool = False, chunk_bytes: int = CHUNK_BYTES
) -> ChunkedCrossEntropyHandle:
    """Make a causal LM compute its loss by `chunked_cross_entropy` whenever it gets labels in training.

    The output's `logits` then have no classes: shape (batch, length, 0). Without labels, in evaluation, and in
    `generate`, the model runs unchanged. `why_not_chunked` tells beforehand whether the model is supported.

    Args:
        model: A causal LM of transformers with a plain linear head, or a PEFT model around one.
        evaluation: Whether the loss is chunked in evaluation, too, if logits are not needed there.
        chunk_bytes: Bytes of the fp32 scores that exist at a time, 64 MiB by default.

    Returns:
        Handle that removes it again; also a context manager.

    Raises:
        ValueError: If the model's head or loss is of another kind, with the reason, or if `chunk_bytes` is below 1.
        RuntimeError: If the loss of the model is chunked already.

    Example:
        >>> with slivertune.attach_chunked_cross_entropy(model):
        ...     model(input_ids=tokens, labels=tokens).loss.backward()
    """
    return ChunkedCrossEntropyHandle(model, evaluation=evaluation, chunk_bytes=chunk_bytes)


def why_not_chunked(model: nn.Module) -> str | None:
    """Find out whether a model is supported, by forwards of two tokens without gradients, as it is and in training.

    Call it on the model as it will be trained: with its adapters, and inside of autocast if training is.

    Args:
        model: Any model; it is unchanged afterwards.

    Returns:
        Reason why not, as a clause; None if `attach_chunked_cross_entropy` supports the model.

    Example:
        >>> if slivertune.why_not_chunked(model) is None:
        ...     handle = slivertune.attach_chunked_cross_entropy(model)
    """
    inner = find_transformers_model(model)
    if inner is None:
        return f"{type(model).__name__} holds no transformers model"
    reason = _structural_reason(inner)
    if reason is not None:
        return reason
    with ChunkedCrossEntropyHandle(inner) as handle:
        return handle.why_not_equal()


class ChunkedCrossEntropyHandle(ModelHandle):
    """Handle of a causal LM whose loss is chunked. As a context manager, it removes the chunking at its end.

    In a forward with labels, the head returns a stand-in for the logits of its hidden states. The loss function gets
    that stand-in, and calls the head again for the loss. So the product runs inside the head's own forward, around
    which engines gather its weight, and wrappers of the loss function (TokenTune) work as before.
    """

    refusal_to_copy = (
        "a ChunkedCrossEntropyHandle belongs to one model and is neither copied nor pickled. A copy of the model "
        "computes whole logits. Call attach_chunked_cross_entropy on it"
    )

    def __init__(self, model: nn.Module, *, evaluation: bool = False, chunk_bytes: int = CHUNK_BYTES) -> None:
        """Attach to a model, as `attach_chunked_cross_entropy` describes."""
        super().__init__()
        inner = find_transformers_model(model)
        if inner is None:
            raise ValueError(
                f"{type(model).__name__} holds no transformers model (PreTrainedModel) to chunk the loss of. Attach "
                "it to a causal language model of transformers"
            )
        if inner in _attached:
            raise RuntimeError(
                f"{type(inner).__name__} computes its loss in chunks already. Call remove() on that handle first"
            )
        reason = _structural_reason(inner)
        if reason is not None:
            raise ValueError(f"the loss of {type(inner).__name__} can't be chunked: {reason}. Leave it as it is")
        check_integer("chunk_bytes", chunk_bytes, 1)
        self._evaluation = evaluation
        self._signature = inspect.signature(type(inner).forward)
        self._head = _Head(inner.get_output_embeddings(), chunk_bytes, self.why_not_equal)
        loss = _Loss(self._head)
        _attached.add(inner)
        self._undo.append(lambda: _attached.discard(inner))
        self._head.put()
        self._undo.append(self._head.take_off)
        _swap_loss(inner, ForCausalLMLoss, loss)
        self._undo.append(lambda: _swap_loss(inner, loss, ForCausalLMLoss))
        self._undo.append(inner.register_forward_pre_hook(ModuleHook(self._begin), with_kwargs=True).remove)
        # This hook runs first, since other hooks may read the output.
        self._undo.append(inner.register_forward_hook(ModuleHook(self._end), prepend=True, always_call=True).remove)
        self._model, self._loss = inner, loss
        self._in_forward = False
        if may_be_called_directly(model):
            self._undo.append(call_through_hooks(inner, lambda: self._in_forward))

    @property
    def last_loss(self) -> torch.Tensor:
        """Last loss that was computed in chunks and without gradients, a scalar."""
        assert self._loss.last is not None
        return self._loss.last

    def why_not_equal(self) -> str | None:
        """Return the reason why the model's chunked loss differs from its plain loss, as a clause. None if it does not.

        Runs the model a few times on two tokens, without gradients.
        """

        def run(is_chunked: bool, batch: dict[str, Any]) -> Any:
            self._evaluation = is_chunked
            return self._model(**batch)

        def chunked(**batch: Any) -> tuple[Any, torch.Tensor]:
            return run(True, batch), self.last_loss

        head = self._head
        # The first compiled forward asks for this, and may have begun.
        before = self._evaluation, self._in_forward, head.stand_ins, head.scored
        head.is_on_trial, head.scored = True, []
        try:
            return why_not_equal(self._model, chunked, lambda **batch: run(False, batch))
        finally:
            self._evaluation, self._in_forward, head.stand_ins, head.scored = before
            head.is_on_trial = False

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._in_forward = True
        wanted = (model.training and torch.is_grad_enabled()) or (self._evaluation and not torch.is_grad_enabled())
        is_chunked = wanted and self._has_labels(model, args, kwargs)
        if is_chunked and any(each.__name__ == "FSDPModule" for each in type(model).__mro__):
            # FSDP2 gathers the head's weight only for the root's forward. A later read of it has crashed the process.
            raise ChunkedLossError("FSDP2 shards the head's weight over the ranks")
        if is_chunked and hasattr(self._head.module.weight, "ds_id"):
            # ZeRO-3's hooks on the head return another tensor than the stand-in.
            raise ChunkedLossError("ZeRO-3 shards the head's weight over the ranks")
        self._head.stand_ins = [] if is_chunked else None

    def _has_labels(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if kwargs.get("labels") is not None:
            return True  # a forward of a subclass may not name it
        try:
            bound = self._signature.bind_partial(model, *args, **kwargs)
        except TypeError:
            return False  # the model's own error says what is wrong with the call
        return bound.arguments.get("labels") is not None

    def _end(self, model: nn.Module, args: Any, output: Any) -> None:
        stand_ins, self._head.stand_ins = self._head.stand_ins, None
        self._in_forward = False
        AbsentLogits.release([*self._head.scored, *(stand_in for stand_in, _ in stand_ins or ())])
        self._head.scored = []
        if output is not None and stand_ins:
            raise ChunkedLossError(f"{type(model).__name__} does not compute its loss by model.loss_function")


class _Head(StandIn):
    """Stands in for the `forward` of a linear head.

    Args:
        module: The head.
        chunk_bytes: Bytes of the fp32 scores that exist at a time.
        why_not_equal: Function that finds the reason why the model's loss is not supported. Compiled code asks for it
            once, since it can't watch what the model does with a stand-in.
    """

    def __init__(self, module: nn.Linear, chunk_bytes: int, why_not_equal: Callable[[], str | None]) -> None:
        super().__init__(module.forward)
        self.module = module
        self._chunk_bytes = chunk_bytes
        self._why_not_equal: Callable[[], str | None] | None = why_not_equal
        self._reason: str | None = None
        self.is_on_trial = False
        """Whether the forwards that look for that reason run now."""
        self.stand_ins: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        """Stand-ins that are not scored yet, each with its hidden states, or None outside of a chunked forward."""
        self.scored: list[torch.Tensor] = []
        """Stand-ins of this forward whose loss is computed."""
        self._request: dict[str, Any] | None = None
        """Hidden states, targets and divisor of the loss that the next call computes."""

    def put(self) -> None:
        """Replace the head's forward."""
        self.module.forward = self  # type: ignore[method-assign, assignment]

    def take_off(self) -> None:
        """Restore the head's own forward. If other code has wrapped it since, this stays and passes calls through."""
        self.stand_ins = None
        if vars(self.module).get("forward") is self:
            del self.module.forward

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the loss if it was requested, else a stand-in for the logits in a chunked forward, else the logits."""
        if self._request is not None:
            module = self.module
            return chunked_cross_entropy(
                weight=module.weight, bias=module.bias, chunk_bytes=self._chunk_bytes, **self._request
            )
        if self.stand_ins is None:
            return nn.Linear.forward(self.module, hidden)
        if torch.compiler.is_compiling() and not self.is_on_trial:
            self._reason = self._find_reason()
        if self._reason is not None:
            raise ChunkedLossError(self._reason)
        stand_in = AbsentLogits.like(hidden, is_compiling=torch.compiler.is_compiling() and not self.is_on_trial)
        self.stand_ins.append((stand_in, hidden))
        return stand_in

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _find_reason(self) -> str | None:
        """Return the reason why the model's loss is not supported. Runs uncompiled while the model is compiled."""
        if self._why_not_equal is not None:
            function, self._why_not_equal = self._why_not_equal, None
            with torch.compiler.set_stance("force_eager"):
                self._reason = function()
        return self._reason

    def loss_of(self, stand_in: torch.Tensor, **request: Any) -> torch.Tensor | None:
        """Compute the loss of a stand-in by a call of the module, or return None if this head did not make it.

        Args:
            stand_in: Logits that the loss function got.
            **request: Targets and divisor.
        """
        known = [hidden for given, hidden in self.stand_ins or () if given is stand_in]
        if not known:
            return None
        self.stand_ins = [pair for pair in self.stand_ins or () if pair[0] is not stand_in]
        self.scored.append(stand_in)
        # Hooks that change the head's input have done so in its first call.
        self._request = {"hidden": known[0], **request}
        try:
            loss: torch.Tensor = self.module(known[0])
        finally:
            self._request = None
        return loss


class _Loss(StandIn):
    """Stands in for `ForCausalLMLoss`.

    Args:
        head: Head that computes the loss.
    """

    def __init__(self, head: _Head) -> None:
        super().__init__(ForCausalLMLoss)
        self._head = head
        self.last: torch.Tensor | None = None
        """Last loss that was computed without gradients."""

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: Any = None,
        ignore_index: int = IGNORED,
        shift_labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Compute the loss, with the arguments of `ForCausalLMLoss`."""
        if self._head.stand_ins is None:
            loss: torch.Tensor = ForCausalLMLoss(
                logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs
            )
            return loss
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        chunked = self._head.loss_of(
            logits, targets=shift_labels, num_items_in_batch=num_items_in_batch, ignore_index=ignore_index
        )
        if chunked is None:
            raise ChunkedLossError(f"{READ}, or the head's forward was replaced after the handle was attached")
        if not torch.is_grad_enabled():
            self.last = chunked.clone()  # the model may add to it in place
        return chunked


_attached: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def _structural_reason(model: Any) -> str | None:
    """Return the reason why a model is not supported, as far as it shows without running it, or None."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        return f"its head is {'none' if head is None else type(head).__name__}, not a plain linear layer"
    if has_other_forward(head):
        return f"the forward of its head was replaced by {vars(head)['forward']!r}"
    function = model.loss_function
    while hasattr(function, "function"):
        function = function.function
    if function is not ForCausalLMLoss:
        return f"its loss function is {getattr(function, '__name__', function)!r}, not that of causal language models"
    return None


def _swap_loss(model: Any, old: Any, new: Any) -> None:
    """Replace a loss function, also if another function wraps it (in an attribute `function`)."""
    outer = model.loss_function
    if outer is old:
        # Without an attribute of its own, the model has the loss of its class.
        vars(model).pop("_loss_function", None)
        if model.loss_function is not new:
            model.loss_function = new
        return
    while getattr(outer, "function", None) is not old:
        if not hasattr(outer, "function"):
            return  # other code has set another loss since, which stays
        outer = outer.function
    outer.function = new
