"""Parses the command line of `slivertune train` into the settings of a run."""

import copy
import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from transformers import TrainingArguments, get_scheduler
from transformers.debug_utils import DebugOption

from slivertune.core.activation_room import check_can_measure
from slivertune.core.kept_activations import without_checkpointing
from slivertune.core.masking import MASK, Secret, is_secret, learn, masked
from slivertune.core.offloaded_activations import offloading_without_checkpointing
from slivertune.core.options import enum_value
from slivertune.core.refused_pairs import refuse_together
from slivertune.training.early_stopping import check_early_stopping
from slivertune.training.embedded.built_in import DATES, built_in_of, counts_answers
from slivertune.training.folders import Goal, RunFolder, choose_run_folder
from slivertune.training.layerwise_lr import check_layerwise_lr
from slivertune.training.methods import TrainingMethod
from slivertune.training.methods.registry import (
    TRAIN_METHODS,
    check_method,
    check_method_parks,
    check_method_takes_4bit,
)
from slivertune.training.models import Precision, choose_precision
from slivertune.training.options.arguments import (
    DataArguments,
    ModelArguments,
    ParkedArguments,
    RunArguments,
    TokenArguments,
)
from slivertune.training.options.config_file import read_settings
from slivertune.training.options.full_method import without_full
from slivertune.training.options.methods import DEFAULT_METHOD
from slivertune.training.options.parser import given_values
from slivertune.training.ranks.coordinator import LaunchCoordinator
from slivertune.training.ranks.processes import (
    asks_for,
    check_engine_precision,
    check_fp16,
    check_processes,
    device_values,
    precision_values,
)

_Dataclass = TypeVar("_Dataclass")

