import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from slivertune.core.layout import Layout
from slivertune.core.presets import preset_path
from slivertune.planning.answer import DATASET, train_command
from slivertune.planning.methods import planned_methods
from slivertune.planning.optimizers import OptimizerName
from slivertune.planning.request import PlanRequest, PrecisionName
from slivertune.planning.search import start_of_search
from slivertune.training.options.checks import enum_value
from slivertune.training.options.parse import TrainArguments, parse_train_arguments


def parsed(request: PlanRequest, folder: Path) -> TrainArguments:
    """What `slivertune train` understands of the command for a request."""
    command = train_command(request, "owner/model").arguments
    assert command is not None and command[:2] == ("slivertune", "train")
    assert shlex.split(shlex.join(command)) == list(command)
    # These say where this machine computes and writes, which a plan does not.
    return parse_train_arguments([*command[2:], "--use_cpu", "--output_dir", str(folder / "out")])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"batch_size": 3, "gradient_accumulation_steps": 4, "seq_length": 77, "gradient_checkpointing": True},
        {"chunked_cross_entropy": False},
        {"task": "classification"},
        {"token_ratio": 0.3},
        {"precision": "mixed_hi", "layers_per_group": 3, "stream_bytes": 0, "master": "split"},
        {"precision": "mixed_hi", "state": "disk"},
        {"precision": "bf16", "state": "device"},
        {"step_in_backward": True},
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
    training = arguments.training
    assert arguments.model.model_name_or_path == "owner/model"
    assert arguments.data.dataset == DATASET
    assert arguments.data.task == request.task
    assert arguments.data.max_length == request.seq_length
    assert arguments.method.name == request.method
    assert arguments.model.load_in_4bit == request.load_in_4bit
    assert arguments.tokens.token_ratio == request.token_ratio
    assert training.per_device_train_batch_size == request.batch_size
    assert training.gradient_accumulation_steps == request.gradient_accumulation_steps
    assert training.activation_checkpointing == request.gradient_checkpointing
    if request.method == "hift":
        config = arguments.method.options.config(seed=0)
        assert config.layers_per_group == request.layers_per_group
        assert config.stream_bytes == request.stream_bytes
        assert config.state == request.state
        assert config.step_in_backward == request.step_in_backward
        assert not (request.step_in_backward and training.max_grad_norm)
        assert request.precision in ("fp32", "mixed") or config.master == request.master_kind
    if request.method == "sft":
        for name in ("density", "selection", "reselection_interval", "estimation_steps", "replacement_rate"):
            assert getattr(arguments.method.options, name) == getattr(request, name), name
    if request.method == "lora":
        assert arguments.method.options.lora_rank == request.lora_rank


@pytest.mark.parametrize("precision", get_args(PrecisionName))
@pytest.mark.parametrize("method", planned_methods())
def test_the_command_has_the_weights_and_the_autocast_of_the_plan(method: Any, precision: Any, tmp_path: Path) -> None:
    if precision == "mixed_hi" and method != "hift":
        pytest.skip("masters are HiFT's")
    request = PlanRequest(method=method, precision=precision)
    chosen = parsed(request, tmp_path).precision
    is_bf16 = request.precision in ("bf16", "mixed_hi")
    assert chosen.loading == ("bf16" if is_bf16 else "fp32")
    assert chosen.autocast == ("bf16" if request.has_autocast else "no")


@pytest.mark.parametrize("optimizer", get_args(OptimizerName))
def test_the_command_has_the_optimizer_of_the_plan(optimizer: Any, tmp_path: Path) -> None:
    from transformers import Trainer

    from slivertune.planning.optimizers import optimizer_of

    training = parsed(PlanRequest(method="dense", optimizer=optimizer), tmp_path).training
    found, options = Trainer.get_optimizer_cls_and_kwargs(training)
    planned, planned_options = optimizer_of(optimizer)
    assert found is planned or (optimizer == "adamw8bit" and options["optim_bits"] == 8)
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
    alone = train_command(replace(request, layout="single", num_gpus=1), "owner/model")
    assert tuple(shlex.split(note.removeprefix(prefix))) == alone.arguments


def test_streamed_weights_are_asked_of_their_engine() -> None:
    offload = {"offload_parameters": True, "num_gpus": 1}
    fsdp2 = train_command(PlanRequest(layout="fsdp2", **offload), "x").notes[0]
    zero3 = train_command(PlanRequest(layout="zero3", **offload), "x").notes[0]
    assert "path fsdp2) --num_processes 1 --fsdp_offload_params true -m slivertune train" in fsdp2
    assert "path zero3_offload) --num_processes 1 -m slivertune train" in zero3


def test_disk_state_gets_a_folder_and_the_allocator_a_word() -> None:
    notes = train_command(PlanRequest(state="disk"), "x").notes
    assert any("PYTORCH_ALLOC_CONF=expandable_segments:True" in note for note in notes)
    assert any("--state_dir" in note for note in notes)


def test_the_start_of_every_search_has_a_command(tmp_path: Path) -> None:
    for method in planned_methods():
        assert parsed(start_of_search({"method": method}), tmp_path / method).method.name == method
