"""SFT over the tests' models, and plain loops that train them."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from slivertune import SFT, SFTConfig
from tests.helpers.models import differing, token_batches

SETTINGS = {each.name for each in dataclasses.fields(SFTConfig)}


def sft_over(model: nn.Module, **options: Any) -> SFT:
    """SFT that trains a tenth of the weights for 40 updates, unless `options`, of SFTConfig and of SFT, say otherwise.

    Weights are reselected after update 4, which ends the first phase, and at the multiples of 6.
    """
    settings: dict[str, Any] = {"density": 0.1, "reselection_interval": 6, "estimation_steps": 4}
    settings |= {name: value for name, value in options.items() if name in SETTINGS}
    rest = {name: value for name, value in options.items() if name not in SETTINGS}
    return SFT(model, config=SFTConfig(**settings), **{"lr": 1e-2, "total_steps": 40, **rest})


def over(model: nn.Module, **options: Any) -> tuple[Any, SFT]:
    """A model, and SFT over it."""
    return model, sft_over(model, **options)


def loss_of(model: Callable[..., Any], batch: Any) -> torch.Tensor:
    """The loss of a batch of tokens, or what a model makes of anything else."""
    is_tokens = isinstance(batch, dict) and "input_ids" in batch
    loss: torch.Tensor = model(**batch).loss if is_tokens else model(batch)
    return loss


def train(
    model: Callable[..., Any], optimizer: torch.optim.Optimizer, batches: Iterable[Any], *, micro: int = 1
) -> list[float]:
    """Update once for each so many batches; the losses."""
    losses = []
    for at, batch in enumerate(batches, 1):
        loss = loss_of(model, batch) / micro
        loss.backward()
        losses.append(loss.item())
        if at % micro == 0:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def token_rows(count: int) -> list[Any]:
    """The rows of so many batches of two, as data sets have them."""
    return [{key: value[at] for key, value in batch.items()} for batch in token_batches(count) for at in range(2)]


def in_4_bits(model: nn.Module) -> nn.Module:
    """As bitsandbytes loads a model: linear layers of the blocks in 4 bits, all else as it was."""
    import bitsandbytes

    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and "layers" in path:
            layer = bitsandbytes.nn.Linear4bit(
                module.in_features, module.out_features, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"
            )
            layer.weight.data.copy_(module.weight.data)
            model.set_submodule(path, layer)
    return model.to("cpu").train()


def assert_keeps_state_dict(model: nn.Module, before: dict[str, torch.Tensor]) -> None:
    """The model's `state_dict`, codes of 4-bit weights included, has the bits that it had."""
    assert differing(dict(model.state_dict()), before) == []
