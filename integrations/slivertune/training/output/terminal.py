"""One voice on the terminal: the run's own lines, and nothing that libraries print for their own sake."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import datasets
import torch
import transformers
from rich.console import Console

_WIDTH_WITHOUT_TERMINAL = 120


def make_console(*, quiet: bool = False) -> Console:
    """The console of a run, on standard output.

    Args:
        quiet: Whether another process of the run speaks.
    """
    console = Console(highlight=False, quiet=quiet)
    return console if console.is_terminal else Console(highlight=False, width=_WIDTH_WITHOUT_TERMINAL, quiet=quiet)


@contextmanager
def one_voice(console: Console) -> Iterator[None]:
    """While the block runs, let this package's log and all warnings speak in the console, and libraries' bars be still.

    Args:
        console: Where lines go.
    """
    if not torch.cuda.is_available():
        # What DeepSpeed would find out by itself, and announce, as soon as a model is saved.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    had_bars = transformers.utils.logging.is_progress_bar_enabled(), not datasets.are_progress_bars_disabled()
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    verbosity = transformers.utils.logging.get_verbosity(), datasets.logging.get_verbosity()
    if console.quiet:
        transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        datasets.logging.set_verbosity_error()
    if not console.is_terminal:
        datasets.disable_progress_bars()
    log = logging.getLogger("slivertune")
    level, handler = log.level, _ConsoleHandler(console)
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        with warnings.catch_warnings():
            # DeepSpeed 0.19.8 calls collectives by names that torch 2.13 retires, which can't be changed here.
            warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+_tensor` is deprecated")
            warnings.showwarning = lambda message, *_, **__: _print(console, f"warning: {message}")
            yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        if console.quiet:
            transformers.utils.logging.set_verbosity(verbosity[0])
            datasets.logging.set_verbosity(verbosity[1])
        if had_bars[0]:
            transformers.utils.logging.enable_progress_bar()  # type: ignore[no-untyped-call]
        if had_bars[1]:
            datasets.enable_progress_bars()


class _ConsoleHandler(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        prefix = "note" if record.levelno < logging.WARNING else record.levelname.lower()
        _print(self._console, f"{prefix}: {record.getMessage()}")


def _print(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)
