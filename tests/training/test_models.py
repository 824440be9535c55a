from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from slivertune.training.models import load_model, open_model
from slivertune.training.options.arguments import ModelArguments
from slivertune.training.precision import Precision
from slivertune.training.tasks.task import Task
from tests.training.tiny import byte_tokenizer, llama_config

FP32 = Precision(loading="fp32", autocast="no")


def make_task(kind: str = "causal_lm") -> Task:
    labels = {0: "bad", 1: "good", 2: "odd"} if kind == "sequence_classification" else None
    return Task(
        train_dataset=None, eval_dataset=None, data_collator=None, model_kind=kind,
        max_length=8, pad_token_id=7, id2label=labels,
    )  # type: ignore[arg-type]  # fmt: skip


def stored_as(dtype: torch.dtype, base: Path, folder: Path) -> Path:
    AutoModelForCausalLM.from_pretrained(base).to(dtype).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("stored", "loading", "expected"),
    [
        (torch.float32, "stored", torch.float32),
        (torch.bfloat16, "stored", torch.bfloat16),
        (torch.float16, "stored", torch.bfloat16),
        (torch.float16, "fp32", torch.float32),
        (torch.float32, "bf16", torch.bfloat16),
    ],
)
def test_weights_are_held_in_what_was_settled(
    stored: torch.dtype, loading: str, expected: torch.dtype, tiny_base: Path, tmp_path: Path
) -> None:
    source = open_model(ModelArguments(model_name_or_path=str(stored_as(stored, tiny_base, tmp_path))), None)
    model = load_model(source, make_task(), precision=Precision(loading=loading, autocast="no")).model  # type: ignore[arg-type]
    assert {parameter.dtype for parameter in model.parameters()} == {expected}
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_classifier_knows_its_labels_and_its_padding(tiny_base: Path) -> None:
    source, precision = open_model(ModelArguments(), tiny_base), FP32
    model = load_model(source, make_task("sequence_classification"), precision=precision).model
    assert model.config.id2label == {0: "bad", 1: "good", 2: "odd"}
    assert model.config.label2id == {"bad": 0, "good": 1, "odd": 2}
    assert model.config.pad_token_id == 7
    assert model.score.out_features == 3


def test_attention_is_the_one_asked_for(tiny_base: Path) -> None:
    source, precision = open_model(ModelArguments(), tiny_base), FP32
    model = load_model(source, make_task(), precision=precision, attn_implementation="eager").model
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize(("kind", "attention"), [("causal_lm", "psychic"), ("masked_lm", None)])
def test_an_attention_or_a_head_that_the_model_has_not_is_named(
    kind: str, attention: str | None, tiny_base: Path
) -> None:
    source, precision = open_model(ModelArguments(), tiny_base), FP32
    with pytest.raises(ValueError, match=f"can't be loaded as {kind}"):
        load_model(source, make_task(kind), precision=precision, attn_implementation=attention)


@pytest.mark.parametrize("name", ["./nowhere", "./unheard"])
def test_a_model_that_is_not_there_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "unheard").mkdir()
    (tmp_path / "unheard" / "config.json").write_text('{"model_type": "unheard"}')
    with pytest.raises(ValueError, match=rf"model_name_or_path='{name}' can't be opened.*give a local folder"):
        open_model(ModelArguments(model_name_or_path=name), None)


def test_new_modules_are_those_that_the_checkpoint_lacks(tiny_base: Path, tmp_path: Path) -> None:
    source, precision = open_model(ModelArguments(), tiny_base), FP32
    assert load_model(source, make_task(), precision=precision).new_modules == ()
    classifier = load_model(source, make_task("sequence_classification"), precision=precision)
    assert classifier.new_modules == ("score",)
    classifier.model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    again = open_model(ModelArguments(model_name_or_path=str(tmp_path)), None)
    assert load_model(again, make_task("sequence_classification"), precision=precision).new_modules == ()


def test_a_head_that_is_tied_to_the_embedding_is_not_new(tmp_path: Path) -> None:
    config = llama_config()
    config.tie_word_embeddings = True
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    source = open_model(ModelArguments(model_name_or_path=str(tmp_path)), None)
    assert load_model(source, make_task(), precision=FP32).new_modules == ()
