import re
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from slivertune.training.command_line.parse import TrainArguments, parse_train_arguments
from slivertune.training.command_line.settings_file import older_defaults_note, settings_text, write_settings
from slivertune.training.options.config_file import read_settings
from tests.training.tiny_runs import COMBINATIONS


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def resolved(arguments: TrainArguments) -> dict[str, Any]:
    """All that a run is made of, but how its settings were given."""
    names = ("run", "tokens", "model", "data", "precision", "folder", "values")
    found = {name: getattr(arguments, name) for name in names}
    method = (type(arguments.method), arguments.method.options)
    return {**found, "method": method, "training": arguments.training.to_dict()}


PROMPTS = ("--task", "prompt_classification", "--template", "{text}: {mask}\n", "--label_words", "0=no,1=yes")
COMMANDS: dict[str, tuple[str, ...]] = {
    "nothing": (),
    "other data": (
        *("--dataset", "a.jsonl", "b c.jsonl", "--dataset_weights", "0.7", "3", "--response_separator", "\n\n"),
    ),
    "prompts": (*PROMPTS, "--model", "./x", "--dataset", "d.csv", "--column_names", "text", "no"),
    "words that YAML reads as something else": (
        *("--memory_ledger", "off", "--save_strategy", "no", "--run_name", "2026-01-02", "--sample_prompt", "null"),
        *("--learning_rate", "1e-4", "--layers_per_group", "2", "--prefetch_bytes", "auto", "--model_revision", "1e3"),
    ),
    "JSON and switches": (
        *("--gradient_checkpointing", "--gradient_checkpointing_kwargs", '{"use_reentrant": false}'),
        *("--no_chunked_cross_entropy", "--lr_scheduler_type", "cosine_with_min_lr"),
        *("--lr_scheduler_kwargs", '{"min_lr": 1e-5}', "--warmup_steps", "0.1", "--bf16"),
    ),
    "its place": ("--output_dir", "out", "--resume_from_checkpoint", "auto"),
    **{name: (*typed, "--model", "./x") for name, typed in COMBINATIONS.items()},
}


@pytest.mark.parametrize("typed", COMMANDS.values(), ids=COMMANDS)
def test_the_file_of_a_run_makes_the_same_run(typed: tuple[str, ...]) -> None:
    first = parse_train_arguments(typed)
    write_settings(first, Path("kept.yaml"))
    place = typed if typed == COMMANDS["its place"] else ()
    again = parse_train_arguments(["kept.yaml", *place])
    assert resolved(again) == resolved(first)
    # And so does its own, in turn.
    assert settings_text(again) == settings_text(first)
    assert older_defaults_note(again) is older_defaults_note(first) is None


def test_a_file_written_for_one_folder_names_none() -> None:
    kept = yaml.safe_load(settings_text(parse_train_arguments(COMMANDS["its place"])))
    assert kept.keys().isdisjoint(("output_dir", "resume_from_checkpoint")) and kept["method"] == "hift"


def test_a_token_of_the_hub_is_not_kept() -> None:
    text = settings_text(parse_train_arguments(["--hub_token", "hf_secret", "--hub_model_id", "me/mine"]))
    assert "hf_secret" not in text and "hub_model_id: me/mine\n" in text


def test_precision_that_a_launcher_asked_for_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    write_settings(parse_train_arguments([]), Path("kept.yaml"))
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
    again = parse_train_arguments(["kept.yaml"])
    assert again.precision.loading == "bf16" and parse_train_arguments([]).precision.loading != "bf16"


def test_what_was_chosen_for_a_run_stands_in_place_of_auto() -> None:
    arguments = parse_train_arguments(["--layers_per_group", "auto", "--gpu", "4090"])
    assert "layers_per_group: auto\n" in settings_text(arguments) and "gpu: 4090" in settings_text(arguments)
    arguments.method.options = replace(arguments.method.options, layers_per_group=3, gpu=None)
    kept = yaml.safe_load(settings_text(arguments))
    assert kept["layers_per_group"] == 3 and "gpu" not in kept


