import json
import re
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest

from slivertune.core.atomic import write_json
from slivertune.core.manifest import MANIFEST_NAME, find_damage, write_manifest
from slivertune.training.folders import (
    SETTINGS_NAME,
    START_NAME,
    Goal,
    RunFolder,
    checkpoint_folders,
    choose_run_folder,
    newest_whole,
    read_facts,
    remove_old,
)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_fresh_run_takes_the_first_free_default_folder() -> None:
    assert choose_run_folder("hift", None, None).path == Path("runs/hift")
    Path("runs/hift").mkdir(parents=True)
    assert choose_run_folder("hift", None, "false").path == Path("runs/hift"), "an empty folder is free"
    for name in (START_NAME, SETTINGS_NAME):
        (Path("runs/hift") / name).touch()
    assert choose_run_folder("hift", None, None).path == Path("runs/hift"), "so is that of a run that only started"
    Path("runs/hift/results.json").touch()
    Path("runs/hift-2").touch()
    assert choose_run_folder("hift", None, None).path == Path("runs/hift-3")
    assert choose_run_folder("dense", None, None).path == Path("runs/dense")


def test_a_folder_that_was_asked_for_must_hold_nothing() -> None:
    Path("mine").mkdir()
    assert choose_run_folder("hift", "mine", None).path == Path("mine")
    Path("mine/thesis.txt").touch()
    with pytest.raises(FileExistsError, match=r"mine already holds something.*--resume_from_checkpoint true"):
        choose_run_folder("hift", "mine", None)


@pytest.mark.parametrize("resume", [None, "true", "auto"])
def test_a_file_where_a_folder_is_asked_for_or_above_it_is_called_a_file(resume: str | None) -> None:
    Path("thesis.txt").touch()
    for asked, text in (
        ("thesis.txt", "thesis.txt is a file. Name a folder"),
        ("thesis.txt/runs/one", "thesis.txt/runs/one lies under .*thesis.txt, which is a file"),
    ):
        with pytest.raises(FileExistsError, match=f"output_dir {text}"):
            choose_run_folder("hift", asked, resume)


def test_a_link_that_leads_nowhere_is_called_one() -> None:
    Path("loop").symlink_to("loop")
    Path("old").symlink_to("gone")
    for asked in ("loop", "loop/x", "old", "old/x"):
        with pytest.raises(FileExistsError, match=rf"output_dir {asked} .*link that leads nowhere\. Name a folder"):
            choose_run_folder("hift", asked, None)


def test_a_file_in_the_place_of_all_runs_is_called_a_file() -> None:
    Path("runs").touch()
    with pytest.raises(FileExistsError, match=r"output_dir runs/hift lies under .*runs, which is a file"):
        choose_run_folder("hift", None, None)


def test_a_folder_that_can_not_be_written_is_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse = Mock(return_value=False)
    monkeypatch.setattr("os.access", refuse)
    Path("mine").mkdir()
    # The folder, and the nearest one that is there.
    for folder, nearest in (("there/too", Path.cwd()), ("mine", Path("mine"))):
        reason = f"{nearest} is not writable for this user. It needs a folder {nearest} in which"
        with pytest.raises(ValueError, match=f"output_dir {folder} could not be written: {reason}"):
            choose_run_folder("hift", folder, None)
    assert [call.args[0] for call in refuse.call_args_list] == [Path.cwd(), Path("mine")]


@pytest.mark.parametrize(
    ("folder", "said"),
    [
        (
            "/proc/mine",
            "output_dir /proc/mine could not be written: No such file or directory. It needs a folder /proc",
        ),
        ("x" * 300, "can't be a folder: File name too long. Name another"),
        ("new/" + "x" * 300, "can't be a folder: File name too long. Name another"),
        ("a\0b", "can't be a folder: embedded null byte. Name another"),
    ],
    ids=["proc", "long", "long below a new one", "null"],
)
@pytest.mark.parametrize("resume", [None, "auto"])
def test_a_folder_that_can_not_be_made_is_refused_by_its_name(folder: str, said: str, resume: str | None) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        choose_run_folder("hift", folder, resume)
    assert list(Path().iterdir()) == []


