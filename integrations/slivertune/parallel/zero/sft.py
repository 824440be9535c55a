"""SFT on DeepSpeed: ZeRO-3 shares out the frozen weights; the deltas and their state lie on every rank, and SFT steps.

ZeRO shards gradients and state of what trains, of which there is next to nothing here: under ZeRO-1 and 2 a rank holds
what it does under DDP. DeepSpeed (0.19.8) builds no engine of stage 1 or 2 without an optimizer, and ZeRO's optimizers
would share the deltas out, so that no rank could select; so the engine is built over one number that is thrown away,
and then steps SFT.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DeepSpeedOptimizerWrapper
from torch import nn

from slivertune.parallel.checkpoint.manifests import seal_engine
from slivertune.parallel.consistency.explain import compare_before_saving, explain_engine, explain_saving
from slivertune.parallel.consistency.heartbeat import guard
from slivertune.parallel.consistency.timeouts import follow_default_timeout
from slivertune.parallel.sft.communicator import RankCommunicator
from slivertune.parallel.sft.sharded_values import ShardedPretrainedValues
from slivertune.parallel.zero.engine import drive_by_config, initialize_over, prepare_over, replace_prepared
from slivertune.parallel.zero.other_ranks import fill_frozen, first_states, ranks_of_states, reading_first
from slivertune.parallel.zero.unsupported import check_sft_config, fill_clipping
from slivertune.sft import SFT
from slivertune.sft.pretrained_values import PretrainedValues
from slivertune.sft.targets import Target

_PLACEHOLDER = "slivertune_placeholder"


def prepare(accelerator: Any, model: nn.Module, sft: SFT, objects: tuple[Any, ...]) -> tuple[Any, ...]:
    """Prepare under accelerate's DeepSpeed plugin of stage 1, 2 or 3.

    Args:
        accelerator: `accelerate.Accelerator`.
        model: The model.
        sft: Built over it; under stage 3 it is in the layer form afterwards.
        objects: All that is to be prepared, these two included.

    Returns:
        The prepared objects in the same order; the model is DeepSpeed's engine.

    Raises:
        ValueError: If the ranks were given other settings, or SFT and the config don't go together.
    """
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    stage = check_sft_config(config)
    _adjust(config)
    with _built_over_placeholder(sft, stage) as (placeholder, built):
        prepared, engine = prepare_over(accelerator, model, objects, sft, placeholder)
        built.append(engine)
    explain_saving(accelerator)
    replace_prepared(accelerator, prepared, prepared[objects.index(sft)], DeepSpeedOptimizerWrapper(sft), engine)
    return tuple(prepared)


def initialize(sft: SFT, config: dict[str, Any], arguments: dict[str, Any]) -> tuple[Any, SFT, Any, Any]:
    """Make a bare DeepSpeed engine that steps SFT.

    Args:
        sft: Built over the model among the arguments.
        config: DeepSpeed's, without "auto".
        arguments: The others of `deepspeed.initialize`.

    Returns:
        The engine, SFT, the loader and the schedule.

    Raises:
        ValueError: If the ranks were given other settings, or SFT and the config don't go together.
    """
    stage = check_sft_config(config)
    _adjust(config)
    with _built_over_placeholder(sft, stage) as (placeholder, built):
        engine, loader = initialize_over(placeholder, config, arguments)
        built.append(engine)
    return engine, sft, loader, engine.lr_scheduler


def _adjust(config: dict[str, Any]) -> None:
    fill_clipping(config)
    # Of the placeholder alone: the buffer of ZeRO's optimizer would outlive it.
    config["zero_optimization"]["reduce_bucket_size"] = 1


@contextmanager
def _built_over_placeholder(sft: SFT, stage: int) -> Iterator[tuple[torch.optim.Optimizer, list[Any]]]:
    """Inside, build the engine over the placeholder and append it to the list; afterwards it steps SFT."""
    built: list[Any] = []

    def is_last() -> bool:
        engine = built[0]
        # Where the caller alone knows which backward is the last, the mean is taken after each.
        return bool(not engine.managed_gradient_accumulation() or engine.is_gradient_accumulation_boundary())

    def pretrained(target: Target) -> PretrainedValues:
        return _Partition(target, built[0]) if stage == 3 else PretrainedValues(target)

    model = sft.model
    communicator = RankCommunicator(is_last)
    with sft.rebinding_parameters(
        communicator, in_layers=stage == 3, pretrained=pretrained, with_delta_parameters=False
    ):
        device = next(model.parameters()).device
        placeholder = nn.Parameter(torch.zeros(1, dtype=next(model.parameters()).dtype, device=device))
        model.register_parameter(_PLACEHOLDER, placeholder)
        yield torch.optim.SGD([placeholder], lr=float(sft.param_groups[0]["lr"])), built
        (engine,) = built
        delattr(model, _PLACEHOLDER)
        engine.optimizer = engine.basic_optimizer = EngineStep(sft, engine)
        drive_by_config(engine, sft)
        _read_by_any_ranks(engine, stage)
        seal_engine(engine)
        communicator.keep_together(sft)
        explain_engine(engine)
        follow_default_timeout([engine.seq_data_parallel_group, engine.data_parallel_group])
        compare_before_saving(engine, lambda: communicator.compare_all(sft))


def _read_by_any_ranks(engine: Any, stage: int) -> None:
    """Let an engine that steps SFT load what another number of ranks has saved, which DeepSpeed itself refuses."""
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
        if tag is None or num_saved in (None, torch.distributed.get_world_size()):
            return own_load(
                load_dir,
                tag,
                load_optimizer_states=load_optimizer_states,
                load_module_only=load_module_only,
                **options,
            )
        assert num_saved is not None
        folder = Path(load_dir) / tag
        with reading_first(engine, folder):
            loaded = engine._load_checkpoint(load_dir, tag, load_optimizer_states=True, **options)
        if stage == 3:
            engine.empty_partition_cache()
            fill_frozen(engine, folder, num_saved, ())
        if load_optimizer_states:
            engine.optimizer.load_state_dict([first_states(folder)])
        return loaded

    engine.load_checkpoint = load_checkpoint


class EngineStep:
    """What a DeepSpeed engine has as its optimizer: SFT, which clips by the engine's norm and shards nothing.

    Args:
        sft: Steps.
        engine: DeepSpeed's.
    """

    overflow = False
    """Whether the last step was skipped; fp16 weights are refused."""
    bit16_groups: Sequence[Any] = ()
    fp16_groups: Sequence[Any] = ()
    """No parameter is flattened."""

    def __init__(self, sft: SFT, engine: Any) -> None:
        self._sft = sft
        self._engine = engine
        self.dp_process_group = engine.seq_data_parallel_group
        self.parameter_offload = getattr(engine.optimizer, "parameter_offload", None)
        """What gathers and releases the weights under stage 3; DeepSpeed and others look for it here."""
        self._global_grad_norm: float | None = None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """SFT's."""
        return self._sft.param_groups

    def step(self) -> None:
        """Clip as the engine's config says, and step."""
        limit = self._engine.gradient_clipping()
        self._global_grad_norm = float(self._sft.clip_(limit if limit > 0 else math.inf))
        self._sft.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        self._sft.zero_grad()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Nothing to note: gradients are averaged when a backward ends."""

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

    def finalize_gradient_accumulation_boundary(self) -> None:
        """Nothing to reduce: as above."""

    def reduce_gradients(self, pipeline_parallel: bool = False) -> None:
        """Nothing to reduce: as above."""

    def state_dict(self) -> dict[str, Any]:
        """SFT's whole state; every rank's file of the engine's checkpoint has it."""
        return self._sft.whole_state()

    def load_state_dict(
        self, state_dict_list: Sequence[Any], load_optimizer_states: bool = True, **ignored: Any
    ) -> None:
        """Continue from what each rank saved.

        Args:
            state_dict_list: What DeepSpeed read, with None for other ranks' files.
            load_optimizer_states: Whether to.
            **ignored: What else DeepSpeed passes to ZeRO's optimizers.

        Raises:
            ValueError: If there is no state of SFT in it.
        """
        if not load_optimizer_states:
            return
        found = [each for each in state_dict_list if each is not None]
        if not found:
            raise ValueError("the checkpoint holds no optimizer state for this rank; resume with the ranks that saved")
        self._sft.load_state_dict(found[0])