_TRAINERS = frozenset(item.name for item in dataclasses.fields(TrainingArguments))
DERIVED = frozenset(("sample_prompt", "dataloader_pin_memory"))
"""Options whose defaults follow from the other settings and from the machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainArguments:
    """The checked settings of `slivertune train`."""

    method: TrainingMethod
    run: RunArguments
    tokens: TokenArguments
    parked: ParkedArguments
    model: ModelArguments
    data: DataArguments
    training: TrainingArguments
    precision: Precision
    folder: RunFolder
    given: frozenset[str]
    """Names of the arguments that the user set."""
    values: dict[str, Any]
    """Values by name, set by the user or defaults of the method and the embedded model. They repeat the run in another
    folder."""
    command: tuple[str, ...]
    """Command line, for the hint on how to resume."""


def parse_train_arguments(argv: Sequence[str], coordinator: LaunchCoordinator | None = None) -> TrainArguments:
    """Read and check the arguments of `slivertune train`. `--help` prints them and exits.

    Args:
        argv: Words after `slivertune train`: an optional config file, which the first process reads, then options.
        coordinator: Coordinator of this run's processes; None for a single one. The first process chooses the folder.

    Returns:
        The settings, including the defaults of the method and of the embedded model.

    Raises:
        ValueError: If an argument is unknown, out of range, or contradicts another.
        FileExistsError: If `--output_dir` names a folder that is not empty.
        ImportError: If an argument needs a library that is not installed.
        SilentError: If the first process failed to read the config file or to choose a folder.
    """
    coordinator = coordinator or LaunchCoordinator()
    learn(argv)
    typed = given_values(argv, lambda path: coordinator.decide("the config file", lambda: read_settings(path)))
    learn(values=typed)
    _check_secrets(typed)
    _check_work(typed)
    typed = without_full(typed)
    method_class = TRAIN_METHODS[typed.get("method", DEFAULT_METHOD.name)]
    typed |= values_of_preset(method_class, typed, argv)
    given = frozenset(typed)
    check_method(method_class, given)
    values = {"method": method_class.about.name, **default_values(method_class, typed), **typed}
    method = method_class(method_class.about.make(values))
    parked = build(ParkedArguments, values)
    check_method_parks(method_class, parked, values)
    method.parked = parked if parked.is_asked else None
    model = build(ModelArguments, values)
    if model.load_in_4bit:
        check_method_takes_4bit(method_class)
    run, tokens, data = build(RunArguments, values), build(TokenArguments, values), build(DataArguments, values)
    mixed = _mixed_precision(values)
    precision = choose_precision(
        method.bf16_use,
        model.weights_dtype,
        bf16=mixed == "bf16",
        fp16=mixed == "fp16",
        four_bit=model.load_in_4bit,
        deepspeed=asks_for("deepspeed", values),
    )
    check_engine_precision(values, precision.autocast)
    folder = coordinator.decide(
        "the run's folder",
        lambda: choose_run_folder(
            method.name, values.get("output_dir"), values.get("resume_from_checkpoint"), build(Goal, values)
        ),
    )
    kept = {name: value for name, value in method.values().items() if name in method.kept_settings}
    again = _settings_again({**kept, **values}, given, mixed)
    values |= {
        "bf16": precision.autocast == "bf16",
        "fp16": precision.autocast == "fp16",
        "output_dir": str(folder.path),
        "resume_from_checkpoint": None if folder.checkpoint is None else str(folder.checkpoint),
    }
    # These values are not saved with the settings, which may repeat the run on a machine with a GPU.
    values |= precision_values(values, (mixed, precision.autocast))
    training = build(TrainingArguments, values | device_values(values, coordinator.world_size))
    _check_engine_secrets(training)
    check_processes(training, coordinator.world_size, four_bit=model.load_in_4bit)
    for name in filter(is_secret, _TRAINERS):
        if getattr(training, name):
            # The Trainer pickles its arguments into each checkpoint.
            setattr(training, name, Secret(getattr(training, name)))
    training.mixed_precision = precision.autocast
    method.check(given, training)
    check_fp16(values)
    _check_task(data, training)
    _check_schedule(training)
    _check_debug(run, data, training)
    check_pairs(values)
    _check_kept(run, training)
    check_early_stopping(run.early_stopping_patience, training)
    check_layerwise_lr(run.layerwise_lr_decay, training, own_optimizer_of=method.name if method.is_optimizer else None)
    return TrainArguments(
        method=method,
        run=run,
        tokens=tokens,
        parked=parked,
        model=model,
        data=data,
        training=training,
        precision=precision,
        folder=folder,
        given=given,
        values=again,
        command=masked(("slivertune", "train", *argv)),
    )


def default_values(method: type[TrainingMethod], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults that differ from those of the option classes.

    The embedded model has a learning rate for each method: the best on the language reference, in runs of 160 updates
    (HiFT: see `methods/hift.py`). The model was trained for only a minute or two, so all methods want nearly the
    largest stable rate. A built-in dataset has defaults of its own, such as the length of the run.

    Args:
        method: Method that trains the model.
        given: Values that the user typed, by name.

    Returns:
        Names of arguments and their values.
    """
    has_cuda = torch.cuda.is_available() and not given.get("use_cpu", False)
    defaults: dict[str, Any] = {"report_to": "none", "dataloader_pin_memory": has_cuda}
    dataset = given.get("dataset", [DATES])
    built_in = built_in_of(dataset)
    if built_in is not None:
        defaults |= {"dataset": dataset, **built_in.defaults}
    if "model_name_or_path" not in given:
        defaults |= {"lr_scheduler_type": "cosine", "warmup_steps": 0.05, **method.embedded_defaults(given)}
    if "num_train_epochs" in given:
        defaults.pop("max_steps", None)  # which would replace them
    return defaults


def values_of_preset(method: type[TrainingMethod], given: Mapping[str, Any], argv: Sequence[str]) -> dict[str, Any]:
    """Return the values that the method's preset sets. Typed values win over it, and a typed preset over a run file.

    Args:
        method: Class of the method.
        given: Values by option, of the command line and of its run file.
        argv: Words after the command's name.
    """
    typed = {word.partition("=")[0].strip("-").replace("-", "_") for word in argv if word.startswith("--")}
    others = typed if "preset" in typed else given.keys()
    return {name: value for name, value in method.preset_values(given).items() if name not in others}


