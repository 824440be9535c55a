import io
import logging
import warnings
from types import SimpleNamespace
from typing import Any

import datasets
import transformers
from rich.console import Console

from slivertune.training.output.display import Display, describe_metrics, make_console, one_voice


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


def test_our_log_and_all_warnings_speak_in_the_console() -> None:
    out = io.StringIO()
    with one_voice(Console(file=out, width=40)):
        logging.getLogger("slivertune.training.data.splits").info("held out %d rows [of many]", 3)
        logging.getLogger("slivertune.training.data.splits").warning("one is odd")
        warnings.simplefilter("default")
        warnings.warn("x" * 60, UserWarning, stacklevel=1)
    assert out.getvalue().splitlines() == [
        "note: held out 3 rows [of many]",
        "warning: one is odd",
        "warning: " + "x" * 60,
    ]


def test_what_an_engine_calls_by_a_retired_name_is_not_said() -> None:
    out = io.StringIO()
    with one_voice(Console(file=out, width=120)):
        for text in (
            "`torch.distributed.all_gather_into_tensor` is deprecated. Please ...",
            "`torch.distributed` is odd",
        ):
            warnings.warn_explicit(text, UserWarning, "torch.py", 1, module="deepspeed.comm.torch")
    assert out.getvalue().splitlines() == ["warning: `torch.distributed` is odd"]


def test_another_process_than_the_first_is_quiet_and_its_libraries_too() -> None:
    verbosity = transformers.utils.logging.get_verbosity()
    console = make_console(quiet=True)
    with console.capture() as captured, one_voice(console):
        assert transformers.utils.logging.get_verbosity() == logging.ERROR == datasets.logging.get_verbosity()
        console.print("a line")
        logging.getLogger("slivertune").info("a note")
    assert captured.get() == ""
    assert transformers.utils.logging.get_verbosity() == verbosity


def test_everything_is_as_before_afterwards() -> None:
    log, show = logging.getLogger("slivertune"), warnings.showwarning
    before = (log.level, list(log.handlers))
    bars = transformers.utils.logging.is_progress_bar_enabled(), datasets.are_progress_bars_disabled()
    with one_voice(Console(file=io.StringIO())):
        assert not transformers.utils.logging.is_progress_bar_enabled()
        assert datasets.are_progress_bars_disabled()
    assert (log.level, log.handlers) == before
    assert warnings.showwarning is show
    assert (transformers.utils.logging.is_progress_bar_enabled(), datasets.are_progress_bars_disabled()) == bars


def test_a_console_without_a_terminal_is_wide_enough_for_our_lines() -> None:
    assert make_console().width == 120
