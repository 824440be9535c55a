"""The model that a run trains, of fake tensors: its weights in their forms, its hooks, and its forward on a batch."""

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoModelForSpeechSeq2Seq,
    PreTrainedConfig,
)

from slivertune.chunked_loss import attach_chunked_cross_entropy, why_not_chunked
from slivertune.core.checkpointing import enable_checkpointing
from slivertune.core.kept_activations import keep_activations
from slivertune.core.offloaded_activations import offload_activations
from slivertune.core.token_tiles import tile_tokens
from slivertune.core.torch_internals import set_buffer
from slivertune.planning.batches import make_batch
from slivertune.planning.counter import computing_again
from slivertune.planning.eight_bit import EightBitLinear
from slivertune.planning.four_bit import hold_in_4bit, hold_others_in_fp32, replace_linear
from slivertune.planning.kernels import kernels_of
from slivertune.planning.known_values import knowing
from slivertune.planning.methods import planned
from slivertune.planning.request import PlanRequest, TaskName
from slivertune.planning.step import Forward, autocast_of
from slivertune.tokentune import TokenTune

_MODELS: dict[TaskName, Any] = {
    "causal_lm": AutoModelForCausalLM,
    "classification": AutoModelForSequenceClassification,
    "image_text": AutoModelForImageTextToText,
    "speech": AutoModelForSpeechSeq2Seq,
}


def build_model(request: PlanRequest, config: PreTrainedConfig) -> Any:
    """Make the model that a run trains on the meta device, in training mode, with the changes of its method.

    Args:
        request: Run that names the head, the dtype of the weights and the method.
        config: The model's configuration; only read.

    Returns:
        A transformers model, or a PEFT model around one.

    Raises:
        ValueError: If the configuration does not belong to a model with such a head.
        ImportError: If the method needs a package that is not installed.
    """
    config = copy.deepcopy(config)
    config.use_cache = config.get_text_config().use_cache = False
    if request.task == "classification":
        config.num_labels = request.num_labels
        if getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = 0
    dtype = torch.bfloat16 if request.has_bf16_weights else torch.float32
    with torch.device("meta"):
        try:
            model: Any = _MODELS[request.task].from_config(
                config,
                dtype=dtype,
                attn_implementation=request.attn_implementation,
            )
        except AssertionError:
            # Not every model reads its padding token.
            _check_padding(config)
            raise
        if request.load_in_4bit:
            hold_in_4bit(model, dtype)
        if request.recipe == "peft-8bit":
            replace_linear(model, EightBitLinear)
        if request.recipe == "peft-8bit" or (request.recipe is not None and request.load_in_4bit):
            hold_others_in_fp32(model)
        if request.gradient_checkpointing:
            enable_checkpointing(
                model,
                {
                    "use_reentrant": False,
                    "context_fn": partial(_again, request),
                },
            )
        model = planned(request.method).change_model(model, request)
    return model.train()


def _check_padding(config: PreTrainedConfig) -> None:
    """Refuse a padding token that has no row in the embeddings."""
    text = config.get_text_config()
    pad, size = getattr(text, "pad_token_id", None), getattr(text, "vocab_size", None)
    if isinstance(pad, int) and isinstance(size, int) and not 0 <= pad < size:
        raise ValueError(
            f"pad_token_id={pad} must be at least 0 and less than vocab_size={size}. Correct one of the two in the "
            "model's config.json"
        )


def _again(request: PlanRequest) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of a block's first computation and of its recomputation, where torch drops function modes."""
    return nullcontext(), _as_in_forward(request)


@contextmanager
def _as_in_forward(request: PlanRequest) -> Iterator[None]:
    with kernels_of(request.kernels), knowing(request.images > 0), computing_again():
        yield


def give_sizes(model: nn.Module) -> None:
    """Replace tensors on the meta device by fake tensors on the device where the model computes.

    Args:
        model: Model to change, among fake tensors. Tied parameters stay tied.
    """
    replaced: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in replaced:
                replaced[id(parameter)] = nn.Parameter(
                    torch.empty(parameter.shape, dtype=parameter.dtype), requires_grad=parameter.requires_grad
                )
                vars(replaced[id(parameter)]).update(vars(parameter))  # attributes of 4-bit codes
            module._parameters[name] = replaced[id(parameter)]
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            set_buffer(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))


@contextmanager
def attached(request: PlanRequest, model: nn.Module) -> Iterator[tuple[str, ...]]:
    """Attach a run's hooks to the model inside this context, in the run's order.

    Args:
        request: Run that selects the hooks.
        model: Model of fake tensors, with its method applied.

    Yields:
        Notes for people on the parts that were left out or computed from sizes.
    """
    notes: tuple[str, ...] = ()
    with ExitStack() as stack:
        if request.keep_activations:
            stack.enter_context(keep_activations(model, request.keep_activations))
        if request.offload_activations:
            stack.enter_context(offload_activations(model))
        if request.token_tile_size is not None:
            context = partial(_again, request)
            stack.enter_context(tile_tokens(model, request.token_tile_size, recompute_context=context))
        if request.token_ratio is not None:
            stack.enter_context(TokenTune(ratio=request.token_ratio).attach(model))
        if request.task in ("causal_lm", "image_text") and request.chunked_cross_entropy and request.recipe is None:
            with autocast_of(request.has_autocast):
                reason = why_not_chunked(model)
            if reason is None:
                stack.enter_context(attach_chunked_cross_entropy(model))
            else:
                notes = (f"the loss is computed from all logits: {reason}",)
        if request.load_in_4bit:
            notes += ("products with 4-bit weights are computed from their sizes",)
        stack.enter_context(knowing(request.images > 0))
        yield notes


def forward_of(model: Any, request: PlanRequest, config: PreTrainedConfig) -> Forward:
    """Return the forward of a model on a run's batch.

    Args:
        model: The model, among fake tensors.
        request: The run.
        config: The model's configuration.
    """
    batch = make_batch(request, config)
    kept: list[Any] = []

    def forward() -> torch.Tensor:
        with autocast_of(request.has_autocast):
            try:
                outputs = model(**batch)
            except (AttributeError, ValueError) as error:
                # MBart and T5Gemma begin without it.
                if "decoder_start_token_id" in str(error):
                    raise ValueError(_without_start(request, config)) from error
                raise
        if request.recipe == "peft-loop":
            kept[:] = [outputs]
        loss: torch.Tensor = outputs.loss
        return loss

    return forward


def _without_start(request: PlanRequest, config: PreTrainedConfig) -> str:
    ending = "; its classifier, which searches the tokens for their end, has no plan even then"
    return (
        f"decoder_start_token_id=None must be the id of a token, the first of a {config.model_type!r} decoder. Set "
        "it in the model's config.json, for T5 to its pad_token_id"
        + (ending if request.task == "classification" else "")
    )
