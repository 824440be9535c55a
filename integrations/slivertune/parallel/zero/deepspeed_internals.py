"""What the library relies on of DeepSpeed that it does not document, in DeepSpeed 0.19.8.

Everything else of the library reaches private names through this file. `RELIED_ON` says where each lies and what for,
so that a test can tell with a clear word which has moved. Attributes of ZeRO's optimizers that DeepSpeed itself reads
from other files (`bit16_groups_flat`, `fp16_partitioned_groups_flat`, `averaged_gradients`, `parameter_offload`,
`ipg_buckets` and the like) are listed, too.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slivertune.core.manifest import read_entries
from slivertune.parallel.consistency.explain import call_before

_ENGINE = "deepspeed.runtime.engine.DeepSpeedEngine"
_STAGES_1_AND_2 = "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer"
_STAGE_3 = "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3"
_READERS = ("step", "state_dict", "load_state_dict", "refresh_fp32_params", "offload_states", "reload_states")
"""Methods of ZeRO's optimizers that read or write masters or state."""
_READERS_OF_A_PARAMETER = ("get_full_hp_param", "set_full_hp_param")
"""Those that stages 1 and 2 give to each parameter, for `safe_get_full_fp32_param` and the like."""
_READERS_OF_STAGE_3 = (*_READERS_OF_A_PARAMETER, "get_local_fp32_param", "set_local_hp_param")
RELIED_ON: Mapping[str, str] = {
    f"{_ENGINE}._configure_zero_optimizer": "builds one ZeRO optimizer for each group",
    f"{_ENGINE}._backward_post_hook": "lets the engine hear of each optimizer's gradients",
    f"{_ENGINE}._load_checkpoint": "reads a checkpoint of another number of ranks",
    f"{_ENGINE}._get_all_ckpt_names": "reads a checkpoint of another number of ranks",
    f"{_ENGINE}._scheduler_from_config": "lets the config's schedule drive the method's optimizer",
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
"""By dotted name: what for. `Class#attribute` is one that instances have."""
_WHOLE_MODEL_FILE = "mp_rank_00_model_states.pt"
_SHARED_MODEL_FILE = "zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
_FROZEN = "frozen_param_fragments"
_STATES = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")


def new_zero_optimizer(engine: Any, optimizer: torch.optim.Optimizer) -> Any:
    """Another ZeRO optimizer of the engine's stage and config, which the engine hears of as of its own.

    Args:
        engine: DeepSpeed's.
        optimizer: What it is built over.
    """
    made = engine._configure_zero_optimizer(optimizer)
    made.register_grad_acc_post_hook(engine._backward_post_hook)
    return made


def set_owner(parameters: Any, zero_optimizer: Any) -> None:
    """Let stage 3's parameters belong to one of several optimizers, each of which has claimed all of the module's."""
    for parameter in parameters:
        parameter._z3_optimizer = zero_optimizer


@contextmanager
def masters_listed(zero_optimizer: Any, stage: int) -> Iterator[torch.optim.Optimizer]:
    """The torch optimizer inside, with its masters in its param groups; on stage 3 they are there on demand."""
    if stage == 3:
        zero_optimizer._set_fp32_optimizer_param_groups()
    try:
        yield zero_optimizer.optimizer
    finally:
        if stage == 3:
            zero_optimizer._clear_fp32_optimizer_param_groups()


def follow_master(zero_optimizer: Any, index: int) -> None:
    """Set stage 3's weights to a master that was written, rounded."""
    zero_optimizer._reassign_or_swap_out_partitioned_parameters(index)


def call_before_reading(zero_optimizer: Any, stage: int, first: Callable[[], None]) -> None:
    """Call something before masters or state are read or written through one of ZeRO's optimizers, on this instance."""
    for name in (*_READERS, *(_READERS_OF_STAGE_3 if stage == 3 else ())):
        call_before(zero_optimizer, name, first)


def unlink_fragments(zero_optimizer: Any) -> None:
    """Drop the views into masters (for `safe_get_full_fp32_param`) of stages 1 and 2, which keep their memory."""
    for parameters in zero_optimizer.bit16_groups:
        for parameter in parameters:
            parameter._hp_mapping = None


def link_fragments(zero_optimizer: Any, first: Callable[[], None]) -> None:
    """Make these views again; those of state DeepSpeed makes after the next step.

    Args:
        zero_optimizer: Of stage 1 or 2.
        first: Called before somebody reads or writes through them.
    """
    zero_optimizer._link_all_hp_params()
    zero_optimizer._hp_optimizer_states_linked = False
    for parameters in zero_optimizer.bit16_groups:
        for parameter in parameters:
            for name in _READERS_OF_A_PARAMETER:  # made anew by DeepSpeed just now
                call_before(parameter, name, first)


def note_step_without_update(engine: Any) -> None:
    """Let the engine say that its last step was not applied."""
    engine._step_applied = False


def schedule_of_config(engine: Any, optimizer: torch.optim.Optimizer) -> Any:
    """The schedule that the engine's config asks for, over another optimizer than the engine's."""
    return engine._scheduler_from_config(optimizer)


def load_first(engine: Any, folder: Path, **options: Any) -> Any:
    """Load counters, schedule and whole weights that another number of ranks has saved.

    DeepSpeed (0.19.8) lets a rank read the file of its own number alone, and cuts nothing again: so every rank reads
    the model's file of rank 0, without that rank's shares, and without the engine's look at how many have saved it.

    Args:
        engine: DeepSpeed's; two of its methods are overridden meanwhile, on this instance.
        folder: The checkpoint's.
        **options: Others of `engine.load_checkpoint`.

    Returns:
        What `engine.load_checkpoint` returns.
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
    """How many ranks' files of optimizer state the manifest of a checkpoint lists; None where there are none.

    Args:
        folder: Found to be whole.
    """
    found = [_STATES.fullmatch(name) for name in read_entries(folder)["files"]]
    return max((int(each[1]) + 1 for each in found if each), default=None)


def first_states(folder: Path) -> Any:
    """Rank 0's optimizer state in a checkpoint of DeepSpeed's, which is unpickled.

    Args:
        folder: Found to be whole.
    """
    listed = read_entries(folder)["files"]
    name = next(name for name in listed if (found := _STATES.fullmatch(name)) and found[1] == "0")
    return torch.load(folder / name, map_location="cpu", weights_only=False)["optimizer_state_dict"]


def fill_frozen(engine: Any, folder: Path, num_saved: int, trained: Collection[int]) -> None:
    """Load weights under ZeRO-3 that no optimizer of DeepSpeed's holds, whose shares lie in all ranks' files.

    Args:
        engine: DeepSpeed's.
        folder: The checkpoint's, found to be whole: DeepSpeed's files are unpickled.
        num_saved: Ranks that saved.
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
            continue  # left out when it was saved, so it is what the model was built with
        whole = torch.cat([file[_FROZEN][name].view(-1) for file in files])
        share = parameter.ds_tensor
        first = share.ds_numel * dist.get_rank(parameter.ds_process_group)
        count = max(0, min(share.ds_numel, parameter.ds_numel - first))
        share.data.view(-1)[:count].copy_(whole[first : first + count])
