"""SFT on DeepSpeed: ZeRO-3 shards the frozen weights, every rank holds the deltas and their state, and SFT steps.

ZeRO shards the gradients and state of trained parameters, which are tiny here: under ZeRO-1 and 2 a rank needs the
same memory as under DDP. If ZeRO's optimizers sharded the deltas, no rank could select positions.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import signature
from typing import Any

import torch
from accelerate.utils import DeepSpeedOptimizerWrapper
from deepspeed.runtime.zero import GatheredParameters
from torch import nn

from slivertune.deltas.delta import write_flat
from slivertune.parallel.consistency.explain import call_before
from slivertune.parallel.consistency.heartbeat import guard
from slivertune.parallel.sft.communicator import RankCommunicator, ShardedPretrainedValues
from slivertune.parallel.zero.deepspeed_internals import never_exclude
from slivertune.parallel.zero.engine import (
    engine_over_placeholder,
    initialize_over,
    is_last_backward,
    prepare_over,
    replace_prepared,
)
from slivertune.parallel.zero.unsupported import check_sft_config
from slivertune.sft import SFT
from slivertune.sft.targets import Target
from slivertune.sft.weight import PretrainedValues


def prepare(accelerator: Any, model: nn.Module, sft: SFT, objects: tuple[Any, ...]) -> tuple[Any, ...]:
    """Prepare under accelerate's DeepSpeed plugin of stage 1, 2 or 3.

    Args:
        accelerator: `accelerate.Accelerator`.
        model: The model.
        sft: SFT built over the model; under stage 3 it is in the layer form afterwards.
        objects: All objects to prepare, including the model and SFT.

    Returns:
        The prepared objects in the same order; the model is DeepSpeed's engine.

    Raises:
        ValueError: If the settings differ between ranks, or the config does not support SFT.
    """
    with _built_over_placeholder(sft, accelerator.state.deepspeed_plugin.deepspeed_config) as (placeholder, made):
        prepared, engine = prepare_over(accelerator, model, objects, sft, placeholder)
        made.append(engine)
    return replace_prepared(accelerator, prepared, objects.index(sft), DeepSpeedOptimizerWrapper(sft), engine)


def initialize(sft: SFT, config: dict[str, Any], arguments: dict[str, Any]) -> tuple[Any, SFT, Any, Any]:
    """Make a bare DeepSpeed engine that steps SFT.

    Args:
        sft: SFT built over the model among the arguments.
        config: DeepSpeed's config without "auto".
        arguments: The other arguments of `deepspeed.initialize`.

    Returns:
        The engine, SFT, the loader and the schedule.

    Raises:
        ValueError: If the settings differ between ranks, or the config does not support SFT.
    """
    with _built_over_placeholder(sft, config) as (placeholder, made):
        engine, loader = initialize_over(placeholder, config, arguments)
        made.append(engine)
    return engine, sft, loader, engine.lr_scheduler


@contextmanager
def _built_over_placeholder(sft: SFT, config: dict[str, Any]) -> Iterator[tuple[torch.optim.Optimizer, list[Any]]]:
    """Build the engine over the placeholder in the block, and append it to the list. It steps SFT afterwards."""
    stage = check_sft_config(config)
    made: list[Any] = []

    def pretrained(target: Target) -> PretrainedValues:
        return _Partition(target, made[0]) if stage == 3 else PretrainedValues(target)

    communicator = RankCommunicator(lambda: is_last_backward(made[0]))
    with (
        sft.rebinding_parameters(
            communicator, in_layers=stage == 3, pretrained=pretrained, with_delta_parameters=False
        ),
        engine_over_placeholder(sft.model, sft, config, made) as placeholder,
    ):
        yield placeholder, made
    communicator.keep_together(sft)
    never_exclude(made[0], sft.were_trainable)
    if stage == 3:
        _save_frozen(made[0])
    call_before(made[0], "save_checkpoint", communicator.compare_all)


def _save_frozen(engine: Any) -> None:
    """Let checkpoints have all frozen weights: DeepSpeed saves stage 3's shares of all or none, and SFT freezes all."""
    own_save = engine.save_checkpoint

    @wraps(own_save)
    def save_checkpoint(*args: Any, **options: Any) -> Any:
        passed = signature(own_save).bind(*args, **options)
        passed.arguments["exclude_frozen_parameters"] = False
        return own_save(*passed.args, **passed.kwargs)

    engine.save_checkpoint = save_checkpoint


class _Partition(ShardedPretrainedValues):
    """A parameter that ZeRO-3 shards into one flat part per rank."""

    def __init__(self, target: Target, engine: Any) -> None:
        super().__init__(target, engine.device)
        self._engine = engine

    def own(self) -> tuple[torch.Tensor, int]:
        """Return this rank's part without padding, and the position of its first element."""
        parameter: Any = self._target.parameter
        part = parameter.ds_tensor
        first = min(part.ds_numel * torch.distributed.get_rank(parameter.ds_process_group), parameter.ds_numel)
        return part.data.view(-1)[: parameter.ds_numel - first], first

    def write(self, indices: torch.Tensor, values: torch.Tensor) -> None:
        """Set entries. A collective: small tensors stay gathered on every rank, and must be updated there."""
        name, parameter = self._target.name, self._target.parameter
        self._engine.empty_partition_cache()
        with guard(f"writing entries of {name}", computes=True), GatheredParameters([parameter], modifier_rank=0):
            if torch.distributed.get_rank() == 0:
                write_flat(parameter.data, indices, values.to(parameter.device))

    def whole(self) -> torch.Tensor:
        """Gather the whole tensor on every rank. A collective."""
        # A forward without a backward, as in evaluation, may have left its gathering in flight, which would fail here.
        self._engine.empty_partition_cache()
        with guard(f"gathering {self._target.name}", computes=True), GatheredParameters([self._target.parameter]):
            return self._target.parameter.detach().clone()
