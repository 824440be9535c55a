"""Runs in folders of an older version go on with their own settings, or are refused with the way out."""

from typing import Any

import pytest
import yaml

from slivertune.cli import main
from slivertune.core.manifest import read_entries, write_manifest
from tests.training.tiny_runs import UNMEASURED, Runs, assert_same_bits, complaint, results_of

SCHEDULE = {"layers_per_group": 1, "steps_per_group": 1, "order": "bottom2up"}
"""The schedule that was the default once, and is the paper's."""


def schedule_of(runs: Runs, name: str) -> dict[str, Any]:
    """The schedule in the results of a run."""
    settings = results_of(runs[name])["settings"]
    return {key: settings[key] for key in SCHEDULE}


def test_an_sft_run_goes_on_with_its_own_settings_and_ends_with_the_same_bits(runs: Runs) -> None:
    own = {"density": 0.1, "reselection_interval": 3, "estimation_steps": 2}
    more = ("--save_steps", "3", *UNMEASURED)
    runs.train(
        "whole", *(word for name, value in own.items() for word in (f"--{name}", str(value))), *more, method="sft"
    )
    checkpoint = runs["whole"] / "checkpoint-3"
    entries = read_entries(checkpoint)
    for name in ("redistribute", "packed"):  # as if these settings had come later
        del entries["facts"]["sft"][name]
    write_manifest(checkpoint, entries)
    resumed = (*more, "--resume_from_checkpoint", str(checkpoint))
    runs.train("again", *resumed, method="sft")  # as if the settings had been defaults
    assert_same_bits(runs["whole"], runs["again"])
    kept = yaml.safe_load((runs["again"] / "slivertune_run.yaml").read_text(encoding="utf-8"))
    assert {name: kept[name] for name in own} == own
    said = runs.complaint(*resumed, "--replacement_rate", "0.3", method="sft")
    assert "sft={'replacement_rate': 0.2}, and this run asks for sft={'replacement_rate': 0.3}" in said
    assert "Repeat the first run's settings (--replacement_rate 0.2), or start again" in said
    said = runs.complaint(*resumed, "--estimation_steps", "4", method="sft")
    assert f"{checkpoint} can't be resumed with the options given now, or by this version: reselection" in said
    entries["facts"]["sft"]["rounding"] = "nearest"
    write_manifest(checkpoint, entries)
    said = runs.complaint(*resumed, method="sft")
    assert "was trained with sft={'rounding': 'nearest'}, which this version does not have. Continue with the" in said


def test_a_run_of_the_embedded_model_by_older_defaults_is_told_which_options_repeat_it(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("--max_steps", "2", *UNMEASURED)
    runs.train("out", *more)
    # It is refused before the embedded model is made.
    words = ["train", *more, "--output_dir", str(runs["out"]), "--resume_from_checkpoint", "true", "--max_steps", "4"]
    words += ["--layers_per_group", "1", "--dataset", "builtin:dates"]
    monkeypatch.setattr("slivertune.training.assemble.prepare_base_model", None)
    said = complaint(capsys, words)
    assert "hift={'steps_per_group': 1, 'order': 'bottom2up'}, and this run asks for hift={'steps_per_group'" in said
    assert "Repeat the first run's settings (--steps_per_group 1 --order bottom2up), or start again" in said


def test_the_run_file_of_an_older_version_continues_its_run_and_says_what_repeats_it(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.train("older", "--max_steps", "3", *UNMEASURED)
    kept = runs["older"] / "slivertune_run.yaml"
    settings = yaml.safe_load(kept.read_text(encoding="utf-8"))
    for name in ("preset", *SCHEDULE):
        del settings[name]
    lines = "".join(f"# {name}: {value}\n" for name, value in {**SCHEDULE, "update": "step"}.items())
    older = f"{yaml.safe_dump({**settings, 'update': 'step'})}\n# Not set, and so by default:\n{lines}"
    copy = runs["copy.yaml"]
    for path in (kept, copy):
        path.write_text(older, encoding="utf-8")
    note = f"note: {copy} was written when other defaults held. To repeat its run, add to it: "
    added = "layers_per_group: 1; steps_per_group: 1; order: bottom2up"
    runs.printed()
    assert main(["train", str(copy), "--output_dir", str(runs["new"])]) == 0
    assert f"{note}{added}" in runs.printed().replace("\n", "") and schedule_of(runs, "new") != SCHEDULE
    copy.write_text(added.replace("; ", "\n") + f"\n{older}", encoding="utf-8")
    assert main(["train", str(copy), "--output_dir", str(runs["repeated"])]) == 0
    assert_same_bits(runs["older"], runs["repeated"])
    resumed = ["train", str(kept), "--output_dir", str(runs["older"]), "--resume_from_checkpoint", "auto"]
    assert main([*resumed, "--max_steps", "5"]) == 0
    assert "other defaults" not in runs.printed() and schedule_of(runs, "older") == SCHEDULE
    copy.write_text(older.replace("update: step", "update: forward", 1), encoding="utf-8")
    said = complaint(capsys, ["train", str(copy), "--output_dir", str(runs["never"])])
    assert "update was removed: step() always applies the update. Leave it out" in said


def test_a_checkpoint_of_another_format_is_refused_and_not_started_over(runs: Runs) -> None:
    runs.train("out", *UNMEASURED)
    (checkpoint,) = runs["out"].glob("checkpoint-*")
    (runs["out"] / "results.json").unlink()
    (checkpoint / "slivertune_checkpoint.json").write_text('{"format": 1, "files": {}}', encoding="utf-8")
    for resume in ("auto", "true", str(checkpoint)):
        said = runs.complaint("--resume_from_checkpoint", resume)
        assert f"{checkpoint} can't be resumed" in said and "Or start again in another --output_dir" in said
        assert "Continue with the version of slivertune that wrote it" in said
