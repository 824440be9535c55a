import importlib.util
import json
from pathlib import Path

import pytest

from slivertune.cli import main
from slivertune.training.run_report import command
from slivertune.training.run_report.command import draw_at_the_end, run_report
from slivertune.training.run_report.figure import run_figure
from slivertune.training.run_report.run_log import read_run_log
from tests.training.run_report.made_logs import write_run
from tests.training.tiny_runs import TINY_CYCLE, Runs

PNG = b"\x89PNG\r\n\x1a\n"


def test_a_run_is_drawn_into_its_folder_and_again_wherever_one_likes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "run")
    (tmp_path / "run" / "report.png").write_bytes(b"an older one")
    assert main(["report", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'run' / 'report.png'}\n"
    assert (tmp_path / "run" / "report.png").read_bytes().startswith(PNG)
    assert main(["report", str(tmp_path / "run"), "--output", str(tmp_path / "other.png")]) == 0
    assert (tmp_path / "other.png").read_bytes().startswith(PNG)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.png", "run"]


@pytest.mark.parametrize(("words", "text"), [(["nowhere"], "nowhere is not a folder"), (["."], ". has no log")])
def test_what_can_not_be_drawn_is_said_in_a_line(
    words: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"slivertune report: error: {text}") and said.count("\n") == 1


@pytest.mark.parametrize("history", ["[]", '[{"eval_loss": 1, "step": 3}]'])
def test_a_log_without_a_loss_is_not_drawn(history: str, tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text(f'{{"global_step": 3, "log_history": {history}}}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"trainer_state\.json has no line with a loss: .*--logging_steps"):
        run_report(tmp_path)


def test_without_matplotlib_the_verb_fails_and_a_run_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"needs matplotlib.*pip install matplotlib$"):
        run_report(write_run(tmp_path))
    said: list[str] = []
    assert draw_at_the_end(tmp_path, said.append) is None
    (line,) = said
    needed = "matplotlib, which is missing. Run pip install matplotlib"
    assert line == f"note: no report.png: a picture of the run needs {needed}"
    assert not (tmp_path / "report.png").exists()


@pytest.mark.slow
def test_train_draws_its_log_which_a_resumed_run_goes_on_with(runs: Runs) -> None:
    run = runs["out"]
    options = ("--logging_steps", "1", "--report", "true", "--save_strategy", "steps", "--save_steps", "3")
    results = runs.train("out", *options)
    assert (run / "report.png").read_bytes().startswith(PNG)
    assert str(run / "report.png") in runs.printed().replace("\n", "")
    runs.train("out", *options, "--max_steps", "9", "--resume_from_checkpoint", "true")
    log = read_run_log(run)
    steps, losses = log.series("loss")
    state = json.loads((run / "checkpoint-9" / "trainer_state.json").read_text(encoding="utf-8"))
    assert steps == list(range(1, 10))
    assert losses == [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    assert log.series("hift/group")[1] == [step % TINY_CYCLE for step in range(9)]
    assert log.evaluations("eval_loss")[0] == [0, 9]
    assert log.evaluations("eval_loss")[1][0] == results["before"]["eval_loss"]
    titles = [axes.get_title(loc="left").split(" ")[0] for axes in run_figure(log).axes]
    assert titles == ["loss", "learning", "group", "gradient", "tokens/s", "optimizer", "memory"]


def test_a_picture_that_fails_breaks_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(log: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(command, "run_figure", fail)
    said: list[str] = []
    assert draw_at_the_end(write_run(tmp_path), said.append) is None
    assert said == ["note: no report.png: ZeroDivisionError"]
