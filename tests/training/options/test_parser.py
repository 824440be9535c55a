import json
import re
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from slivertune.training.options.parser import given_values, without_unset
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
    examples |= {"debug": "[underflow_overflow]", "optim_args": "rank=2"}
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
            "line 2: --learning_rate 'much' must be a number, at least 0 and at most 100; see",
        ),
        ("max_steps: 1e3", "--max_steps '1e3' must be a whole number, at least 1 and"),
        ("bf16: maybe", "--bf16 'maybe' must be true or false"),
        ("seed: [1, 2]", "run.yaml, line 1: seed takes one value, not a list of 2"),
        ("order: {first: random}", "run.yaml, line 1: order takes one value, not a mapping. Options are not nested"),
        (
            "training: {seed: 1}",
            "line 1: there is no option 'training', and options are not nested. Write each alone",
        ),
        ("model: a\nmodel_name_or_path: a", "2: model_name_or_path sets model_name_or_path, and so does another line"),
        pytest.param(
            f"{CHECKPOINTING}: true\ngradient_checkpointing: false",
            f"line 2: gradient_checkpointing sets {CHECKPOINTING}, and so does another line. Keep one",
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
        ("--seed 1 run.yaml", "Name a config file before all options: slivertune train run.yaml --seed 3"),
        ("--config run.yaml", "Name a config file before all options"),
        ("gpt2", "'gpt2' is not a config file: its name must end in .yaml, .yml, .json. Name a model by"),
    ],
)
def test_a_mistyped_word_is_an_error_that_says_what_was_meant(words: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        given_values(words.split())


PARTED = {
    name: "0.25,0.75" if option.item_kind is float else "one,two"
    for name, option in train_options().items()
    if option.takes_words and not option.choices and name != "debug"
}
"""Every option that takes several words, and two of them in one text."""


def test_the_options_that_take_several_words_are_all_known() -> None:
    assert {"dataset", "dataset_weights", "column_names", "lora_target_modules", "sft_target_modules"} <= PARTED.keys()
    assert {"layers", "label_names", "include_for_metrics", "report_to"} <= PARTED.keys()


@pytest.mark.parametrize("option", PARTED)
def test_a_comma_parts_words_however_they_are_written(option: str) -> None:
    one, two = (text := PARTED[option]).split(",")
    expected = given_values([f"--{option}", one, two])
    assert len(expected[option]) == 2
    texts = (text, f"{one}, {two}", f"[{one}, {two}]", f'["{text}"]', f"\n- {one}\n- {two}")
    assert [given_values([write(f"{option}: {each}\n")]) for each in texts] == [expected] * len(texts)
    assert given_values([write(json.dumps({option: text}), "run.json")]) == expected
    assert given_values([f"--{option}", text]) == given_values([f"--{option}={text}"]) == expected
    single = given_values([f"--{option}", one])
    assert given_values([write(f"{option}: {one}\n")]) == given_values([write(f"{option}: [{one}]\n")]) == single


@pytest.mark.parametrize("option", ["lora_target_modules", "sft_target_modules", "layers", "dataset_weights"])
def test_a_space_parts_words_that_have_none_inside(option: str) -> None:
    one, two = PARTED[option].split(",")
    expected = given_values([f"--{option}", one, two])
    assert given_values([write(f"{option}: {one} {two}\n")]) == expected
    assert given_values([f"--{option}", f"{one} {two}"]) == expected


def test_a_space_parts_no_files_and_no_columns_and_a_comma_no_file_that_is_there() -> None:
    Path("a,b.jsonl").touch()
    words = ["--dataset", "a,b.jsonl", "my data.csv,c.csv", "--column_names", "a b,c"]
    expected = {"dataset": ["a,b.jsonl", "my data.csv", "c.csv"], "column_names": ["a b", "c"]}
    assert given_values(words) == expected
    text = 'dataset: ["a,b.jsonl", "my data.csv,c.csv"]\ncolumn_names: a b, c\n'
    assert given_values([write(text)]) == expected


@pytest.mark.parametrize("text", [",", " , "])
def test_commas_without_words_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--layers '' is empty"):
        given_values(["--layers", text])
    with pytest.raises(ValueError, match=r"run.yaml, line 1: --lora_target_modules '' is empty"):
        given_values([write(f'lora_target_modules: "{text}"\n')])


UNSET = """\
learning_rate: 1e-4
seed: 3
lora_rank: 4
method: lora
model: base
dataset: [a, b]
dataset_weights: [0.5, 0.5]
token_ratio: 0.4
gradient_checkpointing: true
bf16: true
chunked_cross_entropy: false
output_dir: out
"""


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("--unset dataset_weights", ["dataset_weights"]),
        ("--unset dataset-weights token_ratio --seed 4", ["dataset_weights", "token_ratio"]),
        ("--unset learning_rate,lora_rank --unset token_ratio", ["learning_rate", "lora_rank", "token_ratio"]),
        ("--unset=bf16 --unset chunked_cross_entropy", ["bf16", "chunked_cross_entropy"]),
        ("--unset model output_dir", ["model_name_or_path", "output_dir"]),
        ("--unset model_name_or_path", ["model_name_or_path"]),
        ("--unset gradient_checkpointing", [CHECKPOINTING]),
        (f"--unset {CHECKPOINTING}", [CHECKPOINTING]),
    ],
)
def test_what_a_file_sets_can_be_unset(words: str, names: list[str]) -> None:
    path = write(UNSET)
    expected = given_values([path]) | ({"seed": 4} if "--seed 4" in words else {})
    assert given_values([path, *words.split()]) == {
        name: value for name, value in expected.items() if name not in names
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--unset dataset_weigths", "--unset dataset_weigths: there is no such option; did you mean dataset_weights?"),
        ("--unset lr", "--unset lr: there is no such option; did you mean learning_rate?"),
        ("--unset update", "update was removed"),
        ("--unset zzz", "--unset zzz: there is no such option; see slivertune train --help"),
        ("--unset seed --seed 4", "--unset seed resets what --seed 4 sets. Leave out one of the two"),
        (
            "--unset gradient-checkpointing --gradient_checkpointing false",
            f"--unset gradient-checkpointing resets what --{CHECKPOINTING} False sets",
        ),
        ("--unset model --model_name_or_path x", "--unset model resets what --model_name_or_path x sets"),
        ("--unset max_steps", "--unset max_steps: run.yaml does not set it. Leave it out"),
        ("--unset", "argument --unset: expected at least one argument"),
    ],
)
def test_what_can_not_be_unset_is_refused(words: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        given_values([write(UNSET), *words.split()])


@pytest.mark.parametrize(
    ("words", "left"),
    [
        ("run.yaml --seed 3 --order random", "run.yaml --seed 3 --order random"),
        ("run.yaml --unset output_dir --seed 3", "run.yaml --seed 3"),
        ("run.yaml --unset output-dir seed --packing", "run.yaml --packing --unset seed"),
        ("run.yaml --unset=output_dir,seed --unset model model_name_or_path", "run.yaml --unset seed"),
    ],
)
def test_what_a_command_goes_on_to_set_is_no_longer_unset(words: str, left: str) -> None:
    without = without_unset(words.split(), {"output_dir", "model_name_or_path"})
    assert " ".join(without) == left


def test_without_a_file_nothing_can_be_unset() -> None:
    with pytest.raises(ValueError, match="--unset seed: no run file is read"):
        given_values(["--unset", "seed"])


def test_null_in_a_file_leaves_out_every_option_whose_default_is_null() -> None:
    names = [name for name, option in train_options().items() if option.default is None]
    assert {"dataset_weights", "lora_target_modules", "token_ratio", "hub_token", "eval_steps"} <= {*names}
    for null in ("null", "~"):
        assert given_values([write("".join(f"{name}: {null}\n" for name in names) + "seed: 3")]) == {"seed": 3}
    assert given_values([write(json.dumps({**dict.fromkeys(names), "seed": 3}), "run.json")]) == {"seed": 3}


@pytest.mark.parametrize("option", ["learning_rate", "layers_per_group", "packing", "method", "pakcing"])
def test_null_in_a_file_is_refused_where_a_default_is_something(option: str) -> None:
    message = f"run.yaml, line 2: {option} can't be null, since its default is not null. Leave the key out"
    if option not in train_options():
        message = f"run.yaml, line 2: there is no option '{option}'"
    with pytest.raises(ValueError, match=re.escape(message)):
        given_values([write(f"token_ratio: 0.4\n{option}: null\n")])
