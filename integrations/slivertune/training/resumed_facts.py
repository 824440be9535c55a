"""Comparison of a resumed run's settings with the facts in its checkpoint, which an older version may have written."""

import hashlib
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import datasets
import torch
from torch import nn
from transformers import TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

_OF_UPDATES = (
    *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "optim", "optim_args"),
    *("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "label_smoothing_factor"),
    *("neftune_noise_alpha", "bf16", "fp16", "train_sampling_strategy", "dataloader_drop_last"),
)
"""Settings of `TrainingArguments` of which a resumed run would take some from the checkpoint, and others as given."""
_INSTEAD = "start again without --resume_from_checkpoint"
_ROWS_LOOKED_AT = 1000
_VALUES_LOOKED_AT = 64
"""Values of each weight."""
_OFF = (None, False)
"""Values of a setting that is off. 0 is one of them, too."""


def check_facts(
    checkpoint: Path, saved: Mapping[str, Any], asked: Mapping[str, Any], defaults: Mapping[str, Any]
) -> None:
    """Refuse to resume a run with other settings than it had.

    A setting that the checkpoint does not know had its default, since it came with a later version. A setting that
    this version does not know must be off.

    Args:
        checkpoint: Checkpoint of the run, for the error.
        saved: Facts of the checkpoint. A fact may be a mapping of settings.
        asked: Facts of the run that resumes it.
        defaults: Defaults of the method's settings, by name.

    Raises:
        ValueError: If a setting differs. The message has all differences of one fact.
    """
    for name, ours in asked.items():
        theirs = saved.get(name)
        if isinstance(theirs, dict) and isinstance(ours, dict):
            unknown = {key: value for key, value in theirs.items() if key not in ours and value not in _OFF}
            if unknown:
                raise ValueError(
                    f"{checkpoint} was trained with {name}={unknown}, which this version does not have. Continue with "
                    f"the version of slivertune that wrote it, or {_INSTEAD}"
                )
            theirs = {key: theirs.get(key, defaults.get(key)) for key in ours}
            differing = [key for key, value in ours.items() if theirs[key] != value]
            theirs, ours = ({key: each[key] for key in differing} for each in (theirs, ours))
        if theirs != ours:
            raise ValueError(
                f"{checkpoint} was trained with {name}={theirs}, and this run asks for {name}={ours}. Repeat the first "
                f"run's settings{_typed(theirs, defaults)}, or {_INSTEAD}"
            )


def training_facts(training: TrainingArguments) -> dict[str, Any]:
    """Return the settings of the Trainer that decide an update, as plain JSON.

    Args:
        training: Settings of the run.
    """
    values = {name: getattr(training, name, None) for name in _OF_UPDATES}
    return {name: value.value if isinstance(value, Enum) else value for name, value in values.items()}


def check_schedule(checkpoint: Path, saved: Mapping[str, Any], training: TrainingArguments) -> None:
    """Refuse to resume a run whose rows or optimizer state can't be taken up.

    Args:
        checkpoint: Checkpoint of the run.
        saved: Its facts.
        training: Settings of the run that resumes it.

    Raises:
        ValueError: If the optimizer's state was not saved, or rows would be trained on twice.
    """
    if saved.get("save_only_model"):
        raise ValueError(
            f"{checkpoint} was saved with --save_only_model true: it has no optimizer state and no schedule, so that "
            f"the run can't be resumed. Evaluate it or merge it, or {_INSTEAD}"
        )
    rows, ours = saved.get("rows_per_update"), rows_per_update(training)
    if rows is not None and rows != ours:
        raise ValueError(
            f"{checkpoint} was trained with {rows} rows per update, and this run asks for {ours} "
            "(--per_device_train_batch_size x --gradient_accumulation_steps x processes), with which some rows of the "
            f"running epoch would be trained on twice, or never. Choose options that make {rows}, or {_INSTEAD}"
        )
    if training.train_sampling_strategy == "group_by_length" and not _ends_epoch(checkpoint):
        raise ValueError(
            f"{checkpoint} ends in the middle of an epoch, and --train_sampling_strategy group_by_length draws another "
            f"order when it is resumed. Resume from a checkpoint at the end of an epoch, or {_INSTEAD}"
        )


