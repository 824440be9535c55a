from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from slivertune.training.output.display import Display, describe_metrics


def make_display() -> tuple[Display, io.StringIO, Any]:
    out = io.StringIO()
    state = SimpleNamespace(max_steps=10, global_step=4, is_local_process_zero=True)
    return Display(Console(file=out, width=80)), out, state


def test_logs_become_lines_that_are_not_cut_or_wrapped() -> None:
    display, out, state = make_display()
    display.on_train_begin(None, state, None)
    display.on_log(None, state, None, logs={"loss": 1.23456, "learning_rate": 1e-5, "grad_norm": 2.0, "epoch": 0.5})
    display.say("x" * 200)
    display.close()
    assert out.getvalue().splitlines()[:2] == [
        "step    4/10  loss 1.235  learning rate 1e-05  gradient norm 2",
        "x" * 200,
    ]


def test_a_log_that_counts_tokens_is_a_log_and_a_summary_is_none() -> None:
    display, out, state = make_display()
    speed = {"num_input_tokens_seen": 7, "train_runtime": 1.0, "train_tokens_per_second": 7.0}
    display.on_log(None, state, None, logs={"loss": 1.0, **speed})
    display.on_log(None, state, None, logs={"train_loss": 1.0, **speed})
    assert out.getvalue() == "step    4/10  loss 1  num_input_tokens_seen 7\n"


def test_evaluations_in_mid_run_are_said_and_others_left_to_the_report() -> None:
    display, out, state = make_display()
    metrics = {"eval_loss": 0.5, "eval_accuracy": 0.75, "eval_runtime": 1.0}
    display.on_evaluate(None, state, None, metrics=metrics)
    display.on_log(None, state, None, logs=metrics)
    assert out.getvalue() == ""
    display.on_train_begin(None, state, None)
    display.on_prediction_step(None, state, None, eval_dataloader=[1, 2])
    display.on_evaluate(None, state, None, metrics=metrics)
    display.close()
    assert "step    4/10  evaluation: loss 0.5000, accuracy 75.00%" in out.getvalue()


def test_updates_are_timed_without_what_lies_between_them(monkeypatch: Any) -> None:
    clock = iter([0.0, 2.0, 10.0, 13.0])
    monkeypatch.setattr("slivertune.training.output.display.time.perf_counter", lambda: next(clock))
    display, _, state = make_display()
    display.on_train_begin(None, state, None)
    for _ in range(2):
        display.on_step_begin(None, state, None)
        display.on_step_end(None, state, None)
    display.close()
    assert (display.seconds, display.num_updates) == (5.0, 2)


def test_metrics_are_described() -> None:
    assert describe_metrics({"eval_loss": 1.0}) == "loss 1.0000"
