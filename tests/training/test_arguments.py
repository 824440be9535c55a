from __future__ import annotations

import dataclasses
import re
import warnings
from pathlib import Path

import pytest
import torch
from transformers import TrainingArguments

from slivertune.hift.config import HiFTConfig
from slivertune.training.arguments import make_parser, parse_train_arguments
from slivertune.training.data_arguments import DataArguments
from slivertune.training.defaults import EMBEDDED_LEARNING_RATES
from slivertune.training.method_arguments import MethodArguments, ModelArguments, hift_settings


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_help_lists_every_argument(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse_train_arguments(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for kind in (MethodArguments, ModelArguments, DataArguments, TrainingArguments):
        for item in dataclasses.fields(kind):
            assert f"--{item.name}" in text or not item.init
    for title in ("\nmethod:", "\nmodel:", "\ndata:", "\ntransformers.TrainingArguments:"):
        assert title in text


def test_no_two_arguments_share_a_name() -> None:
    # argparse would refuse them, when the parser is made.
    assert make_parser().prog == "slivertune train"


def test_nothing_given_is_hift_on_the_embedded_default() -> None:
    arguments = parse_train_arguments([])
    assert arguments.given == frozenset()
    assert arguments.method.method == "hift"
    assert arguments.model.model_name_or_path is None
    assert arguments.data.dataset is None
    assert arguments.data.packing is True
    assert arguments.training.learning_rate == EMBEDDED_LEARNING_RATES["hift"]
    assert arguments.training.max_steps > 0
    assert arguments.training.report_to == []
    assert arguments.training.output_dir == "runs/hift"


def test_what_the_user_gives_wins_over_every_default() -> None:
    arguments = parse_train_arguments(
        ["--learning_rate", "0.5", "--max_steps", "3", "--max_length", "99", "--packing", "false"]
    )
    assert arguments.training.learning_rate == 0.5
    assert arguments.training.max_steps == 3
    assert arguments.data.max_length == 99
    assert arguments.data.packing is False
    assert arguments.given == {"learning_rate", "max_steps", "max_length", "packing"}


def test_the_librarys_own_defaults_hold_for_other_models_and_data() -> None:
    arguments = parse_train_arguments(["--model_name_or_path", "gpt2", "--dataset", "rows.csv"])
    assert arguments.training.learning_rate == TrainingArguments.learning_rate
    assert arguments.training.max_steps == -1
    assert arguments.data.packing is False


def test_both_spellings_of_an_argument_are_taken() -> None:
    assert parse_train_arguments(["--layers-per-group", "3"]).method.layers_per_group == 3


def test_every_choice_of_hift_has_an_argument_or_a_reason_to_have_none() -> None:
    without = {item.name for item in dataclasses.fields(HiFTConfig)} - set(hift_settings())
    # The seed is the run's; layers and element-wise are for code, where they can be looked up.
    assert without == {"seed", "layers", "elementwise"}


def test_hifts_settings_reach_its_config() -> None:
    arguments = parse_train_arguments(
        ["--order", "random", "--state", "disk", "--state_dir", "d", "--stream_bytes", "0", "--seed", "7"]
    )
    config = arguments.method.hift_config(arguments.training.seed)
    assert config == HiFTConfig(order="random", state="disk", state_dir="d", stream_bytes=0, seed=7)


@pytest.mark.parametrize("old", ["gradient_checkpointing", "activation_checkpointing"])
def test_the_old_name_of_activation_checkpointing_is_taken_without_a_warning(old: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        arguments = parse_train_arguments([f"--{old}", f"--{old}_kwargs", '{"every_n_layers": 2}'])
    assert arguments.training.activation_checkpointing is True
    assert arguments.training.activation_checkpointing_kwargs == {"every_n_layers": 2}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers_per_group", "0"], "layers_per_group=0 must be at least 1"),
        (["--layers_per_group", "many"], "invalid int value: 'many'"),
        (["--order", "sideways"], "invalid choice: 'sideways'"),
        (["--method", "magic"], "invalid choice: 'magic'"),
        (["--state", "disk"], 'state="disk" needs state_dir'),
        (["--method", "dense", "--order", "random", "--master", "none"], "--order, --master: only --method hift reads"),
        (["--lerning_rate", "1"], "unrecognized arguments: --lerning_rate"),
        (["--learning_rate"], "expected one argument"),
        (["--optim", "lomo"], "--optim lomo can't be HiFT's base optimizer: it updates weights inside backward"),
        (["--optim", "galore_adamw_layerwise"], "galore_adamw_layerwise can't be HiFT's base optimizer"),
        (["--optim", "schedule_free_adamw"], "swaps the weights"),
        (["--optim", "adamw_magic"], "adamw_magic"),
        (["--bf16", "--fp16"], "--bf16 and --fp16 exclude each other"),
        (["--fp16", "--weights_dtype", "bf16"], "--fp16 autocast needs fp32 weights"),
        (["--non_finite_limit", "0"], "non_finite_limit=0 must be at least 1"),
        (["--sample_tokens", "-1"], "sample_tokens=-1 must be at least 0"),
        (["--resume_from_checkpoint", "true"], "nothing whole to resume"),
        (["--eval_fraction", "2"], "eval_fraction=2.0 must lie between 0 and 1"),
        (["--logging_steps", "0"], "logging"),
        (["--save_total_limit", "0"], "save_total_limit=0 must be at least 1"),
        (["--deepspeed", "ds.json"], "runs on one device"),
        (
            ["--dataset", "d.csv", "--task", "classification", "--label_smoothing_factor", "0.1"],
            "--label_smoothing_factor 0.1 has no effect on --task classification",
        ),
        (
            ["--dataset", "d.csv", "--task", "classification", "--batch_eval_metrics"],
            "--batch_eval_metrics True has no effect on --task classification",
        ),
    ],
)
def test_what_does_not_hold_together_is_refused_in_one_sentence(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_train_arguments(arguments)


def test_dense_takes_the_optimizers_that_hift_can_not() -> None:
    assert parse_train_arguments(["--method", "dense", "--optim", "galore_adamw"]).training.optim == "galore_adamw"


def test_bf16_is_weights_for_hift_and_autocast_for_dense() -> None:
    hift = parse_train_arguments(["--bf16"])
    assert (hift.precision.loading, hift.precision.autocast, hift.training.bf16) == ("bf16", "no", False)
    dense = parse_train_arguments(["--method", "dense", "--bf16", "--use_cpu"])
    assert (dense.precision.loading, dense.precision.autocast, dense.training.bf16) == ("fp32", "bf16", True)


def test_pinned_batches_are_for_machines_with_a_gpu() -> None:
    assert parse_train_arguments([]).training.dataloader_pin_memory is torch.cuda.is_available()


def test_a_launchers_mixed_precision_means_what_the_argument_means(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    hift = parse_train_arguments([])
    assert (hift.precision.loading, hift.training.bf16, hift.training.mixed_precision) == ("bf16", False, "no")
    dense = parse_train_arguments(["--method", "dense", "--use_cpu"])
    assert (dense.precision.loading, dense.training.mixed_precision) == ("fp32", "bf16")
    assert parse_train_arguments(["--bf16", "false"]).precision.loading == "stored"
