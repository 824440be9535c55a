import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from peft import PeftModel, PrefixTuningConfig, get_peft_model
from peft.tuners.lora import Conv2d, Embedding, Linear
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForPreTraining,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    MixtralConfig,
    MixtralForCausalLM,
    modeling_utils,
)

from slivertune.cli import main
from slivertune.deltas import adapter_merge
from slivertune.deltas.adapter_folder import check_no_adapter, open_adapter
from slivertune.deltas.adapter_merge import merge_adapter
from slivertune.deltas.adapter_outputs import choose_inputs
from tests.deltas.adapters import BASES, config, half_spacing, naive_merge, save_adapter, save_base
from tests.helpers.ranks import quick

IDS = torch.arange(1, 25).view(2, 12)
# PEFT 0.21 asks by the name that transformers 5.23 retires, and warns of what is to be tested.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed but the targeted layer:UserWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def by_peft(model: Any, adapter: str) -> Any:
    return PeftModel.from_pretrained(model, adapter).merge_and_unload().eval()


@dataclass(frozen=True, kw_only=True)
class Case:
    """A base, an adapter of it, and what becomes of both."""

    base: str = "llama"
    tie: bool = False
    dtype: torch.dtype = torch.float32
    shard: int | str = "50GB"
    resize: int | None = None
    adapter: dict[str, Any] = field(default_factory=dict)
    untied: bool = False
    """Whether the merged configuration must no longer tie the embeddings."""
    refused: str | None = None
    not_run: bool = False
    """Whether PEFT's model of the adapter does not run, so that outputs can not be compared."""


EMBEDDING, HEAD = {"target_modules": ["q_proj", "embed_tokens"]}, {"target_modules": ["v_proj", "lm_head"]}
BOTH = {"target_modules": ["embed_tokens", "lm_head"]}
TOKENS, WHOLE = {"trainable_token_indices": [3, 60]}, {"modules_to_save": ["embed_tokens", "lm_head"]}
EXPERTS = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
PATTERNS = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.1.mlp.down_proj": 32}}
BERT = {"target_modules": ["query", "value"], "task_type": None}
LINEAR = {"target_modules": "all-linear", "task_type": None}
PATCHES = {"target_modules": ["projection"], "task_type": None}
SOUNDS = {"target_modules": ["conv1", "conv2"], "task_type": None}
T5 = {"task_type": "SEQ_2_SEQ_LM"}
BF16, F16 = torch.bfloat16, torch.float16

