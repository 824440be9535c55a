import json
from pathlib import Path

import pytest
from transformers import TrainerState

from slivertune.training.run_report.run_log import read_run_log, write_run_log
from tests.training.run_report.made_logs import LOG, evaluation, line, write_run, write_state


def test_a_series_has_every_value_at_its_step_and_none_that_is_not_finite(tmp_path: Path) -> None:
    log = [line(1), line(2, loss=float("nan")), evaluation(2, 1.0), line(3, note="text", flag=True)]
    run = read_run_log(write_run(tmp_path, log, 30))
    assert run.series("loss") == ([1, 3], [3.0, 2 + 1 / 3])
    assert run.series("grad_norm") == ([1, 2, 3], [0.1, 0.2, 0.1 * 3])
    assert run.series("note") == run.series("flag") == run.series("absent") == ([], [])


def test_evaluations_are_those_before_in_mid_run_and_after(tmp_path: Path) -> None:
    run = read_run_log(write_run(tmp_path))
    assert run.evaluations("eval_loss") == ([0, 10, 20, 30], [3.0, 2.5, 1.5, 0.5])


def test_of_a_run_that_ends_with_its_best_model_the_last_evaluation_is_of_that_step(tmp_path: Path) -> None:
    best = {"best_checkpoint": "runs/x/checkpoint-20", "after": {"eval_loss": 1.5}}
    run = read_run_log(write_run(tmp_path, **best))
    assert run.evaluations("eval_loss") == ([0, 10, 20], [3.0, 2.5, 1.5])


def test_without_evaluations_and_results_there_are_none(tmp_path: Path) -> None:
    write_state(tmp_path, [line(5)], 5)
    assert read_run_log(tmp_path).evaluations("eval_loss") == ([], [])


def test_a_run_that_was_interrupted_is_read_from_its_newest_checkpoint(tmp_path: Path) -> None:
    write_state(tmp_path / "checkpoint-10", LOG[:2], 10)
    newest = write_state(tmp_path / "checkpoint-20", LOG[:4], 20)
    run = read_run_log(tmp_path)
    assert (run.source, run.entries, run.results) == (newest, LOG[:4], {})


def test_of_a_run_that_ended_and_was_resumed_the_newer_log_counts_and_older_results_do_not(tmp_path: Path) -> None:
    write_run(tmp_path)
    newest = write_state(tmp_path / "checkpoint-40", [*LOG, line(40)], 40)
    run = read_run_log(tmp_path)
    assert (run.source, run.results, run.series("loss")[0]) == (newest, {}, [10, 20, 30, 40])
    write_run(tmp_path, [*LOG, line(40), line(50)], 50, num_steps=50)
    run = read_run_log(tmp_path)
    assert run.series("loss")[0] == [10, 20, 30, 40, 50] and run.results["num_steps"] == 50


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "can't be read"),
        ("{", "can't be read"),
        ("[]", "a Trainer's state has a number as its global_step"),
        ('{"global_step": 3}', "a list of dictionaries as its log_history"),
        ('{"global_step": 3, "log_history": [1]}', "a list of dictionaries as its log_history"),
    ],
)
def test_a_log_that_is_broken_is_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message) as caught:
        read_run_log(tmp_path)
    assert str(tmp_path / "trainer_state.json") in str(caught.value)


def test_a_folder_that_is_none_or_has_no_log_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere is not a folder\. Name that of a run"):
        read_run_log(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"has no log: neither a trainer_state\.json nor a checkpoint with one"):
        read_run_log(tmp_path)


def test_a_log_is_written_aside_and_replaces_the_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = TrainerState(global_step=30, log_history=list(LOG))
    assert write_run_log(state, tmp_path) == tmp_path / "trainer_state.json"
    assert read_run_log(tmp_path).entries == LOG

    def cut(self: TrainerState, path: str) -> None:
        Path(path).write_text("half", encoding="utf-8")
        raise KeyboardInterrupt

    monkeypatch.setattr(TrainerState, "save_to_json", cut)
    with pytest.raises(KeyboardInterrupt):
        write_run_log(state, tmp_path)
    assert json.loads((tmp_path / "trainer_state.json").read_text())["global_step"] == 30
    assert [path.name for path in tmp_path.iterdir()] == ["trainer_state.json"]