def _settings_again(values: Mapping[str, Any], given: frozenset[str], mixed: str) -> dict[str, Any]:
    """Return the values that repeat the run in another folder, including the precision of a launcher."""
    precision = {} if mixed == "no" else {mixed: True}
    # A token is not saved; the one that `hf auth login` stores is found without it.
    left_out = {"output_dir", "resume_from_checkpoint", *filter(is_secret, values), *(DERIVED - given)}
    kept = {name: value for name, value in {**values, **precision}.items() if name not in left_out}
    # The Trainer fills mappings with values that the user did not set, so they are copied before.
    return copy.deepcopy(kept)


def _check_secrets(given: Mapping[str, Any]) -> None:
    """Refuse a mask in place of a secret, and secrets that the Trainer would pickle and send to trackers."""
    for name, value in given.items():
        if MASK in str(value):
            raise ValueError(
                f"--{name} {value} has {MASK} in place of a secret, as in a saved command. Give the secret itself, or "
                "leave the option out"
            )
        if name in _TRAINERS and not is_secret(name) and masked(value) != value:
            raise ValueError(
                f"--{name} {masked(value)} holds a secret. The Trainer would save it in each checkpoint and send it "
                "to trackers. Set it in the environment, as HF_TOKEN or WANDB_API_KEY"
            )


def _check_engine_secrets(training: TrainingArguments) -> None:
    """Refuse secrets in the config files of DeepSpeed and FSDP, which the Trainer pickles with its arguments."""
    of_deepspeed: Any = getattr(training, "hf_deepspeed_config", None)
    for name, config in (("deepspeed", getattr(of_deepspeed, "config", None)), ("fsdp_config", training.fsdp_config)):
        if config and masked(config) != config:
            raise ValueError(
                f"the file of --{name} holds a secret. The Trainer would save it in each checkpoint. Set it in the "
                "environment"
            )


def _mixed_precision(values: dict[str, Any]) -> str:
    """Return the mixed precision of --bf16 or --fp16, else that of the launcher."""
    bf16, fp16 = values.get("bf16", False), values.get("fp16", False)
    if bf16 and fp16:
        raise ValueError("--bf16 and --fp16 exclude each other. Keep --bf16 if the hardware supports it")
    if bf16 or fp16:
        return "bf16" if bf16 else "fp16"
    if {"bf16", "fp16"}.intersection(values):
        return "no"
    # `accelerate launch` passes its mixed_precision in the environment, which only autocast would follow.
    return os.environ.get("ACCELERATE_MIXED_PRECISION", "no")


def _check_task(data: DataArguments, training: TrainingArguments) -> None:
    """Refuse arguments of the Trainer that don't fit the task."""
    # These tasks have their own loss and metric, so the Trainer would silently ignore these arguments.
    for name in ("label_smoothing_factor", "batch_eval_metrics"):
        if data.task != "causal_lm" and getattr(training, name):
            raise ValueError(f"--{name} {getattr(training, name)} has no effect on --task {data.task}. Leave it out")
    if counts_answers(data.dataset, data.task, is_packed=data.packing):
        for name, needed in (("batch_eval_metrics", False), ("eval_do_concat_batches", True)):
            if getattr(training, name) != needed:
                raise ValueError(
                    f"--{name} {getattr(training, name)} does not go with {DATES}, whose right answers are counted "
                    "over all rows. Leave it out"
                )


def _check_work(given: Mapping[str, Any]) -> None:
    """Refuse options of the Trainer's example scripts that this command has no choice of."""
    for name, is_done, work in (
        ("do_train", True, "always trains"),
        ("do_eval", True, "always evaluates before and after training, and in between with --eval_strategy"),
        ("do_predict", False, "never predicts"),
    ):
        if given.get(name, is_done) != is_done:
            raise ValueError(f"--{name} {str(given[name]).lower()}: this command {work}. Leave it out")


