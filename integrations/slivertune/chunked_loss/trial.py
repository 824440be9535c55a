"""Comparison of a model's chunked loss with its plain loss, in forwards of two tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.loss.loss_utils import ForCausalLMLoss

from slivertune.chunked_loss.absent_logits import ChunkedLossError
from slivertune.chunked_loss.function import MixedDtypesError
from slivertune.core.torch_internals import is_without_data


def why_not_equal(
    model: Any, chunked: Callable[..., tuple[Any, torch.Tensor]], plain: Callable[..., Any]
) -> str | None:
    """Compare both losses in the model's present mode and in training, which may add a term of its own.

    Args:
        model: A causal LM of transformers; its mode, buffers and random numbers are unchanged afterwards.
        chunked: Function that runs the model with a chunked loss, and returns its output and the chunked loss alone.
        plain: Function that runs the model with whole logits.

    Returns:
        Reason why the losses differ, as a clause; None if they are equal, or can't be computed yet.
    """
    with torch.no_grad(), _as_before(model):
        reason = _difference(model, chunked, plain)
        if reason is None and not all(module.training for module in model.modules()):
            reason = _difference(model.train(), chunked, plain)
    return reason


def _difference(model: Any, chunked: Callable[..., tuple[Any, torch.Tensor]], plain: Callable[..., Any]) -> str | None:
    embedding = model.get_input_embeddings().weight
    # The first token of a vocabulary is often padding. Its embedding is zero, so every head has the same loss.
    tokens = torch.full((1, 2), embedding.shape[0] // 2, dtype=torch.long, device=embedding.device)
    try:
        with torch.random.fork_rng():
            output, found_score = chunked(input_ids=tokens, labels=tokens)
    except ChunkedLossError as error:
        return error.reason
    except MixedDtypesError:
        return None  # whole logits fail here, too; under the autocast of training both work
    except torch.OutOfMemoryError:
        raise
    except (ValueError, RuntimeError) as error:
        # A loss that the model computes by itself finds no classes in the logits.
        return f"{type(model).__name__} does not compute its loss by model.loss_function ({error})"
    if is_without_data():
        return None  # in a memory plan there is no value to compare
    found = _loss_and_logits(output)[0]
    with torch.random.fork_rng():
        expected, logits = _loss_and_logits(plain(input_ids=tokens, labels=tokens))
    score = ForCausalLMLoss(logits, tokens, logits.shape[-1])
    # Terms that the model adds to the loss of its logits, such as a router's loss, differ only by the sum's rounding.
    # The loss itself comes from products in another order, and only the plain ones are rounded to the logits' dtype.
    rounding = 4 * torch.finfo(expected.dtype).eps * (1 + expected.abs())
    eps = max(torch.finfo(logits.dtype).eps, 0.0 if logits.device.type == "cpu" else _TF32_EPS)
    rounding_of_products = 32 * eps * (1 + logits.abs().max())
    for one, other, limit in (
        (found - found_score, expected - score, rounding),
        (found, expected, rounding + rounding_of_products),
    ):
        if not torch.isclose(one, other, rtol=0.0, atol=float(limit.nan_to_num()), equal_nan=True):
            return f"its loss of two tokens is {float(other - one):.6g} off in chunks"
    return None


_TF32_EPS = 2.0**-10
"""Relative rounding of fp32 matrix products on a GPU, which may use TF32."""


def _loss_and_logits(output: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return (output["loss"], output["logits"]) if isinstance(output, dict) else (output[0], output[1])


@contextmanager
def _as_before(model: nn.Module) -> Iterator[None]:
    """Restore each module's mode, and the buffers that a forward in training writes (running statistics)."""
    modes = {module: module.training for module in model.modules()}
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in modes
        for name, buffer in module._buffers.items()
        if buffer is not None and not buffer.is_inference()
    ]
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for module, name, buffer, value in buffers:
            module._buffers[name] = buffer
            buffer.data.copy_(value)  # batch norm's kernel writes without a count in the tensor's version
