import json
import re
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from slivertune.training.options.parser import given_values
from slivertune.training.options.table import RENAMED, Option, train_options

CHECKPOINTING = RENAMED.get("gradient_checkpointing", "gradient_checkpointing")
"""What the installed transformers calls it."""

FILE = """\
method: sft
model: base
learning_rate: 1e-4
dataset: [a.jsonl, b.jsonl]
dataset_weights: [0.5, 0.5]
packing: on
bf16: off
chunked_cross_entropy: false
memory_ledger: off
save_strategy: no
gradient_checkpointing: true
gradient_checkpointing_kwargs: {use_reentrant: false}
report_to: [tensorboard, wandb]
lr_scheduler_kwargs: {min_lr: 1e-5}
warmup_steps: .1
max_grad_norm: 0.5
response_separator: ""
resume_from_checkpoint: auto
"""
TYPED = (
    *("--method", "sft", "--model", "base", "--learning_rate", "1e-4", "--dataset", "a.jsonl", "b.jsonl"),
    *("--dataset_weights", "0.5", "0.5", "--packing", "--bf16", "false", "--no_chunked_cross_entropy"),
    *("--memory_ledger", "off", "--save_strategy", "no", "--gradient_checkpointing"),
    *("--warmup_steps", ".1", "--max_grad_norm", "0.5", "--response_separator", ""),
    *("--resume_from_checkpoint", "auto"),
)
MAPPINGS = {
    f"{CHECKPOINTING}_kwargs": {"use_reentrant": False},
    "lr_scheduler_kwargs": {"min_lr": 1e-5},
    "report_to": ["tensorboard", "wandb"],
}
"""What can't be typed as it stands in the file: mappings would be JSON, and one tracker alone can be typed."""


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(text: str, name: str = "run.yaml") -> str:
    Path(name).write_text(text, encoding="utf-8")
    return name


def test_a_file_means_what_its_options_mean_when_typed() -> None:
    assert given_values([write(FILE)]) == {**given_values(TYPED), **MAPPINGS}


def test_what_is_typed_wins_over_the_file_under_any_of_its_names() -> None:
    words = ["--learning-rate", "2e-5", "--model_name_or_path", "other", "--dataset", "c.jsonl"]
    words += ["--packing", "false", "--gradient_checkpointing", "false"]
    values = given_values([write(FILE), *words])
    expected: dict[str, Any] = {"learning_rate": 2e-5, "model_name_or_path": "other", "dataset": ["c.jsonl"]}
    expected |= {"packing": False, CHECKPOINTING: False}
    assert values == {**given_values([write(FILE)]), **expected}
    # The new name in the file, and the old one typed, and the other way round.
    for one, other in permutations(("gradient_checkpointing", CHECKPOINTING)):
        path = write(f"{one}: true\n")
        assert given_values([path, f"--{other}", "false"]) == {CHECKPOINTING: False}


def example_of(option: Option) -> str | None:
    """A value as it is written; None where no text is one."""
    if option.choices or option.is_switch:
        return option.choices[0] if option.choices else "true"
    if option.takes_mapping:
        return "{}"
    if option.item_kind is not None:
        return "[0.5, 0.25]"
    return next((text for kind, text in ((int, "1"), (float, "0.5"), (str, "x")) if kind in option.kinds), None)


def test_every_option_can_stand_in_a_file_but_an_object_of_accelerate() -> None:
    examples = {name: example_of(option) for name, option in train_options().items()}
    assert [name for name, text in examples.items() if text is None] == ["parallelism_config"]
    del examples["parallelism_config"]
    examples["debug"] = "[underflow_overflow]"
    for old in ("gradient_checkpointing", "gradient_checkpointing_kwargs"):
        del examples[old]
    values = given_values([write("".join(f"{name}: {text}\n" for name, text in examples.items()))])
    assert values.keys() == examples.keys() and None not in values.values()


@pytest.mark.parametrize("words", [("--fsdp",), ("--fsdp", "full_shard")])
def test_what_may_stand_alone_and_may_be_a_text_is_either_in_a_file(words: tuple[str, ...]) -> None:
    assert given_values([write(f"fsdp: {[*words, 'true'][1]}\n")]) == given_values(words)
    assert given_values([write("fsdp: false\n")]) == {"fsdp": False}


def test_several_trackers_are_named_on_the_command_line_and_in_a_file() -> None:
    several = {"report_to": ["tensorboard", "wandb"]}
    assert given_values(["--report_to", "tensorboard", "wandb", "--seed", "3"]) == {**several, "seed": 3}
    assert given_values([write("report_to: [tensorboard, wandb]")]) == several
    assert given_values(["--report_to", "none"])["report_to"] == "none"


