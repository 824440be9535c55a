"""Runs that are resumed with other settings, weights or folders than they began with."""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from slivertune.core.manifest import read_entries, write_manifest
from tests.training.tiny_runs import UNMEASURED, Runs, assert_same_bits

RESUMED = ("--resume_from_checkpoint", "true", *UNMEASURED)
METHODS: dict[str, tuple[str, ...]] = {
    "dense": (),
    "lora": ("--lora_rank", "4"),
    "sft": ("--density", "0.1"),
    "hift": (),
}


@pytest.mark.parametrize("method", METHODS)
def test_settings_of_an_update_and_its_rows_are_those_of_the_first_run(method: str, runs: Runs) -> None:
    own = METHODS[method]
    runs.train("out", *own, "--learning_rate", "1e-3", "--max_steps", "2", *UNMEASURED, method=method)
    refused = {
        ("--learning_rate", "1e-5"): "training={'learning_rate': 0.001}, and this run asks for",
        ("--weight_decay", "0.5"): "training={'weight_decay': 0.0}",
        ("--adam_beta2", "0.9"): "training={'adam_beta2': 0.999}",
        ("--lr_scheduler_type", "cosine"): "asks for training={'lr_scheduler_type': 'cosine'}",
        ("--max_grad_norm", "0.1"): "training={'max_grad_norm': ",
        ("--per_device_train_batch_size", "1"): "with 2 rows per update, and this run asks for 1",
        ("--gradient_accumulation_steps", "2"): "Choose options that make",
    }
    if method == "sft":
        del refused["--weight_decay", "0.5"], refused["--adam_beta2", "0.9"]  # of other optimizers
    for words, message in refused.items():
        more = ("--learning_rate", "1e-3", "--max_steps", "4", *words, *RESUMED)
        assert message in runs.complaint(*own, *more, method=method)
    assert "(--learning_rate 0.001)" in runs.complaint(*own, "--learning_rate", "1e-5", *RESUMED, method=method)


def test_a_batch_may_be_cut_in_two_when_a_run_is_resumed(runs: Runs) -> None:
    runs.train("out", "--per_device_train_batch_size", "4", "--max_steps", "2", *UNMEASURED, method="dense")
    cut = ("--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2", "--max_steps", "4")
    assert runs.train("out", *cut, *RESUMED, method="dense")["num_steps"] == 4


@pytest.mark.parametrize("method", ["lora", "sft"])
def test_other_weights_of_the_same_shapes_are_refused(method: str, runs: Runs, tmp_path: Path) -> None:
    runs.train("out", *METHODS[method], "--max_steps", "2", *UNMEASURED, method=method)
    model = AutoModelForCausalLM.from_pretrained(runs.base)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    other = tmp_path / "other"
    shutil.copytree(runs.base, other)
    model.save_pretrained(other)
    more = ("--model_name_or_path", str(other), "--max_steps", "4", *RESUMED)
    assert f"was trained from other weights than those of {other}" in runs.complaint(
        *METHODS[method], *more, method=method
    )


def test_a_checkpoint_of_an_older_version_resumes_with_the_settings_of_now(runs: Runs) -> None:
    runs.train("out", "--max_steps", "2", *UNMEASURED, method="dense")
    checkpoint = runs["out"] / "checkpoint-2"
    facts = read_entries(checkpoint)["facts"]
    for name in ("training", "rows_per_update", "base_weights"):
        facts.pop(name)
    write_manifest(checkpoint, {"facts": facts})
    assert runs.train("out", "--max_steps", "4", *RESUMED, method="dense")["num_steps"] == 4


@pytest.mark.parametrize("method", ["dense", "lora"])
def test_a_checkpoint_without_the_optimizers_state_is_not_resumed(method: str, runs: Runs) -> None:
    runs.train("out", "--max_steps", "2", "--save_only_model", "true", *UNMEASURED, method=method)
    for resume in ("true", "auto"):
        more = ("--max_steps", "4", "--resume_from_checkpoint", resume, *UNMEASURED)
        assert "was saved with --save_only_model true" in runs.complaint(*more, method=method)


