from __future__ import annotations

import io
import logging
import warnings

import datasets
import transformers
from rich.console import Console

from slivertune.training.output.terminal import make_console, one_voice


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
