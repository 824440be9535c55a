import shlex
import subprocess
from pathlib import Path

import pytest

from slivertune.core.typed_command import MAKE_VARIABLE, typed_command

WORDS = ("train", "--sample_prompt", "a 'b' $c", "--seed", "3")


@pytest.fixture(autouse=True)
def not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MAKE_VARIABLE, raising=False)


@pytest.mark.parametrize(
    ("argv", "typed", "program"),
    [
        ("/x/slivertune/__main__.py", "python -m slivertune", "python -m slivertune"),
        ("/x/slivertune/__main__.py", ".venv/bin/python -X dev -m slivertune", ".venv/bin/python -X dev -m slivertune"),
        ("bin/slivertune", "bin/python bin/slivertune", "bin/slivertune"),
        ("{on_path}/slivertune", "/x/python {on_path}/slivertune", "slivertune"),
        ("/x/pytest/__main__.py", "python -m pytest", "slivertune"),
        ("-c", "python -c code", "slivertune"),
        ("", "python", "slivertune"),
    ],
)
def test_a_command_names_the_program_that_was_typed(
    argv: str, typed: str, program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, here = tmp_path / "slivertune", tmp_path / "bin"
    script.write_text("")
    script.chmod(0o755)
    here.mkdir()
    (here / "slivertune").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.argv", [argv.format(on_path=tmp_path), "train", "old"])
    monkeypatch.setattr("sys.orig_argv", [*typed.format(on_path=tmp_path).split(), "train", "old"])
    assert typed_command(*WORDS) == (*program.split(), *WORDS)


def test_after_make_train_the_options_stand_in_args_as_make_and_a_shell_read_them(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MAKE_VARIABLE, "make -C 'a b' train VENV=x")
    command = typed_command(*WORDS)
    assert command[:5] == ("make", "-C", "a b", "train", "VENV=x") and len(command) == 6
    assert typed_command("merge", "x")[0] == "slivertune"
    (tmp_path / "Makefile").write_text("train:\n\t@printf '%s\\n' $(ARGS)\n")
    line = shlex.join(("make", "--no-print-directory", "train", command[-1]))
    made = subprocess.run(["sh", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert made.stdout.splitlines() == list(WORDS[1:])


@pytest.mark.parametrize(
    ("more", "said"),
    [((), "make train"), (("VENV=/x", "ARGS=--seed 3"), "make train VENV=/x"), (("-C", "."), "make")],
)
def test_make_tells_the_command_how_it_was_typed(more: tuple[str, ...], said: str, checkout: Path) -> None:
    installed = ("-o", ".venv/.installed", "-o", "/x/.installed")
    made = subprocess.run(
        ["make", "-n", *installed, "train", *more], cwd=checkout, capture_output=True, text=True, check=True
    )
    assert f"SLIVERTUNE_MAKE='{said}" in made.stdout
