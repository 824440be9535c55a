"""Undocumented interfaces of DeepSpeed 0.19.8 that the library uses.

The rest of the library reaches private names through this file. `RELIED_ON` lists each interface and its purpose, so
that a test can name the one that has moved. It also lists attributes of ZeRO's optimizers that DeepSpeed itself reads
from other files (`bit16_groups_flat`, `fp16_partitioned_groups_flat`, `averaged_gradients`, `parameter_offload`,
`ipg_buckets` and the like).
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slivertune.core.manifest import read_entries
from slivertune.parallel.consistency.explain import call_before

_WHOLE_WEIGHTS = "_zero3_consolidated_16bit_state_dict"
_ENGINE = "deepspeed.runtime.engine.DeepSpeedEngine"
_STAGES_1_AND_2 = "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer"
_STAGE_3 = "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3"
_READERS = ("step", "state_dict", "load_state_dict", "refresh_fp32_params", "offload_states", "reload_states")
"""Methods of ZeRO's optimizers that read or write masters or state."""
_READERS_OF_A_PARAMETER = ("get_full_hp_param", "set_full_hp_param")
"""Such methods that stages 1 and 2 add to each parameter, for `safe_get_full_fp32_param` and the like."""
_READERS_OF_STAGE_3 = (*_READERS_OF_A_PARAMETER, "get_local_fp32_param", "set_local_hp_param")
RELIED_ON: Mapping[str, str] = {
    f"{_ENGINE}._configure_zero_optimizer": "builds one ZeRO optimizer for each group",
    f"{_ENGINE}._backward_post_hook": "lets the engine hear of each optimizer's gradients",
    f"{_ENGINE}._load_checkpoint": "reads a checkpoint of another number of ranks",
    f"{_ENGINE}._get_all_ckpt_names": "reads a checkpoint of another number of ranks",
    f"{_ENGINE}._scheduler_from_config": "lets the config's schedule drive the method's optimizer",
    f"{_ENGINE}.{_WHOLE_WEIGHTS}": "weights without frozen ones have those that the method trains",
    f"{_ENGINE}.was_step_applied": "a step that passes without an update is none",
    f"{_STAGES_1_AND_2}._link_all_hp_params": "the fragments of masters follow them to the host",
    f"{_STAGES_1_AND_2}.setup_buckets": "a backward pass without gradients",
    f"{_STAGES_1_AND_2}.register_grad_acc_post_hook": "lets the engine hear of each optimizer's gradients",
    f"{_STAGE_3}._set_fp32_optimizer_param_groups": "lists the masters",
    f"{_STAGE_3}._clear_fp32_optimizer_param_groups": "lists the masters no longer",
    f"{_STAGE_3}._reassign_or_swap_out_partitioned_parameters": "weights follow masters that were loaded",
    **{
        f"{where}.{name}": "whoever reads masters or state waits until they have arrived"
        for where, names in ((_STAGES_1_AND_2, _READERS), (_STAGE_3, (*_READERS, *_READERS_OF_STAGE_3)))
        for name in names
    },
    **{
        f"deepspeed.utils.{name}": "whoever reads masters or state waits until they have arrived"
        for name in _READERS_OF_A_PARAMETER
    },
    f"{_STAGES_1_AND_2}#bit16_groups_flat": "where the weights lie",
    f"{_STAGES_1_AND_2}#averaged_gradients": "drops the zeros of a step without an update",
    f"{_STAGES_1_AND_2}#_hp_optimizer_states_linked": "the fragments of state follow it to the host",
    f"{_STAGES_1_AND_2}#parallel_partitioned_bit16_groups": "this rank's part of the weights",
    f"{_STAGE_3}#fp16_partitioned_groups_flat": "this rank's part of the weights",
    f"{_STAGE_3}#grad_partitions_flat_buffer": "gives back the memory of a waiting group's gradients",
    f"{_STAGE_3}#parameter_offload": "one set of hooks gathers the weights, not one for each group",
    f"{_STAGE_3}#ipg_buckets": "one bucket, not one for each group",
    f"{_ENGINE}#_step_applied": "a step that passes without an update is none",
}
"""Purpose of each interface, by dotted name. `Class#attribute` is an attribute of instances."""
_WHOLE_MODEL_FILE = "mp_rank_00_model_states.pt"
_SHARED_MODEL_FILE = "zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
_FROZEN = "frozen_param_fragments"
_STATES = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")


