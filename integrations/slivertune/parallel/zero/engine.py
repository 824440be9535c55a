"""DeepSpeed's engine for HiFT and SFT: its creation, and the replacement of its optimizer and step.

An optimizer that steps by itself does the same on every rank. DeepSpeed (0.19.8) builds no engine of stage 1 or 2
without an optimizer, and ZeRO's optimizers would shard the trained parameters. So the engine is built over one
temporary number, and then steps the method's own optimizer.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import deepspeed
import torch
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DeepSpeedSchedulerWrapper
from torch import nn

from slivertune.core.sliver import Sliver
from slivertune.parallel.accelerate_internals import prepared_optimizers
from slivertune.parallel.checkpoint.manifests import seal_engine
from slivertune.parallel.consistency.explain import explain_engine, explain_saving
from slivertune.parallel.consistency.heartbeat import guard
from slivertune.parallel.consistency.processes import follow_default_timeout, keeping_timeout
from slivertune.parallel.zero.deepspeed_internals import (
    fill_frozen,
    first_states,
    load_first,
    ranks_of_states,
    schedule_of_config,
)
from slivertune.parallel.zero.unsupported import fill_clipping

_PLACEHOLDER = "slivertune_placeholder"


def prepare_over(
    accelerator: Any, model: nn.Module, objects: tuple[Any, ...], own: Any, first: torch.optim.Optimizer
) -> tuple[list[Any], Any]:
    """Let accelerate prepare all objects, with the engine built over another optimizer than the method's own.

    Args:
        accelerator: `accelerate.Accelerator`.
        model: The model among the objects.
        objects: All objects to prepare.
        own: The method's optimizer among them.
        first: Optimizer that the engine is built over.

    Returns:
        The prepared objects in the same order, and DeepSpeed's engine.
    """
    with guard("making the engine", computes=True), keeping_timeout():
        prepared = list(accelerator.prepare(*(first if each is own else each for each in objects)))
    return prepared, prepared[objects.index(model)]


def initialize_over(first: torch.optim.Optimizer, config: dict[str, Any], arguments: dict[str, Any]) -> tuple[Any, Any]:
    """Make a bare DeepSpeed engine over an optimizer.

    Args:
        first: Optimizer that the engine is built over.
        config: DeepSpeed's config; changed in place.
        arguments: The other arguments of `deepspeed.initialize`.

    Returns:
        The engine and the loader.
    """
    # The method has already checked everything that DeepSpeed's list of tested optimizers protects against.
    config.setdefault("zero_allow_untested_optimizer", True)
    with guard("making the engine", computes=True), keeping_timeout():
        engine, _, loader, _ = deepspeed.initialize(optimizer=first, config=config, **arguments)
    return engine, loader


def replace_prepared(accelerator: Any, prepared: list[Any], place: int, new: Any, engine: Any) -> tuple[Any, ...]:
    """Replace the optimizer that the engine was built over, among the prepared objects and inside accelerate.

    Args:
        accelerator: `accelerate.Accelerator`; a save or load that fails names missing ranks from now on.
        prepared: Objects that it has prepared.
        place: Index of the optimizer among them.
        new: Optimizer that training loops and schedules use.
        engine: DeepSpeed's engine.

    Returns:
        The prepared objects, with the new optimizer.
    """
    explain_saving(accelerator)
    old, prepared[place] = prepared[place], new
    kept = prepared_optimizers(accelerator)
    kept[kept.index(old)] = new
    for each in prepared:
        if isinstance(each, DeepSpeedSchedulerWrapper):
            each.scheduler = engine.lr_scheduler
        if isinstance(each, AcceleratedScheduler):
            each.optimizers = [new if held is old else held for held in each.optimizers]
    return tuple(prepared)


def complete_engine(engine: Any, optimizer: torch.optim.Optimizer) -> None:
    """Guard an engine's checkpoints and collectives, and let its config's schedule, if any, drive HiFT or SFT.

    Args:
        engine: DeepSpeed's engine; some of its methods are overridden on this instance.
        optimizer: Optimizer whose param groups the schedule drives; the engine was not built over it.
    """
    seal_engine(engine)
    explain_engine(engine)
    follow_default_timeout([engine.seq_data_parallel_group, engine.data_parallel_group])
    if engine.lr_scheduler is not None and engine.client_lr_scheduler is None:
        engine.lr_scheduler = schedule_of_config(engine, optimizer)


@contextmanager
def engine_over_placeholder(
    model: nn.Module, optimizer: Sliver, config: dict[str, Any], made: list[Any]
) -> Iterator[torch.optim.Optimizer]:
    """Build the engine over a placeholder in the block, and append it to the list.

    It steps the optimizer afterwards.

    Args:
        model: The model; it has the placeholder during the block.
        optimizer: Steps by itself; the method averages its gradients.
        config: DeepSpeed's config; changed in place.
        made: An empty list, for the engine.

    Yields:
        Optimizer to build the engine over.
    """
    fill_clipping(config)
    # Sized for the placeholder alone: the buffer of ZeRO's optimizer would outlive it.
    config["zero_optimization"]["reduce_bucket_size"] = 1
    weight = next(model.parameters())
    placeholder = nn.Parameter(torch.zeros(1, dtype=weight.dtype, device=weight.device))
    model.register_parameter(_PLACEHOLDER, placeholder)
    yield torch.optim.SGD([placeholder], lr=float(optimizer.param_groups[0]["lr"]))
    (engine,) = made
    delattr(model, _PLACEHOLDER)
    engine.optimizer = engine.basic_optimizer = EngineStep(optimizer, engine)
    _read_by_any_ranks(engine)
    complete_engine(engine, optimizer)


def is_last_backward(engine: Any) -> bool:
    """Return whether the running backward is the last one of an update.

    If only the caller knows, every backward counts as the last, so the mean is taken after each.
    """
    return bool(not engine.managed_gradient_accumulation() or engine.is_gradient_accumulation_boundary())


def _read_by_any_ranks(engine: Any) -> None:
    """Let the engine load a checkpoint of another number of ranks, which DeepSpeed itself refuses."""
    own_load = engine.load_checkpoint

    @wraps(own_load)
    def load_checkpoint(
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> Any:
        options = {
            "load_module_strict": load_module_strict,
            "load_lr_scheduler_states": load_lr_scheduler_states,
            "custom_load_fn": custom_load_fn,
        }
        num_saved = None if tag is None or load_module_only else ranks_of_states(Path(load_dir) / tag)
        if tag is None or num_saved is None or num_saved == torch.distributed.get_world_size():
            return own_load(
                load_dir,
                tag,
                load_optimizer_states=load_optimizer_states,
                load_module_only=load_module_only,
                **options,
            )
        folder = Path(load_dir) / tag
        loaded = load_first(engine, folder, **options)
        if engine.zero_optimization_stage() == 3:
            engine.empty_partition_cache()
            fill_frozen(engine, folder, num_saved, ())
        if load_optimizer_states:
            engine.optimizer.load_state_dict([first_states(folder)])
        return loaded

    engine.load_checkpoint = load_checkpoint


class EngineStep:
    """Optimizer of the engine: clips by the engine's norm, steps the method's optimizer, and shards nothing.

    Args:
        optimizer: The method's optimizer.
        engine: DeepSpeed's engine.
    """

    overflow = False
    """Whether the last step was skipped. It is always False, since fp16 weights are refused."""
    bit16_groups: Sequence[Any] = ()
    fp16_groups: Sequence[Any] = ()
    """Empty, because no parameter is flattened."""

    def __init__(self, optimizer: Sliver, engine: Any) -> None:
        self._optimizer = optimizer
        self._engine = engine
        self.dp_process_group = engine.seq_data_parallel_group
        self._of_placeholder = engine.optimizer
        self.parameter_offload = getattr(engine.optimizer, "parameter_offload", None)
        """Object that gathers and releases the weights under stage 3. DeepSpeed and others look for it here."""
        self._global_grad_norm: float | None = None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Param groups of the method's optimizer."""
        return self._optimizer.param_groups

    def step(self) -> None:
        """Clip by the norm of the engine's config, and step."""
        limit = self._engine.gradient_clipping()
        self._global_grad_norm = float(self._optimizer.clip_(limit if limit > 0 else math.inf))
        self._optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        self._optimizer.zero_grad()

    def reduce_gradients(self, *arguments: Any, **options: Any) -> None:
        """Do nothing: gradients are averaged at the end of each backward."""

    set_gradient_accumulation_boundary = finalize_gradient_accumulation_boundary = reduce_gradients

    def overlapping_partition_gradients_reduce_epilogue(self) -> None:
        """Release the weights of layers that passed no gradient on, as ZeRO-3's optimizer does. It reduces nothing."""
        if self.parameter_offload is not None:
            self.parameter_offload.release_backward_leftovers()

    def empty_partition_cache(self) -> None:
        """Release all gathered weights, for `engine.empty_partition_cache`."""
        if self.parameter_offload is not None:
            self.parameter_offload.empty_partition_cache()

    def destroy(self) -> None:
        """Remove the hooks of ZeRO's own optimizer, and ZeRO-3's from the model, for `engine.destroy`."""
        self._of_placeholder.destroy()  # its hook on the placeholder's gradient would keep the engine alive

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state. Every rank's file of the engine's checkpoint stores it."""
        return self._optimizer.whole_state()

    def load_state_dict(
        self, state_dict_list: Sequence[Any], load_optimizer_states: bool = True, **ignored: Any
    ) -> None:
        """Continue from the state in a checkpoint.

        Args:
            state_dict_list: States that DeepSpeed read, with None for other ranks' files.
            load_optimizer_states: Whether to load them.
            **ignored: Further arguments that DeepSpeed passes to ZeRO's optimizers.

        Raises:
            ValueError: If the list has no state.
        """
        if not load_optimizer_states:
            return
        found = next((each for each in state_dict_list if each is not None), None)
        if found is None:
            raise ValueError("the checkpoint has no optimizer state for this rank. Resume with as many ranks as saved")
        self._optimizer.load_whole_state(found)
