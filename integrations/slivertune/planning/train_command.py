"""From a planned run to the command that makes it."""

import shlex
from dataclasses import dataclass

from slivertune.planning.methods import planned
from slivertune.planning.optimizers import OptimizerName
from slivertune.planning.request import PlanRequest

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
    arguments = (
        *("slivertune", "train"),
        *("--model_name_or_path", model_name_or_path),
        *("--dataset", DATASET),
        *(("--task", "classification") if request.task == "classification" else ()),
        *("--method", request.method),
        *_precision(request),
        *(() if request.method == "sft" else _OPTIM[request.optimizer]),
        *("--per_device_train_batch_size", str(request.batch_size)),
        *_accumulation(request),
        *("--max_length", str(request.seq_length)),
        *(("--gradient_checkpointing", "true") if request.gradient_checkpointing else ()),
        *(
            ()
            if request.chunked_cross_entropy or request.task == "classification"
            else ("--chunked_cross_entropy", "false")
        ),
        *(() if request.token_ratio is None else ("--token_ratio", str(request.token_ratio))),
        *planned(request.method).train_arguments(request),
    )
    notes = ["PYTORCH_ALLOC_CONF=expandable_segments:True in the environment keeps fragmentation within the allowance"]
    if request.state == "disk" and request.method == "hift":
        notes.append("--state_dir names a folder on a fast local disk")
    if request.layout != "single":
        return TrainCommand(arguments=None, notes=(f"start it by {_launched(request, arguments)}", *notes))
    return TrainCommand(arguments=arguments, notes=tuple(notes))


def _precision(request: PlanRequest) -> tuple[str, ...]:
    """What gives the same weights and the same autocast in `slivertune train`."""
    match request.precision:
        case "fp32":
            return ("--weights_dtype", "fp32")
        case "mixed":
            return ("--weights_dtype", "fp32", "--bf16")
        case "mixed_hi":
            return ("--bf16",)
        case "bf16":
            # What is bf16 arithmetic to others is autocast to dense fine-tuning.
            is_autocast = planned(request.method).bf16_precision == "mixed"
            return ("--weights_dtype", "bf16") if is_autocast else ("--bf16",)


def _accumulation(request: PlanRequest) -> tuple[str, ...]:
    steps = request.gradient_accumulation_steps
    return () if steps == 1 else ("--gradient_accumulation_steps", str(steps))


def _launched(request: PlanRequest, arguments: tuple[str, ...]) -> str:
    """A shell's command line that starts `slivertune train` under the layout's preset."""
    preset: str = request.layout
    offload = ""
    if request.offload_parameters and request.layout == "zero3":
        preset = "zero3_offload"
    elif request.offload_parameters:
        offload = " --fsdp_offload_params true"
    launcher = (
        f"accelerate launch --config_file $(slivertune path {preset}) --num_processes {request.num_gpus}{offload}"
    )
    return f"{launcher} -m {shlex.join(arguments)}"
