import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slivertune.deltas import load
from slivertune.training.command_line.parse import parse_train_arguments
from slivertune.training.early_stopping import EarlyStopping, check_best_metric
from tests.helpers.models import differing
from tests.training.tiny_runs import COMBINATIONS, UNMEASURED, Runs, saved_weights

EVERY_2 = (
    *("--eval_strategy", "steps", "--eval_steps", "2"),
    *("--save_strategy", "steps", "--save_steps", "2"),
)
SLOW = pytest.mark.slow
BEST = (*EVERY_2, "--load_best_model_at_end", "true")


def judged(losses: list[float], patience: int, callback: EarlyStopping | None = None) -> tuple[int, list[str]]:
    """Evaluations until training is to stop, as the Trainer asks for them; and what was said."""
    said: list[str] = []
    callback = callback or EarlyStopping(patience, said.append)
    args: Any = SimpleNamespace(
        load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=False, eval_strategy="steps"
    )
    state: Any = SimpleNamespace(global_step=0, stateful_callbacks={}, best_metric=None, best_model_checkpoint=None)
    control: Any = SimpleNamespace(should_training_stop=False)
    callback.on_train_begin(args, state, control)
    for count, loss in enumerate(losses, start=1):
        state.global_step = count
        callback.on_evaluate(args, state, control, metrics={"eval_loss": loss})
        state.best_metric = loss if state.best_metric is None else min(loss, state.best_metric)
        if control.should_training_stop:
            return count, said
    return len(losses), said


@pytest.mark.parametrize(
    ("losses", "patience", "expected"),
    [
        ([3, 2, 2, 1, 1, 1], 2, 6),
        ([3, 2, 2.5, 2.5], 2, 4),
        ([3, 2, 2.5, 2.5], 1, 3),
        ([3, 4, 2, 3, 1, 2], 2, None),
    ],
)
def test_training_stops_after_as_many_evaluations_without_a_better_loss(
    losses: list[float], patience: int, expected: int | None
) -> None:
    count, said = judged(losses, patience)
    assert count == (expected or len(losses))
    best = min(losses[:count])
    line = f"stopping early at step {expected}: loss was no better than {best:.4f} in {patience} evaluations"
    assert said == ([] if expected is None else [line])


def test_evaluations_before_and_after_the_training_do_not_count() -> None:
    said: list[str] = []
    callback = EarlyStopping(1, said.append)
    control: Any = SimpleNamespace(should_training_stop=False)
    args: Any = SimpleNamespace(metric_for_best_model="loss", greater_is_better=False)
    state: Any = SimpleNamespace(global_step=0, best_metric=1.0)
    callback.on_evaluate(args, state, control, metrics={"eval_loss": 5.0})
    judged([1.0], 1, callback)
    callback.on_train_end(args, state, control)
    callback.on_evaluate(args, state, control, metrics={"eval_loss": 5.0})
    assert said == [] and not control.should_training_stop


def test_a_resumed_run_counts_on_with_its_own_patience() -> None:
    callback = EarlyStopping(3, print)
    saved = {"args": {"early_stopping_patience": 9}, "attributes": {"early_stopping_patience_counter": 2}}
    state: Any = SimpleNamespace(global_step=4, stateful_callbacks={"EarlyStopping": saved})
    args: Any = SimpleNamespace(load_best_model_at_end=True, metric_for_best_model="loss", eval_strategy="steps")
    callback.on_train_begin(args, state, None)  # type: ignore[arg-type]
    assert (callback.early_stopping_patience, callback.early_stopping_patience_counter) == (3, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--early_stopping_patience", "0"], "early_stopping_patience=0 must be at least 1"),
        (
            ["--early_stopping_patience", "2"],
            "--early_stopping_patience 2 needs evaluations while training. Give --eval_strategy steps",
        ),
        (
            ["--early_stopping_patience", "2", *EVERY_2],
            "--early_stopping_patience 2 needs a metric to watch. Give --load_best_model_at_end true",
        ),
    ],
)
def test_what_early_stopping_needs_is_said(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_train_arguments(arguments)


def test_a_metric_that_is_not_evaluated_is_refused_before_training(runs: Runs) -> None:
    error = runs.complaint(*BEST, "--metric_for_best_model", "eval_accuracy", code=1)
    assert "--metric_for_best_model eval_accuracy is no metric of the evaluation. Use eval_loss" in error
    assert not list(runs["out"].glob("checkpoint-*"))
    check_best_metric(SimpleNamespace(metric_for_best_model="accuracy"), {"eval_accuracy": 1.0})  # type: ignore[arg-type]


def stopped(runs: Runs, *more: str) -> tuple[Path, dict[str, Any]]:
    """Make a run whose loss counts as better the larger it is, so that the first evaluation stays the best."""
    backwards = ("--metric_for_best_model", "loss", "--greater_is_better", "true", "--max_steps", "20")
    return runs["out"], runs.train("out", *BEST, *backwards, "--early_stopping_patience", "2", *UNMEASURED, *more)


@pytest.mark.parametrize(
    "name", ["sft", *(pytest.param(each, marks=SLOW) for each in ("hift", "dense", "lora", "sft in bf16, packed"))]
)
def test_a_run_stops_early_and_saves_the_best_model(name: str, runs: Runs) -> None:
    run, results = stopped(runs, *COMBINATIONS.get(name, ("--method", name)))
    out = " ".join(runs.printed().split())
    assert results["num_steps"] == 6, "evaluations at 2, 4 and 6"
    assert results["best_checkpoint"] == str(run / "checkpoint-2")
    assert "stopping early at step 6" in out and "ends with the model of" in out
    state = json.loads((run / "checkpoint-6" / "trainer_state.json").read_text(encoding="utf-8"))
    count = state["stateful_callbacks"]["EarlyStopping"]["attributes"]["early_stopping_patience_counter"]
    assert count == 2, "from which a resumed run goes on"
    best = saved_weights(run / "checkpoint-2")
    assert differing(best, saved_weights(run / "model")) == []
    assert differing(best, saved_weights(run / "checkpoint-6")) != []
    if name.startswith("sft"):
        assert_deltas_of_the_best(run)


def test_a_resumed_run_that_restores_callbacks_stops_where_the_whole_one_does(runs: Runs) -> None:
    run, whole = stopped(runs, "--method", "dense")
    (run / "results.json").unlink()
    shutil.rmtree(run / "checkpoint-6")
    more = ("--resume_from_checkpoint", "true", "--restore_callback_states_from_checkpoint", "true")
    _, resumed = stopped(runs, "--method", "dense", *more)
    assert (resumed["num_steps"], resumed["after"]) == (whole["num_steps"], whole["after"]) and whole["num_steps"] == 6
    assert "continuing from" in runs.printed()


def assert_deltas_of_the_best(run: Path) -> None:
    state = torch.load(run / "checkpoint-2" / "optimizer.pt", weights_only=True)["state"]
    deltas = load(run / "delta").deltas
    assert deltas.keys() == state.keys()
    for name, delta in deltas.items():
        assert torch.equal(delta.indices, state[name]["indices"])
        assert torch.equal(delta.values, state[name]["delta"].float())


@pytest.mark.slow
def test_deltas_beside_4_bit_weights_are_the_best_ones(runs: Runs) -> None:
    run, _ = stopped(runs, "--method", "sft", "--density", "0.1", "--load_in_4bit")
    assert_deltas_of_the_best(run)
