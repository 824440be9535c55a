from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, BertForMaskedLM, LlamaForCausalLM

from slivertune.training.methods.registry import TRAIN_METHODS
from slivertune.training.models import LoadedModel, Precision, choose_precision, load_model, num_weights, open_model
from slivertune.training.options.arguments import ModelArguments, WeightsDtype
from slivertune.training.tasks.task import Task
from tests.training.tiny import bert_config, byte_tokenizer, llama_config, word_tokenizer

FP32 = Precision(loading="fp32", autocast="no")
BF16 = Precision(loading="bf16", autocast="bf16")


def make_task(kind: str = "causal_lm") -> Task:
    labels = {0: "bad", 1: "good", 2: "odd"} if kind == "sequence_classification" else None
    return Task(
        train_dataset=None, eval_dataset=None, data_collator=None, model_kind=kind,
        max_length=8, pad_token_id=7, id2label=labels,
    )  # type: ignore[arg-type]  # fmt: skip


def load(folder: Path, kind: str = "causal_lm", precision: Precision = FP32, **options: Any) -> LoadedModel:
    source = open_model(ModelArguments(model_name_or_path=str(folder)), None)
    return load_model(source, make_task(kind), precision=precision, **options)


def load_4bit(folder: Path, kind: str = "causal_lm", precision: Precision = FP32) -> LoadedModel:
    return load(folder, kind, precision, four_bit_device=torch.device("cpu"))


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
    stored: torch.dtype, loading: Any, expected: torch.dtype, tiny_base: Path, tmp_path: Path
) -> None:
    AutoModelForCausalLM.from_pretrained(tiny_base).to(stored).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    model = load(tmp_path, precision=Precision(loading=loading, autocast="no")).model
    assert {parameter.dtype for parameter in model.parameters()} == {expected}
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_classifier_knows_its_labels_and_its_padding(tiny_base: Path) -> None:
    model = load(tiny_base, "sequence_classification").model
    assert model.config.id2label == {0: "bad", 1: "good", 2: "odd"}
    assert model.config.label2id == {"bad": 0, "good": 1, "odd": 2}
    assert (model.config.pad_token_id, model.score.out_features) == (7, 3)


def test_the_embedded_model_is_taken_where_none_is_named_with_the_attention_asked_for(tiny_base: Path) -> None:
    source = open_model(ModelArguments(), tiny_base)
    model = load_model(source, make_task(), precision=FP32, attn_implementation="eager").model
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize(("kind", "attention"), [("causal_lm", "psychic"), ("masked_lm", None)])
def test_an_attention_or_a_head_that_the_model_has_not_is_named(
    kind: str, attention: str | None, tiny_base: Path
) -> None:
    with pytest.raises(ValueError, match=f"can't be loaded as {kind}"):
        load(tiny_base, kind, attn_implementation=attention)


@pytest.mark.parametrize("name", ["./nowhere", "./unheard"])
def test_a_model_that_is_not_there_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "unheard").mkdir()
    (tmp_path / "unheard" / "config.json").write_text('{"model_type": "unheard"}')
    with pytest.raises(ValueError, match=rf"model_name_or_path='{name}' can't be opened.*Give a local folder"):
        open_model(ModelArguments(model_name_or_path=name), None)


def test_new_modules_are_those_that_the_checkpoint_lacks(tiny_base: Path, tmp_path: Path) -> None:
    assert load(tiny_base).new_modules == ()
    classifier = load(tiny_base, "sequence_classification")
    assert classifier.new_modules == ("score",)
    classifier.model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    assert load(tmp_path, "sequence_classification").new_modules == ()


def test_a_head_that_is_tied_to_the_embedding_is_not_new(tmp_path: Path) -> None:
    config = llama_config()
    config.tie_word_embeddings = True
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    assert load(tmp_path).new_modules == ()


PRECISIONS = {
    # What the method takes --bf16 for, --weights_dtype: loading and autocast without --bf16, and with it.
    ("weights", "auto"): (("stored", "no"), ("bf16", "no")),
    ("weights", "fp32"): (("fp32", "no"), ("fp32", "bf16")),
    ("weights", "bf16"): (("bf16", "no"), ("bf16", "no")),
    ("autocast", "auto"): (("fp32", "no"), ("fp32", "bf16")),
    ("autocast", "fp32"): (("fp32", "no"), ("fp32", "bf16")),
    ("autocast", "bf16"): (("bf16", "no"), ("bf16", "no")),
    ("both", "auto"): (("fp32", "no"), ("bf16", "bf16")),
    ("both", "fp32"): (("fp32", "no"), ("fp32", "bf16")),
    ("both", "bf16"): (("bf16", "bf16"), ("bf16", "bf16")),
}


@pytest.mark.parametrize(("use", "weights_dtype"), PRECISIONS)
def test_the_table_of_precisions(use: Any, weights_dtype: WeightsDtype) -> None:
    def chosen(**options: bool) -> tuple[str, str]:
        precision = choose_precision(use, weights_dtype, **{"bf16": False, "fp16": False, **options})
        return precision.loading, precision.autocast

    assert (chosen(), chosen(bf16=True)) == PRECISIONS[use, weights_dtype]
    if weights_dtype != "bf16":
        assert chosen(fp16=True) == ("fp32", "fp16")
    if use == "weights":  # beside 4-bit weights, SFT computes as LoRA does
        beside = chosen(four_bit=True), chosen(four_bit=True, bf16=True)
        assert beside == PRECISIONS["both", weights_dtype]