def test_what_every_run_does_now_is_read_over_in_a_file_that_was_kept() -> None:
    assert given_values([write("update: step\nseed: 3\n")]) == {"seed": 3}
    assert given_values([write(json.dumps({"update": "step", "seed": 3}), "run.json")]) == {"seed": 3}


def test_json_is_taken_too() -> None:
    path = write(json.dumps({"learning_rate": 1e-4, "bf16": True, "dataset": ["a"]}), "run.json")
    assert given_values([path]) == {"learning_rate": 1e-4, "bf16": True, "dataset": ["a"]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learnin_rate: 1", "run.yaml, line 1: there is no option 'learnin_rate'; did you mean learning_rate?; see"),
        (
            "seed: 1\nlearning-rate: 1",
            "run.yaml, line 2: there is no option 'learning-rate'; did you mean learning_rate?",
        ),
        ("--seed: 1", "there is no option '--seed'; did you mean seed?"),
        ("modle: x", "did you mean model?"),
        ("lora_r: 8", "there is no option 'lora_r'; did you mean lora_rank?"),
        ("no_packing: true", "did you mean packing?"),
        ("help: all", "there is no option 'help'"),
        ("qqq: 1", "run.yaml, line 1: there is no option 'qqq'; see slivertune train --help"),
        ("master: split", "run.yaml, line 1: argument --master: invalid choice: 'split' (choose from"),
        ("master: split", "'split' was removed: fp32 trains with the same bits and stores 2 bytes more per parameter"),
        (
            "seed: 1\nupdate: forward",
            "run.yaml, line 2: there is no option 'update'; update was removed: step() always applies the update",
        ),
        ("method: hifft", "run.yaml, line 1: argument --method: invalid choice: 'hifft' (choose from"),
        ("method: hifft", "); did you mean hift?"),
        (
            "seed: 1\nlearning_rate: much",
            "line 2: argument --learning_rate/--learning-rate: invalid float value: 'much'",
        ),
        ("max_steps: 1e3", "invalid int value: '1e3'"),
        ("bf16: maybe", "Truthy value expected: got maybe"),
        ("seed: [1, 2]", "run.yaml, line 1: seed takes one value, and this is a list of 2"),
        ("order: {first: random}", "run.yaml, line 1: order takes one value and no mapping; options are not nested"),
        (
            "training: {seed: 1}",
            "line 1: there is no option 'training', and options are not nested; write each by itself",
        ),
        ("model: a\nmodel_name_or_path: a", "line 2: model_name_or_path sets model_name_or_path, which another line"),
        pytest.param(
            f"{CHECKPOINTING}: true\ngradient_checkpointing: false",
            f"line 2: gradient_checkpointing sets {CHECKPOINTING}, which another line sets, too; keep one",
            marks=pytest.mark.skipif(not RENAMED, reason="before transformers 5.23 it has one name"),
        ),
    ],
)
def test_what_is_no_option_or_no_value_of_one_is_an_error_that_names_the_line(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        given_values([write(text)])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--learnin_rate 1", "unrecognized arguments: --learnin_rate 1; did you mean --learning_rate?"),
        ("--batch_size 1", "; did you mean --per_device_train_batch_size?"),
        ("--lr 1", "; did you mean --learning_rate?"),
        ("--save_strategy epochs", "'epoch', 'best'); did you mean epoch?"),
        ("--optim adamw_torh", "; did you mean adamw_torch?"),
        ("--seed 1 run.yaml", "a config file comes before all options: slivertune train run.yaml --seed 3"),
        ("--config run.yaml", "a config file comes before all options"),
        ("gpt2", "'gpt2' is no config file, whose name would end in .yaml, .yml, .json; a model is named by"),
    ],
)
def test_a_mistyped_word_is_an_error_that_says_what_was_meant(words: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        given_values(words.split())


@pytest.mark.parametrize("option", ["lora_target_modules", "sft_target_modules", "label_names"])
@pytest.mark.parametrize("text", ["q_proj,v_proj", "q_proj, v_proj", "[q_proj, v_proj]"])
def test_a_comma_parts_names_in_a_file_and_where_they_are_typed(option: str, text: str) -> None:
    expected = {option: ["q_proj", "v_proj"]}
    assert given_values([write(f"{option}: {text}\n")]) == expected
    assert given_values([f"--{option}", *text.strip("[]").split(" ")]) == expected


def test_a_comma_in_the_name_of_a_file_or_a_column_parts_nothing() -> None:
    words = ["--dataset", "a,b.jsonl", "--column_names", "a,b", "c"]
    assert given_values(words) == {"dataset": ["a,b.jsonl"], "column_names": ["a,b", "c"]}