CASES = {
    "plain": Case(),
    "bf16": Case(dtype=BF16),
    "fp16, sharded": Case(dtype=F16, shard=20_000),
    "bf16, sharded, tied": Case(dtype=BF16, shard=20_000, tie=True),
    "rslora, patterns": Case(dtype=BF16, adapter={"use_rslora": True, **PATTERNS}),
    "dora": Case(dtype=BF16, adapter={"use_dora": True}),
    "dora, resized": Case(dtype=BF16, resize=70, adapter={"use_dora": True}),
    "dora, sharded": Case(dtype=BF16, shard=20_000, adapter={"use_dora": True}),
    "embedding, tied": Case(tie=True, adapter=EMBEDDING, untied=True),
    "embedding, tied, bf16, sharded": Case(tie=True, dtype=BF16, shard=20_000, adapter=EMBEDDING, untied=True),
    "embedding, not tied": Case(dtype=BF16, adapter=EMBEDDING),
    "embedding, tied, dora": Case(tie=True, adapter={**EMBEDDING, "use_dora": True}, untied=True),
    "embedding, tied, rslora, resized": Case(
        tie=True, resize=72, adapter={**EMBEDDING, "use_rslora": True}, untied=True
    ),
    "head, tied": Case(tie=True, dtype=BF16, adapter=HEAD, untied=True),
    "both, tied": Case(tie=True, dtype=BF16, adapter=BOTH, untied=True),
    "both, not tied": Case(adapter=BOTH),
    "whole, tied": Case(tie=True, dtype=BF16, adapter=WHOLE, untied=True),
    "whole, not tied, resized": Case(resize=70, dtype=BF16, adapter=WHOLE),
    "whole, tied, resized, sharded": Case(
        tie=True, resize=70, dtype=BF16, shard=20_000, adapter=WHOLE, untied=True
    ),
    "tokens, sharded": Case(dtype=BF16, shard=20_000, adapter=TOKENS),
    "tokens, tied": Case(tie=True, dtype=BF16, adapter=TOKENS),
    "tokens, not tied, dora": Case(adapter={**TOKENS, "use_dora": True}),
    "tokens, resized, tied": Case(tie=True, resize=66, adapter={"trainable_token_indices": [3, 64, 65]}),
    "resized": Case(resize=80, dtype=BF16),
    "resized to fewer, tied": Case(resize=48, tie=True),
    "conv1d": Case(base="gpt2", tie=True, adapter={"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "conv1d, bf16, dora, embedding": Case(
        base="gpt2", tie=True, dtype=BF16, untied=True,
        adapter={"target_modules": ["c_attn", "wte"], "fan_in_fan_out": True, "use_dora": True},
    ),
    "experts": Case(base="mixtral", dtype=BF16, adapter=EXPERTS),
    "experts, sharded": Case(base="mixtral", shard=20_000, adapter={**EXPERTS, "use_rslora": True}),
    "experts of transposed weights": Case(base="gpt_oss", dtype=BF16, adapter=EXPERTS),
    "convolution of an image": Case(base="vit", dtype=BF16, adapter=PATCHES),
    "convolution of an image, dora": Case(base="vit", adapter={**PATCHES, "use_dora": True}),
    "convolutions of sounds": Case(base="whisper", tie=True, not_run=True, adapter=SOUNDS),
    "convolutions of sounds, dora": Case(base="whisper", tie=True, not_run=True, adapter={**SOUNDS, "use_dora": True}),
    # PEFT 0.21 adds the delta of the output projection twice.
    "attention of torch": Case(
        base="siglip", adapter={**LINEAR, "target_modules": ["attention"]}, refused="attention.out_proj puts out "
    ),
    "both, tied, told to stay so": Case(tie=True, adapter={**BOTH, "ensure_weight_tying": True}),
    "whole, tied, told to stay so": Case(
        tie=True, adapter={"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
    ),
    "biases": Case(base="bert", tie=True, adapter={**BERT, "bias": "lora_only"}),
    "all biases, bf16": Case(base="bert", tie=True, dtype=BF16, adapter={**BERT, "bias": "all"}),
    "bert, embedding": Case(
        base="bert", tie=True, untied=True, adapter={**BERT, "target_modules": ["query", "word_embeddings"]}
    ),
    "encoder and decoder": Case(base="t5", tie=True, adapter={**T5, "target_modules": ["q", "v"]}),
    "encoder and decoder, head": Case(
        base="t5", tie=True, adapter={**T5, "target_modules": ["q", "lm_head"]}, untied=True
    ),
    "image": Case(base="vit", dtype=BF16, adapter={**LINEAR, "modules_to_save": ["classifier"]}),
    "speech, tied": Case(base="whisper", tie=True, adapter=LINEAR),
    "bias of the factor": Case(base="bert", tie=True, adapter={**BERT, "lora_bias": True}),
    "bias of the factor, without one": Case(adapter={"lora_bias": True}, refused="because the base layer has no bias"),
    "head and tokens, tied": Case(
        tie=True, adapter={**HEAD, **TOKENS}, refused="PEFT does not merge the adapters of lm_head"
    ),
    "embedding whole, tied": Case(tie=True, adapter={"modules_to_save": ["embed_tokens"]}, untied=True),
    **{
        f"init {init}": Case(adapter={"init_lora_weights": init}, refused="changed the base before the training")
        for init in ("pissa", "pissa_niter_2", "olora")
    },
    "replicated": Case(adapter={"layer_replication": [(0, 2), (1, 2)]}, refused="has layer_replication, so the model"),
    "invocation": Case(adapter={"alora_invocation_tokens": [3]}, refused="has alora_invocation_tokens, so the model"),
}  # fmt: skip


def state_of(folder: str, case: Case) -> dict[str, torch.Tensor]:
    """All tensors under all their names, as transformers load them."""
    made: Any = type(BASES[case.base](case.tie))
    return dict(made.from_pretrained(folder, dtype=torch.float32).state_dict())


def save_case(case: Case) -> None:
    """Save the base and the adapter of a case."""
    torch.manual_seed(0)
    BASES[case.base](case.tie).to(case.dtype).save_pretrained("base", max_shard_size=case.shard)
    model = type(BASES[case.base](case.tie)).from_pretrained("base", dtype="auto")
    if case.resize is not None:
        model.resize_token_embeddings(case.resize, mean_resizing=False)
    save_adapter(Path("adapter"), model, **case.adapter)


SLOW = {
    *("plain", "bf16", "dora", "dora, resized", "both, not tied", "whole, tied", "tokens, not tied, dora"),
    *("embedding, tied", "embedding, tied, rslora, resized", "experts, sharded", "convolutions of sounds, dora"),
    *("bert, embedding", "encoder and decoder", "init pissa_niter_2", "embedding, not tied", "tokens, tied"),
}
"""Cases whose values another one has together with more."""


@pytest.mark.parametrize("case_name", quick(CASES, CASES.keys() - SLOW))
def test_each_tensor_is_the_base_and_the_delta_rounded_once_or_the_merge_is_refused(
    case_name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    case = CASES[case_name]
    save_case(case)
    code = main(["merge", "adapter", "--output_dir", "merged"])
    said = capfd.readouterr()
    if case.refused is not None:
        assert code == 2 and case.refused in said.err and not Path("merged").exists()
        return
    assert code == 0, said.err
    base, merged = state_of("base", case), state_of("merged", case)
    if case.resize is not None:
        assert f"the vocabulary was resized to {case.resize} rows" in said.out
    expected = naive_merge(base, Path("adapter"), ("model.embed_tokens.weight", "lm_head.weight") if case.tie else ())
    assert merged.keys() == expected.keys()
    for name, exact in expected.items():
        if exact.equal(base[name].double()):
            assert torch.equal(merged[name], base[name]), name
        # Beside the one rounding, fp32 keeps 24 bits of each of up to 48 terms: 3e-6 of the largest.
        room = half_spacing(exact, case.dtype) + 3e-6 * max(1, exact.abs().max())
        assert (merged[name].double() - exact).abs().le(room).all(), name
    stored = [each for path in Path("merged").glob("*.safetensors") for each in load_file(path).values()]
    assert {each.dtype for each in stored} == {case.dtype}
    settings = json.loads(Path("merged/config.json").read_text(encoding="utf-8"))
    assert settings.get("tie_word_embeddings", case.tie) == (case.tie and not case.untied)
    assert ("untied (tied in the base" in said.out) == case.untied
    assert ("outputs were not compared" in said.out) == case.not_run


@pytest.mark.parametrize("more", [{}, {"use_dora": True}, {"use_rslora": True}, {"modules_to_save": ["lm_head"]}])
def test_transformers_alone_give_the_logits_of_pefts_own_merged_model(
    more: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    save_base(Path("base"))
    save_adapter(Path("adapter"), AutoModelForCausalLM.from_pretrained("base"), **more)
    before = AutoModelForCausalLM.from_pretrained("base")
    expected = by_peft(AutoModelForCausalLM.from_pretrained("base"), "adapter")(IDS).logits
    assert main(["merge", "adapter", "--output_dir", "merged"]) == 0
    assert "merged: base with the LoRA of adapter added to 4 matrices\n" in capsys.readouterr().out
    assert not list(Path("merged").glob("adapter*"))
    merged = AutoModelForCausalLM.from_pretrained("merged")
    assert type(merged) is LlamaForCausalLM
    assert torch.equal(merged(IDS).logits, expected)
    assert (before(IDS).logits - expected).abs().max() > 0.1


def test_a_classifier_keeps_its_head_and_as_many_classes_as_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    save_base(Path("base"))
    model = AutoModelForSequenceClassification.from_pretrained("base", num_labels=3)
    save_adapter(Path("adapter"), model, task_type="SEQ_CLS")
    assert main(["merge", "adapter", "--output_dir", "merged"]) == 0
    assert "replaced, since they were trained whole: score\n" in capsys.readouterr().out
    expected = by_peft(AutoModelForSequenceClassification.from_pretrained("base", num_labels=3), "adapter")(IDS).logits
    merged = AutoModelForSequenceClassification.from_pretrained("merged")
    assert type(merged) is LlamaForSequenceClassification and merged.config.num_labels == 3
    assert torch.equal(merged(IDS).logits, expected)


def test_a_model_without_a_task_of_pefts_is_of_the_class_that_it_was() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    # Of another class than the model that was trained.
    BertForPreTraining(BertConfig(vocab_size=64, **sizes)).save_pretrained("base")
    save_adapter(
        Path("adapter"), AutoModelForMaskedLM.from_pretrained("base"), task_type=None, target_modules=["query"]
    )
    expected = by_peft(AutoModelForMaskedLM.from_pretrained("base"), "adapter")(IDS).logits
    assert main(["merge", "adapter", "--output_dir", "merged"]) == 0
    merged = AutoModelForMaskedLM.from_pretrained("merged")
    assert merged.config.architectures == ["BertForMaskedLM"] and torch.equal(merged(IDS).logits, expected)


def change_config(folder: str, name: str = "adapter_config.json", **more: Any) -> None:
    path = Path(folder) / name
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **more}), encoding="utf-8")


def test_what_can_not_be_merged_is_one_line_and_leaves_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    save_base(Path("base"))
    save_base(Path("wider"), hidden_size=64)
    save_base(Path("deeper"), num_hidden_layers=3)
    save_base(Path("shallower"), num_hidden_layers=1)
    save_base(Path("quantised"))
    save_base(Path("narrow"), torch.float8_e4m3fn)
    save_base(Path("foreign"))
    change_config("foreign", "config.json", model_type="own", auto_map={"AutoConfig": "own.Own"})
    torch.manual_seed(0)
    LlamaModel(config()).save_pretrained("headless")
    (save_base(Path("bare")) / "model.safetensors").unlink()
    save_adapter(Path("adapter"), AutoModelForCausalLM.from_pretrained("base"))
    for name in ("nameless", "lost", "damaged", "empty", "not_a_number", "newer", "named/first", "named/second"):
        save_adapter(Path(name), AutoModelForCausalLM.from_pretrained("base"))
    change_config("nameless", base_model_name_or_path=None)
    change_config("lost", base_model_name_or_path="./gone")
    change_config("newer", use_tomorrow=True)
    Path("damaged/adapter_config.json").write_text("{", encoding="utf-8")
    Path("empty/adapter_model.safetensors").unlink()
    weights = load_file("not_a_number/adapter_model.safetensors")
    weights[next(iter(weights))].fill_(float("nan"))
    save_file(weights, "not_a_number/adapter_model.safetensors")
    prefixes = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    get_peft_model(AutoModelForCausalLM.from_pretrained("base"), prefixes).save_pretrained("prefixes")
    path = Path("quantised/config.json")
    settings = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**settings, "quantization_config": {"load_in_4bit": True}}), encoding="utf-8")
    before = sorted(Path.cwd().rglob("*"))
    for arguments, message in (
        (
            ["adapter", "--model_name_or_path", "wider"],
            "layers.0.mlp.down_proj.lora_B.weight is (32, 4) in the adapter and (64, 4) in the base. Name the base",
        ),
        (
            ["adapter", "--model_name_or_path", "deeper"],
            "deeper is not the base of adapter: base_model.model.model.layers.2",
        ),
        (
            ["adapter", "--model_name_or_path", "shallower"],
            "shallower is not the base of adapter: base_model.model.model.la",
        ),
        (["adapter", "--model_name_or_path", "quantised"], "quantised is quantised, and its codes can't hold the sum"),
        (["adapter", "--model_name_or_path", "lost"], "lost is an adapter itself. Name the base by"),
        (
            ["adapter", "--model_name_or_path", "narrow"],
            "in float8_e4m3fn, and adapters merge only into float32, bfloat16, float16",
        ),
        (
            ["adapter", "--model_name_or_path", "foreign"],
            "foreign can't be loaded: it brings code of its own, which is",
        ),
        (
            ["adapter", "--model_name_or_path", "headless"],
            "lm_head.weight of a LlamaForCausalLM is neither in headless nor in adapter, and would be random",
        ),
        (["newer"], "newer has use_tomorrow=True, which this PEFT does not know and would ignore"),
        (["named"], "neither SFT's deltas nor a LoRA adapter. Did you mean named/first or named/second?"),
        (["adapter", "--model_name_or_path", "./gone"], "model_name_or_path='./gone' is neither a folder nor a model"),
        (["nameless"], "nameless does not name its base. Name it with --model_name_or_path"),
        (["lost"], "model_name_or_path='./gone' is neither a folder nor a model in the hub's cache"),
        (["damaged"], "damaged/adapter_config.json can't be read: "),
        (["empty"], "empty has no adapter_model.safetensors: the adapter is not whole"),
        (["adapter", "--model_name_or_path", "bare"], "bare holds neither model.safetensors nor "),
        (["not_a_number"], "not_a_number can't be merged into base: NaNs detected"),
        (["prefixes"], "prefixes is an adapter of the type PREFIX_TUNING, and only LoRA's can be merged"),
        (["adapter", "nameless"], "adapter is a LoRA adapter, which is merged alone. Name it without the others"),
        (
            ["adapter", "--allow_quantized_base"],
            "--allow_quantized_base is an option for SFT's deltas, and adapter is a LoRA",
        ),
        (["base"], "base/sft_delta.safetensors is not there. Name the folder that save_pretrained"),
    ):
        assert main(["merge", *arguments, "--output_dir", "out"]) == 2, arguments
        error = capfd.readouterr().err
        line = next(line for line in error.splitlines() if line.startswith("slivertune merge: error: "))
        assert message in line, line
    assert main(["merge", "adapter", "--output_dir", "base"]) == 2
    assert "base exists already. Name a new folder" in capfd.readouterr().err
    assert sorted(Path.cwd().rglob("*")) == before


