"""`HiFTConfig(layers_per_group="auto")` under a stock Trainer: chosen by a plan of its model, arguments and device."""

from collections.abc import Collection
from dataclasses import fields, replace
from typing import Any, get_args

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, Trainer

from slivertune.core.device_memory import usable_bytes
from slivertune.core.host_memory import available_host_bytes
from slivertune.core.kept_activations import keeps_activations
from slivertune.core.options import enum_value
from slivertune.hift import HiFTConfig
from slivertune.planning.cards import Card, card_here
from slivertune.planning.layers_per_group import LayersChoice, choose_layers_per_group
from slivertune.planning.optimizers import optimizer_named
from slivertune.planning.plan import Limits
from slivertune.planning.request import REQUEST_OPTIONS, AttentionName, PlanRequest, PrecisionName, TaskName
from slivertune.tokentune import TokenTune

_INSTEAD = "Give a number, for example the one that `slivertune plan --layers_per_group auto` prints"


def settle_layers(trainer: Trainer, model: nn.Module, config: HiFTConfig, tune: TokenTune | None) -> HiFTConfig:
    """Return the settings with a number of layers per group in place of `auto`.

    A plan knows neither `attach_chunked_cross_entropy`, `offload_activations` nor `tile_tokens`, so that a run with one
    of these may have room for more layers.

    Args:
        trainer: The Trainer, whose arguments have batch, accumulation, precision and optimizer.
        model: Its model, on its device.
        config: Settings of HiFT.
        tune: Token selection of the run, if there is one.

    Raises:
        ValueError: If the run can't be planned, or does not fit.
    """
    try:
        choice = _choose(trainer, model, config, tune)
    except ValueError as error:
        raise ValueError(f"layers_per_group='auto': {str(error).rstrip('.')}. {_INSTEAD}") from error
    print("\n".join(choice.lines()))
    return replace(config, layers_per_group=choice.chosen.layers_per_group)


def _choose(trainer: Trainer, model: Any, config: HiFTConfig, tune: TokenTune | None) -> LayersChoice:
    card = _card(trainer)
    request = _request(trainer, model, config, tune)
    limits = Limits(device_bytes=usable_bytes(trainer.args.device), host_bytes=available_host_bytes())
    prefetch_bytes = None if config.prefetch_bytes == "auto" else config.prefetch_bytes
    # A plan builds models, whose initial weights must not advance the run's random state.
    with torch.random.fork_rng(devices=[]):
        return choose_layers_per_group(request, model.config, card, limits, prefetch_bytes=prefetch_bytes)


def _card(trainer: Trainer) -> Card:
    if trainer.args.world_size > 1:
        raise ValueError(f"it is chosen for one GPU, and this run has {trainer.args.world_size} processes")
    card = card_here()
    if card is None:
        raise ValueError("its choice takes the rates of this machine's GPU, and there is none whose rates are known")
    return card


def _request(trainer: Trainer, model: Any, config: HiFTConfig, tune: TokenTune | None) -> PlanRequest:
    """Return the plan request of the Trainer's run, with one layer per group."""
    arguments: Any = trainer.args
    task = _task_of(model)
    marks = (getattr(each, "gradient_checkpointing", False) for each in model.modules())
    is_checkpointed = bool(arguments.gradient_checkpointing) or any(marks)
    attention = getattr(model.config, "_attn_implementation", None)
    for is_unknown, what in (
        (task is None, f"{type(model).__name__}, which no AutoModel for text loads,"),
        (getattr(model, "quantization_method", None) is not None, "a quantized model"),
        (attention not in get_args(AttentionName), f"attention by {attention!r}"),
        (arguments.fp16, "fp16"),
        (arguments.torch_compile, "torch_compile"),
        (trainer.optimizer_cls_and_kwargs is not None, "an optimizer class of the Trainer's own"),
        ((arguments.gradient_checkpointing_kwargs or {}).get("use_reentrant"), "reentrant checkpointing"),
        (keeps_activations(model), "a model with keep_activations"),
        ("input_ids" not in _columns_of(trainer.train_dataset), "a training set without a column input_ids"),
    ):
        if is_unknown:
            raise ValueError(f"{what} has no plan here")
    assert task is not None
    settings = {each.name: getattr(config, each.name) for each in fields(config) if each.name in REQUEST_OPTIONS}
    sizes = ("device_bytes", "prefetch_bytes", "resident_bytes")
    settings |= {name: None for name in sizes if settings[name] == "auto"}
    precision = _precision(model, config, has_autocast=arguments.bf16)
    if precision not in ("bf16", "mixed_hi"):
        settings["master"] = None
    return PlanRequest(
        **settings | {"layers_per_group": 1},
        task=task,
        optimizer=optimizer_named(enum_value(arguments.optim), arguments.optim_args or ""),
        precision=precision,
        batch_size=arguments.per_device_train_batch_size,
        gradient_accumulation_steps=arguments.gradient_accumulation_steps,
        seq_length=longest_row(trainer.train_dataset),
        num_labels=model.config.num_labels if task == "classification" else 2,
        attn_implementation=attention,
        gradient_checkpointing=is_checkpointed,
        chunked_cross_entropy=False,
        token_ratio=None if tune is None else tune.ratio,
    )


def _columns_of(dataset: Any) -> Collection[str]:
    return getattr(dataset, "column_names", None) or ()


def _task_of(model: nn.Module) -> TaskName | None:
    mappings: dict[TaskName, Any] = {
        "causal_lm": MODEL_FOR_CAUSAL_LM_MAPPING,
        "classification": MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    }
    config = type(getattr(model, "config", None))
    found = (task for task, mapping in mappings.items() if config in mapping and type(model) is mapping[config])
    return next(found, None)


def _precision(model: nn.Module, config: HiFTConfig, *, has_autocast: bool) -> PrecisionName:
    if any(each.dtype == torch.bfloat16 for each in model.parameters()):
        return "mixed_hi" if config.master == "fp32" else "bf16"
    return "mixed" if has_autocast else "fp32"


def longest_row(dataset: Any) -> int:
    """Return the length of the longest row in tokens, to which the rows of a batch are padded at most. 0 without rows.

    Args:
        dataset: Training set with a column `input_ids`, as datasets has them.
    """
    chunks = dataset.data.column("input_ids").chunks
    longest = [int(chunk.value_lengths().to_numpy(zero_copy_only=False).max()) for chunk in chunks if len(chunk)]
    return max(longest, default=0)
