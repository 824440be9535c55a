import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    LlamaForCausalLM,
    LlamaForQuestionAnswering,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
)

from slivertune import SFT, SFTConfig
from tests.helpers.models import tiny_bert, tiny_gpt2, tiny_llama
from tests.sft.runs import sft_over

# Nor the head of the classifiers here.
pytestmark = pytest.mark.filterwarnings("ignore:SFT trains the linear layers of the blocks")

LLAMA_LINEAR = [
    f"model.layers.{block}.{part}.weight"
    for block in range(3)
    for part in (
        *(f"self_attn.{name}_proj" for name in "qkvo"),
        *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    )
]


def names(model: nn.Module, **options: Any) -> list[str]:
    return list(sft_over(model, **options).deltas())


def test_by_default_the_linear_layers_of_the_blocks_are_trained() -> None:
    assert names(tiny_llama()) == LLAMA_LINEAR
    gpt2 = names(tiny_gpt2())
    assert len(gpt2) == 3 * 4 and all(name.startswith("transformer.h.") for name in gpt2)
    bert = names(tiny_bert())
    assert len(bert) == 3 * 6 and all(".encoder.layer." in name for name in bert)


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (LlamaForSequenceClassification, {}, ["score.weight"]),
        (LlamaForTokenClassification, {}, ["score.weight"]),
        (LlamaForQuestionAnswering, {}, ["qa_outputs.weight"]),
        (LlamaForSequenceClassification, {"targets": ["q_proj", "score"]}, []),
        (LlamaForCausalLM, {}, []),
    ],
)
def test_a_classifiers_head_that_is_not_trained_is_named(kind: Any, options: dict[str, Any], said: list[str]) -> None:
    model = kind(tiny_llama().config)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sft_over(model, **options)
    heads = [re.findall(r"no weight of the head \((.*?)\)", str(each.message)) for each in caught]
    assert [name for each in heads for name in each] == said


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"targets": ["q_proj"]}, [name for name in LLAMA_LINEAR if "q_proj" in name]),
        ({"targets": ["layers.1.mlp"]}, [name for name in LLAMA_LINEAR if "layers.1.mlp" in name]),
        ({"targets": ["model.layers.2.mlp.up_proj.weight"]}, ["model.layers.2.mlp.up_proj.weight"]),
        ({"targets": [nn.Linear]}, [*LLAMA_LINEAR, "lm_head.weight"]),
        ({"targets": ["model.norm", "lm_head"]}, ["model.norm.weight", "lm_head.weight"]),
        ({"targets": ["model.norm"], "embeddings": True}, ["model.embed_tokens.weight", "model.norm.weight"]),
        ({"embeddings": True}, ["model.embed_tokens.weight", *LLAMA_LINEAR]),
    ],
)
def test_targets_are_found_by_name_and_type_in_the_models_order(options: dict[str, Any], wanted: list[str]) -> None:
    assert names(tiny_llama(), **options) == wanted


def test_a_bias_is_a_target_by_its_name() -> None:
    found = names(tiny_bert(), targets=["query.bias"])
    assert len(found) == 3 and all(name.endswith("query.bias") for name in found)


def test_what_the_user_froze_stays_frozen_unless_it_is_named() -> None:
    model = tiny_llama()
    model.model.layers[0].requires_grad_(False)
    assert names(model) == [name for name in LLAMA_LINEAR if ".layers.0." not in name]
    model = tiny_llama()
    model.requires_grad_(False)
    assert names(model, targets=["q_proj"]) == [name for name in LLAMA_LINEAR if "q_proj" in name]


def test_what_is_not_a_target_is_frozen_and_gets_no_gradient() -> None:
    model = tiny_llama()
    SFT(model, config=SFTConfig(density=0.1), lr=1.0, total_steps=9)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad and "slivertune" not in name}
    assert trainable == set(LLAMA_LINEAR)