class _Partition(ShardedPretrainedValues):
    """A parameter that ZeRO-3 cuts into one flat part a rank."""

    def __init__(self, target: Target, engine: Any) -> None:
        super().__init__(target, engine.device)
        self._engine = engine

    def own(self) -> tuple[torch.Tensor, int]:
        """This rank's part without its padding, and where it begins."""
        parameter: Any = self._target.parameter
        part = parameter.ds_tensor
        first = min(part.ds_numel * torch.distributed.get_rank(parameter.ds_process_group), parameter.ds_numel)
        return part.data.view(-1)[: parameter.ds_numel - first], first

    def write(self, indices: torch.Tensor, values: torch.Tensor) -> None:
        """Set entries. A collective: small tensors stay gathered on each rank, and have to follow."""
        from deepspeed.runtime.zero import GatheredParameters

        parameter = self._target.parameter
        self._engine.empty_partition_cache()
        doing = f"writing entries of {self._target.name}"
        with guard(doing, computes=True), GatheredParameters([parameter], modifier_rank=0):
            if torch.distributed.get_rank() == 0:
                parameter.data.put_(indices.long(), values.to(parameter.device))

    def whole(self) -> torch.Tensor:
        """The whole tensor, on every rank. A collective."""
        from deepspeed.runtime.zero import GatheredParameters

        # A forward without a backward, as of an evaluation, may have left it on its way here, which can't be gathered.
        self._engine.empty_partition_cache()
        with guard(f"gathering {self._target.name}", computes=True), GatheredParameters([self._target.parameter]):
            return self._target.parameter.detach().clone()