def test_the_newest_checkpoint_of_the_newest_default_folder_is_continued() -> None:
    make_checkpoint(Path("runs/hift"), 30)
    make_checkpoint(Path("runs/hift-2"), 10)
    Path("runs/hift-3").mkdir()
    for resume in ("true", "True"):
        newest = RunFolder(path=Path("runs/hift-2"), checkpoint=Path("runs/hift-2/checkpoint-10"))
        assert choose_run_folder("hift", None, resume) == newest


def test_nothing_whole_to_continue_is_an_error_with_the_reasons() -> None:
    with pytest.raises(ValueError, match="nothing whole to resume in runs/hift: it holds no checkpoint"):
        choose_run_folder("hift", None, "true")
    make_checkpoint(Path("mine"), 3, marked=False)
    with pytest.raises(ValueError, match=r"checkpoint-3 is not whole: it has no slivertune_checkpoint\.json"):
        choose_run_folder("hift", "mine", "true")


def test_a_checkpoint_named_by_path_is_continued_where_it_lies_or_elsewhere() -> None:
    checkpoint = make_checkpoint(Path("mine"), 3)
    for asked, path in ((None, Path("mine")), ("elsewhere", Path("elsewhere"))):
        assert choose_run_folder("hift", asked, str(checkpoint)) == RunFolder(path=path, checkpoint=checkpoint)
    occupy(Path("elsewhere"))
    with pytest.raises(FileExistsError, match="elsewhere already holds something"):
        choose_run_folder("hift", "elsewhere", str(checkpoint))


def test_a_damaged_or_absent_checkpoint_named_by_path_is_refused_and_a_whole_one_named() -> None:
    make_checkpoint(Path("mine"), 3)
    damaged = make_checkpoint(Path("mine"), 6)
    (damaged / "model.bin").write_bytes(b"short")
    with pytest.raises(
        ValueError, match=r"model\.bin has 5 bytes where 2,560 were written\. Resume from mine/checkpoint-3"
    ):
        choose_run_folder("hift", None, str(damaged))
    with pytest.raises(ValueError, match="resume_from_checkpoint='mine/checkpoint-9' is not a folder"):
        choose_run_folder("hift", None, "mine/checkpoint-9")


def test_newer_whole_checkpoints_are_not_written_over() -> None:
    older = make_checkpoint(Path("mine"), 3)
    make_checkpoint(Path("mine"), 9, marked=False)
    assert choose_run_folder("hift", None, str(older)).checkpoint == older
    make_checkpoint(Path("mine"), 6)
    with pytest.raises(ValueError, match="checkpoint-6 is newer than mine/checkpoint-3 and would be written over"):
        choose_run_folder("hift", None, str(older))


def test_auto_begins_where_nothing_lies_and_continues_the_newest_whole_checkpoint() -> None:
    for asked, path in ((None, Path("runs/hift")), ("mine", Path("mine"))):
        note = f"{path} holds no whole checkpoint; this run begins at the start"
        assert choose_run_folder("hift", asked, "auto") == RunFolder(path=path, notes=(note,))
        wanted = make_checkpoint(path, 3)
        make_checkpoint(path, 6, marked=False)
        folder = choose_run_folder("hift", asked, "Auto")
        assert (folder.path, folder.checkpoint) == (path, wanted)
        assert len(folder.notes) == 1 and "checkpoint-6 is not whole" in folder.notes[0]


def test_auto_begins_again_in_the_folder_of_a_run_that_was_killed_early() -> None:
    for asked in (None, "mine"):
        path = choose_run_folder("hift", asked, "auto").path
        occupy(path, START_NAME, "events.log")
        assert choose_run_folder("hift", asked, "auto").path == path
        make_checkpoint(path, 3, marked=False)
        folder = choose_run_folder("hift", asked, "auto")
        assert (folder.path, folder.checkpoint) == (path, None)
        assert "checkpoint-3 is not whole" in folder.notes[0]


