"""All models that transformers has, made tiny: a hooked one computes what it computes unhooked, or is refused."""

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

import slivertune as st
from tests.tokentune.reference import Gradients, distance, selected, take_gradients

HEADS: dict[str, tuple[Mapping[str, Any], int]] = {
    "causal": (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, 85),
    "token": (MODEL_FOR_MASKED_LM_MAPPING_NAMES, 24),
    "pooled": (MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES, 62),
}
"""Classes by type of model, and how many at least can be made tiny, and hooked."""
DRAW_THEIR_EXPERTS = {"phimoe"}
"""Types whose routers draw in training, so that no two forwards are equal."""
VOCAB, LENGTH, CLASSES = 61, 13, 3
MOST_PARAMETERS = 3_000_000
CAP = 1e-4
SIZES: dict[int, tuple[str, ...]] = {
    2: ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_experts_per_tok", "num_key_value_heads"),
    4: ("num_attention_heads", "n_head", "n_heads", "num_heads", "num_experts", "num_local_experts"),
    8: ("head_dim", "rotary_dim", "hidden_size_per_layer_input", "relative_attention_num_buckets"),
    32: ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "word_embed_proj_dim", "embedding_size"),
    48: ("intermediate_size", "ffn_dim", "hidden_dim", "n_inner", "ffn_hidden_size", "moe_intermediate_size"),
    64: ("max_position_embeddings", "n_positions"),
    VOCAB: ("vocab_size", "vocab_size_per_layer_input"),
}


def tiny_config(kind: Any) -> Any:
    """A configuration without dropout, with those sizes that its class has."""
    default = kind()
    changes = {
        name: size for size, names in SIZES.items() for name in names if getattr(default, name, None) is not None
    }
    drops = {name: 0.0 for name, value in vars(default).items() if "drop" in name and isinstance(value, float)}
    return kind(**changes, **drops, num_labels=CLASSES, pad_token_id=0, use_cache=False)


def tiny_models(names: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Make those of the models that have such sizes."""
    for model_type, name in names.items():
        # Whatever goes wrong, it is not ours: sizes that do not fit, a class that needs another library.
        with suppress(Exception):
            config = tiny_config(CONFIG_MAPPING[model_type])
            model_class = getattr(transformers, name if isinstance(name, str) else name[0])
            with torch.device("meta"):
                size = sum(each.numel() for each in model_class(config).parameters())
            if size <= MOST_PARAMETERS and model_type not in DRAW_THEIR_EXPERTS:
                yield model_type, with_weights(model_class(config))


def with_weights(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.15)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.train()


def make_batch(head: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB, (3, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": torch.tensor([2, 0, 1]) if head == "pooled" else ids}


def run(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, Gradients]:
    """Logits, and all gradients."""
    output = model(**batch)
    output.loss.backward()
    return output.logits.detach(), take_gradients(model)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("head", HEADS)
def test_a_hooked_model_computes_what_it_does_unhooked_or_is_refused(head: str) -> None:
    names, least = HEADS[head]
    batch, exact, wrong = make_batch(head), list[str](), dict[str, Any]()
    logging.disable(logging.WARNING)
    try:
        with torch.random.fork_rng():
            for model_type, model in tiny_models(names):
                plain = copy.deepcopy(model)
                try:
                    full, expected = run(plain, batch)
                except Exception:
                    continue  # its sizes do not fit
                try:
                    with st.TokenTune(ratio=0.4, pattern="random").attach(model) as handle:
                        logits, _ = run(model, batch)
                    with st.TokenTune(ratio=1.0).attach(model):
                        _, gradients = run(model, batch)
                except (ValueError, RuntimeError) as refusal:
                    if "TokenTune" not in str(refusal):
                        wrong[model_type] = refusal
                    continue
                if head != "pooled":
                    full = full.gather(1, selected(handle)[:, :, None].expand(-1, -1, full.shape[-1]))
                error = max(float((logits - full).abs().max() / full.abs().max()), distance(gradients, expected))
                if error < CAP:
                    exact.append(model_type)
                else:
                    wrong[model_type] = error
    finally:
        logging.disable(logging.NOTSET)
    assert wrong == {}
    assert len(exact) >= least