def _check_schedule(training: TrainingArguments) -> None:
    """Refuse values that the learning rate's schedule does not take, or lacks."""
    kind, values = enum_value(training.lr_scheduler_type), training.lr_scheduler_kwargs
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=training.learning_rate)
    try:
        get_scheduler(kind, optimizer, 0, 1, values if isinstance(values, dict) else None)
    except (TypeError, ValueError) as error:
        given = f" --lr_scheduler_kwargs {json.dumps(values)}" if values else ""
        instead = "Give --lr_scheduler_kwargs with what it needs, or another schedule"
        if isinstance(values, dict) and values:
            instead = "Give --lr_scheduler_kwargs with what this schedule takes, or leave it out"
        raise ValueError(f"--lr_scheduler_type {kind}{given}: {error}. {instead}") from error


def _check_debug(run: RunArguments, data: DataArguments, training: TrainingArguments) -> None:
    """Refuse the Trainer's search for overflows beside a chunked loss, whose model returns no logits."""
    is_chunked = run.chunked_cross_entropy and data.task == "causal_lm"
    if DebugOption.UNDERFLOW_OVERFLOW in training.debug and is_chunked:
        raise ValueError(
            "--debug underflow_overflow reads the logits, which a chunked loss never stores. Add "
            "--chunked_cross_entropy false"
        )


def _check_kept(run: RunArguments, training: TrainingArguments) -> None:
    """Refuse kept activations without checkpointing, and `auto` if free memory can't be measured."""
    if run.keep_activations is not None and not training.gradient_checkpointing:
        raise ValueError(without_checkpointing(run.keep_activations))
    if run.keep_activations == "auto":
        check_can_measure(training.device.type, training.world_size)


def check_pairs(values: Mapping[str, Any]) -> None:
    """Refuse offloading without checkpointing, and pairs of settings that do not go together.

    Args:
        values: Values by option, without those at their defaults.

    Raises:
        ValueError: If it is refused. The message names both settings.
    """
    checkpointing = next((values[name] for name in _CHECKPOINTING if name in values), False)
    if values.get("offload_activations") and not checkpointing:
        raise ValueError(offloading_without_checkpointing())
    smoothing, task = values.get("label_smoothing_factor"), values.get("task")
    norm, gradients = values.get("max_grad_norm"), values.get("gradients")
    waiting = values.get("waiting")
    refuse_together(
        {
            "gradients='stepped'": f"--gradients {gradients}" if gradients == "stepped" else None,
            "max_grad_norm": f"--max_grad_norm {norm}" if norm else None,
            "quantised layers": None if waiting is None else f"--waiting {waiting}",
            "blocks on the host": "--weights host" if values.get("weights") == "host" else None,
            "load_in_4bit": "--load_in_4bit" if values.get("load_in_4bit") else None,
            "offload_activations": "--offload_activations" if values.get("offload_activations") else None,
            "keep_activations='auto'": "--keep_activations auto" if values.get("keep_activations") == "auto" else None,
            "tile_tokens": None if values.get("token_tile_size") is None else "--token_tile_size",
            "torch.compile": "--torch_compile" if any(map(values.get, _COMPILATION)) else None,
            "use_liger_kernel": "--use_liger_kernel" if values.get("use_liger_kernel") else None,
            "TokenTune": None if values.get("token_ratio") is None else "--token_ratio",
            "label_smoothing_factor": f"--label_smoothing_factor {smoothing}" if smoothing else None,
            "task='prompt_classification'": f"--task {task}" if task == "prompt_classification" else None,
        }
    )


# The Trainer compiles, too, if one of the other two is set.
_COMPILATION = ("torch_compile", "torch_compile_backend", "torch_compile_mode")
_CHECKPOINTING = ("gradient_checkpointing", "activation_checkpointing")


def build(kind: type[_Dataclass], values: Mapping[str, Any]) -> _Dataclass:
    """Make a dataclass of options.

    Args:
        kind: The dataclass.
        values: Values by option; those of other classes are left out.

    Raises:
        ValueError: If a value is refused.
    """
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    return kind(**{item.name: values[item.name] for item in fields if item.init and item.name in values})