def adapter_of_resized(**more: Any) -> None:
    """Of a vocabulary that grew by six rows for the training, and that was not saved with the adapter."""
    model = AutoModelForCausalLM.from_pretrained("base")
    model.resize_token_embeddings(70, mean_resizing=False)
    save_adapter(Path("adapter"), model, **more)
    tensors = load_file("adapter/adapter_model.safetensors")
    save_file(
        {name: each for name, each in tensors.items() if "lora_" in name or "trainable_tokens" in name},
        "adapter/adapter_model.safetensors",
    )


def adapter_without(part: str) -> None:
    model = AutoModelForCausalLM.from_pretrained("base")
    model.resize_token_embeddings(70, mean_resizing=False)
    save_adapter(Path("adapter"), model)
    tensors = load_file("adapter/adapter_model.safetensors")
    save_file({name: each for name, each in tensors.items() if part not in name}, "adapter/adapter_model.safetensors")


@pytest.mark.parametrize(
    "make",
    [
        lambda: adapter_of_resized(target_modules=["lm_head"]),
        lambda: adapter_of_resized(target_modules=["embed_tokens"]),
        lambda: adapter_of_resized(trainable_token_indices=[3, 64]),
        lambda: adapter_without("lm_head"),
        lambda: adapter_without("embed_tokens"),
    ],
    ids=["head", "embedding", "tokens", "rows of the embedding alone", "rows of the head alone"],
)
def test_an_adapter_without_the_rows_of_a_resized_vocabulary_is_told_so(
    make: Callable[[], None], capfd: pytest.CaptureFixture[str]
) -> None:
    save_base(Path("base"))
    make()
    assert main(["merge", "adapter", "--output_dir", "merged"]) == 2
    said = "Its vocabulary was resized for the training, and the adapter does not hold all rows"
    assert said in capfd.readouterr().err
    assert not Path("merged").exists()


