"""Whole runs from a config file: the same as when typed, again from what a run keeps, and under each launcher."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from slivertune.cli import main
from tests.training.test_launches import ACCELERATE, TORCHRUN, launch
from tests.training.tiny_runs import UNMEASURED, Runs, assert_same_bits, results_of, train


def write_run(path: Path, arguments: list[str], **more: Any) -> str:
    """A config file that says what a command line of options with one value each says."""
    words = [word.removeprefix("--") for word in arguments[1:]]
    path.write_text(yaml.safe_dump({**dict(zip(words[::2], words[1::2], strict=True)), **more}), encoding="utf-8")
    return str(path)


def kept_settings(folder: Path) -> dict[str, Any]:
    """What a run's folder says of its settings."""
    settings: dict[str, Any] = yaml.safe_load((folder / "slivertune_run.yaml").read_text(encoding="utf-8"))
    return settings


@pytest.fixture
def typed(runs: Runs) -> list[str]:
    return runs.arguments("typed", "--save_steps", "3", *UNMEASURED)


@pytest.fixture(scope="module")
def typed_run(tiny_base: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run that is typed."""
    folder = tmp_path_factory.mktemp("typed") / "run"
    train(tiny_base, texts, folder, "--save_steps", "3", *UNMEASURED)
    return folder


def test_a_file_and_what_a_run_keeps_make_the_same_run(typed: list[str], typed_run: Path, tmp_path: Path) -> None:
    path = write_run(tmp_path / "run.yaml", typed, output_dir=str(tmp_path / "from file"))
    assert main(["train", path]) == 0
    kept = tmp_path / "from file" / "slivertune_run.yaml"
    assert main(["train", str(kept), "--output_dir", str(tmp_path / "again")]) == 0
    for name in ("from file", "again"):
        assert_same_bits(typed_run, tmp_path / name)
        assert results_of(tmp_path / name)["settings"] == results_of(typed_run)["settings"]
    first, *others = map(kept_settings, (typed_run, tmp_path / "from file", tmp_path / "again"))
    assert first["max_steps"] == 6 and others == [first, first]
    # What is typed wins.
    assert main(["train", str(kept), "--max_steps", "2", "--output_dir", str(tmp_path / "shorter")]) == 0
    assert results_of(tmp_path / "shorter")["num_steps"] == 2
    assert kept_settings(tmp_path / "shorter") == {**first, "max_steps": 2}


def test_one_command_with_a_file_starts_goes_on_and_is_finished(
    typed: list[str], typed_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    path = write_run(tmp_path / "run.yaml", typed, output_dir=str(output), resume_from_checkpoint="auto")
    assert main(["train", path]) == 0
    # As after a kill between the checkpoint and the end.
    (output / "results.json").unlink()
    shutil.rmtree(output / "model")
    shutil.rmtree(output / "checkpoint-6")
    capsys.readouterr()
    assert main(["train", path]) == 0
    assert f"continuing from {output / 'checkpoint-3'}" in "".join(capsys.readouterr().out.split("\n"))
    assert_same_bits(typed_run, output)
    assert main(["train", path]) == 0
    said = capsys.readouterr().out
    assert "is finished after 6 updates; nothing was trained" in said and f"started by: slivertune train {path}" in said
    # The run's own file continues it, too.
    more = ("--max_steps", "8", "--output_dir", str(output), "--resume_from_checkpoint", "true")
    assert main(["train", str(output / "slivertune_run.yaml"), *more]) == 0
    assert results_of(output)["num_steps"] == 8


@pytest.mark.slow
def test_two_processes_of_accelerate_launch_read_one_file(typed: list[str], tmp_path: Path) -> None:
    path = write_run(tmp_path / "run.yaml", typed)
    words = ["train", path, "--output_dir", str(tmp_path / "out")]
    results, _ = launch(ACCELERATE, words, tmp_path)
    assert (results["world_size"], results["layout"], results["num_steps"]) == (2, "ddp", 6)
    assert kept_settings(tmp_path / "out")["max_steps"] == 6
    again, _ = launch(
        TORCHRUN, ["train", str(tmp_path / "out" / "slivertune_run.yaml"), *words[2:-1], f"{words[-1]}2"], tmp_path
    )
    assert again["world_size"] == 2
    assert_same_bits(tmp_path / "out", tmp_path / "out2")
