"""HiFT and SFT over a tiny Llama, as tests of files need them."""

from typing import Any

import torch

from slivertune import SFT, HiFT, HiFTConfig, SFTConfig
from tests.helpers.models import tiny_llama, token_batches


def built(method: str) -> tuple[Any, Any]:
    """A model and its optimizer; `method` is "hift" or "sft"."""
    model = tiny_llama()
    if method == "hift":
        return model, HiFT(model, torch.optim.AdamW, config=HiFTConfig.paper(), lr=1e-2)
    return model, SFT(model, config=SFTConfig(density=0.05, reselection_interval=0), lr=1e-2, total_steps=9)


def trained(method: str, updates: int) -> Any:
    """An optimizer that has made some updates."""
    model, optimizer = built(method)
    for batch in token_batches(updates):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer
