"""How the processes of a run find each other's devices, and whether they really train together."""

import os
import sys
from typing import Any, Literal

import torch
from transformers import TrainingArguments
from transformers.utils.import_utils import is_torch_bf16_gpu_available

from slivertune.parallel.accelerate_internals import forget_state
from slivertune.parallel.zero.shm_comm import check_build
from slivertune.planning.methods import clash_with_zero3


def asks_for(engine: Literal["deepspeed", "fsdp"], values: dict[str, Any]) -> bool:
    """Whether the command line or the launcher asks for DeepSpeed, or for FSDP.

    Args:
        engine: Which of the two.
        values: What the user typed, by name.
    """
    is_set = os.environ.get(f"ACCELERATE_USE_{engine.upper()}", "false").lower() in ("1", "true", "yes")
    return bool(values.get(engine)) or is_set


def device_values(values: dict[str, Any], world_size: int) -> dict[str, Any]:
    """What several processes without GPUs need, so that each does not train by itself.

    Args:
        values: What the user typed, by name.
        world_size: Processes that were started.

    Returns:
        Fields of `TrainingArguments` and their values.

    Raises:
        ValueError: If the layout that is asked for does not run here.
        RuntimeError: If DeepSpeed would wait without end for a build that was killed.
    """
    has_gpu = torch.cuda.is_available() and not values.get("use_cpu", False)
    if world_size == 1:
        for name, is_asked in (("DeepSpeed", asks_for("deepspeed", values)), ("FSDP", asks_for("fsdp", values))):
            if is_asked and not has_gpu:
                raise ValueError(
                    f"{name} is asked for, and one process without a GPU has nothing to share; leave it out"
                )
        return {}
    # The Trainer's own default looks for unused parameters, in every update, where there are next to never any.
    settled = {"ddp_find_unused_parameters": values.get("ddp_find_unused_parameters", False)}
    if has_gpu:
        return settled
    if asks_for("fsdp", values):
        raise ValueError("FSDP is asked for, and accelerate shards weights over GPUs alone; take DDP or DeepSpeed here")
    if asks_for("deepspeed", values):
        check_build(_say_once)
        return {**settled, "use_cpu": False, "ddp_backend": "gloo", **_configured(values)}
    return {**settled, "use_cpu": True}


def check_engine_precision(values: dict[str, Any], autocast: str) -> None:
    """Refuse bf16 that the Trainer would refuse with advice that does not go with DeepSpeed.

    Args:
        values: What the user typed, by name.
        autocast: The Trainer's mixed precision.

    Raises:
        ValueError: If DeepSpeed is to train in bf16 where no GPU does.
    """
    if autocast == "bf16" and asks_for("deepspeed", values) and not is_torch_bf16_gpu_available():
        raise ValueError(
            "bf16 is asked for, by --bf16, --weights_dtype or the launcher, and under DeepSpeed the Trainer takes it "
            "on GPUs with bf16 alone, of which none is here; leave it out, as by accelerate launch --mixed_precision no"
        )


def check_layout_takes_4bit(training: TrainingArguments) -> None:
    """Refuse to share out 4-bit weights.

    Args:
        training: Knows DeepSpeed's stage.

    Raises:
        ValueError: If it is ZeRO-3.
    """
    plugin: Any = training.deepspeed_plugin
    if plugin is not None and plugin.zero_stage == 3:
        raise ValueError(clash_with_zero3())


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
    from accelerate.state import PartialState

    forget_state()
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")
    return {"accelerator_config": {"use_configured_state": True}}


def _say_once(line: str) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(line, file=sys.stderr, flush=True)
