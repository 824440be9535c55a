import dataclasses
import importlib.util
import operator
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainingArguments

from slivertune.core.options import options_of
from slivertune.hift.config import HiFTConfig
from slivertune.training.command_line.parse import parse_train_arguments
from slivertune.training.options.arguments import ParkedArguments, TokenArguments
from slivertune.training.options.methods import HIFT, LoraOptions
from slivertune.training.options.parser import make_parser
from slivertune.training.options.table import RENAMED

CHECKPOINTING = RENAMED.get("gradient_checkpointing", "gradient_checkpointing")
"""What the installed transformers calls it."""

PROMPTS = [
    *("--dataset", "d.csv"),
    *("--task", "prompt_classification"),
    *("--template", "{text} It was {mask}"),
    *("--label_words", "bad,good"),
]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_no_two_arguments_share_a_name() -> None:
    # argparse would refuse them, when the parser is made.
    assert make_parser().prog == "slivertune train"


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        pytest.param(
            "",
            {
                "given": frozenset(),
                "method.name": "hift",
                "model.model_name_or_path": None,
                "data.dataset": ["builtin:dates"],
                "data.packing": False,
                "method.options.layers_per_group": 4,
                "training.learning_rate": 2e-3,
                "training.warmup_steps": 0,
                "training.max_steps": 800,
                "training.report_to": [],
                "training.output_dir": "runs/hift",
                "training.dataloader_pin_memory": torch.cuda.is_available(),
            },
            id="nothing given is hift on the embedded default, with pinned batches on machines with a GPU",
        ),
        pytest.param(
            "--dataset builtin:python-reference --learning_rate 0.5 --max_steps 3 --max_length 99 --packing false",
            {
                "training.learning_rate": 0.5,
                "training.max_steps": 3,
                "data.max_length": 99,
                "data.packing": False,
                "given": frozenset({"dataset", "learning_rate", "max_steps", "max_length", "packing"}),
            },
            id="what the user gives wins over every default",
        ),
        pytest.param(
            "--model_name_or_path gpt2 --dataset rows.csv",
            {
                "training.learning_rate": TrainingArguments.learning_rate,
                "training.max_steps": -1,
                "data.packing": False,
            },
            id="the library's own defaults hold for other models and data",
        ),
        pytest.param(
            "--dataset builtin:python-reference",
            {"data.packing": True, "data.max_length": 256, "training.max_steps": 352},
            id="each built-in dataset has defaults of its own",
        ),
        pytest.param(
            "--num_train_epochs 2",
            {"training.num_train_epochs": 2, "training.max_steps": -1},
            id="epochs that are given count, and not the updates of a built-in dataset",
        ),
        pytest.param(
            "--dataset builtin:python-reference --method dense",
            {"training.max_steps": 480},
            id="other methods have a length of their own",
        ),
        pytest.param(
            "--dataset rows.csv",
            {"method.options.layers_per_group": 4, "training.learning_rate": 2e-3, "training.max_steps": -1},
            id="the embedded model learns other data as long as the library says",
        ),
        pytest.param(
            "--model_name_or_path gpt2",
            {"method.options.layers_per_group": 0.25, "data.dataset": ["builtin:dates"], "training.max_steps": 800},
            id="another model on the built-in data has a quarter of the layers in a group",
        ),
        pytest.param("--layers-per-group 3", {"method.options.layers_per_group": 3}, id="both spellings are taken"),
        pytest.param(
            "--method dense --optim galore_adamw",
            {"training.optim": "galore_adamw"},
            id="dense takes the optimizers that hift can not",
        ),
        pytest.param(
            "--bf16",
            {"precision.loading": "bf16", "precision.autocast": "no", "training.bf16": False},
            id="bf16 is weights for hift",
        ),
        pytest.param(
            "--method dense --bf16 --use_cpu",
            {"precision.loading": "fp32", "precision.autocast": "bf16", "training.bf16": True},
            id="bf16 is autocast for dense",
        ),
        pytest.param(
            "--method lora --bf16 --use_cpu",
            {"precision.loading": "bf16", "precision.autocast": "bf16", "training.bf16": True},
            id="lora under bf16 freezes bf16 weights and computes under autocast",
        ),
        pytest.param(
            "--method lora",
            {
                "method.options": LoraOptions(
                    lora_rank=16, lora_alpha=None, lora_dropout=0.0, lora_target_modules=None
                ),
                "method.options.alpha": 32,
                "method.options.target_modules": "all-linear",
                "training.output_dir": "runs/lora",
                "training.learning_rate": 4e-3,
            },
            id="lora's settings have peft's defaults and alpha follows the rank",
        ),
        pytest.param(
            "--method lora --lora_rank 4 --lora_alpha 6 --lora_target_modules q_proj v_proj",
            {
                "method.options.lora_rank": 4,
                "method.options.alpha": 6,
                "method.options.target_modules": ["q_proj", "v_proj"],
            },
            id="lora's settings are taken",
        ),
        # PEFT reads a string as a regular expression of whole paths, and a list as names.
        pytest.param(
            "--method lora --lora_target_modules q_proj",
            {"method.options.target_modules": ["q_proj"]},
            id="a single target is a name and no pattern",
        ),
        pytest.param(
            "--method lora --lora_target_modules all-linear",
            {"method.options.target_modules": "all-linear"},
            id="unless it is peft's shorthand",
        ),
    ],
)
def test_what_is_typed_and_what_is_not_become_settings(typed: str, expected: dict[str, Any]) -> None:
    arguments = parse_train_arguments(typed.split())
    assert {name: operator.attrgetter(name)(arguments) for name in expected} == expected


