"""Results of `slivertune plan`, as objects and as plain JSON, and the command that starts the planned run."""

import shlex
from dataclasses import dataclass, replace
from typing import Any

from slivertune import __version__
from slivertune.core.typed_command import typed_command
from slivertune.hift.config import ALL_LAYERS
from slivertune.planning.cards import Card
from slivertune.planning.configs import ModelFigures
from slivertune.planning.largest import Largest
from slivertune.planning.layers_per_group import LayersChoice
from slivertune.planning.limits import fit_json, limits_json
from slivertune.planning.methods import given_arguments, planned
from slivertune.planning.optimizers import OptimizerName
from slivertune.planning.plan import Limits, MemoryRequirement
from slivertune.planning.planned_time import PlannedTime
from slivertune.planning.request import REQUEST_OPTIONS, PlanRequest
from slivertune.planning.search import Found

DATASET = "YOUR_DATA.jsonl"
"""Placeholder for the user's data, which a plan does not know."""
_OPTIM: dict[OptimizerName, tuple[str, ...]] = {
    "adamw": (),
    "sgd_momentum": ("--optim", "sgd", "--optim_args", "momentum=0.9"),
    "sgd": ("--optim", "sgd"),
    "adafactor": ("--optim", "adafactor"),
    "adagrad": ("--optim", "adagrad"),
    "adamw8bit": ("--optim", "adamw_bnb_8bit"),
    "paged_adamw": ("--optim", "paged_adamw_32bit"),
    "paged_adamw8bit": ("--optim", "paged_adamw_8bit"),
}
"""Options of `transformers.TrainingArguments` for each optimizer. AdamW is its default."""


_OF_FULL = {
    "method": "hift",
    "precision": "bf16",
    "optimizer": "adafactor",
    "gradient_checkpointing": True,
    **ALL_LAYERS,
}
"""Fields of a run that `--method full` starts."""


def _without_full(request: PlanRequest) -> PlanRequest:
    """Return a run of `--method full` with the defaults of the options that this implies."""
    return replace(request, **{name: REQUEST_OPTIONS[name].default for name in ALL_LAYERS}, precision="mixed_hi")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainCommand:
    """Command that starts a planned run."""

    arguments: tuple[str, ...] | None
    """Command line on one device. None if a launcher or a script of the user's own starts the run."""
    notes: tuple[str, ...] = ()
    """Advice that the command does not contain, and the launcher's command if there is one."""


