import random
import shlex
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

import pytest
from transformers import Trainer

from slivertune.core.layout import Layout
from slivertune.core.options import enum_value
from slivertune.core.presets import preset_path
from slivertune.hift.config import ALL_LAYERS
from slivertune.planning.answer import DATASET, train_command
from slivertune.planning.kernels import Kernels
from slivertune.planning.methods import planned, planned_methods
from slivertune.planning.optimizers import PAGED, OptimizerName, optimizer_of
from slivertune.planning.request import PlanRequest, PrecisionName
from slivertune.planning.search import start_of_search
from slivertune.training.command_line.parse import TrainArguments, parse_train_arguments
from slivertune.training.command_line.plan_words import parse_plan_arguments
from tests.training.made_runs import planned_back

NUM_RANDOM = 50
"""Requests of each method; a tenth of a second each."""
ODD, EVEN = range(1, NUM_RANDOM, 2), range(0, NUM_RANDOM, 2)
of_each_half = pytest.mark.parametrize("seeds", [ODD, pytest.param(EVEN, marks=pytest.mark.slow)], ids=["odd", "even"])

RANDOM_VALUES: dict[str, tuple[Any, ...]] = {
    "method": ("hift", "dense", "sft", "lora"),
    "task": ("causal_lm", "classification"),
    "optimizer": get_args(OptimizerName),
    "precision": get_args(PrecisionName),
    "batch_size": (8, 6),
    "gradient_accumulation_steps": (1, 3),
    "seq_length": (1024, 77),
    "attn_implementation": (None, "eager"),
    "gradient_checkpointing": (False, True),
    "keep_activations": (0, 2),
    "offload_activations": (False, True),
    "token_tile_size": (None, 4096),
    "chunked_cross_entropy": (True, False),
    "token_ratio": (None, 0.3),
    "layers_per_group": (1, 3),
    "steps_per_group": (1, 2),
    "device_bytes": (None, 2**21),
    "stream_bytes": (128 * 2**20, 0),
    "state": ("host", "device", "disk", "discard"),
    "state_ram_bytes": (0, 2**20),
    "save_total_limit": (None, 2),
    "master": (None, "fp32", "none", "stochastic"),
    "gradients": ("device", "host", "stepped"),
    "inactive": ("frozen", "above"),
    "compile_step": ("auto", "always", "never"),
    "prefetch_bytes": (None, 0, 2**20),
    "weights": ("device", "host"),
    "resident_bytes": (None, 0, 2**20),
    "selection": ("accumulated_gradient", "momentum"),
    "density": (None, 0.25),
    "num_weights": (None, 9),
    "equivalent_lora_rank": (None, 2),
    "sft_target_modules": (None, ("q_proj", "k_proj")),
    "train_embeddings": (False, True),
    "redistribute": (False, True),
    "packed": (False, True),
    "sft_momentum": (0.0, 0.5),
    "reselection_interval": (20, 6, 0),
    "estimation_steps": (5, 2),
    "replacement_rate": (0.2, 0.5),
    "lora_rank": (16, 4),
    "lora_dropout": (0.0, 0.1),
    "lora_target_modules": (None, ("q_proj",), ("all-linear",)),
    "load_in_4bit": (False, True),
    "waiting": (None, "int8", "nf4"),
}
"""Values of every field that a command on one GPU can say; the default is first."""


def random_request(method: str, seed: int) -> PlanRequest:
    """A request of which some fields that its method reads are not the default."""
    generator = random.Random(f"{method} {seed}")
    of_others = frozenset().union(*(planned(name).settings for name in planned_methods())) - planned(method).settings
    settings: dict[str, Any] = {"method": method}
    for name, (_, *others) in RANDOM_VALUES.items():
        if name in of_others or name == "method" or generator.random() > 0.4:
            continue
        try:
            value = generator.choice(others)
            PlanRequest(**{**settings, name: value})
        except ValueError:
            continue  # does not go with the others
        settings[name] = value
    return as_trained(PlanRequest(**settings))


def as_trained(request: PlanRequest) -> PlanRequest:
    """The request without what makes no difference to a run, and which the command therefore leaves out."""
    has_own_kind = request.precision == "mixed_hi" or request.master == "stochastic"
    settings: dict[str, Any] = {"master": request.master_kind if has_own_kind else None}
    if not request.has_phases:
        settings["estimation_steps"] = 5
    if request.reselection_interval == 0:
        settings |= {"replacement_rate": 0.2, "redistribute": False}
    if request.task == "classification":
        settings["chunked_cross_entropy"] = True
    return replace(request, **settings)


def parsed(request: PlanRequest, folder: Path) -> TrainArguments:
    """What `slivertune train` understands of the command for a request."""
    command = train_command(request, "owner/model").arguments
    assert command is not None and command[:2] == ("slivertune", "train")
    assert shlex.split(shlex.join(command)) == list(command)
    # These say where this machine computes and writes, which a plan does not.
    return parse_train_arguments([*command[2:], "--use_cpu", "--output_dir", str(folder / "out")])