def new_zero_optimizer(engine: Any, optimizer: torch.optim.Optimizer) -> Any:
    """Make another ZeRO optimizer of the engine's stage and config, and connect its gradient hooks to the engine.

    Args:
        engine: DeepSpeed's engine.
        optimizer: Torch optimizer to build it over.
    """
    made = engine._configure_zero_optimizer(optimizer)
    made.register_grad_acc_post_hook(engine._backward_post_hook)
    return made


def set_owner(parameters: Any, zero_optimizer: Any) -> None:
    """Assign stage 3's parameters to one of several optimizers, each of which has claimed all of the module's."""
    for parameter in parameters:
        parameter._z3_optimizer = zero_optimizer


@contextmanager
def masters_listed(zero_optimizer: Any, stage: int) -> Iterator[torch.optim.Optimizer]:
    """Yield the inner torch optimizer with its masters in its param groups. Stage 3 lists them only in the block."""
    if stage == 3:
        zero_optimizer._set_fp32_optimizer_param_groups()
    try:
        yield zero_optimizer.optimizer
    finally:
        if stage == 3:
            zero_optimizer._clear_fp32_optimizer_param_groups()


def follow_master(zero_optimizer: Any, index: int) -> None:
    """Set stage 3's weights to the rounded values of a master that was written."""
    zero_optimizer._reassign_or_swap_out_partitioned_parameters(index)


def call_before_reading(zero_optimizer: Any, stage: int, first: Callable[[], None]) -> None:
    """Call a function before masters or state are read or written through a ZeRO optimizer, on this instance."""
    for name in (*_READERS, *(_READERS_OF_STAGE_3 if stage == 3 else ())):
        call_before(zero_optimizer, name, first)


def unlink_fragments(zero_optimizer: Any) -> None:
    """Drop stage 1's and 2's views into masters (for `safe_get_full_fp32_param`), which would keep their memory."""
    for parameters in zero_optimizer.bit16_groups:
        for parameter in parameters:
            parameter._hp_mapping = None


def link_fragments(zero_optimizer: Any, first: Callable[[], None]) -> None:
    """Make the views into masters again. DeepSpeed makes the views into state after the next step.

    Args:
        zero_optimizer: ZeRO optimizer of stage 1 or 2.
        first: Function called before a read or write through a view.
    """
    zero_optimizer._link_all_hp_params()
    zero_optimizer._hp_optimizer_states_linked = False
    for parameters in zero_optimizer.bit16_groups:
        for parameter in parameters:
            for name in _READERS_OF_A_PARAMETER:  # DeepSpeed has just made them anew
                call_before(parameter, name, first)


def note_step_without_update(engine: Any) -> None:
    """Make the engine report that its last step was not applied."""
    engine._step_applied = False


def never_exclude(engine: Any, trained: Callable[[], Iterable[torch.Tensor]]) -> None:
    """Let the engine save parameters that the method has frozen, even if frozen parameters are to be excluded.

    Args:
        engine: DeepSpeed's engine; two of its methods are overridden on this instance.
        trained: Function that returns the parameters that are saved in any case.
    """

    def override(name: str) -> None:
        original = getattr(engine, name)

        @wraps(original)
        def collect(*args: Any, **kwargs: Any) -> Any:
            frozen = [parameter for parameter in trained() if not parameter.requires_grad]
            for parameter in frozen:
                parameter.requires_grad_(True)
            try:
                return original(*args, **kwargs)
            finally:
                for parameter in frozen:
                    parameter.requires_grad_(False)

        setattr(engine, name, collect)

    for name in ("module_state_dict", _WHOLE_WEIGHTS):
        override(name)


