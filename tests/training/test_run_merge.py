"""Adapters that `slivertune train` leaves, merged into their base by `slivertune merge`."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, LlamaForCausalLM

from slivertune.cli import main
from tests.training.tiny_runs import Runs, write_classes

LORA = ("--method", "lora", "--lora_rank", "4", "--max_steps", "4", "--memory_ledger", "off")
IDS = torch.arange(40).view(2, 20)
# PEFT 0.21 asks by the name that transformers 5.23 retires.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def merge(runs: Runs, folder: object, output: Path, *more: str) -> str:
    """Merge what a run left, and return what is said."""
    runs.printed()
    assert main(["merge", str(folder), "--output_dir", str(output), *more]) == 0
    return runs.printed()


def by_peft(model: Any, adapter: object) -> Any:
    return PeftModel.from_pretrained(model, str(adapter)).merge_and_unload().eval()


@pytest.mark.parametrize(
    "four_bit",
    [pytest.param((), marks=pytest.mark.slow, id="lora"), pytest.param(("--load_in_4bit",), id="qlora")],
)
def test_the_adapter_of_a_run_and_of_a_checkpoint_become_plain_models(
    four_bit: tuple[str, ...], runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    results = runs.train("out", *LORA, *four_bit)
    said = merge(runs, results["model_folder"], runs["merged"])
    assert said.startswith(f"{runs['merged']}: {runs.base} with the LoRA of {results['model_folder']} added to 14")
    assert ("the adapter was trained over quantised weights" in said) == bool(four_bit)
    assert "outputs were not compared" not in said
    # As any folder that PEFT saved: transformers find the base by the adapter's own word.
    assert not (Path(results["model_folder"]) / "config.json").exists()
    for made in (AutoModelForCausalLM, LlamaForCausalLM):
        loaded = made.from_pretrained(results["model_folder"])
        beside = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(runs.base), results["model_folder"])
        assert torch.equal(loaded(IDS).logits, beside(IDS).logits)
    of_checkpoint = AutoModelForCausalLM.from_pretrained(results["checkpoint"])
    assert torch.equal(of_checkpoint(IDS).logits, loaded(IDS).logits)
    for command in (["train", "--output_dir", str(runs["again"]), "--dataset", "x.jsonl"], ["plan"]):
        option = "--model" if command == ["plan"] else "--model_name_or_path"
        assert main([*command, option, str(results["model_folder"]), "--method", "hift"]) == 2
        assert "holds an adapter and not a model. Merge it into its base first" in capsys.readouterr().err
    merged = AutoModelForCausalLM.from_pretrained(runs["merged"])
    assert not hasattr(merged.config, "quantization_config")
    expected = by_peft(AutoModelForCausalLM.from_pretrained(runs.base), results["model_folder"])
    assert torch.equal(merged(IDS).logits, expected(IDS).logits)
    base = AutoModelForCausalLM.from_pretrained(runs.base)
    assert not torch.equal(merged(IDS).logits, base(IDS).logits)
    text = "The 3rd of 60."
    assert AutoTokenizer.from_pretrained(runs["merged"])(text) == AutoTokenizer.from_pretrained(runs.base)(text)
    assert "not checked: whether" not in said
    shutil.copytree(runs.base, runs["copy"])
    other = merge(runs, results["model_folder"], runs["of the copy"], "--model_name_or_path", str(runs["copy"]))
    assert f"not checked: whether {runs['copy']} has the weights of {runs.base}, the adapter's base" in other
    merge(runs, results["checkpoint"], runs["from checkpoint"])
    again = AutoModelForCausalLM.from_pretrained(runs["from checkpoint"])
    assert torch.equal(again(IDS).logits, merged(IDS).logits)


def test_a_merged_classifier_knows_its_classes_by_name(runs: Runs, tmp_path: Path) -> None:
    more = (*LORA, "--task", "classification", "--learning_rate", "3e-2", "--max_steps", "20")
    results = runs.train("out", *more, data=write_classes(tmp_path))
    said = merge(runs, results["model_folder"], runs["merged"])
    assert "replaced, since they were trained whole: score\n" in said
    loaded = AutoModelForSequenceClassification.from_pretrained(results["model_folder"], num_labels=2)
    merged = AutoModelForSequenceClassification.from_pretrained(runs["merged"])
    if Version(transformers.__version__) >= Version("5.23"):  # older ones leave the head as it was drawn, and warn
        # Sums of fp32 in another order.
        torch.testing.assert_close(loaded(IDS[:1]).logits, merged(IDS[:1]).logits, rtol=1e-4, atol=1e-4)
    assert merged.config.id2label == {0: "even", 1: "odd"}
    pad = merged.config.pad_token_id
    base = AutoModelForSequenceClassification.from_pretrained(runs.base, num_labels=2, pad_token_id=pad)
    expected = by_peft(base, results["model_folder"])
    assert pad is not None and torch.equal(merged(IDS).logits, expected(IDS).logits)
    tokenizer = AutoTokenizer.from_pretrained(runs["merged"])
    for text, label in (("aaaa", "odd"), ("bbbb", "even")):
        logits = merged(**tokenizer(text, return_tensors="pt")).logits
        assert merged.config.id2label[int(logits.argmax())] == label
