"""Runs of a comparison as separate processes, whose output goes to a file beside their folder."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from slivertune.training.ranks.launchers import COMPARED

_PATIENCE = 0.3
"""Seconds between two readings of a process's output."""
_TAIL_BYTES = 4096
_MARK = "error: "


class FailedError(RuntimeError):
    """An error that ended a run or a trial of a comparison. The message is the reason."""


def run_process(words: Sequence[str], log: Path, title: str, console: Console) -> None:
    """Run this Python with some arguments to its end.

    Args:
        words: Arguments of Python.
        log: File for the output. Earlier contents are kept.
        title: Name on the screen, beside the last line of the output.
        console: Console that shows the title.

    Raises:
        FailedError: If the process ends with another code than 0.
        KeyboardInterrupt: After Ctrl-C, which the process receives as well. The process has ended by then: by itself,
            after its run has saved a checkpoint, or at a second Ctrl-C.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output, console.status(title) as status:
        process = subprocess.Popen(
            [sys.executable, *words],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, COMPARED: "1"},
        )
        try:
            while process.poll() is None:
                try:
                    process.wait(_PATIENCE)
                except subprocess.TimeoutExpired:
                    status.update(f"{title}: {_last_line(log)}")
        except BaseException as error:
            try:
                if isinstance(error, KeyboardInterrupt):
                    status.update(f"{title}: saving a checkpoint; Ctrl-C again ends at once")
                    process.send_signal(signal.SIGINT)
                    process.wait()
            finally:
                process.terminate()
                process.wait()
            raise
    if process.returncode:
        raise FailedError(_complaint(log, process.returncode))


def _tail(log: Path) -> list[str]:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        return file.read().decode("utf-8", "replace").splitlines()


def _last_line(log: Path) -> str:
    return next((line.strip() for line in reversed(_tail(log)) if line.strip()), "")


def _complaint(log: Path, code: int) -> str:
    """Return the error that the process printed, or else its last line."""
    lines = _tail(log)
    for line in reversed(lines):
        if _MARK in line:
            return line.partition(_MARK)[2].strip()
    return f"ended with code {code}: {_last_line(log)}"
