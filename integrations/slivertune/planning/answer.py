"""What `slivertune plan` found out, the same as plain JSON, and the command that makes the run."""

import shlex
from dataclasses import dataclass
from typing import Any

from slivertune import __version__
from slivertune.planning.cards import Card
from slivertune.planning.configs import ModelFigures
from slivertune.planning.largest import Largest
from slivertune.planning.layers_per_group import LayersChoice
from slivertune.planning.limits import fit_json, limits_json
from slivertune.planning.methods import given_arguments, planned
from slivertune.planning.optimizers import OptimizerName
from slivertune.planning.plan import Limits, MemoryRequirement
from slivertune.planning.planned_time import PlannedTime
from slivertune.planning.request import PlanRequest
from slivertune.planning.search import Found

DATASET = "YOUR_DATA.jsonl"
"""Stands for the user's data, which a plan does not know."""
_OPTIM: dict[OptimizerName, tuple[str, ...]] = {
    "adamw": (),
    "sgd_momentum": ("--optim", "sgd", "--optim_args", "momentum=0.9"),
    "sgd": ("--optim", "sgd"),
    "adafactor": ("--optim", "adafactor"),
    "adagrad": ("--optim", "adagrad"),
    "adamw8bit": ("--optim", "adamw_bnb_8bit"),
}
"""As `transformers.TrainingArguments` calls them; AdamW is its default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainCommand:
    """How to start what was planned."""

    arguments: tuple[str, ...] | None
    """The command line on one device; None where a launcher starts it."""
    notes: tuple[str, ...] = ()
    """What the command does not say, or the launcher's command."""


def train_command(request: PlanRequest, model_name_or_path: str) -> TrainCommand:
    """Write the command that makes a planned run.

    Args:
        request: What was planned.
        model_name_or_path: The model, as `slivertune train` takes it.

    Returns:
        The command, with a placeholder for the data.
    """
    if request.task in ("image_text", "speech"):
        note = f"slivertune train has no task={request.task!r}; a script of your own makes the run (docs/plan.md)"
        return TrainCommand(arguments=None, notes=(note,))
    is_classifier, method = request.task == "classification", planned(request.method)
    has_all_logits = not request.chunked_cross_entropy and not is_classifier
    # What is bf16 arithmetic to others is autocast to dense fine-tuning.
    precisions = {
        "fp32": ("--weights_dtype", "fp32"),
        "mixed": ("--weights_dtype", "fp32", "--bf16"),
        "mixed_hi": ("--bf16",),
        "bf16": ("--weights_dtype", "bf16") if method.bf16_precision == "mixed" else ("--bf16",),
    }
    arguments = (
        *("slivertune", "train"),
        *("--model_name_or_path", model_name_or_path),
        *("--dataset", DATASET),
        *(("--task", "classification") if is_classifier else ()),
        *("--method", request.method),
        *precisions[request.precision],
        *(() if request.method == "sft" else _OPTIM[request.optimizer]),
        *(("--use_cpu",) if request.kernels == "cpu" else ()),
        *("--per_device_train_batch_size", str(request.batch_size)),
        *given_arguments(request, ("gradient_accumulation_steps",)),
        *("--max_length", str(request.seq_length)),
        *given_arguments(request, ("attn_implementation",)),
        *(("--gradient_checkpointing", "true") if request.gradient_checkpointing else ()),
        *given_arguments(request, ("keep_activations",)),
        *(("--offload_activations", "true") if request.offload_activations else ()),
        *given_arguments(request, ("token_tile_size",)),
        *(("--chunked_cross_entropy", "false") if has_all_logits else ()),
        *given_arguments(request, ("token_ratio",)),
        *method.train_arguments(request),
    )
    notes = ["PYTORCH_ALLOC_CONF=expandable_segments:True in the environment keeps fragmentation within the allowance"]
    if request.state == "disk" and request.method == "hift":
        notes.append("--state_dir names a folder on a fast local disk")
    if request.layout == "single":
        return TrainCommand(arguments=arguments, notes=tuple(notes))
    # The layout's preset; ZeRO-3 that streams weights has one of its own.
    streams = request.offload_parameters
    preset = "zero3_offload" if streams and request.layout == "zero3" else request.layout
    offload = " --fsdp_offload_params true" if streams and request.layout == "fsdp2" else ""
    launcher = (
        f"accelerate launch --config_file $(slivertune path {preset}) --num_processes {request.num_gpus}{offload}"
    )
    return TrainCommand(arguments=None, notes=(f"start it by {launcher} -m {shlex.join(arguments)}", *notes))


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One run, planned."""

    model: ModelFigures
    """What is trained."""
    requirement: MemoryRequirement
    """What it takes."""
    limits: Limits | None = None
    """What there is; None where nothing was said of it."""
    found: Found | None = None
    """How the settings came about; None where they were given."""
    choice: LayersChoice | None = None
    """How the number of layers a step came about; None where it was given."""
    largest: Largest | None = None
    """How the value of a setting came about; None where it was given."""
    card: Card | None = None
    """On which it trains; None where nothing was said of it."""
    time: PlannedTime | None = None
    """How long an update takes there; None without a card, and where the run does not fit it."""
    num_tokens: float | None = None
    """That are to be trained on; None where nothing was said of it."""

    @property
    def command(self) -> TrainCommand:
        """The command that makes the run."""
        return train_command(self.requirement.plan.request, self.model.name_or_path)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON: the plan's own fields, and beside them the model, the allowance, the command and the search."""
        command = self.command
        values = {
            **self.requirement.to_json(),
            **_source_json(self.model),
            "command": None if command.arguments is None else shlex.join(command.arguments),
            "command_notes": list(command.notes),
        }
        if self.choice is not None:
            values["layers_choice"] = self.choice.to_json()
        if self.largest is not None:
            values["max"] = self.largest.to_json()
        if self.card is not None:
            values["gpu"] = self.card.name
        if self.time is not None:
            values["time"] = self.time.to_json()
            if self.num_tokens is not None:
                values["time"]["hours"] = self.time.hours(self.num_tokens)
        if self.limits is not None:
            values["fit"] = {
                **fit_json(self.requirement, self.limits),
                **({} if self.found is None else self.found.to_json()),
            }
        return values


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepAnswer:
    """One field over several values, each planned."""

    model: ModelFigures
    """What is trained."""
    field: str
    """The field of the request."""
    requirements: tuple[tuple[Any, MemoryRequirement], ...]
    """Its values, each with what the run takes then."""
    limits: Limits | None = None
    """What there is; None where nothing was said of it."""
    card: Card | None = None
    """On which they train; None where nothing was said of it."""
    times: tuple[PlannedTime | None, ...]
    """How long an update takes there, for each value; None without a card, and for what does not fit it."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON: an array of plans, each with the field's value."""
        points = [{self.field: value, **requirement.to_json()} for value, requirement in self.requirements]
        values = {"field": self.field, "sweep": points, **_source_json(self.model)}
        for point, time in zip(points, self.times, strict=True):
            if time is not None:
                point["time"] = time.to_json()
        if self.limits is not None:
            values["fit"] = limits_json(self.limits)
            for point, (_, requirement) in zip(points, self.requirements, strict=True):
                point["fits"] = requirement.fits(self.limits)
        return values


def _source_json(model: ModelFigures) -> dict[str, Any]:
    return {"model": model.name, "model_source": model.source, "slivertune": __version__}