def train_command(request: PlanRequest, model_name_or_path: str) -> TrainCommand:
    """Write the command that starts a planned run.

    Args:
        request: Planned run.
        model_name_or_path: Model, in the form that `slivertune train` takes.

    Returns:
        Command, with `DATASET` in place of the data.
    """
    if request.task in ("image_text", "speech"):
        note = f"slivertune train has no task={request.task!r}: run it in a script of your own (docs/plan.md)"
        return TrainCommand(arguments=None, notes=(note,))
    if request.recipe is not None:
        note = f"--recipe {request.recipe} is a script of your own. slivertune train takes less: leave --recipe out"
        return TrainCommand(arguments=None, notes=(note,))
    is_classifier, method = request.task == "classification", planned(request.method)
    has_all_logits = not request.chunked_cross_entropy and not is_classifier
    # For dense fine-tuning `--bf16` means autocast, so that bf16 weights need `--weights_dtype bf16`.
    precisions = {
        "fp32": ("--weights_dtype", "fp32"),
        "mixed": ("--weights_dtype", "fp32", "--bf16"),
        "mixed_hi": ("--bf16",),
        "bf16": ("--weights_dtype", "bf16") if method.bf16_precision == "mixed" else ("--bf16",),
    }
    is_full = all(getattr(request, name) == value for name, value in _OF_FULL.items())
    of_method = (
        ("--method", "full")
        if is_full
        else (
            *("--method", request.method),
            *precisions[request.precision],
            *(() if request.method == "sft" else _OPTIM[request.optimizer]),
        )
    )
    arguments = (
        *("slivertune", "train"),
        *("--model_name_or_path", model_name_or_path),
        *("--dataset", DATASET),
        *(("--task", "classification") if is_classifier else ()),
        *of_method,
        *(("--use_cpu",) if request.kernels == "cpu" else ()),
        *("--per_device_train_batch_size", str(request.batch_size)),
        *given_arguments(request, ("gradient_accumulation_steps",)),
        *("--max_length", str(request.seq_length)),
        *given_arguments(request, ("attn_implementation",)),
        *(("--gradient_checkpointing", "true") if request.gradient_checkpointing and not is_full else ()),
        *given_arguments(request, ("keep_activations",)),
        *(("--offload_activations", "true") if request.offload_activations else ()),
        *given_arguments(request, ("token_tile_size",)),
        *(("--chunked_cross_entropy", "false") if has_all_logits else ()),
        *given_arguments(request, ("token_ratio",)),
        *method.train_arguments(_without_full(request) if is_full else request),
    )
    notes = ["PYTORCH_ALLOC_CONF=expandable_segments:True in the environment keeps fragmentation within the allowance"]
    if request.state == "disk" and request.method == "hift":
        notes.append("set --state_dir to a folder on a fast local disk")
    if request.layout == "single":
        return TrainCommand(arguments=arguments, notes=tuple(notes))
    # Presets have the names of layouts; ZeRO-3 with offloaded parameters has a preset of its own.
    streams = request.offload_parameters
    preset = "zero3_offload" if streams and request.layout == "zero3" else request.layout
    offload = " --fsdp_offload_params true" if streams and request.layout == "fsdp2" else ""
    path = shlex.join(typed_command("path", preset))
    launcher = f"accelerate launch --config_file $({path}) --num_processes {request.num_gpus}{offload}"
    return TrainCommand(arguments=None, notes=(f"start it by {launcher} -m {shlex.join(arguments)}", *notes))


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One planned run."""

    model: ModelFigures
    """Model that trains."""
    requirement: MemoryRequirement
    """Memory and disk that the run needs."""
    limits: Limits | None = None
    """Memory and disk of the machine. None if neither `--fit` nor a card sets them."""
    found: Found | None = None
    """Result of the search for settings that fit. None without a search."""
    choice: LayersChoice | None = None
    """Result of `--layers_per_group auto`. None without it."""
    largest: Largest | None = None
    """Result of `--max`. None without it."""
    card: Card | None = None
    """Card that the run trains on. None if it is not known."""
    time: PlannedTime | None = None
    """Planned time of an update on the card. None without a card, and if the run does not fit it."""
    num_tokens: float | None = None
    """Tokens to train on, over all epochs. None if their number was not given."""

    @property
    def command(self) -> TrainCommand:
        """Command that starts the run."""
        return train_command(self.requirement.plan.request, self.model.name_or_path)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON: the fields of the plan, the model, the allowance, the command and the search."""
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
    """Plans of one run for several values of one field."""

    model: ModelFigures
    """Model that trains."""
    field: str
    """Field of `PlanRequest` that varies."""
    requirements: tuple[tuple[Any, MemoryRequirement], ...]
    """Values of the field, each with the memory and disk that the run then needs."""
    limits: Limits | None = None
    """Memory and disk of the machine. None if neither `--fit` nor a card sets them."""
    card: Card | None = None
    """Card that the runs train on. None if it is not known."""
    times: tuple[PlannedTime | None, ...]
    """Planned time of an update on the card, for each value. None without a card, and if the run does not fit it."""
    num_missing: int = 0
    """Values that were not planned before Ctrl-C."""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON: an array of plans, each with the value of the field."""
        points = [{self.field: value, **requirement.to_json()} for value, requirement in self.requirements]
        values = {"field": self.field, "sweep": points, "num_missing": self.num_missing, **_source_json(self.model)}
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
