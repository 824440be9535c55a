"""Commands that are wrong, of every kind: code 2, one line that names what was typed, and nothing is written."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from slivertune.cli import main

DIGITS = "9" * 5000
SHOWN_DIGITS = f"{'9' * 20}... (5,000 digits)"
PLAN = ("plan", "--model", "llama-3-8b")
COMMANDS: dict[str, tuple[tuple[str, ...], str]] = {
    "a negative rate": (
        ("train", "--learning_rate", "-1e-4", "--output_dir", "out"),
        "--learning_rate -0.0001 must be at least 0 and at most 100",
    ),
    "negative epochs": (("train", "--num_train_epochs", "-3"), "--num_train_epochs -3.0 must be more than 0"),
    "a number of updates that is none": (
        ("train", "--max_steps", "-5e0"),
        "--max_steps '-5e0' must be a whole number, at least 1",
    ),
    "5,000 digits": (("train", "--seed", DIGITS), f"--seed '{SHOWN_DIGITS}' must be a whole number, at least 0"),
    "5,000 digits for a number or a word": (
        ("train", "--layers_per_group", DIGITS),
        f"--layers_per_group '{SHOWN_DIGITS}' must be an integer, a share",
    ),
    "5,000 digits in a run file": (("train", "given/digits.json"), f"given/digits.json: --seed '{SHOWN_DIGITS}' must"),
    "a share that is no number": (
        ("train", "--method", "sft", "--density", "nan"),
        "--density nan must be more than 0",
    ),
    "an unknown choice": (("train", "--optim", "magic"), "argument --optim: invalid choice: 'magic'"),
    "a switch that is neither": (
        ("train", "--packing", "maybe"),
        "--packing 'maybe' must be true or false",
    ),
    "a mapping that is none": (
        ("train", "--lr_scheduler_kwargs", "[1]"),
        "--lr_scheduler_kwargs '[1]' must be a JSON mapping",
    ),
    "a value that looks like an option": (
        ("train", "--sample_prompt", "-hello"),
        "expected one argument; if '-hello' is its value, write --sample_prompt=-hello",
    ),
    "fp16 without a GPU": (
        ("train", "--method", "lora", "--fp16", "--use_cpu"),
        "--fp16 needs a GPU, and this run has",
    ),
    "a folder below a file": (
        ("train", "--output_dir", "given/rows.jsonl/run"),
        r"output_dir given/rows.jsonl/run lies under ",
    ),
    "a folder with too long a name": (
        ("train", "--output_dir", "new/" + "x" * 300),
        f"output_dir 'new/{'x' * 76}' can't be a folder: File name too long. Name another",
    ),
    "a folder that is a broken link": (
        ("train", "--output_dir", "given/link"),
        "output_dir given/link is a link that leads nowhere",
    ),
    "a run file in Latin-1": (
        ("train", "given/run.yaml"),
        "config file given/run.yaml is not UTF-8 text: line 2 has the byte 0xe9. Convert it",
    ),
    "a folder for a run file": (("train", "given"), "config file given is a folder. Name a file in it"),
    "rows in Latin-1": (
        ("train", "--dataset", "given/rows.jsonl", "--output_dir", "out"),
        "given/rows.jsonl is not UTF-8 text: line 2 has the byte 0xe9. Convert it",
    ),
    "a length that is no number": ((*PLAN, "--seq_length", "-1e3"), "--seq_length '-1e3' must be a whole number"),
    "a size of 5,000 digits": ((*PLAN, "--fit", DIGITS), f"--fit '{SHOWN_DIGITS}' must be a size"),
    "a picture nowhere": ((*PLAN, "--plot", "new/peak.png"), "--plot new/peak.png: there is no folder new"),
    "a negative seed of a comparison": (("compare", "--seeds", "-1"), "--seeds -1 must be at least 0"),
    "a comparison in a file": (
        ("compare", "--output_dir", "given/rows.jsonl"),
        "output_dir given/rows.jsonl is a file. Name a folder",
    ),
    "a comparison of what is not there": (
        ("compare", "--rows", "dense", "--dataset", "absent.jsonl"),
        "--rows dense: dataset 'absent.jsonl' is not there",
    ),
    "a report of no run": (("report", "absent"), "absent is not a folder. Name that of a run"),
    "a report below a file": (
        ("report", "given", "--output", "given/rows.jsonl/report.png"),
        "--output given/rows.jsonl is a file. Name a folder",
    ),
    "deltas that are not there": (("merge", "absent", "--output_dir", "out"), "absent is not a folder. Name one with"),
    "a merge with too long a name": (
        ("merge", "given", "--output_dir", "x" * 300),
        f"--output_dir '{'x' * 80}' can't be a folder: File name too long",
    ),
    "a merge back below a file": (
        ("unmerge", "given", "--output_dir", "given/rows.jsonl/out"),
        "--output_dir given/rows.jsonl/out lies under",
    ),
    "an unknown preset": (("path", "nowhere"), "there is no preset 'nowhere'"),
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the commands name, which holds all caches, too."""
    given = tmp_path / "given"
    given.mkdir()
    (given / "digits.json").write_text(f'{{"seed": {DIGITS}}}', encoding="utf-8")
    (given / "run.yaml").write_bytes("seed: 3\nrun_name: café\n".encode("latin-1"))
    (given / "rows.jsonl").write_bytes('{"text": "one"}\n{"text": "café"}\n'.encode("latin-1"))
    (given / "link").symlink_to("gone")
    monkeypatch.chdir(tmp_path)
    for name in ("HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "caches" / name))
    return tmp_path


def everything_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def check_complaint(code: int | str | None, out: str, error: str, said: str) -> None:
    assert code == 2, error
    error = re.sub(r"^[IW]\d{4} .*\btorch/.*\n", "", error, flags=re.MULTILINE)  # older torch logs where it is imported
    assert out == "" and error.count("\n") == 1, error
    assert re.match(r"slivertune( [a-z]+)?: error: ", error) and said in error, error
    # An unknown optimizer is answered with all there are.
    assert len(error) < 600 or "choose " in error.lower()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_wrong_command_is_one_line_and_writes_nothing(
    name: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words, said = COMMANDS[name]
    before = everything_in(here)
    code = main(list(words))
    check_complaint(code, *capfd.readouterr(), said)
    assert everything_in(here) == before


def run(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*words], capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_wrong_commands_as_processes(here: Path) -> None:
    installed = Path(sys.executable).with_name("slivertune")
    programs = [[sys.executable, "-m", "slivertune"], *([[str(installed)]] if installed.exists() else [])]
    before = everything_in(here)
    commands = [[*programs[index % len(programs)], *COMMANDS[name][0]] for index, name in enumerate(COMMANDS)]
    with ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        for name, ended in zip(COMMANDS, pool.map(run, commands), strict=True):
            check_complaint(ended.returncode, ended.stdout, ended.stderr, COMMANDS[name][1])
    assert everything_in(here) == before
