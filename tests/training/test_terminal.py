from __future__ import annotations

import io
import logging
import warnings

import datasets
import transformers
from rich.console import Console

from slivertune.training.terminal import make_console, one_voice


def test_our_log_and_all_warnings_speak_in_the_console() -> None:
    out = io.StringIO()
    with one_voice(Console(file=out, width=40)):
        logging.getLogger("slivertune.training.data").info("held out %d rows [of many]", 3)
        logging.getLogger("slivertune.training.data").warning("one is odd")
        warnings.simplefilter("default")
        warnings.warn("x" * 60, UserWarning, stacklevel=1)
    assert out.getvalue().splitlines() == [
        "note: held out 3 rows [of many]",
        "warning: one is odd",
        "warning: " + "x" * 60,
    ]


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
