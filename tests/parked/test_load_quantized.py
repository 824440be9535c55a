"""Which classes `load_quantized` takes. What it loads, and what it refuses of files, is in `test_waiting.py`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertForMaskedLM,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
)

import slivertune
from tests.helpers.model_types import MODEL_TYPES
from tests.helpers.models import tiny_llama


class OwnLlama(LlamaForCausalLM):
    pass


@pytest.mark.parametrize(
    ("model_class", "saved_as"),
    [
        (AutoModelForCausalLM, LlamaForCausalLM),
        (LlamaForCausalLM, LlamaForCausalLM),
        (OwnLlama, LlamaForCausalLM),
        (LlamaModel, LlamaModel),
        (LlamaForSequenceClassification, LlamaForSequenceClassification),
        (AutoModelForSequenceClassification, LlamaForSequenceClassification),
    ],
)
def test_every_model_class_with_from_pretrained_is_loaded(model_class: Any, saved_as: Any, tmp_path: Path) -> None:
    saved_as(tiny_llama().config).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    exact = model_class.from_pretrained(tmp_path / "base", dtype=torch.bfloat16)
    model = slivertune.load_quantized(model_class, tmp_path / "base", "int8")
    assert type(model) is type(exact)
    model.save_pretrained(tmp_path / "again")
    again = model_class.from_pretrained(tmp_path / "again", dtype=torch.bfloat16).state_dict()
    assert again.keys() == exact.state_dict().keys()
    assert all(torch.equal(again[name], each) for name, each in exact.state_dict().items())


@pytest.mark.parametrize("model_class", [AutoConfig, AutoTokenizer, PeftModel, nn.Linear, "LlamaForCausalLM", None])
def test_what_is_no_model_class_is_refused(model_class: Any, tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    with pytest.raises(TypeError, match=r"model_class=.* is not a model class of transformers\. Name one"):
        slivertune.load_quantized(model_class, tmp_path, "int8")


@pytest.mark.parametrize("model_class", [BertForMaskedLM, AutoModelForImageClassification])
def test_a_class_of_other_models_is_refused_by_name(model_class: Any, tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"{model_class.__name__} .* no model of type 'llama'"):
        slivertune.load_quantized(model_class, tmp_path, "int8")


def test_a_checkpoint_of_other_names_can_be_loaded_once_it_is_saved_as_its_refusal_says(tmp_path: Path) -> None:
    model = MODEL_TYPES["vit"].make()
    model.save_pretrained(tmp_path / "hub")
    way_out = r"Load it by from_pretrained .* save_pretrained\(folder, save_original_format=False\)"
    with pytest.raises(ValueError, match=way_out):
        slivertune.load_quantized(type(model), tmp_path / "hub", "int8")
    loaded: Any = type(model)
    loaded.from_pretrained(tmp_path / "hub").save_pretrained(tmp_path / "own", save_original_format=False)
    quantized = slivertune.load_quantized(type(model), tmp_path / "own", "int8", dtype=torch.float32)
    quantized.save_pretrained(tmp_path / "again")
    again = loaded.from_pretrained(tmp_path / "again").state_dict()
    assert all(torch.equal(again[name], each) for name, each in model.state_dict().items())
