"""How the processes of a run find each other's devices, and whether they really train together."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import TrainingArguments


def asks_for_deepspeed(values: dict[str, Any]) -> bool:
    """Whether the command line or the launcher asks for DeepSpeed.

    Args:
        values: What the user typed, by name.
    """
    return bool(values.get("deepspeed")) or _is_set("ACCELERATE_USE_DEEPSPEED")


def asks_for_fsdp(values: dict[str, Any]) -> bool:
    """Whether the command line or the launcher asks for FSDP.

    Args:
        values: What the user typed, by name.
    """
    return bool(values.get("fsdp")) or _is_set("ACCELERATE_USE_FSDP")


def device_values(values: dict[str, Any], world_size: int) -> dict[str, Any]:
    """What several processes without GPUs need, so that each does not train by itself.

    Args:
        values: What the user typed, by name.
        world_size: Processes that were started.

    Returns:
        Fields of `TrainingArguments` and their values.

    Raises:
        ValueError: If the layout that is asked for does not run here.
    """
    has_gpu = torch.cuda.is_available() and not values.get("use_cpu", False)
    if world_size == 1:
        for name, is_asked in (("DeepSpeed", asks_for_deepspeed(values)), ("FSDP", asks_for_fsdp(values))):
            if is_asked and not has_gpu:
                raise ValueError(
                    f"{name} is asked for, and one process without a GPU has nothing to share; leave it out"
                )
        return {}
    # The Trainer's own default looks for unused parameters, in every update, where there are next to never any.
    settled = {"ddp_find_unused_parameters": values.get("ddp_find_unused_parameters", False)}
    if has_gpu:
        return settled
    if asks_for_fsdp(values):
        raise ValueError("FSDP is asked for, and accelerate shards weights over GPUs alone; take DDP or DeepSpeed here")
    if asks_for_deepspeed(values):
        return {**settled, "use_cpu": False, "ddp_backend": "gloo", **_configured(values)}
    return {**settled, "use_cpu": True}


def check_processes(training: TrainingArguments, world_size: int) -> None:
    """Refuse to let each process train by itself.

    Args:
        training: Knows how many processes torch.distributed has joined.
        world_size: Processes that were started.

    Raises:
        ValueError: If these differ.
    """
    if training.world_size != world_size:
        raise ValueError(
            f"{world_size} processes were started, and torch.distributed has joined {training.world_size}: each would "
            "train by itself; start them by torchrun, accelerate launch or deepspeed"
        )


def _configured(values: dict[str, Any]) -> dict[str, Any]:
    """With --deepspeed, `TrainingArguments` takes the backend for GPUs, whatever `ddp_backend` says."""
    if not values.get("deepspeed"):
        return {}
    from accelerate.state import AcceleratorState, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")
    return {"accelerator_config": {"use_configured_state": True}}


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "false").lower() in ("1", "true", "yes")
