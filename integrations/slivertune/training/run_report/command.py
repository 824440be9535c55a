"""`slivertune report`: draws a run's log, at its end or later."""

import shlex
from collections.abc import Callable
from pathlib import Path

from slivertune.core.output_place import check_file_place
from slivertune.core.typed_command import typed_command
from slivertune.planning.plot import require_matplotlib, save
from slivertune.training.run_report.figure import run_figure
from slivertune.training.run_report.run_log import read_run_log

REPORT_NAME = "report.png"
"""Name of the picture in a run's folder."""


def run_report(folder: Path, output: Path | None = None) -> Path:
    """Draw a run.

    Args:
        folder: Folder of the run.
        output: PNG file to write. The default is `report.png` in the folder. An older file is replaced.

    Returns:
        Path of the picture.

    Raises:
        ImportError: If matplotlib is not installed.
        FileNotFoundError: If the folder does not exist.
        ValueError: If the run has no log, a damaged one or one without a loss, or if `output` can't be a file.
        OSError: If the file can't be written.
    """
    require_matplotlib("a picture of the run")
    path = output or folder / REPORT_NAME
    if output is not None:
        check_file_place(path, "--output")
    log = read_run_log(folder)
    if not any("loss" in entry for entry in log.entries):
        raise ValueError(
            f"{log.source} has no line with a loss: the run ended before --logging_steps updates. Lower --logging_steps"
        )
    save(run_figure(log), path)
    return path


def draw_at_the_end(folder: Path, say: Callable[[str], None]) -> Path | None:
    """Draw a run that has just ended. A picture that fails, or Ctrl-C while it is drawn, never breaks a run.

    Args:
        folder: Folder of the run.
        say: Function that prints the reason why there is no picture.

    Returns:
        Path of the picture, or None if there is none.
    """
    try:
        return run_report(folder)
    except KeyboardInterrupt:
        command = shlex.join(typed_command("report", str(folder)))
        say(f"note: no {REPORT_NAME}: it was interrupted. Draw it with: {command}")
        return None
    except Exception as error:
        say(f"note: no {REPORT_NAME}: {' '.join(str(error).split()) or type(error).__name__}")
        return None