def test_every_choice_of_hift_has_an_argument_or_a_reason_to_have_none() -> None:
    config = {item.name for item in dataclasses.fields(HiFTConfig)}
    options = {option.name for option in (*HIFT.options(), *options_of(ParkedArguments))}
    # The seed and the largest norm are the run's; element-wise is for code, where it can be looked up.
    assert config - options == {"seed", "max_grad_norm", "elementwise"}


def test_hifts_settings_reach_its_config() -> None:
    arguments = parse_train_arguments(
        [
            *("--layers_per_group", "3", "--order", "top2down", "--state", "disk", "--state_dir", "d"),
            *("--stream_bytes", "0", "--seed", "7", "--state_ram_bytes", "64", "--prefetch_bytes", "50"),
        ]
    )
    config = arguments.method.options.config(arguments.training.seed)
    expected = HiFTConfig(
        layers_per_group=3,
        order="top2down",
        state="disk",
        state_dir="d",
        state_ram_bytes=64,
        stream_bytes=0,
        seed=7,
        prefetch_bytes=50,
    )
    assert config == expected


@pytest.mark.parametrize("name", sorted({"gradient_checkpointing", CHECKPOINTING}))
def test_the_old_name_of_activation_checkpointing_is_taken_without_a_warning(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        arguments = parse_train_arguments([f"--{name}", f"--{name}_kwargs", '{"every_n_layers": 2}'])
    assert getattr(arguments.training, CHECKPOINTING) is True
    assert getattr(arguments.training, f"{CHECKPOINTING}_kwargs") == {"every_n_layers": 2}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers_per_group", "0"], "layers_per_group=0 must be a number of layers"),
        (
            ["--layers_per_group", "many"],
            "--layers_per_group 'many' must be an integer, a share of the layers as 0.25, 'all' or 'auto'",
        ),
        (["--order", "sideways"], "invalid choice: 'sideways'"),
        (["--keep_activations", "2"], "keep_activations 2 spares blocks that --gradient_checkpointing would recompute"),
        (["--keep_activations", "0"], "Add --gradient_checkpointing true, or leave --keep_activations out"),
        (["--offload_activations"], "Add --gradient_checkpointing true, or leave --offload_activations out"),
        (
            ["--gradient_checkpointing", "--offload_activations", "--torch_compile"],
            "--offload_activations does not go with --torch_compile: offload_activations copies on a second",
        ),
        (["--token_tile_size", "0"], "--token_tile_size 0 must be at least 1"),
        (["--token_tile_size", "64", "--torch_compile"], "--token_tile_size does not go with --torch_compile"),
        (
            ["--token_tile_size", "64", "--use_liger_kernel"],
            "--token_tile_size does not go with --use_liger_kernel: Liger",
        ),
        (
            ["--gradient_checkpointing", "--offload_activations", "--keep_activations", "auto"],
            "--keep_activations auto does not go with --offload_activations: 'auto' measures a block's activations",
        ),
        (["--gradient_checkpointing", "--keep_activations", "-1"], "--keep_activations -1 must be at least 0"),
        (
            ["--gradient_checkpointing", "--keep_activations", "all"],
            "--keep_activations 'all' must be an integer or 'auto'",
        ),
        (
            ["--gradient_checkpointing", "--keep_activations", "auto", "--use_cpu"],
            "and the model is on 'cpu'. Give a number of blocks, from 0 to all",
        ),
        (["--method", "magic"], "invalid choice: 'magic'"),
        (["--state", "disk"], 'state="disk" needs state_dir'),
        (["--method", "dense", "--order", "random", "--master", "none"], "--order, --master: only --method hift reads"),
        (["--lora_rank", "8"], "--lora_rank: only --method lora reads this. Leave it out or choose lora"),
        (["--method", "lora", "--order", "random"], "--order: only --method hift reads this"),
        (["--method", "lora", "--lora_rank", "0"], "--lora_rank 0 must be at least 1"),
        (["--method", "lora", "--lora_alpha", "0"], "lora_alpha=0 must be at least 1. Leave it out for twice the rank"),
        (["--method", "lora", "--lora_dropout", "1"], "--lora_dropout 1.0 must be at least 0 and less than 1"),
        (["--density", "0.1", "--packed"], "--density, --packed: only --method sft reads this. Leave it out or"),
        (
            ["--method", "dense", "--load_in_4bit"],
            "4-bit weights can't be changed by small steps. Use --method lora or sft, which train adapters or deltas",
        ),
        (["--load_in_4bit"], "--load_in_4bit does not go with --method hift: HiFT changes every weight in its turn"),
        (["--token_ratio", "0"], "--token_ratio 0.0 must be more than 0 and at most 1"),
        (["--token_ratio", "1.1"], "--token_ratio 1.1 must be more than 0 and at most 1"),
        (["--token_ratio", "0.3", "--token_pattern", "every_other"], "invalid choice: 'every_other'"),
        (["--token_pattern", "block"], "--token_pattern block needs --token_ratio. Give a ratio, or"),
        (
            ["--gradients", "stepped"],
            "--gradients stepped does not go with --max_grad_norm 1.0: the norm of all gradients is known only when",
        ),
        (["--gradients", "stepped", "--max_grad_norm", "0", "--fp16"], "--gradients stepped does not go with --fp16"),
        (["--gradients", "host", "--fp16"], "--gradients host does not go with --fp16"),
        (["--prefetch_bytes", "much"], "--prefetch_bytes 'much' must be a size, such as 24GiB"),
        (["--resident_bytes", "much"], "--resident_bytes 'much' must be a size, such as 24GiB"),
        (["--weights", "host", "--state", "device"], 'Use state="host" or "disk"'),
        (["--method", "dense", "--gradients", "host"], "--gradients: only --method hift reads this"),
        (
            ["--token_ratio", "0.3", "--label_smoothing_factor", "0.1"],
            "--token_ratio does not go with --label_smoothing_factor 0.1: the smoothed loss is computed outside",
        ),
        (
            [*PROMPTS, "--token_ratio", "0.3"],
            "outside the model, reads only the label word's position, which may not be selected. Leave it out, or",
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
        (["--save_total_limit", "0"], "--save_total_limit 0 must be at least 1"),
        (["--deepspeed", "ds.json"], "DeepSpeed is asked for, and one process without a GPU has nothing to shard"),
        (["--fsdp", "full_shard"], "FSDP is asked for, and one process without a GPU has nothing to shard"),
        (["--do_train", "false"], "--do_train false: this command always trains. Leave it out"),
        (["--do_eval", "false"], "--do_eval false: this command always evaluates before and after training"),
        (["--do_predict"], "--do_predict true: this command never predicts. Leave it out"),
        (["--optim_args", "foo"], "--optim_args 'foo' must be pairs with commas between them"),
        (["--optim_args", "rank=2,"], "--optim_args 'rank=2,' must be pairs with commas between them"),
        (
            ["--lr_scheduler_type", "linear", "--lr_scheduler_kwargs", '{"num_cycles": 3}'],
            '--lr_scheduler_type linear --lr_scheduler_kwargs {"num_cycles": 3}: get_linear_schedule_with_warmup() got',
        ),
        (["--lr_scheduler_type", "warmup_stable_decay"], "'num_decay_steps'. Give --lr_scheduler_kwargs with what it"),
        (
            [
                "--lr_scheduler_type",
                "polynomial",
                "--lr_scheduler_kwargs",
                '{"lr_end": 0.5}',
                "--learning_rate",
                "1e-3",
            ],
            "must be smaller than initial lr",
        ),
        (["--lr_scheduler_type", "cosine_with_min_lr"], "One of min_lr or min_lr_rate should be set"),
        (["--debug", "underflow_overflow"], "Add --chunked_cross_entropy false"),
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


@pytest.mark.parametrize(
    "arguments",
    [
        ["--do_train", "--do_eval", "true", "--do_predict", "false"],
        ["--lr_scheduler_type", "warmup_stable_decay", "--lr_scheduler_kwargs", '{"num_decay_steps": 50}'],
        ["--lr_scheduler_type", "cosine_with_restarts", "--lr_scheduler_kwargs", '{"num_cycles": 3}'],
        *(["--lr_scheduler_type", kind] for kind in ("polynomial", "inverse_sqrt", "reduce_lr_on_plateau", "constant")),
        ["--optim_args", "rank=2, scale=0.5"],
        ["--debug", "underflow_overflow", "--chunked_cross_entropy", "false"],
    ],
)
def test_what_the_trainer_takes_is_not_refused(arguments: list[str]) -> None:
    parse_train_arguments([*arguments, "--eval_strategy", "epoch"])


def test_a_launchers_mixed_precision_means_what_the_argument_means(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    hift = parse_train_arguments([])
    assert (hift.precision.loading, hift.training.bf16, hift.training.mixed_precision) == ("bf16", False, "no")
    dense = parse_train_arguments(["--method", "dense", "--use_cpu"])
    assert (dense.precision.loading, dense.training.mixed_precision) == ("fp32", "bf16")
    assert parse_train_arguments(["--bf16", "false"]).precision.loading == "stored"


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
            "--method lora needs peft, which is missing. Run pip install peft",
        ),
        (
            "bitsandbytes",
            ["--method", "lora", "--load_in_4bit"],
            "--load_in_4bit needs bitsandbytes, which is missing. Run pip install bitsandbytes",
        ),
    ],
)
def test_a_missing_library_is_named_as_pip_does(
    module: str, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == module else find(name, *rest))
    with pytest.raises(ImportError, match=re.escape(message)):
        parse_train_arguments(arguments)


