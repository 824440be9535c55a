"""DeepSpeed's engine as HiFT and SFT have it: making it, taking the place of its optimizer, and stepping in its place.

An optimizer that steps by itself does so the same on every rank. DeepSpeed (0.19.8) builds no engine of stage 1 or 2
without an optimizer, and ZeRO's optimizers would share out what trains; so the engine is built over one number that is
thrown away, and then steps the method's own optimizer.
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
        model: The one among the objects.
        objects: All that is to be prepared.
        own: The method's optimizer among them.
        first: What the engine is built over.

    Returns:
        The prepared objects in the same order, and DeepSpeed's engine.
    """
    with guard("making the engine", computes=True), keeping_timeout():
        prepared = list(accelerator.prepare(*(first if each is own else each for each in objects)))
    return prepared, prepared[objects.index(model)]


def initialize_over(first: torch.optim.Optimizer, config: dict[str, Any], arguments: dict[str, Any]) -> tuple[Any, Any]:
    """Make a bare DeepSpeed engine over an optimizer.

    Args:
        first: What the engine is built over.
        config: DeepSpeed's; changed in place.
        arguments: The others of `deepspeed.initialize`.

    Returns:
        The engine, and the loader.
    """
    # What the list of optimizers that DeepSpeed has tested guards against, the method has looked at.
    config.setdefault("zero_allow_untested_optimizer", True)
    with guard("making the engine", computes=True), keeping_timeout():
        engine, _, loader, _ = deepspeed.initialize(optimizer=first, config=config, **arguments)
    return engine, loader


def replace_prepared(accelerator: Any, prepared: list[Any], place: int, new: Any, engine: Any) -> tuple[Any, ...]:
    """Put an optimizer where accelerate has put that over which the engine was built.

    Args:
        accelerator: `accelerate.Accelerator`; its ways of saving name a rank that is missing from now on.
        prepared: What it has prepared.
        place: Where among that the optimizer is.
        new: What training loops and schedules are to see.
        engine: DeepSpeed's.

    Returns:
        The prepared objects, with the new one.
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
    """Guard an engine's checkpoints and collectives, and let its config's schedule, if it has one, drive HiFT or SFT.

    Args:
        engine: DeepSpeed's; some of its methods are overridden, on this instance.
        optimizer: Whose param groups the schedule is to drive; the engine was not built over it.
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
    """Inside, build the engine over the placeholder and append it to the list; afterwards it steps the optimizer.

    Args:
        model: Has the placeholder meanwhile.
        optimizer: Steps by itself; its gradients are averaged by the method.
        config: DeepSpeed's; changed in place.
        made: An empty list, for the engine.

    Yields:
        What the engine is to be built over.
    """
    fill_clipping(config)
    # Of the placeholder alone: the buffer of ZeRO's optimizer would outlive it.
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
    """Whether the backward that runs is an update's last.

    Where the caller alone knows which is, the mean is taken after each.
    """
    return bool(not engine.managed_gradient_accumulation() or engine.is_gradient_accumulation_boundary())


def _read_by_any_ranks(engine: Any) -> None:
    """Let the engine load what another number of ranks has saved, which DeepSpeed itself refuses."""
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
    """What the engine has as its optimizer: clips by the engine's norm, steps, and shards nothing.

    Args:
        optimizer: Steps.
        engine: DeepSpeed's.
    """

    overflow = False
    """Whether the last step was skipped; fp16 weights are refused."""
    bit16_groups: Sequence[Any] = ()
    fp16_groups: Sequence[Any] = ()
    """No parameter is flattened."""

    def __init__(self, optimizer: Sliver, engine: Any) -> None:
        self._optimizer = optimizer
        self._engine = engine
        self.dp_process_group = engine.seq_data_parallel_group
        self.parameter_offload = getattr(engine.optimizer, "parameter_offload", None)
        """What gathers and releases the weights under stage 3; DeepSpeed and others look for it here."""
        self._global_grad_norm: float | None = None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's."""
        return self._optimizer.param_groups

    def step(self) -> None:
        """Clip as the engine's config says, and step."""
        limit = self._engine.gradient_clipping()
        self._global_grad_norm = float(self._optimizer.clip_(limit if limit > 0 else math.inf))
        self._optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        self._optimizer.zero_grad()

    def reduce_gradients(self, *arguments: Any, **options: Any) -> None:
        """Nothing to reduce, nothing to note: gradients are averaged when a backward ends."""

    set_gradient_accumulation_boundary = finalize_gradient_accumulation_boundary = reduce_gradients

    def overlapping_partition_gradients_reduce_epilogue(self) -> None:
        """Nothing to reduce; release the weights of layers that had no gradient to pass on, as ZeRO-3's own does."""
        if self.parameter_offload is not None:
            self.parameter_offload.release_backward_leftovers()

    def empty_partition_cache(self) -> None:
        """Release all gathered weights, for `engine.empty_partition_cache`."""
        if self.parameter_offload is not None:
            self.parameter_offload.empty_partition_cache()

    def destroy(self) -> None:
        """Take ZeRO-3's hooks off the model, for `engine.destroy`."""
        if self.parameter_offload is not None:
            self.parameter_offload.destroy()

    def state_dict(self) -> dict[str, Any]:
        """The whole state; every rank's file of the engine's checkpoint has it."""
        return self._optimizer.whole_state()

    def load_state_dict(
        self, state_dict_list: Sequence[Any], load_optimizer_states: bool = True, **ignored: Any
    ) -> None:
        """Continue from what each rank saved.

        Args:
            state_dict_list: What DeepSpeed read, with None for other ranks' files.
            load_optimizer_states: Whether to.
            **ignored: What else DeepSpeed passes to ZeRO's optimizers.

        Raises:
            ValueError: If there is none in it.
        """
        if not load_optimizer_states:
            return
        found = next((each for each in state_dict_list if each is not None), None)
        if found is None:
            raise ValueError("the checkpoint holds no optimizer state for this rank; resume with the ranks that saved")
        self._optimizer.load_whole_state(found)