def test_two_values_for_one_tied_weight_are_refused(capfd: pytest.CaptureFixture[str]) -> None:
    save_base(Path("base"), tie_word_embeddings=True)
    save_adapter(Path("adapter"), AutoModelForCausalLM.from_pretrained("base"))
    tensors = load_file("adapter/adapter_model.safetensors")
    rows = {f"base_model.model.{name}.weight": torch.randn(64, 32) for name in ("model.embed_tokens", "lm_head")}
    save_file({**tensors, **rows}, "adapter/adapter_model.safetensors")
    assert main(["merge", "adapter", "--output_dir", "merged"]) == 2
    assert (
        "can't keep its values in the base, where it is tied to another tensor. Untie the base"
        in capfd.readouterr().err
    )


def test_a_base_that_stores_tensors_in_several_dtypes_keeps_them() -> None:
    save_base(Path("base"), torch.bfloat16)
    tensors = load_file("base/model.safetensors")
    kept = ("model.norm.weight", "model.layers.0.self_attn.q_proj.weight")
    tensors |= {name: tensors[name].float() / 3 for name in kept}
    save_file(tensors, "base/model.safetensors", {"format": "pt"})
    save_adapter(Path("adapter"), AutoModelForCausalLM.from_pretrained("base", dtype=torch.float32))
    assert main(["merge", "adapter", "--output_dir", "merged"]) == 0
    base, merged = load_file("base/model.safetensors"), load_file("merged/model.safetensors")
    assert {name: each.dtype for name, each in merged.items()} == {name: each.dtype for name, each in base.items()}
    assert torch.equal(merged[kept[0]], base[kept[0]]) and not torch.equal(merged[kept[1]], base[kept[1]])