@pytest.mark.parametrize("method", ["dense", "hift", "sft", "lora"])
@pytest.mark.parametrize("asked", ["typed", "by a launcher", "in a run file"])
def test_fp16_and_tf32_without_a_gpu_are_refused_alike_for_all_methods(
    method: str, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    monkeypatch.setattr("slivertune.training.ranks.processes.is_torch_tf32_available", lambda: False)
    Path("run.yaml").write_text("fp16: on\n", encoding="utf-8")
    words = {"typed": ["--fp16"], "in a run file": ["run.yaml"]}.get(asked, [])
    if asked == "by a launcher":
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    for more in ([], ["--use_cpu"]):
        with pytest.raises(ValueError, match=r"^--fp16 needs a GPU, and this run has none\. Leave it out, or use --bf"):
            parse_train_arguments([*words, "--method", method, *more])
    with pytest.raises(ValueError, match="--tf32 needs an NVIDIA GPU of compute capability 8 or later"):
        parse_train_arguments(["--method", method, "--tf32"])
    assert [path.name for path in Path().iterdir()] == ["run.yaml"]


@pytest.mark.parametrize("method", ["dense", "hift", "sft", "lora"])
@pytest.mark.parametrize("asked", ["--bf16", "--bf16_full_eval", "by a launcher"])
def test_bf16_without_support_is_said_alike_for_all_methods(
    method: str, asked: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "slivertune")
    words = ["--method", method, *([asked] if asked.startswith("--") else [])]
    if asked == "by a launcher":
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setattr("slivertune.training.ranks.processes.is_torch_bf16_gpu_available", lambda: False)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    arguments = parse_train_arguments(words)
    assert arguments.training.device.type == "cpu" and "use_cpu" not in arguments.values
    assert "no GPU is here, so --bf16 computes on the CPU" in caplog.text
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    with pytest.raises(ValueError, match="--bf16 needs a GPU with bf16, and this machine's GPU has none"):
        parse_train_arguments(words)