def test_what_each_method_takes_bf16_for() -> None:
    uses = {name: method.bf16_use for name, method in TRAIN_METHODS.items()}
    assert uses == {"dense": "autocast", "hift": "weights", "sft": "weights", "lora": "both"}


def quantised(model: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if isinstance(module, bitsandbytes.nn.Linear4bit)}


@pytest.fixture(scope="module")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    BertForMaskedLM(bert_config()).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["causal_lm", "sequence_classification"])
def test_the_linear_layers_of_the_blocks_are_nf4_with_double_quantisation_and_no_others(
    kind: str, tiny_base: Path
) -> None:
    model = load_4bit(tiny_base, kind).model
    found = quantised(model)
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert {tuple(name.split(".")[1:]) for name in found} == {
        ("layers", str(index), part, name)
        for index in (0, 1)
        for name in names
        for part in ["mlp" if name in names[4:] else "self_attn"]
    }
    for module in found.values():
        state = module.weight.quant_state
        assert (state.quant_type, state.nested, module.compute_dtype) == ("nf4", True, torch.float32)
    others = [parameter for parameter in model.parameters() if not hasattr(parameter, "quant_state")]
    assert {parameter.dtype for parameter in others} == {torch.float32}


@pytest.mark.parametrize("kind", ["masked_lm", "sequence_classification"])
def test_of_an_encoder_neither_head_nor_pooler_is_quantised(kind: str, tiny_bert: Path) -> None:
    loaded = load_4bit(tiny_bert, kind)
    found = quantised(loaded.model)
    assert len(found) == 2 * 6 and all(".encoder.layer." in name for name in found)
    assert loaded.new_modules == (("bert.pooler.dense", "classifier") if kind == "sequence_classification" else ())


def test_bf16_multiplies_in_bf16_and_holds_norms_in_it(tiny_base: Path, tiny_bert: Path) -> None:
    model = load_4bit(tiny_base, precision=BF16).model
    assert {module.compute_dtype for module in quantised(model).values()} == {torch.bfloat16}
    # In fp32 they would make every activation after them fp32.
    assert model.model.norm.weight.dtype == torch.bfloat16
    assert model.model.layers[0].input_layernorm.weight.dtype == torch.bfloat16
    assert model.model.embed_tokens.weight.dtype == model.lm_head.weight.dtype == torch.bfloat16
    bert = load_4bit(tiny_bert, "masked_lm", BF16).model
    norms = [module for module in bert.modules() if isinstance(module, nn.LayerNorm)]
    assert len(norms) == 2 * 2 + 2, "two in a block, one in the embedding, one in the head"
    assert {parameter.dtype for norm in norms for parameter in norm.parameters()} == {torch.bfloat16}
    assert bert.bert.embeddings.word_embeddings.weight.dtype == torch.bfloat16


def test_quantised_weights_are_counted_as_many_as_they_were(tiny_base: Path) -> None:
    expected = AutoModelForCausalLM.from_pretrained(tiny_base).num_parameters()
    assert sum(map(num_weights, load_4bit(tiny_base).model.parameters())) == expected


def test_quantised_weights_are_those_that_were_read_rounded_to_nf4(tiny_base: Path) -> None:
    whole, functional = AutoModelForCausalLM.from_pretrained(tiny_base), bitsandbytes.functional
    for name, module in quantised(load_4bit(tiny_base).model).items():
        read = whole.get_parameter(f"{name}.weight").data
        expected = functional.dequantize_4bit(
            *functional.quantize_4bit(read, quant_type="nf4", compress_statistics=True)
        )
        found = functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
        assert torch.equal(found, expected) and not torch.equal(found, read)


def test_an_evaluation_changes_neither_the_weights_nor_the_gradients(tiny_base: Path) -> None:
    # On CPUs with AVX512-BF16 bitsandbytes would repack the weights here, for a kernel without a backward.
    model = load_4bit(tiny_base).model
    ids = torch.arange(12).reshape(2, 6)

    def gradient() -> torch.Tensor:
        model.zero_grad()
        model.train()(input_ids=ids, labels=ids).loss.backward()
        return torch.clone(model.model.embed_tokens.weight.grad)

    before, weights = gradient(), {name: module.weight.data.clone() for name, module in quantised(model).items()}
    with torch.no_grad():
        model.eval()(input_ids=ids)
    assert all(torch.equal(module.weight.data, weights[name]) for name, module in quantised(model).items())
    assert before.abs().max() > 0 and torch.equal(gradient(), before)


def test_the_configuration_of_the_source_stays_as_it_was(tiny_base: Path) -> None:
    source = open_model(ModelArguments(), tiny_base)
    load_model(source, make_task(), precision=FP32, four_bit_device=torch.device("cpu"))
    assert source.config.to_dict() == AutoConfig.from_pretrained(tiny_base).to_dict()
