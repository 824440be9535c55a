"""Adapters that `slivertune train` leaves, merged into their base by `slivertune merge`."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from slivertune.cli import main
from tests.training.tiny_runs import train, write_classes

LORA = ("--method", "lora", "--lora_rank", "4", "--max_steps", "4", "--memory_ledger", "off")
IDS = torch.arange(40).view(2, 20)
# PEFT 0.21 asks by the name that transformers 5.23 retires.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def merge(folder: object, output: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    """Merge what a run left; what is said."""
    capsys.readouterr()
    assert main(["merge", str(folder), "--output_dir", str(output), *more]) == 0
    return capsys.readouterr().out


def by_peft(model: Any, adapter: object) -> Any:
    return PeftModel.from_pretrained(model, str(adapter)).merge_and_unload().eval()


@pytest.mark.parametrize("four_bit", [(), ("--load_in_4bit",)], ids=["lora", "qlora"])
def test_the_adapter_of_a_run_and_of_a_checkpoint_become_plain_models(
    four_bit: tuple[str, ...], tiny_base: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = train(tiny_base, texts, tmp_path / "out", *LORA, *four_bit)
    said = merge(results["model_folder"], tmp_path / "merged", capsys)
    assert said.startswith(f"{tmp_path / 'merged'}: {tiny_base} with the LoRA of {results['model_folder']} added to 14")
    assert ("the adapter was trained over quantised weights" in said) == bool(four_bit)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert not hasattr(merged.config, "quantization_config")
    expected = by_peft(AutoModelForCausalLM.from_pretrained(tiny_base), results["model_folder"])
    assert torch.equal(merged(IDS).logits, expected(IDS).logits)
    base = AutoModelForCausalLM.from_pretrained(tiny_base)
    assert not torch.equal(merged(IDS).logits, base(IDS).logits)
    text = "The 3rd of 60."
    assert AutoTokenizer.from_pretrained(tmp_path / "merged")(text) == AutoTokenizer.from_pretrained(tiny_base)(text)
    assert "the same weights was not checked" not in said
    shutil.copytree(tiny_base, tmp_path / "copy")
    other = merge(
        results["model_folder"], tmp_path / "of the copy", capsys, "--model_name_or_path", str(tmp_path / "copy")
    )
    assert f"trained over {tiny_base}; that {tmp_path / 'copy'} has the same weights was not checked" in other
    merge(results["checkpoint"], tmp_path / "from checkpoint", capsys)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "from checkpoint")
    assert torch.equal(again(IDS).logits, merged(IDS).logits)


def test_a_merged_classifier_knows_its_classes_by_name(
    tiny_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = (*LORA, "--task", "classification", "--learning_rate", "3e-2", "--max_steps", "30")
    results = train(tiny_base, write_classes(tmp_path), tmp_path / "out", *more)
    assert "trained whole and put in place of the base's: score\n" in merge(
        results["model_folder"], tmp_path / "merged", capsys
    )
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    assert merged.config.id2label == {0: "even", 1: "odd"}
    pad = merged.config.pad_token_id
    base = AutoModelForSequenceClassification.from_pretrained(tiny_base, num_labels=2, pad_token_id=pad)
    expected = by_peft(base, results["model_folder"])
    assert pad is not None and torch.equal(merged(IDS).logits, expected(IDS).logits)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    for text, label in (("aaaa", "odd"), ("bbbb", "even")):
        logits = merged(**tokenizer(text, return_tensors="pt")).logits
        assert merged.config.id2label[int(logits.argmax())] == label
