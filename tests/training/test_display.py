import io
import logging
import re
import warnings
from types import SimpleNamespace
from typing import Any

import datasets
import transformers
from rich.console import Console

from slivertune.training.display import Display, describe_metrics, make_console, one_voice


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
        "step    4/10  loss 1.235  rate 1e-05  gradient norm 2",
        "x" * 200,
    ]


def test_what_is_for_trackers_is_not_shown_and_speed_is() -> None:
    display, out, state = make_display()
    logs = {"loss": 1.0, "hift/group": 3, "memory/state_host_bytes": 5, "skipped_updates": 0, "mine": 2}
    display.on_log(None, state, None, logs={**logs, "tokens_per_second": 12345.6})
    assert out.getvalue() == "step    4/10  loss 1  mine 2  12,346 tokens/s\n"


def test_the_bar_shows_loss_and_speed_and_fits_into_80_columns() -> None:
    out = io.StringIO()
    display = Display(Console(file=out, width=80, force_terminal=True, legacy_windows=False))
    state: Any = SimpleNamespace(max_steps=100000, global_step=4, is_local_process_zero=True)
    display.on_train_begin(None, state, None)  # type: ignore[arg-type]
    display.on_log(None, state, None, logs={"loss": 1.23456, "tokens_per_second": 1234567.8})  # type: ignore[arg-type]
    display._progress.refresh()
    display.close()
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    bars = [line.rstrip() for line in re.split(r"[\r\n]+", plain) if line.startswith("training")]
    assert bars[0].endswith("0:00:00 < -:--:--") and "4/100000" in bars[0]
    assert bars[-1].endswith("loss 1.235  1,234,568 tokens/s") and "4/100000" in bars[-1]
    assert all(len(bar) <= 80 for bar in bars)


def test_in_a_terminal_lines_break_between_words_and_what_follows_is_set_in() -> None:
    out = io.StringIO()
    display = Display(Console(file=out, width=40, force_terminal=True, color_system=None))
    display.say("  memory  100.2 MB planned at the peak (weights 11.0, gradients 0.0)")
    display.say("step    4/10  loss 1.235  rate 1e-05  gradient norm 2")
    display.say("note: it lies in /a/very/long/path/that/is/longer/than/any/line now")
    assert out.getvalue().splitlines() == [
        "  memory  100.2 MB planned at the peak",
        "          (weights 11.0, gradients 0.0)",
        "step    4/10  loss 1.235  rate 1e-05",
        "    gradient norm 2",
        "note: it lies in",
        "    /a/very/long/path/that/is/longer/than/any/line",
        "    now",
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
    assert describe_metrics({"eval_loss": 1.0}) == "loss 1.0000"


def test_our_log_and_all_warnings_speak_in_the_console() -> None:
    out = io.StringIO()
    with one_voice(Console(file=out, width=40)):
        logging.getLogger("slivertune.training.data.splits").info("held out %d rows [of many]", 3)
        logging.getLogger("slivertune.training.data.splits").warning("one is odd")
        # What an engine calls by a retired name is not said.
        for text in (
            "`torch.distributed.all_gather_into_tensor` is deprecated. Please ...",
            "`torch.distributed` is odd",
        ):
            warnings.warn_explicit(text, UserWarning, "torch.py", 1, module="deepspeed.comm.torch")
        warnings.simplefilter("default")
        warnings.warn("x" * 60, UserWarning, stacklevel=1)
    assert out.getvalue().splitlines() == [
        "note: held out 3 rows [of many]",
        "warning: one is odd",
        "warning: `torch.distributed` is odd",
        "warning: " + "x" * 60,
    ]


def test_another_process_than_the_first_is_quiet_and_its_libraries_too() -> None:
    verbosity = transformers.utils.logging.get_verbosity()
    console = make_console(quiet=True)
    with console.capture() as captured, one_voice(console):
        assert transformers.utils.logging.get_verbosity() == logging.ERROR == datasets.logging.get_verbosity()
        console.print("a line")
        logging.getLogger("slivertune").info("a note")
    assert captured.get() == ""
    assert transformers.utils.logging.get_verbosity() == verbosity
    assert make_console().width == console.width == 120, "without a terminal, wide enough for our lines"


def test_everything_is_as_before_afterwards() -> None:
    log = logging.getLogger("slivertune")

    def bars() -> tuple[bool, bool]:
        return transformers.utils.logging.is_progress_bar_enabled(), datasets.are_progress_bars_disabled()

    before = (log.level, list(log.handlers), warnings.showwarning, bars())
    with one_voice(Console(file=io.StringIO())):
        assert bars() == (False, True)
    assert (log.level, log.handlers, warnings.showwarning, bars()) == before