FULL = {"precision": "bf16", "optimizer": "adafactor", "gradient_checkpointing": True, **ALL_LAYERS}


def test_the_command_of_all_layers_is_that_of_full() -> None:
    command = train_command(PlanRequest(**FULL), "m").arguments
    assert command is not None
    assert shlex.join(command[4:]).startswith(
        f"--dataset {DATASET} --method full --per_device_train_batch_size 8 --max"
    )
    assert command[-2:] == ("--max_length", "1024")
    other = train_command(PlanRequest(**{**FULL, "optimizer": "sgd"}), "m").arguments
    assert other is not None and "full" not in other


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"batch_size": 3, "gradient_accumulation_steps": 4, "seq_length": 77, "gradient_checkpointing": True},
        {"gradient_checkpointing": True, "keep_activations": 3},
        {"gradient_checkpointing": True, "offload_activations": True, "token_tile_size": 8192},
        {"chunked_cross_entropy": False},
        {"task": "classification"},
        {"token_ratio": 0.3},
        {"precision": "mixed_hi", "layers_per_group": 3, "stream_bytes": 0},
        {"precision": "mixed_hi", "state": "disk", "state_ram_bytes": 2**30},
        {"precision": "bf16", "state": "device"},
        {"gradients": "stepped"},
        {"gradients": "stepped", "inactive": "above"},
        FULL,
        {**FULL, "batch_size": 2, "keep_activations": 1, "stream_bytes": 0},
        {"gradients": "host"},
        {"method": "sft", "precision": "bf16", "density": 0.0125, "selection": "momentum"},
        {"method": "sft", "precision": "bf16", "load_in_4bit": True},
        {"method": "sft", "reselection_interval": 6, "estimation_steps": 4, "replacement_rate": 0.5},
        {"method": "sft", "reselection_interval": 0},
        {"method": "lora", "precision": "bf16", "lora_rank": 4, "load_in_4bit": True},
    ],
)
def test_train_understands_the_command_as_the_run_that_was_planned(changes: dict[str, Any], tmp_path: Path) -> None:
    request = PlanRequest(**changes)
    arguments = parsed(request, tmp_path)
    model, data, training = arguments.model, arguments.data, arguments.training
    assert (model.model_name_or_path, data.dataset, arguments.method.name) == ("owner/model", [DATASET], request.method)
    understood = {
        "task": data.task,
        "seq_length": data.max_length,
        "load_in_4bit": model.load_in_4bit,
        "token_ratio": arguments.tokens.token_ratio,
        "batch_size": training.per_device_train_batch_size,
        "gradient_accumulation_steps": training.gradient_accumulation_steps,
        "gradient_checkpointing": training.gradient_checkpointing,
        "keep_activations": arguments.run.keep_activations or 0,
        "offload_activations": arguments.run.offload_activations,
        "token_tile_size": arguments.run.token_tile_size,
    }
    if request.method == "hift":
        config = arguments.method.options.config(seed=0)
        names = (
            "layers_per_group",
            "stream_bytes",
            "state",
            "state_ram_bytes",
            "gradients",
            "inactive",
            "waiting",
            "weights",
        )
        understood |= {name: getattr(config, name) for name in names}
        assert not (request.gradients == "stepped" and training.max_grad_norm)
        assert request.precision in ("fp32", "mixed") or config.master == request.master_kind
    if request.method == "sft":
        names = ("density", "selection", "reselection_interval", "estimation_steps", "replacement_rate")
        understood |= {name: getattr(arguments.method.options, name) for name in names}
    if request.method == "lora":
        understood["lora_rank"] = arguments.method.options.lora_rank
    assert understood == {name: getattr(request, name) for name in understood}


def test_random_requests_reach_every_field() -> None:
    requests = [random_request(method, seed) for method in planned_methods() for seed in ODD]
    default = PlanRequest()
    others = {"num_labels", "layers", "layout", "num_gpus", "offload_parameters", "kernels", "images", "image_size"}
    others |= {"recipe"}  # for which no command is printed
    assert RANDOM_VALUES.keys() | others == {item.name for item in fields(PlanRequest)}
    for name in RANDOM_VALUES:
        assert any(getattr(request, name) != getattr(default, name) for request in requests), name


@of_each_half
@pytest.mark.parametrize("method", planned_methods())
def test_a_command_is_planned_back_as_what_it_was_printed_for(method: str, seeds: range, tmp_path: Path) -> None:
    for seed in seeds:
        request = random_request(method, seed)
        command = train_command(request, "owner/model").arguments
        found = planned_back(parsed(request, tmp_path / str(seed)))
        # It is parsed for the CPU, and a run's own plan is held against what it measures, checkpoints left out.
        expected = replace(request, save_total_limit=None)
        assert as_trained(replace(found, kernels="gpu", save_total_limit=None)) == expected, command
        assert found.save_total_limit is None


