"""The model of a plan: the classes of the real one, from its configuration, without data."""

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedConfig

from slivertune.chunked_loss import attach_chunked_cross_entropy, why_not_chunked
from slivertune.core.torch_internals import set_buffer
from slivertune.planning.four_bit import hold_in_4bit
from slivertune.planning.kernels import GpuKernels
from slivertune.planning.methods import planned
from slivertune.planning.request import PlanRequest
from slivertune.planning.step import autocast_of
from slivertune.tokentune import TokenTune


def build_model(request: PlanRequest, config: PreTrainedConfig) -> Any:
    """Make the model that a run trains, on the meta device, in training mode, with what its method puts into it.

    Args:
        request: Names the head, the dtype of the weights and the method.
        config: The model's configuration; it is only read.

    Returns:
        A transformers model, or a PEFT model around one.

    Raises:
        ValueError: If the configuration is not that of a model with such a head.
        ImportError: If the method needs a package that is not installed.
    """
    config = copy.deepcopy(config)
    config.use_cache = False
    auto: Any = AutoModelForCausalLM
    if request.task == "classification":
        auto = AutoModelForSequenceClassification
        config.num_labels = request.num_labels
        if getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = 0
    is_bf16 = request.precision in ("bf16", "mixed_hi")
    with torch.device("meta"):
        model: Any = auto.from_config(config, dtype=torch.bfloat16 if is_bf16 else torch.float32)
        if request.load_in_4bit:
            hold_in_4bit(model, torch.bfloat16 if is_bf16 else torch.float32)
        if request.gradient_checkpointing:
            # torch takes function modes off for the time of a backward, in which checkpoints are computed again.
            contexts = {"use_reentrant": False, "context_fn": lambda: (nullcontext(), GpuKernels())}
            model.activation_checkpointing_enable(activation_checkpointing_kwargs=contexts)
        model = planned(request.method).change_model(model, request)
    return model.train()


def give_sizes(model: nn.Module) -> None:
    """Replace what lies on the meta device by tensors that say they lie where the model computes.

    Args:
        model: The model; changed. Called among tensors without data. Parameters that are tied stay tied.
    """
    replaced: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in replaced:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                replaced[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            module._parameters[name] = replaced[id(parameter)]
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            set_buffer(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))


@contextmanager
def attached(request: PlanRequest, model: nn.Module) -> Iterator[tuple[str, ...]]:
    """Put on the model what a run hooks on it, for a time, in the run's order: selection of tokens, chunked loss.

    Args:
        request: Says what.
        model: The model, among tensors without data, with its method on it.

    Yields:
        What had to be left out or was computed from sizes, for people to read.
    """
    notes: tuple[str, ...] = ()
    with ExitStack() as stack:
        if request.token_ratio is not None:
            stack.enter_context(TokenTune(ratio=request.token_ratio).attach(model))
        if request.task == "causal_lm" and request.chunked_cross_entropy:
            with autocast_of(request.has_autocast):
                reason = why_not_chunked(model)
            if reason is None:
                stack.enter_context(attach_chunked_cross_entropy(model))
            else:
                notes = (f"the loss is computed from all logits: {reason}",)
        if request.load_in_4bit:
            notes += ("products with 4-bit weights are computed from their sizes",)
        yield notes


def make_batch(request: PlanRequest) -> dict[str, torch.Tensor]:
    """Tokens and labels of one forward; no sequence is padded.

    Args:
        request: Batch and length.

    Returns:
        Arguments of the model's forward.
    """
    ids = torch.zeros(request.batch_size, request.seq_length, dtype=torch.long)
    if request.task == "classification":
        return {"input_ids": ids, "labels": torch.zeros(request.batch_size, dtype=torch.long)}
    return {"input_ids": ids, "labels": ids.clone()}
