"""What the library relies on of DeepSpeed that it does not document, in DeepSpeed 0.19.8.

Everything else of the library reaches private names through this file. `RELIED_ON` says where each lies and what for,
so that a test can tell with a clear word which has moved. Attributes of ZeRO's optimizers that DeepSpeed itself reads
from other files (`bit16_groups_flat`, `fp16_partitioned_groups_flat`, `averaged_gradients`, `parameter_offload`,
`ipg_buckets` and the like) are listed, too.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

_ENGINE = "deepspeed.runtime.engine.DeepSpeedEngine"
_STAGES_1_AND_2 = "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer"
_STAGE_3 = "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3"
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


def unlink_fragments(zero_optimizer: Any) -> None:
    """Drop the views into masters (for `safe_get_full_fp32_param`) of stages 1 and 2, which keep their memory."""
    for parameters in zero_optimizer.bit16_groups:
        for parameter in parameters:
            parameter._hp_mapping = None


def link_fragments(zero_optimizer: Any) -> None:
    """Make these views again; those of state DeepSpeed makes after the next step."""
    zero_optimizer._link_all_hp_params()
    zero_optimizer._hp_optimizer_states_linked = False


def note_step_without_update(engine: Any) -> None:
    """Let the engine say that its last step was not applied."""
    engine._step_applied = False


def schedule_of_config(engine: Any, optimizer: torch.optim.Optimizer) -> Any:
    """The schedule that the engine's config asks for, over another optimizer than the engine's."""
    return engine._scheduler_from_config(optimizer)


def load_as_saved(engine: Any, folder: Any, tag: str, **options: Any) -> Any:
    """Load a checkpoint without the engine's look at how many ranks have saved it."""
    return engine._load_checkpoint(str(folder), tag, load_optimizer_states=True, **options)


@contextmanager
def reading_files(engine: Any, names: list[str]) -> Iterator[None]:
    """Inside, the engine takes these for the model's files of a checkpoint."""
    engine._get_all_ckpt_names = lambda *_: names
    try:
        yield
    finally:
        del engine._get_all_ckpt_names
