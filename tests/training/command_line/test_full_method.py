"""`--method full`: a name for options of HiFT, of the optimizer and of the Trainer."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from slivertune import HiFTConfig
from slivertune.planning.compare import ways_of
from slivertune.training.command_line.parse import parse_train_arguments
from slivertune.training.command_line.plan_words import parse_plan_arguments
from slivertune.training.options.table import RENAMED
from tests.planning.made import tiny_model

CHECKPOINTING = RENAMED.get("gradient_checkpointing", "gradient_checkpointing")
MEANT: dict[str, Any] = {
    "method": "hift",
    "layers_per_group": "all",
    "steps_per_group": 1,
    "gradients": "stepped",
    "state": "device",
    "master": "stochastic",
    "optim": "adafactor",
    "max_grad_norm": 0.0,
    CHECKPOINTING: True,
    "bf16": True,
}
PLANNED = {
    **{name: value for name, value in MEANT.items() if name not in ("optim", "max_grad_norm", "bf16")},
    "optimizer": "adafactor",
    "precision": "bf16",
}
PLANNED["gradient_checkpointing"] = PLANNED.pop(CHECKPOINTING)


def train(*words: str, folder: Path) -> Any:
    return parse_train_arguments([*words, "--use_cpu", "--output_dir", str(folder / "out")])


@pytest.mark.parametrize(
    ("words", "others"),
    [
        ("", {}),
        ("--optim adamw_bnb_8bit --state host", {"optim": "adamw_bnb_8bit", "state": "host"}),
        ("--gradients host --max_grad_norm 1", {"gradients": "host", "max_grad_norm": 1.0, "state": None}),
        ("--gradient_checkpointing false", {CHECKPOINTING: False}),
        ("--weights_dtype bf16", {"weights_dtype": "bf16", "bf16": None}),
        ("--fp16 false", {"fp16": False}),
        ("--weights_dtype fp32", {"weights_dtype": "fp32", "bf16": None, "master": None}),
        ("--layers_per_group all --seed 3", {"seed": 3}),
    ],
)
def test_it_means_these_options_unless_others_are_given(words: str, others: dict[str, Any], tmp_path: Path) -> None:
    found = train("--method", "full", *words.split(), folder=tmp_path)
    expected = {name: value for name, value in {**MEANT, **others}.items() if value is not None}
    assert {name: found.values[name] for name in expected} == expected
    assert expected.keys() - {"use_cpu", "output_dir"} <= found.given
    assert found.given.intersection(MEANT) == MEANT.keys() & expected.keys()
    assert found.precision.loading == ("fp32" if "fp32" in words else "bf16")


def test_its_settings_are_those_of_all_layers_and_a_saved_run_repeats_them(tmp_path: Path) -> None:
    first = train("--method", "full", folder=tmp_path)
    assert first.method.options.config(seed=0) == HiFTConfig.all_layers()
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"method": "full", "learning_rate": 1e-3}), encoding="utf-8")
    assert train(str(path), folder=tmp_path).values["gradients"] == "stepped"
    assert train(str(path), "--method", "hift", folder=tmp_path).method.options.gradients == "device"
    path.write_text(yaml.safe_dump(first.values), encoding="utf-8")
    assert train(str(path), folder=tmp_path).method.options == first.method.options


def test_a_plan_means_the_same_and_a_comparison_has_a_row_of_it() -> None:
    found = parse_plan_arguments(["--model", "x", "--method", "full"])
    assert (found.given, found.unread) == (PLANNED, ())
    assert parse_plan_arguments(["--model", "x", "--method", "full", "--optimizer", "sgd"]).given == {
        **PLANNED,
        "optimizer": "sgd",
    }
    given: dict[str, Any]
    for given in ({}, {"master": "none", "optimizer": "sgd"}):
        (request,) = (way.request(given) for way in ways_of(tiny_model(), given) if way.title == "full")
        assert {name: getattr(request, name) for name in PLANNED} == PLANNED


def test_a_sweep_replaces_what_it_means() -> None:
    for words, name in (
        ("gradients=host,stepped", "gradients"),
        ("precision=bf16", "precision"),
        ("optimizer=sgd,adafactor", "optimizer"),
        ("layers_per_group=1,all", "layers_per_group"),
    ):
        found = parse_plan_arguments(["--model", "x", "--method", "full", "--sweep", words])
        assert found.given == {key: value for key, value in PLANNED.items() if key != name}, words


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--layers_per_group 2", "--layers_per_group 2 does not go with --method full, .* --method hift"),
        ("--layers_per_group auto", "--layers_per_group auto does not go with --method full, .* --method hift"),
        ("--preset paper", "--preset paper does not go with --method full, .* --method hift"),
        ("--load_in_4bit true", "--load_in_4bit does not go with --method full, .* lora or sft"),
        ("--bf16 false", "--bf16 false does not go with --method full, .* Use --weights_dtype fp32"),
        ("--max_grad_norm 1", r"--max_grad_norm 1.*default is 1\.0.* 'host' gradients, .* 2 bytes of host memory per"),
    ],
)
def test_options_that_contradict_it_are_refused_with_the_way_out_by_both(
    words: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        train("--method", "full", *words.split(), folder=tmp_path)
    with pytest.raises(ValueError, match=message):
        parse_plan_arguments(["--model", "x", "--method", "full", *words.split()])


def test_a_comparison_of_all_methods_is_not_of_one() -> None:
    with pytest.raises(ValueError, match=r"--method full is set by each row of --compare\. Leave out one of the two"):
        parse_plan_arguments(["--model", "x", "--method", "full", "--compare", "--gpu", "4090"])
