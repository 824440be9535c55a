"""Loads a run's model and tokenizer, and chooses the dtypes in which weights are held and computed.

The dtypes follow from `--weights_dtype`, `--bf16`, `--fp16` and `--load_in_4bit`. Weights in 4 bits are bitsandbytes'
NF4 with double quantisation, as QLoRA freezes them (Dettmers et al., 2023).
"""

import copy
import logging
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from slivertune.core.layers import modules_in_blocks
from slivertune.core.parameters import num_elements
from slivertune.deltas.adapter_folder import check_no_adapter
from slivertune.training.options.arguments import ModelArguments, WeightsDtype
from slivertune.training.tasks.task import ModelKind, Task

_CLASS_OF_KIND: dict[str, Any] = {
    "causal_lm": AutoModelForCausalLM,
    "masked_lm": AutoModelForMaskedLM,
    "sequence_classification": AutoModelForSequenceClassification,
}


Loading = Literal["fp32", "bf16", "stored"]
Autocast = Literal["no", "bf16", "fp16"]

Bf16Use = Literal["autocast", "weights", "both"]
"""Meaning of `--bf16` for a method. `autocast` runs over fp32 weights. `weights` means bf16 weights, with fp32 master
weights or deltas. `both` means bf16 weights that are frozen, under autocast."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """The dtype of the loaded weights, and the autocast of operators."""

    loading: Loading
    """Dtype of the loaded weights. `stored` takes the checkpoint's own, with fp16 read as bf16."""
    autocast: Autocast
    """Mixed precision of the Trainer. "no" computes in the weights' own dtype."""


def choose_precision(
    bf16_use: Bf16Use,
    weights_dtype: WeightsDtype,
    *,
    bf16: bool,
    fp16: bool,
    four_bit: bool = False,
    deepspeed: bool = False,
) -> Precision:
    """Choose the precision of a run.

    With HiFT, `--bf16` means the paper's Mixed^Hi: bf16 weights with offloaded fp32 master weights. Autocast is then
    off, since everything is bf16 already. Dense fine-tuning has no master weights, so its `--bf16` keeps fp32 weights
    under bf16 autocast, as in the Trainer. LoRA's frozen weights need no master weights, and its adapters are fp32, so
    its `--bf16` means both: bf16 weights (unless `--weights_dtype` is fp32) and bf16 autocast.

    DeepSpeed itself converts weights to bf16 or fp16 and keeps fp32 master weights of the trained ones, so the setting
    goes to its config.

    SFT adds fp32 deltas to weights that may be bf16, so it loads them as HiFT does; with 4-bit weights, as LoRA does.

    Args:
        bf16_use: Meaning of `--bf16` for the method.
        weights_dtype: Value of `--weights_dtype`.
        bf16: Whether `--bf16` was given, or is a launcher's mixed precision.
        fp16: Whether `--fp16` was given, or is a launcher's; not together with `bf16`.
        four_bit: Whether the blocks' linear layers are held in 4 bits.
        deepspeed: Whether DeepSpeed trains.

    Returns:
        Dtype to load, and autocast to compute in.

    Raises:
        ValueError: If fp16 autocast is requested over bf16 weights.
    """
    if deepspeed and (bf16 or weights_dtype == "bf16"):
        return Precision(loading="bf16" if weights_dtype != "fp32" else "fp32", autocast="bf16")
    if fp16:
        if weights_dtype == "bf16":
            raise ValueError("--fp16 autocast needs fp32 weights. Leave out --weights_dtype bf16, or use --bf16")
        return Precision(loading="fp32", autocast="fp16")
    if bf16_use == "both" or four_bit:
        is_bf16 = bf16 or weights_dtype == "bf16"
        loading: Loading = "bf16" if is_bf16 and weights_dtype != "fp32" else "fp32"
        return Precision(loading=loading, autocast="bf16" if is_bf16 else "no")
    if weights_dtype == "bf16" or (weights_dtype == "auto" and bf16 and bf16_use == "weights"):
        return Precision(loading="bf16", autocast="no")
    if weights_dtype == "auto" and bf16_use == "weights":
        return Precision(loading="stored", autocast="no")
    return Precision(loading="fp32", autocast="bf16" if bf16 else "no")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """A model's source, with everything that can be read without its weights."""

    name_or_path: str
    options: dict[str, Any]
    """Keyword arguments of `from_pretrained` that identify the model."""
    config: Any
    """The model's configuration, a `transformers.PreTrainedConfig`."""
    tokenizer: PreTrainedTokenizerBase


