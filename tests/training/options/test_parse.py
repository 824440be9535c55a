import dataclasses
import importlib.util
import re
import warnings
from pathlib import Path

import pytest
import torch
from transformers import TrainingArguments

from slivertune.hift.config import HiFTConfig
from slivertune.training.methods.hift import HiFTArguments
from slivertune.training.methods.lora import LoraArguments
from slivertune.training.methods.sft import SFTArguments
from slivertune.training.options.arguments import DataArguments, ModelArguments, RunArguments, TokenArguments
from slivertune.training.options.parse import make_parser, parse_train_arguments

PROMPTS = [
    *("--dataset", "d.csv"),
    *("--task", "prompt_classification"),
    *("--template", "{text} It was {mask}"),
    *("--label_words", "bad,good"),
]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_help_lists_every_argument(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse_train_arguments(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    kinds = (RunArguments, HiFTArguments, SFTArguments, LoraArguments, TokenArguments, ModelArguments, DataArguments)
    for kind in (*kinds, TrainingArguments):
        for item in dataclasses.fields(kind):
            assert f"--{item.name}" in text or not item.init
    assert "\n  --method {dense,hift,sft,lora}\n" in text
    titles = ("run", "method hift", "method sft", "method lora", "tokens", "model", "data")
    for title in (*titles, "transformers.TrainingArguments"):
        assert f"\n{title}:\n" in text


def test_no_two_arguments_share_a_name() -> None:
    # argparse would refuse them, when the parser is made.
    assert make_parser().prog == "slivertune train"


def test_nothing_given_is_hift_on_the_embedded_default() -> None:
    arguments = parse_train_arguments([])
    assert arguments.given == frozenset()
    assert arguments.method.name == "hift"
    assert arguments.model.model_name_or_path is None
    assert arguments.data.dataset is None
    assert arguments.data.packing is True
    assert arguments.training.learning_rate == 2e-3
    assert arguments.training.warmup_steps == 0 < parse_train_arguments(["--method", "dense"]).training.warmup_steps
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
    assert parse_train_arguments(["--layers-per-group", "3"]).method.options.layers_per_group == 3


def test_every_choice_of_hift_has_an_argument_or_a_reason_to_have_none() -> None:
    config, arguments = ({item.name for item in dataclasses.fields(kind)} for kind in (HiFTConfig, HiFTArguments))
    # The seed is the run's; layers and element-wise are for code, where they can be looked up.
    assert config - arguments == {"seed", "layers", "elementwise"}


def test_hifts_settings_reach_its_config() -> None:
    arguments = parse_train_arguments(
        ["--order", "random", "--state", "disk", "--state_dir", "d", "--stream_bytes", "0", "--seed", "7"]
    )
    config = arguments.method.options.config(arguments.training.seed)
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
        (["--lora_rank", "8"], "--lora_rank: only --method lora reads this; leave it out or choose lora"),
        (["--method", "lora", "--order", "random"], "--order: only --method hift reads this"),
        (["--method", "lora", "--lora_rank", "0"], "lora_rank=0 must be at least 1"),
        (["--method", "lora", "--lora_alpha", "0"], "lora_alpha=0 must be at least 1; leave it out for twice the rank"),
        (["--method", "lora", "--lora_dropout", "1"], "lora_dropout=1.0 must lie in [0, 1)"),
        (
            ["--density", "0.1", "--packed"],
            "--density, --packed: only --method sft reads this; leave it out or",
        ),
        (
            ["--method", "dense", "--load_in_4bit"],
            "4-bit weights can't be changed by small steps; take --method lora or sft, which train adapters or deltas",
        ),
        (["--load_in_4bit"], "--load_in_4bit does not go with --method hift: HiFT changes every weight in its turn"),
        (["--token_ratio", "0"], "token_ratio=0.0 must lie in (0, 1]; leave it out to train on all tokens"),
        (["--token_ratio", "1.1"], "token_ratio=1.1 must lie in (0, 1]"),
        (["--token_ratio", "0.3", "--token_pattern", "every_other"], "invalid choice: 'every_other'"),
        (["--token_pattern", "block"], "--token_pattern block is read with --token_ratio alone; give a ratio, or"),
        (
            ["--step_in_backward"],
            "--step_in_backward does not go with --max_grad_norm 1: the norm of all gradients is known only when",
        ),
        (
            ["--step_in_backward", "--max_grad_norm", "0", "--gradient_accumulation_steps", "2"],
            "--step_in_backward does not go with --gradient_accumulation_steps 2",
        ),
        (["--step_in_backward", "--max_grad_norm", "0", "--fp16"], "--step_in_backward does not go with --fp16"),
        (["--method", "dense", "--step_in_backward"], "--step_in_backward: only --method hift reads this"),
        (
            ["--token_ratio", "0.3", "--label_smoothing_factor", "0.1"],
            "--label_smoothing_factor 0.1 does not go with --token_ratio: the smoothed loss would score positions that",
        ),
        (
            [*PROMPTS, "--token_ratio", "0.3"],
            "outside the model, and that place may not be selected; leave it out, or take --task classification",
        ),
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
        (["--deepspeed", "ds.json"], "DeepSpeed is asked for, and one process without a GPU has nothing to share"),
        (["--fsdp", "full_shard"], "FSDP is asked for, and one process without a GPU has nothing to share"),
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


def test_loras_settings_have_pefts_defaults_and_alpha_follows_the_rank() -> None:
    arguments = parse_train_arguments(["--method", "lora"])
    lora = arguments.method.options
    assert lora == LoraArguments(lora_rank=16, lora_alpha=None, lora_dropout=0.0, lora_target_modules=None)
    assert (lora.alpha, lora.target_modules) == (32, "all-linear")
    assert arguments.training.output_dir == "runs/lora"
    assert arguments.training.learning_rate == 4e-3
    given = parse_train_arguments(
        ["--method", "lora", "--lora_rank", "4", "--lora_alpha", "6", "--lora_target_modules", "q_proj", "v_proj"]
    )
    lora = given.method.options
    assert (lora.lora_rank, lora.alpha, lora.target_modules) == (4, 6, ["q_proj", "v_proj"])


def test_a_single_target_is_a_name_and_no_pattern_unless_it_is_pefts_shorthand() -> None:
    # PEFT reads a string as a regular expression of whole paths, and a list as names.
    for given, expected in (("q_proj", ["q_proj"]), ("all-linear", "all-linear")):
        arguments = parse_train_arguments(["--method", "lora", "--lora_target_modules", given])
        assert arguments.method.options.target_modules == expected


@pytest.mark.parametrize("method", ["dense", "hift", "sft", "lora"])
def test_every_method_takes_a_token_ratio(method: str) -> None:
    arguments = parse_train_arguments(["--method", method, "--token_ratio", "0.3", "--token_pattern", "block"])
    assert arguments.tokens == TokenArguments(token_ratio=0.3, token_pattern="block")
    assert parse_train_arguments(["--method", method]).tokens == TokenArguments(token_ratio=None, token_pattern=None)


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [
        (
            "peft",
            ["--method", "lora"],
            "--method lora needs peft, which is not installed; pip install 'slivertune[peft]'",
        ),
        (
            "bitsandbytes",
            ["--method", "lora", "--load_in_4bit"],
            "--load_in_4bit needs bitsandbytes, which is not installed; pip install 'slivertune[bitsandbytes]'",
        ),
    ],
)
def test_a_missing_library_is_named_with_its_extra(
    module: str, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == module else find(name, *rest))
    with pytest.raises(ImportError, match=re.escape(message)):
        parse_train_arguments(arguments)


def test_lora_under_bf16_freezes_bf16_weights_and_computes_under_autocast() -> None:
    lora = parse_train_arguments(["--method", "lora", "--bf16", "--use_cpu"])
    assert (lora.precision.loading, lora.precision.autocast, lora.training.bf16) == ("bf16", "bf16", True)