def rows_per_update(training: TrainingArguments) -> int:
    """Return the number of rows of an update, of all processes together."""
    return int(training.per_device_train_batch_size * training.gradient_accumulation_steps * training.world_size)


def check_base(checkpoint: Path | None, facts: dict[str, Any], model: nn.Module, name: str) -> None:
    """Refuse to resume a run from other weights than it began with, and note these among the facts.

    Args:
        checkpoint: Checkpoint of the run; None for a run that begins.
        facts: Facts of the run, which one of an older version has without them.
        model: The model as it was loaded.
        name: Name of the model, for the error.

    Raises:
        ValueError: If the weights differ.
    """
    found = describe_weights(model)
    if found is None:
        return
    if facts.setdefault("base_weights", found) != found:
        raise ValueError(
            f"{checkpoint} was trained from other weights than those of {name}, or in another dtype. Give the model "
            f"and the options of the first run, or {_INSTEAD}"
        )


def describe_weights(model: nn.Module) -> str | None:
    """Return a hash of some values of each weight, codes left out. None if this rank does not hold all of them."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_id") or parameter.device.type == "meta":
            return None
        if not parameter.is_floating_point():
            continue  # devices may round codes differently
        flat = parameter.detach().flatten()
        some = flat[:: max(1, flat.numel() // _VALUES_LOOKED_AT)].cpu().contiguous().view(torch.uint8)
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(some.numpy().tobytes())
    return digest.hexdigest()[:16]


def _ends_epoch(checkpoint: Path) -> bool:
    epoch = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME)).epoch
    return epoch is not None and float(epoch).is_integer()


def describe_rows(rows: Any) -> str | None:
    """Return the number of prepared rows and a hash of at most 1,000 of them. None if that is not possible.

    Args:
        rows: Rows of a split. A task of another package may have rows without a number, and these are not described.
    """
    if not isinstance(rows, datasets.Dataset) or not len(rows):
        return None
    digest = hashlib.sha256()
    some = rows.with_format("arrow").select(range(0, len(rows), -(-len(rows) // _ROWS_LOOKED_AT)))
    for batch in some.iter(batch_size=100):
        digest.update(repr(sorted(batch.to_pydict().items())).encode())
    return f"{len(rows)} rows, {digest.hexdigest()[:16]}"


def check_rows(checkpoint: Path | None, facts: dict[str, Any], splits: Mapping[str, Any]) -> None:
    """Refuse to resume a run on other rows, and note the rows among the facts.

    Args:
        checkpoint: Checkpoint of the run; None for a run that begins.
        facts: Facts of the run, which one of an older version has without its rows.
        splits: Prepared rows by name of the split.

    Raises:
        ValueError: If rows of a split differ.
    """
    found = {split: describe_rows(rows) for split, rows in splits.items()}
    known = facts.setdefault("rows", found)
    differing = [split for split, rows in found.items() if known.get(split) != rows]
    if differing:
        raise ValueError(
            f"{checkpoint} was trained with other {' and '.join(differing)} rows ({known}) than this run reads "
            f"({found}). Give the data and the options of the first run, or {_INSTEAD}"
        )


def _typed(theirs: Any, defaults: Mapping[str, Any]) -> str:
    """Return the options that repeat the settings of a fact, if it is a mapping of options."""
    known = theirs if isinstance(theirs, dict) else {}
    words = [
        f"--{name} {' '.join(map(str, value)) if isinstance(value, list) else value}"
        for name, value in known.items()
        if name in defaults and value is not None
    ]
    return f" ({' '.join(words)})" if words else ""