@of_each_half
def test_a_plan_takes_the_words_of_its_command(seeds: range) -> None:
    for method in planned_methods():
        for seed in seeds:
            request = random_request(method, seed)
            command = list(train_command(request, "owner/model").arguments or ())
            # These change neither memory nor time, and a plan has none of them.
            for words in (("--dataset", DATASET), ("--state_dir", "state"), ("--max_grad_norm", "0")):
                if words[0] in command:
                    at = command.index(words[0])
                    assert tuple(command[at : at + 2]) == words
                    del command[at : at + 2]
            arguments = parse_plan_arguments(command[2:])
            assert arguments.model == "owner/model"
            assert as_trained(PlanRequest(**arguments.given)) == request, command


@pytest.mark.parametrize("precision", get_args(PrecisionName))
@pytest.mark.parametrize("method", planned_methods())
def test_the_command_has_the_weights_and_the_autocast_of_the_plan(method: Any, precision: Any, tmp_path: Path) -> None:
    if precision == "mixed_hi" and method != "hift":
        pytest.skip("masters are HiFT's")
    request = PlanRequest(method=method, precision=precision)
    chosen = parsed(request, tmp_path).precision
    loading = "bf16" if request.precision in ("bf16", "mixed_hi") else "fp32"
    assert (chosen.loading, chosen.autocast) == (loading, "bf16" if request.has_autocast else "no")


def test_a_run_on_the_cpu_says_so() -> None:
    for kernels in get_args(Kernels):
        command = train_command(PlanRequest(kernels=kernels), "x")
        assert command.arguments is not None
        assert ("--use_cpu" in command.arguments) == (kernels == "cpu")


@pytest.mark.parametrize("optimizer", get_args(OptimizerName))
def test_the_command_has_the_optimizer_of_the_plan(optimizer: Any, tmp_path: Path) -> None:
    training = parsed(PlanRequest(method="dense", optimizer=optimizer), tmp_path).training
    found, options = Trainer.get_optimizer_cls_and_kwargs(training)
    planned, planned_options = optimizer_of(optimizer)
    bits = 8 if "8bit" in optimizer else 32
    kind = planned.__mro__[1] if optimizer in PAGED else planned
    assert found is kind or (options["optim_bits"] == bits == 8 and kind.__name__ == "AdamW8bit")
    assert options.get("is_paged", False) == (optimizer in PAGED)
    assert options.get("momentum", 0.0) == planned_options.get("momentum", 0.0)
    assert ("fused" in enum_value(training.optim)) == bool(planned_options.get("fused", False))


@pytest.mark.parametrize("layout", [name for name in get_args(Layout) if name != "single"])
def test_a_layout_comes_with_the_launchers_command_for_its_preset(layout: Any) -> None:
    request = PlanRequest(layout=layout, num_gpus=2)
    command = train_command(request, "owner/model")
    assert command.arguments is None
    note = command.notes[0].removeprefix("start it by ")
    prefix = f"accelerate launch --config_file $(slivertune path {layout}) --num_processes 2 -m "
    assert note.startswith(prefix)
    assert preset_path(layout).name == f"{layout}.yaml"
    assert (
        tuple(shlex.split(note.removeprefix(prefix)))
        == train_command(replace(request, layout="single", num_gpus=1), "owner/model").arguments
    )


def test_the_launchers_command_names_the_program_as_it_was_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/x/slivertune/__main__.py", "plan"])
    monkeypatch.setattr("sys.orig_argv", ["python", "-m", "slivertune", "plan"])
    note = train_command(PlanRequest(layout="ddp", num_gpus=2), "owner/model").notes[0]
    assert "--config_file $(python -m slivertune path ddp)" in note


def test_streamed_weights_are_asked_of_their_engine() -> None:
    offload = {"offload_parameters": True, "num_gpus": 1}
    for layout, part in (
        ("fsdp2", "path fsdp2) --num_processes 1 --fsdp_offload_params true -m slivertune train"),
        ("zero3", "path zero3_offload) --num_processes 1 -m slivertune train"),
    ):
        assert part in train_command(PlanRequest(layout=layout, **offload), "x").notes[0]


def test_disk_state_gets_a_folder_and_the_allocator_a_word() -> None:
    notes = train_command(PlanRequest(state="disk"), "x").notes
    for part in ("PYTORCH_ALLOC_CONF=expandable_segments:True", "--state_dir"):
        assert any(part in note for note in notes)


def test_the_start_of_every_search_has_a_command(tmp_path: Path) -> None:
    for method in planned_methods():
        assert parsed(start_of_search({"method": method}), tmp_path / method).method.name == method
