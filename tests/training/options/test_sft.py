from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from slivertune.sft.config import SFTConfig
from slivertune.training.methods.sft import EMBEDDED_DENSITY, SFTArguments
from slivertune.training.options.parse import parse_train_arguments

RENAMED = {"targets": "sft_target_modules", "embeddings": "train_embeddings"}
MOMENTUM = ("--selection", "momentum")


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_choice_of_sft_has_an_argument_or_a_reason_to_have_none() -> None:
    config, arguments = ({item.name for item in dataclasses.fields(kind)} for kind in (SFTConfig, SFTArguments))
    # The seed is the run's and clipping the Trainer's; the form follows the weights, and the layer form's way to a
    # gradient is a choice among dense fp32 weights, which have the optimizer form here.
    assert {RENAMED.get(name, name) for name in config} - arguments == {
        "seed",
        "max_grad_norm",
        "form",
        "phi_gradient",
    }
    assert arguments - {RENAMED.get(name, name) for name in config} == {"sft_momentum"}


def test_the_arguments_defaults_are_the_configs() -> None:
    assert SFTArguments().config(seed=0) == SFTConfig()


def test_sfts_settings_reach_its_config() -> None:
    given = ["--density", "0.2", "--reselection_interval", "9", "--estimation_steps", "4", "--replacement_rate", "0.5"]
    names = ["--sft_target_modules", "q_proj", "v_proj", "--train_embeddings", "--redistribute", "--packed"]
    arguments = parse_train_arguments(["--method", "sft", *given, *names, "--seed", "7"])
    assert arguments.method.options.config(arguments.training.seed) == SFTConfig(
        density=0.2,
        reselection_interval=9,
        estimation_steps=4,
        replacement_rate=0.5,
        targets=["q_proj", "v_proj"],
        embeddings=True,
        redistribute=True,
        packed=True,
        seed=7,
    )
    momentum = parse_train_arguments(["--method", "sft", *MOMENTUM, "--sft_momentum", "0.9", "--num_weights", "50"])
    assert momentum.method.options.config(seed=0) == SFTConfig(selection="momentum", num_weights=50)
    assert momentum.method.options.sft_momentum == 0.9
    fixed = parse_train_arguments(["--method", "sft", "--reselection_interval", "0", "--equivalent_lora_rank", "3"])
    assert fixed.method.options.config(seed=0) == SFTConfig(reselection_interval=None, equivalent_lora_rank=3)


def test_the_embedded_model_has_a_share_and_a_rate_for_each_update_rule_of_its_own() -> None:
    arguments = parse_train_arguments(["--method", "sft"])
    assert arguments.training.output_dir == "runs/sft"
    assert arguments.method.options.density == EMBEDDED_DENSITY
    assert arguments.training.learning_rate == 8e-3
    momentum = parse_train_arguments(["--method", "sft", *MOMENTUM, "--equivalent_lora_rank", "2"])
    assert momentum.method.options.density is None
    assert momentum.training.learning_rate == 1e-1
    other = parse_train_arguments(["--method", "sft", "--model_name_or_path", "gpt2", "--dataset", "d.csv"])
    assert other.method.options == SFTArguments()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--density", "0"], "density=0.0 must be in (0, 1]"),
        (["--density", "0.1", "--num_weights", "5"], "density and num_weights say the same thing"),
        (["--num_weights", "0"], "num_weights=0 must be at least 1"),
        (["--equivalent_lora_rank", "0"], "equivalent_lora_rank=0 must be at least 1"),
        (["--selection", "magic"], "invalid choice: 'magic'"),
        (["--reselection_interval", "5"], "reselection_interval=5 must be greater than estimation_steps=5"),
        (["--reselection_interval", "-1"], "reselection_interval=-1 must be at least 1, or 0 to keep the first choice"),
        (["--estimation_steps", "0"], "estimation_steps=0 must be at least 1"),
        (["--replacement_rate", "1.5"], "replacement_rate=1.5 must be in [0, 1]"),
        ([*MOMENTUM, "--sft_momentum", "1"], "sft_momentum=1.0 must lie in [0, 1)"),
        (["--sft_momentum", "0.5"], "--sft_momentum: it is SM3's, and read with --selection momentum alone"),
        ([*MOMENTUM, "--estimation_steps", "3"], "--estimation_steps: --selection momentum trains by SM3"),
        ([*MOMENTUM, "--adam_beta2", "0.9", "--adam_epsilon", "1"], "--adam_beta2, --adam_epsilon: --selection"),
        (
            ["--reselection_interval", "0", "--replacement_rate", "0.1", "--redistribute"],
            "--redistribute, --replacement_rate: --reselection_interval 0 keeps the first choice",
        ),
        (["--optim", "adafactor"], "--optim: --method sft is an optimizer itself, AdamW or SM3"),
        (["--optim", "adamw_torch", "--optim_args", "x=1"], "--optim, --optim_args: --method sft is an optimizer"),
        (
            ["--load_best_model_at_end", "--eval_strategy", "steps", "--eval_steps", "500"],
            "load_best_model_at_end does not go with SFT: the Trainer would bring back the best weights",
        ),
    ],
)
def test_what_does_not_hold_together_is_refused_in_one_sentence(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_train_arguments(["--method", "sft", "--save_steps", "500", *arguments])


def test_adams_settings_are_for_sft_by_adamw_too() -> None:
    given = ["--adam_beta1", "0.8", "--adam_epsilon", "1e-6", "--load_in_4bit", "--load_best_model_at_end", "false"]
    arguments = parse_train_arguments(["--method", "sft", *given])
    assert (arguments.training.adam_beta1, arguments.training.adam_epsilon) == (0.8, 1e-6)