def test_auto_continues_the_newest_default_folder_and_leaves_what_is_no_run() -> None:
    make_checkpoint(Path("runs/hift"), 30)
    occupy(Path("runs/hift-2"), START_NAME)
    occupy(Path("runs/hift-3"))
    Path("runs/hift-4").touch()
    folder = choose_run_folder("hift", None, "auto")
    assert (folder.path, folder.checkpoint) == (Path("runs/hift-2"), None)
    with pytest.raises(FileExistsError, match=r"runs/hift-3 holds no checkpoint, and files that no run of"):
        choose_run_folder("hift", "runs/hift-3", "auto")
    with pytest.raises(FileExistsError, match="runs/hift-4"):
        choose_run_folder("hift", "runs/hift-4", "auto")


def test_a_finished_run_is_left_alone_unless_it_has_gone_on() -> None:
    make_checkpoint(Path("mine"), 3)
    results = {"num_steps": 3, "command": ["slivertune", "train"]}
    write_json(Path("mine/results.json"), results)
    assert choose_run_folder("hift", "mine", "auto").is_finished
    assert choose_run_folder("hift", "mine", "true").is_finished
    assert not choose_run_folder("hift", "mine", "true", Goal(max_steps=4)).is_finished, "it had stopped early"
    later = make_checkpoint(Path("mine"), 5)
    folder = choose_run_folder("hift", "mine", "auto")
    assert (folder.is_finished, folder.checkpoint) == (False, later)
    assert not choose_run_folder("hift", "mine", "true").is_finished
    others = [{**results, key: value} for key in results for value in (None, "3", 3.5, [3], {"a": 1})]
    for text in ("{", "[]", "{}", "[" * 100_000, *map(json.dumps, others)):
        Path("mine/results.json").write_text(text)
        with pytest.raises(ValueError, match=r"mine/results\.json can't be read"):
            choose_run_folder("hift", "mine", "auto")


@pytest.mark.parametrize(
    ("log", "goal", "is_raised"),
    [
        # 4 updates per epoch: 2 epochs.
        ((8, 8, 2.0), Goal(num_train_epochs=2), False),
        ((8, 8, 2.0), Goal(num_train_epochs=2.25), True),
        ((8, 8, 2.0), Goal(num_train_epochs=1), False),
        ((8, 8, 2.0), Goal(max_steps=8), False),
        ((8, 8, 2.0), Goal(max_steps=9, num_train_epochs=1), True),
        ((8, 8, 2.0), Goal(max_steps=7, num_train_epochs=9), False),
        # It stopped early, after 5 of them; and 3 updates are 0.75 epochs.
        ((8, 5, 1.25), Goal(num_train_epochs=2), False),
        ((8, 5, 1.25), Goal(num_train_epochs=3), True),
        ((3, 3, 0.75), Goal(num_train_epochs=0.7), False),
        ((3, 3, 0.75), Goal(num_train_epochs=1), True),
        # Nothing is known but the updates that it made.
        (None, Goal(max_steps=9), True),
        (None, Goal(max_steps=5), False),
        (None, Goal(num_train_epochs=9), False),
    ],
)
def test_auto_goes_on_where_the_goal_of_a_finished_run_was_raised(
    log: tuple[int, int, float] | None, goal: Goal, is_raised: bool
) -> None:
    num_steps = 8 if log is None else log[1]
    checkpoint = make_checkpoint(Path("mine"), num_steps)
    write_json(Path("mine/results.json"), {"num_steps": num_steps, "command": ["slivertune", "train"]})
    if log is not None:
        write_json(Path("mine/trainer_state.json"), dict(zip(("max_steps", "global_step", "epoch"), log, strict=True)))
    folder = choose_run_folder("hift", "mine", "auto", goal)
    assert (folder.is_finished, folder.checkpoint) == (not is_raised, checkpoint)
    shutil.rmtree(checkpoint)
    if is_raised:
        with pytest.raises(ValueError, match=f"is finished after {num_steps} updates and kept no checkpoint"):
            choose_run_folder("hift", "mine", "auto", goal)


def test_what_a_kill_has_left_of_a_write_does_not_keep_a_run_from_its_folder() -> None:
    left = Path(f"mine/.{START_NAME}.abcdefgh.partial")
    left.mkdir(parents=True)
    (left / "lock").touch()
    assert {choose_run_folder("hift", "mine", resume).path for resume in (None, "auto")} == {Path("mine")}