def test_rows_that_are_grouped_by_length_resume_at_the_end_of_an_epoch_alone(runs: Runs) -> None:
    grouped = ("--train_sampling_strategy", "group_by_length", "--per_device_train_batch_size", "4", *UNMEASURED)
    more = (*grouped, "--max_steps", "12", "--save_steps", "3")
    runs.train("whole", *more, method="dense")
    resume = [("--resume_from_checkpoint", str(runs["whole"] / f"checkpoint-{step}")) for step in (3, 9)]
    assert "ends in the middle of an epoch" in runs.complaint(*more, *resume[0], method="dense")
    runs.train("again", *more, *resume[1], method="dense")
    assert_same_bits(runs["whole"], runs["again"])


BEST = ("--load_best_model_at_end", "true", "--eval_strategy", "steps", "--eval_steps", "2", "--save_steps", "2")


def test_the_best_checkpoint_is_found_in_a_folder_that_was_moved(runs: Runs) -> None:
    # The first evaluation has the largest loss.
    more = (*BEST, "--greater_is_better", "true", "--max_steps", "6", *UNMEASURED)
    whole = runs.train("whole", *more, method="dense")
    assert Path(whole["best_checkpoint"]).name == "checkpoint-2"
    runs["whole"].rename(runs["moved"])
    (runs["moved"] / "results.json").unlink()
    shutil.rmtree(runs["moved"] / "model")
    again = runs.train("moved", *more, "--resume_from_checkpoint", "auto", method="dense")
    assert again["after"] == whole["after"]
    assert Path(again["best_checkpoint"]) == runs["moved"] / "checkpoint-2"
    (runs["moved"] / "results.json").unlink()
    shutil.rmtree(runs["moved"] / "model")
    state = runs["moved"] / "checkpoint-6" / "trainer_state.json"
    values = json.loads(state.read_text())
    state.write_text(json.dumps({**values, "best_model_checkpoint": str(runs["moved"] / "checkpoint-1")}))
    write_manifest(state.parent, {"facts": read_entries(state.parent)["facts"]})
    out = ("--output_dir", str(runs["moved"]), "--resume_from_checkpoint", "auto")
    assert "checkpoint-1, the best checkpoint so far, is gone" in runs.complaint(*more, *out, code=1, method="dense")


def test_no_row_of_the_evaluation_is_dropped(runs: Runs) -> None:
    drop = ("--dataloader_drop_last", "true", "--max_steps", "2", *UNMEASURED)
    said = runs.complaint(*drop, "--per_device_eval_batch_size", "3", method="dense")
    assert "would also leave out 1 of the 4 rows to evaluate on, of which 3 are evaluated at once" in said
    runs.train("out", *drop, "--per_device_eval_batch_size", "2", method="dense")


def test_a_batch_that_was_lowered_is_told_and_the_failed_one_is_not_counted(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    forward = LlamaForCausalLM.forward

    @functools.wraps(forward)
    def limited(self: Any, *args: Any, **kwargs: Any) -> Any:
        ids = kwargs["input_ids"]
        if self.training and torch.is_grad_enabled():
            if len(ids) > 2:
                raise RuntimeError("CUDA out of memory.")
            seen.append(ids.numel())
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "forward", limited)
    find = ("--auto_find_batch_size", "true", "--per_device_train_batch_size", "4", "--max_steps", "2")
    results = runs.train("out", *find, *UNMEASURED, method="dense")
    assert results["settings"]["per_device_train_batch_size"] == 2
    assert "has lowered --per_device_train_batch_size from 4 to 2" in runs.printed()
    assert len(seen) == 2
    assert results["tokens_per_second"] / results["steps_per_second"] == pytest.approx(sum(seen) / 2)
