"""The model and the tokenizer of a run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from slivertune.training.options.arguments import ModelArguments
from slivertune.training.precision import Precision, four_bit_options, prepare_four_bit
from slivertune.training.tasks.task import Task

_CLASS_OF_KIND: dict[str, Any] = {
    "causal_lm": AutoModelForCausalLM,
    "masked_lm": AutoModelForMaskedLM,
    "sequence_classification": AutoModelForSequenceClassification,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """Where a model comes from, with what can be read without its weights."""

    name_or_path: str
    options: dict[str, Any]
    """Keyword arguments of `from_pretrained` that say which model it is."""
    config: Any
    """The model's configuration, a `transformers.PreTrainedConfig`."""
    tokenizer: PreTrainedTokenizerBase


def open_model(arguments: ModelArguments, embedded: Path | None) -> ModelSource:
    """Read a model's configuration and tokenizer.

    Args:
        arguments: Which model.
        embedded: The folder of the embedded base model, for where none is named.

    Returns:
        The source to load weights from.

    Raises:
        ValueError: If there is no such model or tokenizer.
    """
    name = arguments.model_name_or_path if arguments.model_name_or_path is not None else str(embedded)
    options = {} if arguments.model_revision is None else {"revision": arguments.model_revision}
    try:
        config = AutoConfig.from_pretrained(name, **options)
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ValueError(
            f"model_name_or_path={name!r} can't be opened: {_first_line(error)}; give a local folder with a model and "
            "its tokenizer, or a hub id"
        ) from error
    return ModelSource(name_or_path=name, options=options, config=config, tokenizer=tokenizer)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A model, and what of it the checkpoint did not have."""

    model: PreTrainedModel
    """Where it was loaded: on the CPU, or, if it is quantised, on the device where it trains."""
    new_modules: tuple[str, ...]
    """Paths of the modules with new weights, from torch's seed, such as a classifier's head, sorted."""
    revision: str | None = None
    """That of the model on the hub, which an adapter remembers."""


def load_model(
    source: ModelSource,
    task: Task,
    *,
    precision: Precision,
    attn_implementation: str | None = None,
    four_bit_device: torch.device | None = None,
) -> LoadedModel:
    """Load a model's weights with the head that a task needs.

    Args:
        source: Where from.
        task: Names the head and, for a classifier, its classes.
        precision: In what the weights are held.
        attn_implementation: The attention to use; the library's choice by default.
        four_bit_device: Quantise the blocks' linear layers to 4 bits, on this device; None quantises nothing.

    Returns:
        The model, every weight trainable but those in 4 bits.

    Raises:
        ValueError: If the weights can't be loaded, or the model can't have the head.
    """
    options: dict[str, Any] = {**source.options, "dtype": _dtype(source.config, precision)}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    if task.model_kind == "sequence_classification":
        id2label = task.id2label or {}
        label2id = {name: index for index, name in id2label.items()}
        options |= {"id2label": id2label, "label2id": label2id, "pad_token_id": task.pad_token_id}
    model_class = _CLASS_OF_KIND[task.model_kind]
    try:
        if four_bit_device is not None:
            options |= four_bit_options(model_class, source.config, precision, four_bit_device)
        model, report = model_class.from_pretrained(source.name_or_path, **options, output_loading_info=True)
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(
            f"model_name_or_path={source.name_or_path!r} can't be loaded as {task.model_kind}: {_first_line(error)}"
        ) from error
    if four_bit_device is not None:
        prepare_four_bit(model)
    new_modules = sorted({name.rpartition(".")[0] for name in report["missing_keys"] if "." in name})
    return LoadedModel(model=model, new_modules=tuple(new_modules), revision=source.options.get("revision"))


def _dtype(config: Any, precision: Precision) -> torch.dtype:
    if precision.loading == "bf16":
        return torch.bfloat16
    # fp16 has no room for what a weight may grow to in training; bf16 holds fp32's range.
    if precision.loading == "stored" and config.dtype in (torch.float16, torch.bfloat16):
        return torch.bfloat16
    return torch.float32


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0].rstrip(".")