@pytest.mark.parametrize("resume", ["true", "auto", "mine/checkpoint-6"])
def test_checkpoints_of_another_version_are_refused_and_no_run_starts_over_them(resume: str) -> None:
    for step in (3, 6):
        write_json(make_checkpoint(Path("mine"), step) / MANIFEST_NAME, {"format": 1, "files": {}})
    reason = r"has format 1, and this version reads 2\. Continue with the version of slivertune that wrote it"
    message = rf"^mine/checkpoint-6 can't be resumed: .* {reason}\. Or start again in another --output_dir$"
    with pytest.raises(ValueError, match=message):
        choose_run_folder("hift", "mine", resume)
    whole = make_checkpoint(Path("mine"), 9)
    if "/" not in resume:
        assert choose_run_folder("hift", "mine", resume).checkpoint == whole


def occupy(folder: Path, *names: str) -> None:
    folder.mkdir(parents=True)
    for name in names or ("thesis.txt",):
        (folder / name).touch()


def make_checkpoint(output: Path, step: int, *, marked: bool = True) -> Path:
    folder = output / f"checkpoint-{step}"
    (folder / "deep").mkdir(parents=True)
    (folder / "model.bin").write_bytes(bytes(range(256)) * 10)
    (folder / "deep" / "state.bin").write_bytes(b"state")
    if marked:
        write_manifest(folder, {"global_step": step, "facts": {"method": "hift"}})
    return folder


def test_folders_are_sorted_by_step_and_nothing_else_is_taken(tmp_path: Path) -> None:
    for step in (100, 20, 3):
        make_checkpoint(tmp_path, step, marked=False)
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-7").write_text("a file")
    assert [path.name for path in checkpoint_folders(tmp_path)] == ["checkpoint-3", "checkpoint-20", "checkpoint-100"]
    assert checkpoint_folders(tmp_path / "absent") == []


def test_a_marked_checkpoint_is_whole_and_knows_its_facts(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, 5)
    assert find_damage(folder) is None
    assert read_facts(folder) == {"method": "hift"}
    marker = json.loads((folder / MANIFEST_NAME).read_text())
    assert marker["global_step"] == 5
    assert set(marker["files"]) == {"model.bin", "deep/state.bin"}
    (folder / "model.bin").write_bytes(b"new")
    write_manifest(folder)
    assert find_damage(folder) is None, "marked again, it follows the files"
    (folder / MANIFEST_NAME).write_text('{"format": 1}')
    assert "can't be read" in str(find_damage(folder))


def test_the_newest_whole_one_is_found_and_newer_ones_are_explained(tmp_path: Path) -> None:
    for step in (10, 20, 100):
        make_checkpoint(tmp_path, step, marked=step < 100)
    folder, passed_over = newest_whole(tmp_path)
    assert folder == tmp_path / "checkpoint-20"
    assert len(passed_over) == 1 and "checkpoint-100 is not whole" in passed_over[0]
    assert newest_whole(tmp_path / "absent") == (None, [])


def test_old_checkpoints_go_and_the_newest_whole_one_stays(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        make_checkpoint(tmp_path, step, marked=step < 4)
    assert [path.name for path in remove_old(tmp_path, 2, None)] == ["checkpoint-1", "checkpoint-2"]
    remove_old(tmp_path, 1, None)
    assert [path.name for path in checkpoint_folders(tmp_path)] == ["checkpoint-3"], "whole before newest"


def test_the_best_checkpoint_stays_beside_the_newest(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        make_checkpoint(tmp_path, step)
    remove_old(tmp_path, 1, tmp_path / "checkpoint-1")
    assert [path.name for path in checkpoint_folders(tmp_path)] == ["checkpoint-1", "checkpoint-3"]


def test_nothing_is_deleted_while_nothing_is_whole(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        make_checkpoint(tmp_path, step, marked=False)
    assert remove_old(tmp_path, 1, None) == []
    assert len(checkpoint_folders(tmp_path)) == 3


def test_a_deletion_that_is_cut_short_leaves_nothing_that_looks_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        make_checkpoint(tmp_path, step)

    monkeypatch.setattr("shutil.rmtree", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        remove_old(tmp_path, 1, None)
    assert find_damage(tmp_path / "checkpoint-1") is not None
    assert newest_whole(tmp_path)[0] == tmp_path / "checkpoint-2"