def open_model(arguments: ModelArguments, embedded: Path | None) -> ModelSource:
    """Read a model's configuration and tokenizer.

    Args:
        arguments: Name and revision of the model.
        embedded: Folder of the embedded base model, used if no model is named.

    Returns:
        The source to load weights from.

    Raises:
        ValueError: If the model or its tokenizer does not exist, or the name is an adapter's.
    """
    name = arguments.model_name_or_path if arguments.model_name_or_path is not None else str(embedded)
    check_no_adapter(name)
    options = {} if arguments.model_revision is None else {"revision": arguments.model_revision}
    try:
        config = AutoConfig.from_pretrained(name, **options)
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ValueError(
            f"model_name_or_path={name!r} can't be opened: {_first_line(error)}. Give a local folder with a model and "
            "its tokenizer, or a hub id"
        ) from error
    return ModelSource(name_or_path=name, options=options, config=config, tokenizer=tokenizer)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A loaded model, and the modules that its checkpoint lacks."""

    model: PreTrainedModel
    """Model on the CPU, or, if it is quantised, on the device that trains it."""
    new_modules: tuple[str, ...]
    """Sorted paths of modules with new weights, such as a classifier's head. They are drawn from torch's seed."""
    revision: str | None = None
    """Revision of the model on the hub, which an adapter records."""


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
        source: Source of the weights.
        task: Task that names the head and, for a classifier, its classes.
        precision: Precision that names the weights' dtype.
        attn_implementation: Attention of the transformers library; the library's choice by default.
        four_bit_device: Device on which the blocks' linear layers are quantised to 4 bits; None quantises nothing.

    Returns:
        The model; all weights are trainable except those in 4 bits.

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
    kind = task.model_kind
    model_class: Any = _CLASS_OF_KIND[kind] if isinstance(kind, str) else kind
    try:
        if four_bit_device is not None:
            options |= four_bit_options(model_class, source.config, precision, four_bit_device)
        model, report = model_class.from_pretrained(source.name_or_path, **options, output_loading_info=True)
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(
            f"model_name_or_path={source.name_or_path!r} can't be loaded as {_name_of(kind)}: {_first_line(error)}"
        ) from error
    if four_bit_device is not None:
        prepare_four_bit(model)
    new_modules = sorted({name.rpartition(".")[0] for name in report["missing_keys"] if "." in name})
    return LoadedModel(model=model, new_modules=tuple(new_modules), revision=source.options.get("revision"))


def _dtype(config: Any, precision: Precision) -> torch.dtype:
    if precision.loading == "bf16":
        return torch.bfloat16
    # In training, a weight may exceed the range of fp16; bf16 has the range of fp32.
    if precision.loading == "stored" and config.dtype in (torch.float16, torch.bfloat16):
        return torch.bfloat16
    return torch.float32


def _name_of(kind: ModelKind | type[PreTrainedModel]) -> str:
    return kind if isinstance(kind, str) else kind.__name__


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0].rstrip(".")


def four_bit_options(
    model_class: Any, config: PreTrainedConfig, precision: Precision, device: torch.device
) -> dict[str, Any]:
    """Return arguments of `from_pretrained` that quantise only the linear layers of a model's blocks.

    Embeddings and heads, including a classifier's, are not quantised: they are a small part of a large model, and a new
    head is trained.

    Args:
        model_class: Auto class of the transformers library, or the model's own class.
        config: Configuration of the model.
        precision: Precision of the run. Quantised weights are multiplied in bf16 under bf16 autocast, else in fp32.
        device: Device of the model, on which its weights are quantised.

    Returns:
        Keyword arguments.

    Raises:
        ValueError: If the model's blocks can't be found.
    """
    return {
        "quantization_config": BitsAndBytesConfig(  # type: ignore[no-untyped-call]
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16 if precision.autocast == "bf16" else torch.float32,
            llm_int8_skip_modules=_modules_outside_blocks(model_class, config),
        ),
        "device_map": {"": device},
    }


def prepare_four_bit(model: PreTrainedModel) -> None:
    """Prepare a model with 4-bit weights for training adapters beside them.

    Weights keep the storage format that has a backward. On CPUs with AVX512-BF16, bitsandbytes 0.50 changes this format
    in the first evaluation and rounds the scales; after that, no gradient passes.

    Norms keep their dtype. PEFT's `prepare_model_for_kbit_training` casts them to fp32, as QLoRA's own code does. This
    does not change the value of a bf16 weight, but every activation after the first block is then fp32, in twice the
    memory.

    Args:
        model: Model to change in place.
    """
    from bitsandbytes.nn import Linear4bit  # type: ignore[attr-defined]

    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False


def is_not_about_codes(record: logging.LogRecord) -> bool:
    """Return False for the Trainer's warning that a resumed checkpoint has unexpected quantisation states.

    The 4-bit codes never change, and the model already has their states, which torch does not load.

    Args:
        record: Record of the Trainer's logger, which has this function as a filter.
    """
    message = record.getMessage()
    return not (message.startswith("There were unexpected keys in the checkpoint") and ".quant_state." in message)


def num_weights(parameter: nn.Parameter) -> int:
    """Count the weights of a whole parameter, even if its elements are packed codes or sharded by ZeRO-3."""
    quantised = getattr(parameter, "quant_state", None)
    if quantised is not None:
        return math.prod(quantised.shape)
    return num_elements(parameter)


def _modules_outside_blocks(model_class: Any, config: PreTrainedConfig) -> list[str]:
    """Return one pattern for the path of each linear layer outside the blocks, which is not quantised."""
    make = model_class if issubclass(model_class, PreTrainedModel) else model_class.from_config
    with torch.device("meta"):
        model: nn.Module = make(copy.deepcopy(config))
    in_blocks = modules_in_blocks(model)
    return [
        f"^{re.escape(path)}$"
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and id(module) not in in_blocks
    ]
