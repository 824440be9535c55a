import itertools
import re
from dataclasses import fields
from pathlib import Path

import pytest

from slivertune.planning.arguments import Sweep
from slivertune.planning.request import PlanRequest
from slivertune.training.command_line.plan_words import parse_plan_arguments
from slivertune.training.options.methods import METHOD_OPTIONS

MODEL = ("--model", "llama-2-7b")
OWN = {name: {option.name for option in method.options()} for name, method in METHOD_OPTIONS.items()}
"""Options that one method alone reads, by its name."""


def test_every_field_of_a_request_is_an_argument_and_absent_unless_it_was_typed() -> None:
    typed = {
        "method": "sft",
        "optimizer": "sgd",
        "precision": "mixed",
        "task": "classification",
        "images": 2,
        "image_size": 112,
        "num_labels": 5,
        "batch_size": 3,
        "gradient_accumulation_steps": 2,
        "seq_length": 64,
        "attn_implementation": "eager",
        "gradient_checkpointing": True,
        "keep_activations": 2,
        "offload_activations": True,
        "token_tile_size": 4096,
        "chunked_cross_entropy": False,
        "token_ratio": 0.25,
        "layers_per_group": 4,
        "inactive": "frozen",
        "compile_step": "never",
        "layers": ("a.*", "b+c"),
        "state": "disk",
        "state_ram_bytes": 2**31,
        "save_total_limit": 3,
        "master": "fp32",
        "steps_per_group": 3,
        "device_bytes": 2**33,
        "stream_bytes": 2**25,
        "gradients": "stepped",
        "waiting": "nf4",
        "prefetch_bytes": 2**30,
        "weights": "host",
        "resident_bytes": 2**31,
        "density": 0.5,
        "num_weights": 77,
        "equivalent_lora_rank": 4,
        "sft_target_modules": ("q_proj", "bias"),
        "train_embeddings": True,
        "redistribute": True,
        "packed": True,
        "sft_momentum": 0.5,
        "selection": "momentum",
        "reselection_interval": 7,
        "estimation_steps": 3,
        "replacement_rate": 0.5,
        "lora_rank": 8,
        "lora_dropout": 0.25,
        "lora_target_modules": ("v_proj",),
        "load_in_4bit": True,
        "recipe": "peft-kbit",
        "kernels": "cpu",
        "layout": "zero3",
        "num_gpus": 4,
        "offload_parameters": True,
    }
    assert typed.keys() == {item.name for item in fields(PlanRequest)}
    # Codes of one kind exclude the other.
    codes = {"load_in_4bit"}, {"waiting", "weights", "device_bytes", "resident_bytes"}
    for (method, own), excluded in itertools.product(OWN.items(), codes):
        others = {name for names in OWN.values() for name in names} - own
        # One of three settings gives the number of weights.
        others |= {"num_weights", "equivalent_lora_rank", *excluded}
        of_method = {name: value for name, value in {**typed, "method": method}.items() if name not in others}
        words = list(MODEL)
        for name, value in of_method.items():
            words += [f"--{name}", *(value if isinstance(value, tuple) else [str(value).lower()])]
        assert parse_plan_arguments(words).given == of_method
    for name in ("num_weights", "equivalent_lora_rank"):
        given = parse_plan_arguments([*MODEL, "--method", "sft", f"--{name}", str(typed[name])]).given
        assert given == {"method": "sft", name: typed[name]}
    assert parse_plan_arguments(MODEL).given == {}


def test_names_of_the_hf_trainer_switches_and_sizes_are_understood() -> None:
    arguments = parse_plan_arguments(
        [
            *("--model_name_or_path", "x", "--per_device_train_batch_size", "8", "--max_length", "9"),
            *("--gradient_checkpointing", "--no_chunked_cross_entropy", "--load_in_4bit", "no", "--stream_bytes", "0"),
            *("--fit", "24GiB", "--fit_host", "64 GB", "--fit_disk", "1TiB", "--min_seq_length", "128", "--json"),
        ]
    )
    assert arguments.given == {
        "batch_size": 8,
        "seq_length": 9,
        "gradient_checkpointing": True,
        "chunked_cross_entropy": False,
        "load_in_4bit": False,
        "stream_bytes": 0,
    }
    sizes = (arguments.fit_bytes, arguments.fit_host_bytes, arguments.fit_disk_bytes)
    assert sizes == (24 * 2**30, 64 * 10**9, 2**40)
    assert (arguments.model, arguments.min_seq_length) == ("x", 128)
    assert (arguments.json, arguments.sweep) == (True, None)


