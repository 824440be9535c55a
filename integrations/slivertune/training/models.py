"""The model and the tokenizer of a run, and in what the weights are held and computed with.

That is up to `--weights_dtype`, `--bf16`, `--fp16` and `--load_in_4bit`. Weights in 4 bits are bitsandbytes' NF4 with
double quantisation, as QLoRA freezes them (Dettmers et al., 2023).
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

from slivertune.core.layers import find_layers
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
"""What a method takes `--bf16` for: `autocast` over fp32 weights; bf16 `weights`, where it keeps in fp32 what these
have no room for; `both`, where they are frozen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """How weights are loaded and whether operators autocast."""

    loading: Loading
    """`stored` takes the checkpoint's own type, with fp16 read as bf16."""
    autocast: Autocast
    """The Trainer's mixed precision; "no" where all that is trained is bf16."""


def choose_precision(
    bf16_use: Bf16Use,
    weights_dtype: WeightsDtype,
    *,
    bf16: bool,
    fp16: bool,
    four_bit: bool = False,
    deepspeed: bool = False,
) -> Precision:
    """Settle the precision of a run.

    `--bf16` with HiFT means the paper's Mixed^Hi: weights in bf16, whose fp32 masters wait on the host. Autocast is
    then off: it would only cast what is bf16 already. Dense fine-tuning has no masters, so `--bf16` there keeps fp32
    weights under bf16 autocast, as in the Trainer. LoRA's frozen weights need no masters, and its adapters are held in
    fp32, so there `--bf16` is both: weights in bf16 (unless `--weights_dtype` says fp32), and bf16 autocast.

    DeepSpeed itself turns the weights to bf16 or fp16 and keeps fp32 masters of what trains, so there the setting goes
    to its config.

    SFT adds fp32 deltas to weights that may be bf16, so it holds them as HiFT does; beside 4-bit weights, as LoRA does.

    Args:
        bf16_use: What `--bf16` means to the method.
        weights_dtype: `--weights_dtype`.
        bf16: `--bf16`, or a launcher's mixed precision.
        fp16: `--fp16`, or a launcher's; not together with `bf16`.
        four_bit: Whether the blocks' linear layers are held in 4 bits.
        deepspeed: Whether DeepSpeed trains.

    Returns:
        What to load and how to compute.

    Raises:
        ValueError: If fp16 autocast is asked for over bf16 weights.
    """
    if deepspeed and (bf16 or weights_dtype == "bf16"):
        return Precision(loading="bf16" if weights_dtype != "fp32" else "fp32", autocast="bf16")
    if fp16:
        if weights_dtype == "bf16":
            raise ValueError("--fp16 autocast needs fp32 weights; leave out --weights_dtype bf16, or take --bf16")
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
        ValueError: If there is no such model or tokenizer, or it is an adapter.
    """
    name = arguments.model_name_or_path if arguments.model_name_or_path is not None else str(embedded)
    check_no_adapter(name)
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
    # fp16 has no room for what a weight may grow to in training; bf16 holds fp32's range.
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
    """Arguments of `from_pretrained` that quantise the linear layers of a model's blocks, and nothing else.

    Embeddings and heads, a classifier's among them, stay as they are: they are a small part of a large model, and a new
    head is trained.

    Args:
        model_class: One of the library's Auto classes, or the model's own.
        config: The model's configuration.
        precision: Decides what quantised weights are multiplied in: bf16 under bf16 autocast, else fp32.
        device: Where the model goes; weights are quantised there.

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
    """Make a model with 4-bit weights fit to train adapters beside them.

    Weights keep the layout in which they have a backward: on CPUs with AVX512-BF16, bitsandbytes 0.50 changes it in the
    first evaluation, and rounds the scales on the way; from then on no gradient passes.

    Norms keep their dtype. PEFT's `prepare_model_for_kbit_training` casts them to fp32, as QLoRA's own code does; what
    a bf16 weight says is then the same, but every activation after the first block is fp32, and takes twice the memory.

    Args:
        model: Changed.
    """
    from bitsandbytes.nn import Linear4bit  # type: ignore[attr-defined]

    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False


def is_not_about_codes(record: logging.LogRecord) -> bool:
    """Keeps a Trainer that resumes from naming every quantisation state of the checkpoint as unexpected.

    The codes never change, and the model has their states already, outside of what torch loads.

    Args:
        record: Of the Trainer's logger, whose filter this is.
    """
    message = record.getMessage()
    return not (message.startswith("There were unexpected keys in the checkpoint") and ".quant_state." in message)


def num_weights(parameter: nn.Parameter) -> int:
    """How many weights a parameter has; a quantised one holds several in an element, a sharded one may hold none."""
    quantised = getattr(parameter, "quant_state", None)
    if quantised is not None:
        return math.prod(quantised.shape)
    return num_elements(parameter)


def _modules_outside_blocks(model_class: Any, config: PreTrainedConfig) -> list[str]:
    """Patterns of the linear layers that are not to be quantised, each of one path alone."""
    make = model_class if issubclass(model_class, PreTrainedModel) else model_class.from_config
    with torch.device("meta"):
        model: nn.Module = make(copy.deepcopy(config))
    in_blocks = {name for layer in find_layers(model) if layer.kind == "block" for name in layer.parameter_names}
    return [
        f"^{re.escape(path)}$"
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and in_blocks.isdisjoint(f"{path}.{name}" for name, _ in module.named_parameters())
    ]
