"""Every command of docs/command-line.md runs as it is shown there."""

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from slivertune.cli import main
from tests.helpers.launching import environment
from tests.training.tiny_runs import complaint, results_of, sentences


@pytest.fixture(scope="module")
def page(checkout: Path) -> str:
    return (checkout / "docs" / "command-line.md").read_text(encoding="utf-8")


@pytest.fixture
def folder(page: str, tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page's files and what they name, in the working folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("chats.jsonl", "more.jsonl"):
        rows = [{"prompt": text, "completion": name} for text in sentences(20)]
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for name, text in re.findall(r"^`([\w.]+)`:\n\n```\w+\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        Path(name).write_text(text.replace("PATH_OR_HUB_ID", str(tiny_base)), encoding="utf-8")
    return tmp_path


def commands_of(page: str, base: Path) -> list[list[str]]:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    lines = [line for language, block in blocks if not language for line in block.splitlines()]
    shown = [line for line in lines if not line.startswith("slivertune train: error: ")]
    return [shlex.split(line.replace("PATH_OR_HUB_ID", str(base))) for line in shown]


@pytest.mark.slow
def test_commands_of_one_process_run_as_shown(
    page: str, folder: Path, tiny_base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = [words[1:] for words in commands_of(page, tiny_base) if words[0] == "slivertune"]
    assert len(commands) >= 7
    for words in commands:
        if "--help" in words:
            with pytest.raises(SystemExit) as stop:
                main(words)
            assert stop.value.code == 0 and "examples:" in capsys.readouterr().out
        else:
            assert main(words) == 0, words
    rates = {name: results_of(Path("runs", name))["settings"]["learning_rate"] for name in ("mine", "second", "again")}
    assert rates == {"mine": 4e-5, "second": 2e-5, "again": 4e-5}


def test_errors_are_those_that_are_shown(page: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    in_file, typed = re.findall(r"^slivertune train: error: .*\n", page, re.MULTILINE)
    assert complaint(capsys, ["train", "--lr", "1e-4"]) == typed
    path = Path("run.yaml")
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("learning_rate", "learnin_rate"), encoding="utf-8")
    assert complaint(capsys, ["train", "run.yaml"]) == in_file


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["accelerate", "torchrun", "deepspeed"])
def test_commands_of_launchers_run_as_shown(launcher: str, page: str, folder: Path, tiny_base: Path) -> None:
    (words,) = [words for words in commands_of(page, tiny_base) if words[0] == launcher]
    # Where tests run side by side, each launch has ports of its own.
    free = {
        "accelerate": ["--main_process_port", "0"],
        "torchrun": ["--standalone"],
        "deepspeed": ["--master_port", "29587"],
    }
    place = words.index("-m" if launcher != "deepspeed" else "--module")
    words[place:place] = free[launcher]
    if launcher == "accelerate":
        words = [*words[:2], "--mixed_precision=no", "--num_machines=1", "--dynamo_backend=no", *words[2:]]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert results_of(Path("runs") / launcher)["world_size"] == 2


def test_the_table_has_every_command(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([])
    shown = re.findall(r"^    (\w+) ", capsys.readouterr().out, re.MULTILINE)
    assert set(re.findall(r"^\| `slivertune (\w+)`", page, re.MULTILINE)) == set(shown) and len(shown) > 6
