import csv
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from slivertune.cli import main
from slivertune.core.manifest import find_damage, read_entries, write_manifest
from slivertune.training.folders import SETTINGS_NAME, START_NAME
from tests.helpers.models import differing
from tests.helpers.ranks import quick
from tests.training.tiny_runs import (
    METHODS,
    TINY_CYCLE,
    UNMEASURED,
    Runs,
    assert_same_bits,
    poison_losses,
    results_of,
    saved_weights,
    write_classes,
)

KINDS = {"parameters", "gradients", "state", "residual", "host", "host_activations", "disk"}


@pytest.mark.parametrize("method", METHODS)
def test_a_run_lowers_the_loss_leaves_a_loadable_model_and_a_whole_checkpoint_and_counts_bytes(
    method: str, runs: Runs
) -> None:
    results = runs.train("out", "--max_steps", "24", method=method)
    assert results["after"]["eval_loss"] < results["before"]["eval_loss"] - 0.1
    assert results["num_steps"] == 24 and results["steps_per_second"] > 0
    assert results["settings"]["learning_rate"] == 1e-2
    assert results["settings"].get("num_groups") == (TINY_CYCLE if method == "hift" else None)
    assert results["versions"]["torch"] == torch.__version__
    assert results["command"][:2] == ["slivertune", "train"]
    assert find_damage(Path(results["checkpoint"])) is None
    trained = AutoModelForCausalLM.from_pretrained(results["model_folder"])
    tokenizer = AutoTokenizer.from_pretrained(results["model_folder"])
    assert tokenizer.decode(tokenizer("naïve ☃")["input_ids"]) == "naïve ☃"
    before = AutoModelForCausalLM.from_pretrained(runs.base)
    moved = [not torch.equal(a, b) for a, b in zip(trained.parameters(), before.parameters(), strict=True)]
    assert all(moved), "24 updates are six cycles, so that every layer has moved"
    out = runs.printed()
    for part in ("evaluation before", "evaluation loss", "updates/s", results["checkpoint"], "[prompt]"):
        assert part in out
    lines = [line for line in out.splitlines() if "state on the host" in line and "weights" in line]
    # Of three, for eight updates each: HiFT measures in the first, and what is like the one before is not said again.
    assert len(lines) == (2 if method == "hift" else 1)
    assert set(results["highest_bytes"]) == KINDS
    sizes = [tensor.nbytes for tensor in saved_weights(runs.base).values()]
    weights, most = sum(sizes), results["highest_bytes"]
    # Rotary frequencies are counted among the weights; and HiFT measures an optimizer once on a weight made for that.
    assert weights <= most["parameters"] < weights + 1000 + (max(sizes) if method == "hift" else 0)
    if method == "dense":
        assert most["gradients"] == weights
        # AdamW's two moments of every weight, and its step counts.
        assert 2 * weights <= most["state"] < 2 * weights + 1000
        assert most["host"] == 0
    else:
        assert 0 < most["gradients"] < weights
        # The pool rounds each tensor's place up.
        assert 2 * weights <= most["host"] < 2.1 * weights