@pytest.mark.parametrize(
    ("options", "count"),
    [({"density": 0.05}, None), ({"num_weights": 1234}, 1234), ({"equivalent_lora_rank": 2}, None)],
)
def test_the_number_of_weights_is_what_was_asked_for(options: dict[str, Any], count: int | None) -> None:
    model = tiny_llama()
    shapes = [tuple(model.get_parameter(name).shape) for name in LLAMA_LINEAR]
    optimizer = SFT(model, config=SFTConfig(**options), lr=1.0, total_steps=9)
    if "equivalent_lora_rank" in options:
        count = sum(2 * (rows + columns) for rows, columns in shapes)
    if count is None:
        count = sum(round(0.05 * rows * columns) for rows, columns in shapes)
    assert optimizer.num_weights == count
    share = count / sum(rows * columns for rows, columns in shapes)
    for delta in optimizer.deltas().values():
        assert abs(delta.num_weights - share * (delta.shape[0] * delta.shape[1])) <= 1


def test_the_default_rank_is_lowered_to_what_fits_and_one_that_was_asked_for_is_not() -> None:
    model = tiny_llama()
    shapes = [tuple(model.get_parameter(name).shape) for name in LLAMA_LINEAR]
    with pytest.raises(ValueError, match=r"LoRA of rank 64 would train .* Lower equivalent_lora_rank"):
        SFT(model, config=SFTConfig(equivalent_lora_rank=64), lr=1.0, total_steps=9)
    per_rank, all_weights = (
        sum(rows + columns for rows, columns in shapes),
        sum(rows * columns for rows, columns in shapes),
    )
    rank = max(each for each in range(65) if each * per_rank <= all_weights)
    assert 0 < rank < 64
    with pytest.warns(UserWarning, match=rf"than the {all_weights} .* as LoRA of rank {rank} would\. .*give density"):
        optimizer = SFT(model, config=SFTConfig(), lr=1.0, total_steps=9)
    assert optimizer.num_weights == rank * per_rank


@pytest.mark.parametrize(
    ("model", "options", "text"),
    [
        (tiny_llama, {"targets": ["no_such"]}, "targets has 'no_such', which matches no module with a weight"),
        (tiny_llama, {"targets": [nn.Conv2d]}, "targets has Conv2d, which matches no module"),
        (lambda: tiny_llama(torch.float16), {}, "q_proj.weight is stored in float16.*Load the model in bfloat16"),
        (lambda: tiny_llama(torch.float64), {}, r"q_proj.weight is stored as torch.float64\. SFT trains fp32 and bf16"),
        (lambda: tiny_llama().requires_grad_(False), {}, "no weight to train sparsely.*unfreeze it"),
        (lambda: nn.Linear(3, 4), {}, r"has no nn.ModuleList.*\. Name the targets with SFTConfig\(targets="),
        (tiny_llama, {"density": None, "num_weights": 3}, "3 weights do not fit"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_with_a_reason(model: Any, options: Any, text: str) -> None:
    built = model()
    before = [(name, value.requires_grad) for name, value in built.named_parameters()]
    with pytest.raises(ValueError, match=text):
        names(built, **options)
    assert [(name, value.requires_grad) for name, value in built.named_parameters()] == before


def test_an_embedding_with_sparse_gradients_is_refused() -> None:
    with pytest.raises(ValueError, match=r"weight is an embedding with sparse gradients\. Build it with sparse=False"):
        names(nn.Sequential(nn.Embedding(9, 4, sparse=True)), targets=[nn.Embedding])


def test_codes_of_8_bits_are_refused() -> None:
    model = tiny_llama()
    weight = model.model.layers[0].mlp.up_proj.weight
    model.model.layers[0].mlp.up_proj.weight = nn.Parameter(weight.data.to(torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match=r"up_proj\.weight is stored as torch\.int8\. SFT trains fp32 and bf16"):
        names(model)
