import json
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from peft import LoraConfig, PeftModel, PrefixTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForPreTraining,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from slivertune.cli import main
from slivertune.deltas.adapter_merge import merge_adapter, open_adapter

IDS = torch.arange(1, 25).view(2, 12)
# PEFT 0.21 asks by the name that transformers 5.23 retires.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def config(**more: Any) -> LlamaConfig:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaConfig(**{"vocab_size": 64, "num_hidden_layers": 2, "pad_token_id": 0, **sizes, **more})


def save_base(folder: Path, dtype: torch.dtype = torch.float32, **more: Any) -> Path:
    torch.manual_seed(0)
    LlamaForCausalLM(config(**more)).to(dtype).save_pretrained(folder)
    return folder


def save_adapter(folder: Path, model: Any, **more: Any) -> Path:
    """An adapter with random weights, also in what was trained whole."""
    torch.manual_seed(1)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    adapted = get_peft_model(model, LoraConfig(**{**settings, "init_lora_weights": False, **more}))
    for name, parameter in adapted.named_parameters():
        if "modules_to_save" in name:
            nn.init.normal_(parameter)
    adapted.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def by_peft(model: Any, adapter: str) -> Any:
    return PeftModel.from_pretrained(model, adapter).merge_and_unload().eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_weight_is_the_base_and_the_product_of_the_adapters_matrices(
    dtype: torch.dtype, capsys: pytest.CaptureFixture[str]
) -> None:
    save_base(Path("base"), dtype)
    save_adapter(Path("adapter"), AutoModelForCausalLM.from_pretrained("base", dtype="auto"))
    assert main(["merge", "adapter", "--output_dir", "merged"]) == 0
    out = capsys.readouterr().out
    assert "merged: base with the LoRA of adapter added to 4 matrices\n" in out and "no tokenizer" not in out[:60]
    base, merged = load_file("base/model.safetensors"), load_file("merged/model.safetensors")
    factors = load_file("adapter/adapter_model.safetensors")
    assert merged.keys() == base.keys() and len(factors) == 8
    for name, weight in base.items():
        expected, path = weight, f"base_model.model.{name.removesuffix('.weight')}"
        if f"{path}.lora_A.weight" in factors:
            product = factors[f"{path}.lora_B.weight"].float() @ factors[f"{path}.lora_A.weight"].float()
            expected = (weight + 2 * product.to(dtype)).to(dtype)
            assert not torch.equal(expected, weight)
        # The sum in bf16 may be rounded before it is scaled or after.
        torch.testing.assert_close(
            merged[name], expected, rtol=0 if dtype == torch.float32 else 2**-7, atol=2**-8 * (dtype != torch.float32)
        )


@pytest.mark.parametrize("more", [{}, {"use_dora": True}, {"use_rslora": True}, {"modules_to_save": ["lm_head"]}])
def test_transformers_alone_give_the_logits_of_pefts_own_merged_model(more: dict[str, Any]) -> None:
    save_base(Path("base"))
    save_adapter(Path("adapter"), AutoModelForCausalLM.from_pretrained("base"), **more)
    before = AutoModelForCausalLM.from_pretrained("base")
    expected = by_peft(AutoModelForCausalLM.from_pretrained("base"), "adapter")(IDS).logits
    assert main(["merge", "adapter", "--output_dir", "merged"]) == 0
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
    assert "trained whole and put in place of the base's: score\n" in capsys.readouterr().out
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


def change_config(folder: str, **more: Any) -> None:
    path = Path(folder) / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **more}), encoding="utf-8")


def test_what_can_not_be_merged_is_one_line_and_leaves_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    save_base(Path("base"))
    save_base(Path("wider"), hidden_size=64)
    save_base(Path("deeper"), num_hidden_layers=3)
    save_base(Path("shallower"), num_hidden_layers=1)
    save_base(Path("quantised"))
    (save_base(Path("bare")) / "model.safetensors").unlink()
    save_adapter(Path("adapter"), AutoModelForCausalLM.from_pretrained("base"))
    for name in ("nameless", "lost", "damaged", "empty", "not_a_number"):
        save_adapter(Path(name), AutoModelForCausalLM.from_pretrained("base"))
    change_config("nameless", base_model_name_or_path=None)
    change_config("lost", base_model_name_or_path="./gone")
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
            "wider is not the base of adapter: Error(s) in loading state_dict",
        ),
        (
            ["adapter", "--model_name_or_path", "deeper"],
            "deeper is not the base of adapter: base_model.model.model.layers.2",
        ),
        (
            ["adapter", "--model_name_or_path", "shallower"],
            "shallower is not the base of adapter: base_model.model.model.la",
        ),
        (["adapter", "--model_name_or_path", "quantised"], "quantised is quantised, and its weights have no room for"),
        (["adapter", "--model_name_or_path", "lost"], "lost is an adapter itself; name the base by"),
        (["adapter", "--model_name_or_path", "./gone"], "model_name_or_path='./gone' is neither a folder nor a model"),
        (["nameless"], "nameless does not name its base; say which it is with --model_name_or_path"),
        (["lost"], "model_name_or_path='./gone' is neither a folder nor a model in the hub's cache"),
        (["damaged"], "damaged/adapter_config.json can't be read: "),
        (["empty"], "empty has no adapter_model.safetensors; the adapter is not whole"),
        (["adapter", "--model_name_or_path", "bare"], "bare can't be loaded: "),
        (["not_a_number"], "not_a_number can't be merged into base: NaNs detected"),
        (["prefixes"], "prefixes is an adapter of the type PREFIX_TUNING; only LoRA's are merged here"),
        (["adapter", "nameless"], "adapter is a LoRA adapter, which is merged alone; name it without the others"),
        (
            ["adapter", "--allow_quantized_base"],
            "--allow_quantized_base is read for SFT's deltas, and adapter is a LoRA",
        ),
        (["base"], "base/sft_delta.safetensors is not there; name the folder that save_pretrained"),
    ):
        assert main(["merge", *arguments, "--output_dir", "out"]) == 2, arguments
        error = capfd.readouterr().err
        line = next(line for line in error.splitlines() if line.startswith("slivertune merge: error: "))
        assert message in line, line
    assert main(["merge", "adapter", "--output_dir", "base"]) == 2
    assert "base exists already; name a folder that does not" in capfd.readouterr().err
    assert sorted(Path.cwd().rglob("*")) == before


def test_peft_that_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("adapter").mkdir()
    Path("adapter/adapter_config.json").write_text('{"peft_type": "LORA"}', encoding="utf-8")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=re.escape("merging it needs peft; pip install 'slivertune[peft]'")):
        open_adapter(Path("adapter"))


def test_a_write_that_breaks_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    save_base(Path("base"))
    save_adapter(Path("adapter"), AutoModelForCausalLM.from_pretrained("base"))
    before = sorted(Path.cwd().rglob("*"))
    monkeypatch.setattr(
        "slivertune.deltas.adapter_merge._save_tokenizer", Mock(side_effect=OSError("No space left on device"))
    )
    with pytest.raises(OSError, match="No space left"):
        merge_adapter(open_adapter(Path("adapter")), Path("base"), Path("out"))
    assert sorted(Path.cwd().rglob("*")) == before