def test_a_random_pooler_is_said_where_the_outputs_do_not_need_it(capsys: pytest.CaptureFixture[str]) -> None:
    BASES["bert"](True).save_pretrained("base")
    save_adapter(Path("adapter"), AutoModel.from_pretrained("base"), **{**BERT, "task_type": "FEATURE_EXTRACTION"})
    assert main(["merge", "adapter", "--output_dir", "merged"]) == 0
    said = "not needed for outputs: pooler.dense.bias, pooler.dense.weight\n"
    assert said in capsys.readouterr().out
    expected = by_peft(AutoModel.from_pretrained("base"), "adapter")(IDS).last_hidden_state
    assert torch.equal(AutoModel.from_pretrained("merged")(IDS).last_hidden_state, expected)


def test_files_that_the_model_does_not_save_come_along_and_what_is_left_out_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    BASES["llama"](False).save_pretrained("base", max_shard_size=20_000)
    Path("base/parts").mkdir()
    kept = ("preprocessor_config.json", "own.py", "parts/config.json", "merges.txt")
    for name in (*kept, "pytorch_model.bin", "rust_model.ot"):
        Path("base", name).write_text("{}", encoding="utf-8")
    path = next(Path("base").glob("*.index.json"))
    index = json.loads(path.read_text(encoding="utf-8"))
    save_file({"mtp.weight": torch.ones(2), "mtp.bias": torch.ones(2)}, "base/model-more.safetensors", {"format": "pt"})
    index["weight_map"] |= {"mtp.weight": "model-more.safetensors", "mtp.bias": "model-more.safetensors"}
    path.write_text(json.dumps(index), encoding="utf-8")
    for name in ("adapter", "adapter/second"):
        save_adapter(Path(name), AutoModelForCausalLM.from_pretrained("base"))
    assert main(["merge", "adapter", "--output_dir", "merged"]) == 0
    said = capsys.readouterr().out
    assert "not copied, since the model's class has no such weights: mtp.bias and 1 more\n" in said
    assert "not copied, since they may hold the base's weights: pytorch_model.bin, rust_model.ot\n" in said
    assert "not merged, since they are adapters of other names: adapter/second\n" in said
    found = {str(each.relative_to("merged")) for each in Path("merged").rglob("*") if each.is_file()}
    assert found == {*kept, "config.json", "generation_config.json", "model.safetensors"}


def test_a_sum_beyond_fp16_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    save_base(Path("base"), torch.float16)
    save_adapter(Path("adapter"), AutoModelForCausalLM.from_pretrained("base", dtype="auto"))
    tensors = load_file("adapter/adapter_model.safetensors")
    save_file({name: each.float() * 1000 for name, each in tensors.items()}, "adapter/adapter_model.safetensors")
    assert main(["merge", "adapter", "--output_dir", "merged"]) == 2
    assert "weight' is beyond the range of float16. Use the base in bfloat16 or float32" in capfd.readouterr().err


def a_delta_of_another_scale(patch: pytest.MonkeyPatch) -> None:
    true = Linear.get_delta_weight
    patch.setattr(Linear, "get_delta_weight", lambda *each: 1.01 * true(*each))


def a_base_that_is_changed_on_the_way(patch: pytest.MonkeyPatch) -> None:
    true = PeftModel.from_pretrained

    def load(model: Any, *each: Any, **more: Any) -> Any:
        adapted = true(model, *each, **more)
        model.get_parameter("model.norm.weight").data.add_(2**-20)
        return adapted

    patch.setattr(PeftModel, "from_pretrained", load)


def a_disk_that_changes_a_bit(patch: pytest.MonkeyPatch, name: str = "model.norm.weight", bit: int = 1) -> None:
    true = modeling_utils.safe_save_file

    def save(tensors: dict[str, torch.Tensor], *each: Any, **more: Any) -> None:
        changed = {name: tensor.clone() for name, tensor in tensors.items()}
        changed[name].view(torch.int32).view(-1)[0] ^= bit
        true(changed, *each, **more)

    patch.setattr(modeling_utils, "safe_save_file", save)


def weights_that_stay_tied(patch: pytest.MonkeyPatch) -> None:
    # PEFT's own merge, which adds both deltas to the one tensor.
    patch.setattr("slivertune.deltas.adapter_merge._untie", lambda model: None)


