"""Processes of a comparison: what they say, how they fail, and that none is left behind."""

import os
from pathlib import Path

import pytest
from rich.console import Console
from rich.status import Status

from slivertune.training.run_process import FailedError, run_process

QUIET = Console(quiet=True)


def test_what_a_process_says_goes_to_its_log_behind_what_stands_there(tmp_path: Path) -> None:
    log = tmp_path / "folder" / "run.log"
    for word in ("one", "two"):
        run_process(["-c", f"print({word!r})"], log, "title", QUIET)
    assert log.read_text(encoding="utf-8") == "one\ntwo\n"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import sys; print('slivertune train: error: it broke\\nbye'); sys.exit(3)", "^it broke$"),
        ("import sys; print('last words'); sys.exit(3)", "^ended with code 3: last words$"),
        ("import sys; sys.exit(3)", "^ended with code 3: $"),
    ],
)
def test_a_process_that_fails_says_why(code: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(FailedError, match=message):
        run_process(["-c", code], tmp_path / "log", "title", QUIET)


def test_an_interruption_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "pid"

    def interrupt(status: Status, text: str) -> None:
        if "saving" not in text and place.exists() and place.read_text(encoding="utf-8"):
            raise KeyboardInterrupt

    monkeypatch.setattr(Status, "update", interrupt)
    code = (
        "import os, signal, sys, time; signal.signal(signal.SIGINT, lambda *_: (print('saved'), sys.exit(130)));"
        f"open({str(place)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    )
    with pytest.raises(KeyboardInterrupt):
        run_process(["-c", code], tmp_path / "log", "title", QUIET)
    assert (tmp_path / "log").read_text(encoding="utf-8") == "saved\n", "it ends by itself"
    with pytest.raises(ProcessLookupError):
        os.kill(int(place.read_text(encoding="utf-8")), 0)
