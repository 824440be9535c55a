"""A whole model that runs again inside of a backward: refused, unless nothing was drawn for it before."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, BertModel, LlamaForCausalLM

import slivertune as st
from tests.helpers.models import seeded, tiny_llama
from tests.interop.trainer_runs import recorded_draws
from tests.tokentune.reference import take_gradients

TUNE = st.TokenTune(ratio=0.5, seed=3)
IDS = torch.arange(40).view(4, 10)
REFUSED = "the whole model runs again in the backward"


def tiny_encoder(dropout: float = 0.0) -> nn.Module:
    config = BertConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=24,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        initializer_range=0.2,
    )
    return seeded(lambda: BertModel(config, add_pooling_layer=False), 0)


def embed(model: Any, ids: torch.Tensor) -> torch.Tensor:
    embedding: torch.Tensor = model(ids).last_hidden_state.mean(dim=1)
    return embedding


def backward_in_pieces(model: nn.Module) -> None:
    """Gradient caching: embeddings without a graph first, then each half again, with the gradients that it got."""
    with torch.no_grad():
        embeddings = embed(model, IDS)
    loss = embeddings.requires_grad_().square().sum()

    def again(gradient: torch.Tensor) -> None:
        with torch.enable_grad():
            for half in (slice(0, 2), slice(2, 4)):
                embed(model, IDS[half]).backward(gradient[half])

    embeddings.register_hook(again)
    loss.backward()


def test_a_model_that_had_no_graph_before_draws_in_the_backward() -> None:
    model = tiny_encoder()
    with TUNE.attach(model) as handle, recorded_draws() as draws:
        backward_in_pieces(model)
        cached = take_gradients(model)
        assert handle.num_draws == len(draws) == 2
        handle.num_draws = 0
        for half in (slice(0, 2), slice(2, 4)):
            embed(model, IDS[half]).square().sum().backward()
    direct = take_gradients(model)
    assert len(direct) == 37
    # The same operators, but that embeddings of half a batch and of all of it are rounded otherwise.
    assert all(torch.allclose(cached[name], each, rtol=1e-4, atol=1e-5) for name, each in direct.items())  # type: ignore[arg-type]


@pytest.mark.parametrize("build", [tiny_encoder, tiny_llama])
def test_checkpointing_the_whole_model_is_refused(build: Any) -> None:
    model = build()

    def compute(ids: torch.Tensor) -> Any:
        return model(ids, labels=ids).loss if isinstance(model, LlamaForCausalLM) else embed(model, ids).sum()

    with TUNE.attach(model):
        loss = checkpoint(compute, IDS, use_reentrant=False)
        with pytest.raises(RuntimeError, match=REFUSED):
            loss.backward()


def test_a_forward_that_awaits_its_backward_is_not_run_again_but_one_that_was_given_up_is_forgotten() -> None:
    model = tiny_encoder()
    with TUNE.attach(model):
        waiting = embed(model, IDS).sum()
        with pytest.raises(RuntimeError, match=REFUSED):
            backward_in_pieces(model)
        del waiting
        backward_in_pieces(model)


def test_dropout_is_refused_where_the_model_runs_again() -> None:
    model = tiny_encoder(dropout=0.1)
    with TUNE.attach(model):
        with pytest.raises(RuntimeError, match=r"gradient caching\), where dropout under TokenTune"):
            backward_in_pieces(model)
        embed(model, IDS).sum().backward()