@pytest.mark.parametrize(
    ("text", "sweep"),
    [
        ("seq_length=512,1024", Sweep(field="seq_length", values=(512, 1024))),
        ("token_ratio=0.1,1", Sweep(field="token_ratio", values=(0.1, 1.0))),
        ("stream_bytes=0,32MiB", Sweep(field="stream_bytes", values=(0, 2**25))),
    ],
)
def test_a_sweep_is_a_numeric_field_and_its_values(text: str, sweep: Sweep) -> None:
    assert parse_plan_arguments([*MODEL, "--sweep", text]).sweep == sweep


def test_every_numeric_field_can_be_swept() -> None:
    numeric = {item.name for item in fields(PlanRequest) if isinstance(item.default, (int, float))}
    numeric -= {item.name for item in fields(PlanRequest) if isinstance(item.default, bool)}
    for name in (*numeric, "token_ratio", "density"):
        one = "0.5" if name in ("token_ratio", "density", "sft_momentum", "lora_dropout") else "1"
        method = next((owner for owner, own in OWN.items() if name in own), "dense")
        sweep = parse_plan_arguments([*MODEL, "--method", method, "--sweep", f"{name}={one}"]).sweep
        assert sweep == Sweep(field=name, values=(float(one),))


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([], "required: --model"),
        ([*MODEL, "--nothing"], "unrecognized arguments: --nothing"),
        ([*MODEL, "--method", "magic"], "argument --method: invalid choice: 'magic'"),
        (
            [*MODEL, "--batch", "1"],
            "unrecognized arguments: --batch 1; did you mean --batch_size?; see slivertune plan",
        ),
        ([*MODEL, "--gradient-checkpointin"], "; did you mean --gradient_checkpointing?"),
        ([*MODEL, "--max_seq_length", "1"], "; did you mean --seq_length?"),
        ([*MODEL, "--method", "hifft"], "(choose from 'dense', 'hift', 'sft', 'lora', 'full'); did you mean hift?"),
        ([*MODEL, "--sweep", "seq_lenght=1"], "; did you mean seq_length?"),
        ([*MODEL, "--optim", "adamw_torhc"], "; did you mean adamw_torch?"),
        ([*MODEL, "--gradient_checkpointing", "maybe"], "'maybe' must be true or false"),
        ([*MODEL, "--fit", "24G"], "--fit '24G' must be a size, such as 24GiB"),
        ([*MODEL, "--fit", "0"], "--fit 0 must be more than 0"),
        ([*MODEL, "--fit", "24"], "'24' must be typed with a unit: it would be 24 bytes; did you mean 24GiB?"),
        ([*MODEL, "--fit", "24GiB", "--fit_host", "64"], "did you mean 64GiB?"),
        ([*MODEL, "--fit", "24GiB", "--fit_disk", "1.5"], "did you mean 1.5GiB?"),
        ([*MODEL, "--fit_host", "1GiB"], "--fit_host needs --fit. Give --fit the size"),
        ([*MODEL, "--fit_disk", "1GiB"], "--fit_disk needs --fit. Give --fit the size"),
        ([*MODEL, "--min_seq_length", "1"], "--min_seq_length needs --fit. Give --fit the size"),
        ([*MODEL, "--fit", "1GiB", "--min_seq_length", "0"], "--min_seq_length 0 must be at least 1"),
        ([*MODEL, "--fit", "1GiB", "--min_seq_length", "9", "--sweep", "batch_size=1"], "of --fit, without --sweep"),
        (
            [*MODEL, "--sweep", "packed=true"],
            "'packed=true' must be FIELD=V1,V2,... with one of task, method",
        ),
        ([*MODEL, "--sweep", "seq_length"], "'seq_length' must be FIELD=V1,V2,..."),
        ([*MODEL, "--sweep", "seq_length=1,two"], "has a value that seq_length can't take"),
        ([*MODEL, "--sweep", "seq_length="], "has a value that seq_length can't take"),
        ([*MODEL, "--sweep", "seq_length=1,1"], "has a value twice"),
        (
            [*MODEL, "--sweep", "seq_length=1", "--seq_length", "2"],
            "--seq_length 2 and --sweep seq_length=... both set",
        ),
        ([*MODEL, "--plot", "plan.pdf"], "--plot plan.pdf must end in .png"),
        ([*MODEL, "--plot", "nowhere/plan.png"], "there is no folder nowhere. Make it first"),
    ],
)
def test_what_does_not_hold_together_is_an_error_that_names_it(
    words: list[str], part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=re.escape(part)):
        parse_plan_arguments(words)