def schedule_of_config(engine: Any, optimizer: torch.optim.Optimizer) -> Any:
    """Make the schedule of the engine's config, over another optimizer than the engine's."""
    return engine._scheduler_from_config(optimizer)


def load_first(engine: Any, folder: Path, **options: Any) -> Any:
    """Load counters, schedule and whole weights that another number of ranks has saved.

    DeepSpeed (0.19.8) lets each rank read only the file of its own number, and never reshards. So every rank reads rank
    0's model file without that rank's shares, and without the engine's check of the number of ranks.

    Args:
        engine: DeepSpeed's engine; two of its methods are overridden meanwhile, on this instance.
        folder: Folder of the checkpoint.
        **options: Further options of `engine.load_checkpoint`.

    Returns:
        The result of `engine.load_checkpoint`.
    """
    is_shared = engine.zero_optimization_stage() == 3
    own_load = engine.load_module_state_dict

    def load_unshared(checkpoint: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        return own_load({key: value for key, value in checkpoint.items() if key != _FROZEN}, *args, **options)

    path = folder / (_SHARED_MODEL_FILE.format(rank=0) if is_shared else _WHOLE_MODEL_FILE)
    engine._get_all_ckpt_names = lambda *_: [str(path)]
    if is_shared:
        engine.load_module_state_dict = load_unshared
    try:
        return engine._load_checkpoint(str(folder.parent), folder.name, load_optimizer_states=True, **options)
    finally:
        del engine._get_all_ckpt_names
        if is_shared:
            del engine.load_module_state_dict


def ranks_of_states(folder: Path) -> int | None:
    """Count the ranks' optimizer state files in the manifest of a checkpoint. Return None if there are none.

    Args:
        folder: Checkpoint that was already checked.
    """
    found = [_STATES.fullmatch(name) for name in read_entries(folder)["files"]]
    return max((int(each[1]) + 1 for each in found if each), default=None)


def first_states(folder: Path) -> Any:
    """Read rank 0's optimizer state from a DeepSpeed checkpoint. This unpickles the file.

    Args:
        folder: Checkpoint that was already checked.
    """
    listed = read_entries(folder)["files"]
    name = next(name for name in listed if (found := _STATES.fullmatch(name)) and found[1] == "0")
    return torch.load(folder / name, map_location="cpu", weights_only=False)["optimizer_state_dict"]


def fill_frozen(engine: Any, folder: Path, num_saved: int, trained: Collection[int]) -> None:
    """Load weights under ZeRO-3 that no DeepSpeed optimizer holds. Their shares are in all ranks' files.

    Args:
        engine: DeepSpeed's engine.
        folder: Checkpoint that was already checked; DeepSpeed's files are unpickled.
        num_saved: Number of ranks that saved.
        trained: The `id` of each parameter to leave out.
    """
    left = {name: each for name, each in engine.module.named_parameters() if id(each) not in trained}
    if not left:
        return
    files = [
        torch.load(folder / _SHARED_MODEL_FILE.format(rank=rank), map_location="cpu", weights_only=False, mmap=True)
        for rank in range(num_saved)
    ]
    for name, parameter in left.items():
        if any(name not in (file.get(_FROZEN) or {}) for file in files):
            continue  # left out of the checkpoint, so the model keeps its initial value
        whole = torch.cat([file[_FROZEN][name].view(-1) for file in files])
        share = parameter.ds_tensor
        first = share.ds_numel * dist.get_rank(parameter.ds_process_group)
        count = max(0, min(share.ds_numel, parameter.ds_numel - first))
        share.data.view(-1)[:count].copy_(whole[first : first + count])