def test_what_was_not_set_stands_there_as_a_comment_with_its_default() -> None:
    text = settings_text(parse_train_arguments(["--model", "x", "--dataset", "d.csv"]))
    assert "\n# learning_rate: 5.0e-05\n" in text and '\n# response_separator: "\\n"\n' in text
    assert "\n# lr_scheduler_type: linear\n" in text
    # The schedule stands there in any case, so that no later default changes it.
    assert "\nlayers_per_group: 0.25\nsteps_per_group: 20\norder: random\n" in text
    # Neither another method's options, nor where the run lies.
    assert "lora_rank" not in text and not re.search(r"^# (output_dir|density):", text, re.MULTILINE)
    assert max(map(len, text.splitlines())) < 120


OTHER_DEFAULTS = "was written when other defaults held. To repeat its run, add to it"


def test_a_file_of_an_older_version_is_noted_with_the_defaults_that_it_had() -> None:
    text = settings_text(parse_train_arguments(["--model", "x", "--dataset", "d.csv"]))
    schedule = "layers_per_group: 0.25\nsteps_per_group: 20\norder: random\n"
    assert schedule in text and "# non_finite_limit: 10\n" in text
    older = text.replace(schedule, "update: step\n").replace("# non_finite_limit: 10\n", "# non_finite_limit: 5\n")
    older += "# layers_per_group: '1'\n# steps_per_group: 1\n# order: bottom2up\n# update: step\n"
    Path("kept.yaml").write_text(older, encoding="utf-8")
    note = older_defaults_note(parse_train_arguments(["kept.yaml", "--order", "random"]))
    assert note == f"kept.yaml {OTHER_DEFAULTS}: non_finite_limit: 5; layers_per_group: '1'; steps_per_group: 1"
    # Its lines, as the note has them, make it the older run.
    lines = "layers_per_group: '1'\nsteps_per_group: 1\norder: bottom2up\n"
    Path("kept.yaml").write_text(lines + older, encoding="utf-8")
    again = parse_train_arguments(["kept.yaml", "--non_finite_limit", "5"])
    paper = parse_train_arguments(["--preset", "paper"]).method.values()
    assert again.method.values() == {**paper, "preset": None} and older_defaults_note(again) is None


def test_a_file_from_before_the_data_had_a_name_is_noted_with_the_data_of_then() -> None:
    text = settings_text(parse_train_arguments([]))
    older = text.replace("dataset:\n- builtin:dates\n", "")
    assert older != text
    Path("kept.yaml").write_text(older, encoding="utf-8")
    note = f"kept.yaml {OTHER_DEFAULTS}: dataset: builtin:python-reference"
    assert older_defaults_note(parse_train_arguments(["kept.yaml"])) == note
    assert older_defaults_note(parse_train_arguments(["kept.yaml", "--dataset", "builtin:dates"])) is None


@pytest.mark.parametrize("edited", ["# [no YAML\n", "# - no mapping\n"])
def test_comments_that_were_edited_are_left_alone(edited: str) -> None:
    text = settings_text(parse_train_arguments(["--model", "x", "--dataset", "d.csv"]))
    head, marker, _ = text.partition("# Not set, and so by default:\n")
    Path("kept.yaml").write_text(f"{head}{marker}{edited}", encoding="utf-8")
    arguments = parse_train_arguments(["kept.yaml"])
    assert older_defaults_note(arguments) is None
    Path("kept.yaml").unlink()
    assert older_defaults_note(arguments) is None


def test_it_is_written_with_the_rights_of_a_new_file_and_replaces_an_older_one() -> None:
    Path("touched").touch()
    for seed in ("1", "2"):
        write_settings(parse_train_arguments(["--seed", seed]), Path("kept.yaml"))
    assert yaml.safe_load(Path("kept.yaml").read_text(encoding="utf-8"))["seed"] == 2
    modes = {stat.S_IMODE(Path(name).stat().st_mode) for name in ("kept.yaml", "touched")}
    assert len(modes) == 1 and {path.name for path in Path.cwd().iterdir()} == {"kept.yaml", "touched"}


def test_any_text_comes_back_as_it_was() -> None:
    arguments = parse_train_arguments([])

    # No NUL: no command line can have one.
    @given(text=st.text(st.characters(exclude_characters="\x00"), max_size=20))
    @settings(max_examples=200, deadline=None)
    def comes_back(text: str) -> None:
        kept = settings_text(replace(arguments, values={"response_separator": text}))
        Path("any.yaml").write_text(kept, encoding="utf-8")
        (read,) = read_settings(Path("any.yaml"))
        assert read.value == text

    comes_back()