def test_tensorboard_finds_the_whole_run_in_its_folder(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.chdir(tmp_path)
    runs.train("out", "--report_to", "tensorboard", "--logging_steps", "1", *UNMEASURED)
    events = EventAccumulator(str(runs["out"] / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("eval/loss")] == [0, 6]
    groups = [(event.step, event.value) for event in events.Scalars("train/hift/group")]
    assert groups == [(step + 1, step % TINY_CYCLE) for step in range(6)]
    assert {event.value for event in events.Scalars("train/skipped_updates")} == {0}
    assert not runs["runs"].exists()


def test_the_ledger_can_stop_after_two_lines_or_never_begin(runs: Runs) -> None:
    runs.train("two", "--max_steps", "24", "--memory_ledger", "first_cycles")
    assert runs.printed().count("state on the host") == 2 + 1  # and the summary
    results = runs.train("none", "--memory_ledger", "off")
    assert results["peak_bytes"] is None
    assert "state on the host" not in runs.printed()


@pytest.mark.parametrize("method", METHODS)
def test_a_resumed_run_ends_with_the_same_bits_as_one_that_was_not_stopped(method: str, runs: Runs) -> None:
    more = ("--max_steps", str(2 * TINY_CYCLE + 3), "--save_steps", "3", "--lr_scheduler_type", "cosine", *UNMEASURED)
    whole = runs.train("whole", *more, method=method)
    for step in (3, 6, 9) if method == "hift" else (6,):
        resume = ("--resume_from_checkpoint", str(runs["whole"] / f"checkpoint-{step}"))
        again = runs.train(f"from-{step}", *more, *resume, method=method)
        assert all(again[name] == whole[name] for name in ("before", "after"))
        assert again["sample"]["before"] == whole["sample"]["before"]
        assert_same_bits(runs["whole"], runs[f"from-{step}"])


def test_a_resumed_run_knows_where_it_came_from(runs: Runs) -> None:
    output = runs["out"]
    runs.train("out", "--save_steps", "3", *UNMEASURED)
    values = read_entries(output / "checkpoint-3")
    facts = values["facts"] | {"before": {"eval_loss": 123.0}, "sample_before": "once"}
    write_manifest(output / "checkpoint-3", {"global_step": values["global_step"], "facts": facts})
    again = runs.train("again", "--resume_from_checkpoint", str(output / "checkpoint-3"), *UNMEASURED)
    assert (again["before"], again["sample"]["before"]) == ({"eval_loss": 123.0}, "once")


def test_hift_with_everything_in_one_group_ends_with_the_bits_of_dense(runs: Runs) -> None:
    more = ("--max_steps", "5", "--weight_decay", "0.1", "--gradient_accumulation_steps", "2", *UNMEASURED)
    runs.train("dense", *more, method="dense")
    runs.train("hift", *more, "--layers_per_group", str(TINY_CYCLE), method="hift")
    assert_same_bits(runs["dense"], runs["hift"])


def test_the_newest_whole_checkpoint_is_taken_and_others_are_passed_over_aloud(runs: Runs) -> None:
    output = runs["out"]
    more = ("--max_steps", "8", "--save_steps", "2", *UNMEASURED)
    runs.train("out", *more)
    wanted = saved_weights(output / "model")
    (output / "checkpoint-8" / "slivertune_checkpoint.json").unlink()
    weights = output / "checkpoint-6" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    runs.printed()
    runs.train("out", *more, "--resume_from_checkpoint", "true")
    out = runs.printed()
    for part in (
        f"passed over: {output / 'checkpoint-8'} is not whole: it has no slivertune_checkpoint.json",
        f"passed over: {output / 'checkpoint-6'} is not whole: model.safetensors has",
        f"continuing from {output / 'checkpoint-4'}",
    ):
        assert part in out
    assert differing(saved_weights(output / "model"), wanted) == []
    assert [find_damage(output / name) for name in ("checkpoint-6", "checkpoint-8")] == [None, None]


@pytest.mark.parametrize("method", quick(["dense", "hift", "sft"], ["hift"]))
def test_one_command_starts_continues_and_finishes_a_run(
    method: str, runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sft = ("--density", "0.1", "--reselection_interval", "3", "--estimation_steps", "2")
    more = ("--save_steps", "2", *(sft if method == "sft" else ()), *(UNMEASURED if method != "hift" else ()))
    runs.train("whole", *more, *UNMEASURED, method=method)
    arguments = runs.arguments("x", *more, method=method)
    place = arguments.index("--output_dir")
    command = [*arguments[:place], *arguments[place + 2 :], "--resume_from_checkpoint", "auto"]
    output = runs["runs"] / method
    with patch("slivertune.training.run._evaluate", side_effect=KeyboardInterrupt):  # before its first update
        assert main(command) == 130
    assert sorted(path.name for path in output.iterdir()) == [START_NAME, SETTINGS_NAME]
    with monkeypatch.context() as patched:  # ended while its fourth checkpoint file was being written
        patched.setattr("slivertune.training.callbacks.write_together", _ends_at(output / "checkpoint-4"))
        assert main(command) == 130
    assert find_damage(output / "checkpoint-2") is None and find_damage(output / "checkpoint-4") is not None
    assert main(command) == 0
    out = runs.printed()
    assert f"runs/{method} holds no whole checkpoint; this run begins at the start" in out
    assert f"continuing from runs/{method}/checkpoint-2" in out
    assert_same_bits(runs["whole"], output)
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    assert main(command) == 0
    assert f"the run in runs/{method} is finished after 6 updates; nothing was trained" in runs.printed()
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*")} == before
    (output / "results.json").unlink()  # as if it had ended between the model and the results
    assert main(command) == 0
    assert_same_bits(runs["whole"], output)
    assert [path.name for path in runs["runs"].iterdir()] == [method]


def _ends_at(folder: Path) -> Any:
    def write(checkpoint: Path, entries: Any) -> None:
        if checkpoint.resolve() == folder:
            raise KeyboardInterrupt
        write_manifest(checkpoint, entries)

    return write


def test_rotation_keeps_the_newest_whole_checkpoint(runs: Runs) -> None:
    runs.train("out", "--save_steps", "1", "--save_total_limit", "2", *UNMEASURED)
    kept = {path.name: find_damage(path) for path in runs["out"].glob("checkpoint-*")}
    assert kept == {"checkpoint-5": None, "checkpoint-6": None}


def test_the_default_prompt_fits_rows_of_any_length_and_one_that_was_typed_must(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The embedded data's own prompt, over a file of the same texts.
    defaults = {"sample_prompt": "x" * 33, "report_to": "none"}
    monkeypatch.setattr("slivertune.training.command_line.parse.default_values", lambda *_: defaults)
    short = ("--max_length", "32", "--max_steps", "1", *UNMEASURED)
    runs.train("out", *short)
    message = "sample_prompt has 33 tokens, and must have 1 or more and fewer than max_length=32"
    assert message in runs.complaint(*short, "--output_dir", str(runs["other"]), "--sample_prompt", "y" * 33)


def test_a_run_goes_on_with_the_schedule_that_it_began_with_and_another_is_refused(runs: Runs) -> None:
    # Four layers: the default has a quarter of them, one, and turns of 20 updates in random order.
    more = ("--lr_scheduler_type", "constant", *UNMEASURED)
    runs.train("out", "--max_steps", "3", *more)
    words = runs.arguments("out", "--max_steps", "6", *more, "--resume_from_checkpoint", "auto")
    words = [word for word in words if word not in ("--preset", "paper")]
    assert main([*words, "--order", "random"]) == 2
    assert main(words) == 0
    settings = results_of(runs["out"])["settings"]
    assert [settings[name] for name in ("layers_per_group", "steps_per_group", "order")] == [1, 1, "bottom2up"]
    kept = yaml.safe_load((runs["out"] / "slivertune_run.yaml").read_text(encoding="utf-8"))
    assert [kept[name] for name in ("layers_per_group", "steps_per_group", "order")] == [1, 1, "bottom2up"]
    runs.train("whole", "--max_steps", "6", *more)
    assert_same_bits(runs["whole"], runs["out"])


def test_a_checkpoint_without_the_name_of_its_data_goes_on_only_where_they_are_named(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "train",
        "--model_name_or_path",
        str(runs.base),
        "--output_dir",
        str(runs["out"]),
        "--learning_rate",
        "1e-2",
    ]
    words += ["--per_device_train_batch_size", "2", "--max_eval_samples", "2", "--sample_tokens", "0", *UNMEASURED]
    assert main([*words, "--max_steps", "2"]) == 0
    (checkpoint,) = runs["out"].glob("checkpoint-*")
    entries = read_entries(checkpoint)
    assert entries["facts"].pop("built_in_dataset") == ["builtin:dates"]
    write_manifest(checkpoint, entries)
    resumed = [*words, "--max_steps", "4", "--resume_from_checkpoint", "auto"]
    assert main(resumed) == 2
    assert main([*resumed, "--dataset", "builtin:dates"]) == 0
    assert read_entries(runs["out"] / "checkpoint-4")["facts"]["built_in_dataset"] == ["builtin:dates"]
    more = ("--max_steps", "6", "--resume_from_checkpoint", "auto", "--dataset", "builtin:python-reference")
    assert main([*words, *more]) == 2
    said = capsys.readouterr().err
    assert "does not say on which data it was trained, and the default was another then. Name it: --dataset" in said
    assert "was trained with built_in_dataset=['builtin:dates'], and this run asks for" in said


def test_a_run_does_not_go_on_with_other_rows_or_another_seed(runs: Runs, texts: Path, tmp_path: Path) -> None:
    more = ("--max_steps", "2", *UNMEASURED)
    runs.train("out", *more)
    (checkpoint,) = runs["out"].glob("checkpoint-*")
    resumed = ("--max_steps", "3", *UNMEASURED, "--resume_from_checkpoint", "auto")
    assert "was trained with seed=42, and this run asks for seed=7" in runs.complaint(*resumed, "--seed", "7")
    lines = texts.read_text(encoding="utf-8").splitlines()
    other = tmp_path / "other.txt"
    other.write_text("\n".join([*lines[:-1], "another"]) + "\n", encoding="utf-8")
    for data, words in ((other, ()), (None, ("--max_train_samples", "5")), (None, ("--eval_file", str(other)))):
        said = runs.complaint(*resumed, *words, data=data)
        assert re.search(rf"{checkpoint} was trained with other (train|eval|train and eval) rows \({{'train': '", said)
    entries = read_entries(checkpoint)
    del entries["facts"]["rows"], entries["facts"]["seed"]  # as an older version has left it
    write_manifest(checkpoint, entries)
    assert runs.train("out", *resumed)["num_steps"] == 3
    facts = read_entries(runs["out"] / "checkpoint-3")["facts"]
    assert facts["seed"] == 42 and set(facts["rows"]) == {"train", "eval"}


def test_a_folder_with_something_in_it_is_never_written_over(runs: Runs) -> None:
    runs["out"].mkdir()
    (runs["out"] / "thesis.txt").write_text("mine")
    assert "already holds something" in runs.complaint()
    assert [path.name for path in runs["out"].iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(
    ("first", "raised"),
    # 36 rows are trained on, 12 an update.
    [
        (("--max_steps", "3"), ("--max_steps", "6")),
        (("--max_steps", "-1", "--num_train_epochs", "1"), ("--max_steps", "-1", "--num_train_epochs", "2")),
    ],
    ids=["updates", "epochs"],
)
def test_the_command_of_a_finished_run_goes_on_when_its_goal_is_raised(
    first: tuple[str, ...], raised: tuple[str, ...], runs: Runs
) -> None:
    more = ("--lr_scheduler_type", "constant", "--per_device_train_batch_size", "12", *UNMEASURED)
    runs.train("whole", *more, *raised, method="dense")
    for words, num_steps in ((first, 3), (first, 3), (raised, 6), (first, 6)):
        results = runs.train("parts", *more, *words, "--resume_from_checkpoint", "auto", method="dense")
        assert results["num_steps"] == num_steps
    assert_same_bits(runs["whole"], runs["parts"])


@pytest.mark.parametrize(
    ("method", "weights", "autocast", "dtype"),
    [("hift", "bf16", "no", torch.bfloat16), ("dense", "fp32", "bf16", torch.float32)],
)
def test_bf16_is_bf16_weights_on_fp32_masters_with_hift_and_autocast_over_fp32_weights_with_dense(
    method: str, weights: str, autocast: str, dtype: torch.dtype, runs: Runs
) -> None:
    results = runs.train("out", "--bf16", "--use_cpu", "--max_steps", "4", *UNMEASURED, method=method)
    assert (results["settings"]["weights"], results["settings"]["autocast"]) == (weights, autocast)
    assert {tensor.dtype for tensor in saved_weights(runs["out"] / "model").values()} == {dtype}
    state = torch.load(runs["out"] / "checkpoint-4" / "optimizer.pt", weights_only=True)["state"]
    masters = [values.get("master") for values in state.values()]
    assert {None if master is None else master.dtype for master in masters} == (
        {torch.float32} if method == "hift" else {None}
    )


def test_a_classifier_is_trained_and_judged_by_its_accuracy(runs: Runs, tmp_path: Path) -> None:
    more = ("--task", "classification", "--max_steps", "40", "--learning_rate", "3e-2", *UNMEASURED)
    results = runs.train("out", *more, data=write_classes(tmp_path))
    assert results["after"]["eval_accuracy"] == 1.0
    assert results["sample"]["expected"] == results["sample"]["after"]
    out = runs.printed()
    assert "evaluation accuracy" in out
    assert "whole logits" not in out and results["settings"]["chunked_cross_entropy"] is False


@pytest.mark.parametrize("method", ["hift", pytest.param("sft", marks=pytest.mark.slow)])
def test_a_broken_row_is_skipped_and_counted_and_the_run_goes_on(
    method: str, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison_losses(monkeypatch, calls={3})
    more = ("--max_steps", "9", *(("--density", "0.1", "--reselection_interval", "6") if method == "sft" else ()))
    more += (*UNMEASURED, "--logging_steps", "3")
    results = runs.train("out", *more, method=method)
    assert results["num_skipped"] == 1
    printed = runs.printed()
    assert "step 3: the loss is nan; this update is skipped (1 so far)" in printed
    shown = [math.isnan(float(loss)) for loss in re.findall(r"step +\d/9  loss (\S+)", printed)]
    assert shown == [True, False, False], "no loss is shown that was none"
    state = torch.load(runs["out"] / "checkpoint-9" / "optimizer.pt", weights_only=True)
    assert state[method]["updates"] == 8, "a skipped update does not turn the rotation, and is none for SFT"
    assert all(torch.isfinite(tensor).all() for tensor in saved_weights(runs["out"] / "model").values())
    assert results["after"]["eval_loss"] < results["before"]["eval_loss"]


def test_a_disk_that_is_full_while_the_trainer_saves_is_told_with_the_folder_and_what_was_free(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534")
    monkeypatch.setattr(torch, "save", Mock(side_effect=error))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=4096))
    message = runs.complaint("--max_steps", "2", code=1)
    assert f"{runs['out']} could not be written: No space left on device" in message
    assert f"{tmp_path} had 4,096 free" in message


def test_too_many_broken_updates_in_a_row_stop_the_run(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    poison_losses(monkeypatch, calls=set(range(2, 100)))
    error = runs.complaint("--max_steps", "20", "--non_finite_limit", "4", *UNMEASURED, code=1)
    assert "4 updates in a row were not finite, the last at step 5" in error and "Traceback" not in error


def test_a_run_without_an_update_is_an_error(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    poison_losses(monkeypatch, calls=set(range(1, 100)))
    error = runs.complaint("--max_steps", "2", *UNMEASURED, code=1)
    assert (
        "none of the 2 updates since step 0 was applied, since their losses or gradients were not" in error
        and "Traceback" not in error
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_e2e_descriptions_are_learnt_from_the_embedded_kind_of_model(
    method: str, runs: Runs, shared_data: Path
) -> None:
    with (shared_data / "e2e" / "devset.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))[:200]
    data = runs["e2e.csv"]
    with data.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=["mr", "ref"])
        writer.writeheader()
        writer.writerows(rows)
    more = ("--prompt_column", "mr", "--response_column", "ref", "--max_length", "256", "--truncate")
    results = runs.train("out", *more, "--max_steps", "16", method=method, data=data)
    assert results["after"]["eval_loss"] < results["before"]["eval_loss"] - 0.1
    assert results["sample"]["prompt"].startswith("name[") and results["sample"]["expected"]
