import io
import shlex
import subprocess

import pytest

from slivertune.core.terminal_text import print_line

WORDS = "interrupted; the last whole checkpoint is runs/a-folder-with-hyphens/checkpoint-40; continue with:"
COMMAND = ["slivertune", "train", "--dataset", "my chats.jsonl", "--layers_per_group", "2", "--sample_prompt", "a" * 50]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")


def test_a_terminal_gets_whole_words_and_a_command_that_a_shell_puts_together() -> None:
    terminal = Terminal()
    print_line(WORDS, terminal, command=COMMAND)
    text = terminal.getvalue()
    said, _, typed = text.partition("continue with:\n")
    assert (said + "continue with:").split() == WORDS.split()
    read = subprocess.run(["sh", "-c", f"printf '%s\\n' {typed}"], capture_output=True, text=True, check=True)
    assert read.stdout.splitlines() == COMMAND
    long = [line for line in text.splitlines() if len(line) > 40]
    # A word that does not fit into a line has one of its own.
    assert [line.strip(" \\;") for line in long] == ["runs/a-folder-with-hyphens/checkpoint-40", "a" * 50]
    assert len(text.splitlines()) == 9


def test_a_file_gets_one_line() -> None:
    file = io.StringIO()
    print_line(WORDS, file, command=COMMAND)
    assert file.getvalue() == f"{WORDS} {shlex.join(COMMAND)}\n"
    print_line(WORDS, file)
    assert file.getvalue().splitlines()[1:] == [WORDS]