def a_configuration_that_ties(patch: pytest.MonkeyPatch) -> None:
    true = adapter_merge.copy_others

    def copy(base: Any, adapter: Path, folder: Path) -> Path | None:
        tensors = load_file(folder / "model.safetensors")
        del tensors["lm_head.weight"]
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        change_config(str(folder), "config.json", tie_word_embeddings=True)
        return true(base, adapter, folder)

    patch.setattr(adapter_merge, "copy_others", copy)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (a_delta_of_another_scale, "self_attn.q_proj puts out "),
        (a_base_that_is_changed_on_the_way, "adapter changes model.norm.weight of the base when PEFT loads it"),
        (a_disk_that_changes_a_bit, "'model.norm.weight', read back, is not the base's tensor and the adapter's"),
        (weights_that_stay_tied, "the model puts out "),
        (a_configuration_that_ties, "summed in fp32 and rounded once. Leave tied modules out of the adapter"),
    ],
)
def test_a_merge_that_goes_wrong_leaves_nothing_and_says_where(
    fault: Callable[[pytest.MonkeyPatch], None],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    save_base(Path("base"), tie_word_embeddings=True)
    save_adapter(Path("adapter"), AutoModelForCausalLM.from_pretrained("base"), **EMBEDDING)
    before = sorted(Path.cwd().rglob("*"))
    fault(monkeypatch)
    assert main(["merge", "adapter", "--output_dir", "merged"]) == 2
    assert message in capfd.readouterr().err
    assert sorted(Path.cwd().rglob("*")) == before


def one_delta_of(wrapper: type, factor: float, patch: pytest.MonkeyPatch, entry: Any = ...) -> None:
    """Multiply the delta that PEFT merges, but not the one that its forward adds."""
    true: Any = wrapper.get_delta_weight

    def get_delta_weight(self: Any, *each: Any) -> torch.Tensor:
        delta = true(self, *each).clone()
        delta[entry] *= factor
        return delta

    patch.setattr(wrapper, "get_delta_weight", get_delta_weight)


MERGE = ["merge", "adapter", "--model_name_or_path", "base", "--output_dir", "merged"]


def test_an_expert_that_no_token_of_the_check_reaches_is_verified(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    experts = {"num_hidden_layers": 1, "num_local_experts": 32, "num_experts_per_tok": 2}
    model = MixtralForCausalLM(MixtralConfig(vocab_size=64, **sizes, **experts))
    model.save_pretrained("base")
    inputs = choose_inputs(model, [])
    scores = model(**inputs, output_router_logits=True).router_logits[0]
    reached = set(scores.topk(2).indices.flatten().tolist())
    assert inputs["input_ids"].numel() == 8 and len(reached) <= 16
    save_adapter(Path("adapter"), model, **EXPERTS)
    other = min({*range(32)} - reached)
    one_delta_of(ParamWrapper, 1.05, monkeypatch, entry=other)
    assert main(MERGE) == 2
    said = "'model.layers.0.mlp.experts.down_proj', read back, is not the base's tensor and the adapter's"
    assert said in capfd.readouterr().err
    assert not Path("merged").exists()


@pytest.mark.parametrize(
    ("alpha", "checks_layers"), [(1.5e-4, True), (2e-3, False)], ids=["of a layer", "of the model, by its tensors"]
)
def test_an_error_of_a_twentieth_is_found_if_the_effect_is_a_ten_thousandth_of_the_outputs(
    alpha: float, checks_layers: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    save_base(Path("base"))
    save_adapter(Path("adapter"), AutoModelForCausalLM.from_pretrained("base"), lora_alpha=alpha)
    model = AutoModelForCausalLM.from_pretrained("base")
    before = model(IDS).logits
    effect = (PeftModel.from_pretrained(model, "adapter")(IDS).logits - before).abs().max()
    # A layer's effect is up to ten times as large beside its own outputs.
    assert effect / before.abs().max() < 2e-4
    with monkeypatch.context() as patch:
        one_delta_of(Linear, 1.05, patch)
        if not checks_layers:
            patch.setattr("slivertune.deltas.adapter_merge.check_layers", lambda *each: None)
        assert main(MERGE) == 2
    said = (
        "q_proj puts out " if checks_layers else "_proj.weight', read back, is not the base's tensor and the adapter's"
    )
    assert said in capfd.readouterr().err
    assert not Path("merged").exists()
    assert main(MERGE) == 0


def test_a_convolution_that_is_merged_wrongly_is_found(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    model = BASES["vit"](False)
    model.save_pretrained("base")
    save_adapter(Path("adapter"), model, **PATCHES)
    one_delta_of(Conv2d, 1.05, monkeypatch)
    monkeypatch.setattr("slivertune.deltas.adapter_merge.choose_inputs", Mock(side_effect=TypeError("no pixels")))
    assert main(MERGE) == 2
    assert "patch_embeddings.projection puts out " in capfd.readouterr().err
    monkeypatch.setattr("slivertune.deltas.adapter_merge.check_layers", lambda *each: None)
    assert main(MERGE) == 2
    assert "projection.weight', read back, is not the base's" in capfd.readouterr().err


NEIGHBOURS = [
    ("bf16", "model.layers.1.mlp.down_proj.weight", 5),
    ("bf16", "model.norm.weight", 5),
    ("rslora, patterns", "model.layers.1.mlp.down_proj.weight", -1),
    ("dora", "model.layers.1.self_attn.q_proj.weight", -1),
    ("embedding, tied, bf16, sharded", "model.embed_tokens.weight", -1),
    ("embedding, tied, bf16, sharded", "lm_head.weight", -1),
    ("whole, tied", "lm_head.weight", -1),
    ("tokens, sharded", "model.embed_tokens.weight", 60 * 32),
    ("conv1d, bf16, dora, embedding", "transformer.h.1.attn.c_attn.weight", -1),
    ("experts", "model.layers.1.mlp.experts.gate_up_proj", -1),
    ("experts of transposed weights", "model.layers.1.mlp.experts.down_proj", -1),
    ("convolution of an image", "vit.embeddings.patch_embeddings.projection.weight", -1),
    ("all biases, bf16", "bert.encoder.layer.1.attention.self.query.bias", -1),
    ("image", "classifier.weight", -1),
]
OF_LITTLE_NEWS = ("bf16", "dora", "whole, tied", "image")
"""Cases whose kind of layer another one has, too; of tensors without a delta there is one."""


@pytest.mark.parametrize(
    ("case", "name", "entry"),
    quick(NEIGHBOURS, [each for each in NEIGHBOURS if each[0] not in OF_LITTLE_NEWS or "norm" in each[1]]),
)
def test_a_neighbour_of_the_rounded_sum_is_found(
    case: str, name: str, entry: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    save_case(CASES[case])
    true = adapter_merge._round

    def to_a_neighbour(merged: Any, *each: Any) -> None:
        true(merged, *each)
        merged.get_parameter(name).data.view(torch.int16).view(-1)[entry] += 1

    monkeypatch.setattr(adapter_merge, "_round", to_a_neighbour)
    assert main(["merge", "adapter", "--output_dir", "merged"]) == 2
    assert f"{name!r}, read back, is not the base's tensor and the adapter's" in capfd.readouterr().err
    assert not Path("merged").exists()


@pytest.mark.parametrize("more", [{}, {"use_dora": True}, EMBEDDING], ids=["linear", "dora", "embedding"])
def test_a_scale_that_peft_reads_wrongly_is_found_though_all_outputs_agree(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    save_base(Path("base"))
    save_adapter(Path("adapter"), AutoModelForCausalLM.from_pretrained("base"), **more)
    true = PeftModel.from_pretrained

    def load(*each: Any, **others: Any) -> Any:
        adapted = true(*each, **others)
        for module in adapted.modules():
            if isinstance(module, LoraLayer):
                module.scaling["default"] *= 1.05
        return adapted

    monkeypatch.setattr(PeftModel, "from_pretrained", load)
    assert main(["merge", "adapter", "--output_dir", "merged"]) == 2
    assert ".weight', read back, is not the base's tensor and the adapter's" in capfd.readouterr().err
    assert not Path("merged").exists()


def save_mixed(is_other: str, dtype: torch.dtype, other: torch.dtype) -> None:
    """Save a base that stores some tensors in another dtype, and an adapter of its experts."""
    torch.manual_seed(0)
    BASES["mixtral"](False).save_pretrained("base")
    tensors = load_file("base/model.safetensors")
    assert "model.layers.0.mlp.experts.down_proj" not in tensors and any(is_other in name for name in tensors)
    mixed = {name: each.to(other if is_other in name else dtype) for name, each in tensors.items()}
    save_file(mixed, "base/model.safetensors", {"format": "pt"})
    save_adapter(Path("adapter"), MixtralForCausalLM.from_pretrained("base", dtype=torch.float32), **EXPERTS)


@pytest.mark.parametrize("is_other", ["q_proj", "embed_tokens"])
@pytest.mark.parametrize(("dtype", "other"), [(BF16, torch.float32), (torch.float32, BF16)])
def test_a_base_of_several_dtypes_and_another_layout_is_verified(
    is_other: str, dtype: torch.dtype, other: torch.dtype
) -> None:
    save_mixed(is_other, dtype, other)
    assert main(["merge", "adapter", "--output_dir", "merged"]) == 0
    base, merged = load_file("base/model.safetensors"), load_file("merged/model.safetensors")
    assert {name: each.dtype for name, each in merged.items()} == {name: each.dtype for name, each in base.items()}


def test_the_last_bit_of_an_expert_is_verified_if_the_model_is_loaded_in_fewer(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    save_mixed("embed_tokens", torch.float32, BF16)
    # Saved with the dtype of the embedding, which transformers would load all tensors in.
    a_disk_that_changes_a_bit(monkeypatch, "model.layers.1.block_sparse_moe.experts.3.w2.weight", 1 << 12)
    assert main(["merge", "adapter", "--output_dir", "merged"]) == 2
    assert "experts.down_proj', read back, is not the base's" in capfd.readouterr().err


@pytest.mark.parametrize("is_other", ["experts.1.w1", "block_sparse_moe.gate"])
def test_a_tensor_that_would_lose_its_dtype_by_another_layout_is_refused(
    is_other: str, capfd: pytest.CaptureFixture[str]
) -> None:
    save_mixed(is_other, BF16, torch.float32)
    assert main(["merge", "adapter", "--output_dir", "merged"]) == 2
    said = f"{is_other}.weight' would be bfloat16, and base stores it in float32. Save the base in one dtype"
    assert said in capfd.readouterr().err
    assert not Path("merged").exists()


def test_a_command_in_an_error_begins_as_it_was_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("adapter").mkdir()
    Path("adapter/adapter_config.json").write_text("{}", encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["/elsewhere/slivertune", "train"])
    with pytest.raises(ValueError, match=r"\(/elsewhere/slivertune merge adapter --output_dir FOLDER\)"):
        check_no_adapter("adapter")


def test_an_expert_that_no_token_is_sent_to_is_checked_as_well(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    model = BASES["mixtral"](False)
    for layer in model.model.layers:
        layer.mlp.gate.weight.data.zero_()[0] = 1.0  # the first experts take all tokens
    model.save_pretrained("base")
    save_adapter(Path("adapter"), AutoModelForCausalLM.from_pretrained("base"), **EXPERTS)
    true = ParamWrapper.get_delta_weight

    def change_one(layer: Any, *each: Any) -> torch.Tensor:
        delta = true(layer, *each)
        delta[-1] *= 1.05
        return delta

    monkeypatch.setattr(ParamWrapper, "get_delta_weight", change_one)
    assert main(["merge", "adapter", "--output_dir", "merged"]) == 2
    assert "can't be merged into base" in capfd.readouterr().err
    assert not Path("merged").exists()


@pytest.mark.parametrize("more", [{}, EMBEDDING])
def test_an_adapter_of_little_effect_is_checked_to_a_twentieth_of_it(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    save_base(Path("base"))
    save_adapter(Path("adapter"), AutoModelForCausalLM.from_pretrained("base"), **more)
    tensors = load_file("adapter/adapter_model.safetensors")
    small = {
        name: each * 1e-4 if ".lora_B" in name or "embedding_B" in name else each for name, each in tensors.items()
    }
    save_file(small, "adapter/adapter_model.safetensors")
    assert main(["merge", "adapter", "--output_dir", "right"]) == 0
    for kind in (Linear, Embedding):
        true = kind.get_delta_weight
        monkeypatch.setattr(kind, "get_delta_weight", lambda *each, true=true: 1.05 * true(*each))
    assert main(["merge", "adapter", "--output_dir", "merged"]) == 2
    assert "can't be merged into base" in capfd.readouterr().err and not Path("merged").exists()


def test_peft_that_is_missing_is_named_as_pip_does(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("adapter").mkdir()
    Path("adapter/adapter_config.json").write_text('{"peft_type": "LORA"}', encoding="utf-8")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=re.escape("merging it needs peft, which is missing. Run pip install peft")):
        open_adapter(Path("adapter"))


def test_a_write_that_breaks_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    save_base(Path("base"))
    save_adapter(Path("adapter"), AutoModelForCausalLM.from_pretrained("base"))
    before = sorted(Path.cwd().rglob("*"))
    monkeypatch.setattr(adapter_merge, "copy_others", Mock(side_effect=OSError("No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        merge_adapter(open_adapter(Path("adapter")), Path("base"), Path("out"))
    assert sorted(Path.cwd().rglob("*")) == before


def test_a_merge_that_the_host_can_not_hold_is_refused_before_it_begins(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    save_base(Path("base"))
    save_adapter(Path("adapter"), AutoModelForCausalLM.from_pretrained("base"))
    monkeypatch.setattr("slivertune.deltas.adapter_merge.available_host_bytes", lambda: 1000)
    assert main(["merge", "adapter", "--output_dir", "merged"]) == 2
    assert "of host memory for weights in fp32, and 1000 B are free" in capfd.readouterr().err
    assert not Path("merged").exists()


@pytest.mark.parametrize(("dtype", "fits"), [(torch.float32, False), (BF16, True)])
def test_experts_in_fp32_need_the_result_and_the_base_for_the_last_check(
    dtype: torch.dtype, fits: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    model = BASES["mixtral"](False)
    model.to(dtype).save_pretrained("base")
    save_adapter(Path("adapter"), MixtralForCausalLM.from_pretrained("base", dtype=torch.float32), **EXPERTS)
    num_bytes = 4 * sum(each.numel() for each in model.parameters())
    # Free is what the base takes in fp32, and once that is loaded, one byte less than the last check needs beside it.
    free = iter([num_bytes, num_bytes - 1])
    monkeypatch.setattr("slivertune.deltas.adapter_merge.available_host_bytes", lambda: next(free))
    assert main(["merge", "adapter", "--output_dir", "merged"]) == (0 if fits else 2)
    assert ("in another layout than its model, so the last check takes" in capfd.readouterr().err) is not fits
    assert Path("merged").exists() is fits


def test_a_model_of_several_end_tokens_is_checked_too(capfd: pytest.CaptureFixture[str]) -> None:
    save_base(Path("base"))
    config = json.loads(Path("base/config.json").read_text(encoding="utf-8"))
    Path("base/config.json").write_text(json.dumps({**config, "eos_token_id": [2, 3]}), encoding="utf-8")
    save_adapter(Path("adapter"), AutoModelForCausalLM.from_pretrained("base"))
    assert main(["merge", "adapter", "--output_dir", "merged"]) == 0
    assert "does not run on dummy inputs" not in "".join(capfd.readouterr())


def test_a_model_that_does_not_run_on_dummy_inputs_is_merged_and_the_command_says_so(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    save_base(Path("base"))
    save_adapter(Path("adapter"), AutoModelForCausalLM.from_pretrained("base"))
    monkeypatch.setattr(
        "slivertune.deltas.adapter_merge.choose_inputs", Mock(side_effect=TypeError("pixels are missing"))
    )
    assert main(["merge", "adapter", "--output_dir", "merged"]) == 0
    said = "LlamaForCausalLM does not run on dummy inputs (pixels are missing)"
    assert f"outputs were not compared, tensors were: {said}\n" in capfd.readouterr().out
    assert Path("merged/model.safetensors").is_file()
