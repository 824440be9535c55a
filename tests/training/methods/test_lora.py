from typing import Any

import pytest
import torch
from peft.tuners.lora import LoraLayer
from transformers import (
    BertForMaskedLM,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from slivertune.training.methods.lora import LoraMethod
from slivertune.training.models import LoadedModel
from slivertune.training.options.methods import LoraOptions
from tests.training.test_models import make_task
from tests.training.tiny import bert_config, llama_config


def adapt(model: Any, kind: str, new_modules: tuple[str, ...] = (), **settings: Any) -> tuple[Any, LoraMethod]:
    method = LoraMethod(LoraOptions(**settings))
    loaded = LoadedModel(model=model, new_modules=new_modules, revision="some-branch")
    return method.adapt(loaded, make_task(kind)), method


def trained(model: Any) -> set[str]:
    names = (name for name, parameter in model.named_parameters() if parameter.requires_grad)
    return {name.removeprefix("base_model.model.") for name in names if "lora_" not in name}


def test_of_a_causal_model_adapters_alone_are_trained_and_the_head_has_none() -> None:
    settings = {"lora_rank": 2, "lora_alpha": 8, "lora_dropout": 0.25}
    model, method = adapt(LlamaForCausalLM(llama_config()), "causal_lm", **settings)
    assert trained(model) == set()
    assert method.settings()["num_adapted"] == 2 * 7
    assert not any("lm_head.lora" in name for name, _ in model.named_parameters())
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    assert {(layer.r["default"], layer.scaling["default"]) for layer in layers} == {(2, 4.0)}
    assert {layer.lora_dropout["default"].p for layer in layers} == {0.25}
    assert model.peft_config["default"].revision == "some-branch"


@pytest.mark.parametrize(
    ("model", "new", "paths"),
    [
        (
            BertForSequenceClassification(bert_config()),
            ("bert.pooler.dense", "classifier"),
            [f"{path}.modules_to_save.default" for path in ("bert.pooler.dense", "classifier")],
        ),
        # A head of several modules is trained as one.
        (
            RobertaForSequenceClassification(RobertaConfig(**{**bert_config().to_dict(), "model_type": "roberta"})),
            ("classifier.dense", "classifier.out_proj"),
            [f"classifier.modules_to_save.default.{part}" for part in ("dense", "out_proj")],
        ),
    ],
    ids=["bert", "roberta"],
)
def test_new_modules_of_a_classifier_are_trained_and_none_twice(
    model: Any, new: tuple[str, ...], paths: list[str]
) -> None:
    adapted, method = adapt(model, "sequence_classification", new)
    assert trained(adapted) == {f"{path}.{name}" for path in paths for name in ("weight", "bias")}
    assert method.settings()["num_adapted"] == 2 * 6, "what is trained whole has no adapter beside it"


def test_a_masked_language_model_is_adapted_too() -> None:
    model, method = adapt(BertForMaskedLM(bert_config()), "masked_lm")
    assert trained(model) == set()
    # Six in a block, and the transformation before the head, which is no head itself.
    assert method.settings()["num_adapted"] == 2 * 6 + 1
    ids = torch.arange(5, 15).unsqueeze(0)
    model(input_ids=ids, labels=ids).loss.backward()
    adapters = [parameter for name, parameter in model.named_parameters() if "lora_B" in name]
    assert all(parameter.grad is not None and parameter.grad.abs().max() > 0 for parameter in adapters)


def test_what_is_trained_is_fp32_beside_16_bit_weights() -> None:
    model, _ = adapt(
        BertForSequenceClassification(bert_config()).to(torch.bfloat16), "sequence_classification", ("classifier",)
    )
    assert {parameter.dtype for parameter in model.parameters() if parameter.requires_grad} == {torch.float32}
    assert {parameter.dtype for parameter in model.parameters() if not parameter.requires_grad} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("names", "tie", "told"),
    [
        (["q_proj", "embed_tokens"], True, [("model.embed_tokens", "lm_head")]),
        (["lm_head"], True, [("lm_head", "model.embed_tokens")]),
        (["embed_tokens", "lm_head"], True, [("model.embed_tokens", "lm_head"), ("lm_head", "model.embed_tokens")]),
        (["embed_tokens"], False, []),
        (["q_proj"], True, []),
    ],
)
# PEFT says so too, and calls it a complication.
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
def test_adapters_of_a_tied_weight_are_told_of_its_other_places(
    names: list[str], tie: bool, told: list[tuple[str, str]]
) -> None:
    made = LlamaForCausalLM(LlamaConfig(**{**llama_config().to_dict(), "tie_word_embeddings": tie}))
    model, method = adapt(made, "causal_lm", lora_target_modules=names)
    notes = method.notes(model, learning_rate=None)
    begins = [f"the adapter of {one} does not change {other}, which has the same weight (tied)" for one, other in told]
    assert [note.split(". `slivertune merge` will write them apart")[0] for note in notes] == begins


@pytest.mark.parametrize("names", [["query"], ["all-linear", "query"]])
def test_targets_that_no_module_has_are_named(names: list[str]) -> None:
    with pytest.raises(ValueError, match=r"lora_target_modules=\[.*'query'\] does not fit LlamaForCausalLM: "):
        adapt(LlamaForCausalLM(llama_config()), "causal_lm", lora_target_modules=names)
