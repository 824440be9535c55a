"""Settings and checks that let the processes of a run train together, for each layout and device.

They complement `slivertune.attach`.
"""

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import Trainer, TrainingArguments
from transformers.utils.import_utils import is_torch_bf16_gpu_available, is_torch_tf32_available

from slivertune.core.layout import Layout, world_size
from slivertune.core.refused_pairs import refuse_together
from slivertune.parallel.accelerate_internals import forget_state
from slivertune.parallel.consistency.heartbeat import guard
from slivertune.parallel.layout import layout_of
from slivertune.parallel.zero.shm_comm import check_build
from slivertune.parallel.zero.unsupported import fill_buckets

_LOG = logging.getLogger(__name__)


def asks_for(engine: Literal["deepspeed", "fsdp"], values: Mapping[str, Any]) -> bool:
    """Return whether the command line or the launcher requests an engine.

    Args:
        engine: Name of the engine.
        values: Values that the user typed, by name.
    """
    asked = os.environ.get(f"ACCELERATE_USE_{engine.upper()}", "false")
    return bool(values.get(engine)) or asked.lower() in ("1", "true", "yes")


def device_values(values: dict[str, Any], world_size: int) -> dict[str, Any]:
    """Return the settings that several processes, with or without GPUs, need to train together.

    Args:
        values: Values that the user typed, by name.
        world_size: Number of processes that were started.

    Returns:
        Fields of `TrainingArguments` and their values.

    Raises:
        ValueError: If the requested layout does not run here.
        RuntimeError: If DeepSpeed would wait without end for a build that was killed.
    """
    has_gpu = torch.cuda.is_available() and not values.get("use_cpu", False)
    if world_size == 1:
        for name, is_asked in (("DeepSpeed", asks_for("deepspeed", values)), ("FSDP", asks_for("fsdp", values))):
            if is_asked and not has_gpu:
                raise ValueError(
                    f"{name} is asked for, and one process without a GPU has nothing to shard. Leave it out"
                )
        return {}
    # The Trainer's default searches for unused parameters in every update, though there are hardly ever any.
    settled: dict[str, Any] = {"ddp_find_unused_parameters": values.get("ddp_find_unused_parameters", False)}
    if has_gpu:
        return settled
    if asks_for("fsdp", values):
        raise ValueError("FSDP is asked for, and accelerate shards weights only over GPUs. Use DDP or DeepSpeed here")
    if asks_for("deepspeed", values):
        check_build(_say_once)
        settled |= {"use_cpu": False, "ddp_backend": "gloo"}
        if values.get("deepspeed"):
            # With --deepspeed, `TrainingArguments` ignores `ddp_backend` and takes the backend for GPUs.
            from accelerate.state import PartialState

            forget_state()
            os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
            PartialState(backend="gloo")
            settled["accelerator_config"] = {"use_configured_state": True}
        return settled
    return {**settled, "use_cpu": True}


def check_engine_precision(values: dict[str, Any], autocast: str) -> None:
    """Refuse bf16 under DeepSpeed without a GPU for it. The Trainer's own error gives advice that does not fit.

    Args:
        values: Values that the user typed, by name.
        autocast: Mixed precision of the Trainer.

    Raises:
        ValueError: If DeepSpeed is to train in bf16 and no GPU here supports it.
    """
    if autocast == "bf16" and asks_for("deepspeed", values) and not is_torch_bf16_gpu_available():
        raise ValueError(
            "bf16 is asked for, by --bf16, --weights_dtype or the launcher. Under DeepSpeed the Trainer needs a GPU "
            "with bf16 for it, and none is here. Leave it out, as by accelerate launch --mixed_precision no"
        )


def precision_values(values: dict[str, Any], mixed: Sequence[str]) -> dict[str, Any]:
    """Choose the device of a precision that an option or a launcher requests, alike for all methods.

    Args:
        values: Values that the user typed, by name.
        mixed: Mixed precision requested by `--bf16` or a launcher, and the resulting autocast of the Trainer.

    Returns:
        Fields of `TrainingArguments` and their values: without a GPU, bf16 is computed on the CPU.

    Raises:
        ValueError: If the GPU here does not support bf16, or no GPU supports TF32.
    """
    if values.get("tf32") and not is_torch_tf32_available():
        raise ValueError("--tf32 needs an NVIDIA GPU of compute capability 8 or later, and none is here. Leave it out")
    is_bf16 = "bf16" in mixed or values.get("bf16_full_eval", False)
    has_place = values.get("use_cpu", False) or asks_for("deepspeed", values) or is_torch_bf16_gpu_available()
    if has_place or not is_bf16:
        return {}
    if torch.accelerator.is_available():
        raise ValueError(
            "--bf16 needs a GPU with bf16, and this machine's GPU has none. Leave it out, or add --use_cpu"
        )
    _LOG.info("no GPU is here, so --bf16 computes on the CPU")
    return {"use_cpu": True}


def check_fp16(values: dict[str, Any]) -> None:
    """Refuse fp16 autocast on a CPU, which accelerate would refuse only after the model is loaded.

    Args:
        values: Values that the user typed, by name; `fp16` may also be the launcher's.

    Raises:
        ValueError: If there is no GPU, or it is not used.
    """
    on_cpu = values.get("use_cpu", False) or not torch.accelerator.is_available()
    if values.get("fp16", False) and on_cpu and not asks_for("deepspeed", values):
        raise ValueError("--fp16 needs a GPU, and this run has none. Leave it out, or use --bf16")


def check_processes(training: TrainingArguments, world_size: int, *, four_bit: bool = False) -> None:
    """Refuse processes that would each train alone, and sharded 4-bit weights.

    Args:
        training: Arguments of the Trainer, with the number of joined processes and DeepSpeed's stage.
        world_size: Number of processes that were started.
        four_bit: Whether the model has 4-bit weights.

    Raises:
        ValueError: If the two numbers differ, or 4-bit weights meet ZeRO-3.
    """
    if training.world_size != world_size:
        raise ValueError(
            f"{world_size} processes were started, and torch.distributed has joined {training.world_size}: each would "
            "train by itself. Start them by torchrun, accelerate launch or deepspeed"
        )
    plugin: Any = training.deepspeed_plugin if four_bit else None
    if plugin is not None and plugin.zero_stage == 3:
        refuse_together({"load_in_4bit": "--load_in_4bit", "zero3": "ZeRO-3"})


def is_on_any_rank(is_here: bool, device: torch.device, doing: str) -> bool:
    """Return whether a condition holds on any rank. A collective.

    Args:
        is_here: Whether the condition holds on this rank.
        device: Device on which the flags are reduced.
        doing: Name of the work, for the error about a rank that does not arrive.
    """
    return are_on_any_rank([is_here], device, doing)[0]


def are_on_any_rank(are_here: Sequence[bool], device: torch.device, doing: str) -> list[bool]:
    """Return the same as `is_on_any_rank` for several conditions at once."""
    if world_size() == 1:
        return list(are_here)
    found = torch.tensor(are_here, dtype=torch.float32, device=device)
    with guard(doing):
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
    return found.bool().tolist()


def settle_layout(trainer: Trainer) -> Layout:
    """Name a Trainer's layout, and complete DeepSpeed's config: buckets by the model's width, gathering on save.

    Args:
        trainer: Trainer that has not trained yet.

    Returns:
        The layout.

    Raises:
        ValueError: If slivertune does not support the layout.
    """
    layout = layout_of(trainer.accelerator)
    if layout.startswith("zero"):
        plugin: Any = trainer.accelerator.state.deepspeed_plugin
        model: Any = trainer.model
        # For every method: a preset can't know the model's width, and a plan assumes these buckets.
        fill_buckets(plugin.deepspeed_config, model)
        # accelerate also does this when it prepares the engine, but warns that one of the two numbers is wrong.
        trainer.accelerator.gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
        if layout == "zero3":
            plugin.deepspeed_config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    return layout


def save_whole_model(trainer: Trainer, folder: Path) -> None:
    """Save the model as a plain checkpoint, however it is sharded. All processes call it, and the first writes.

    Args:
        trainer: Trainer that has trained.
        folder: Folder to write to, the same on all processes.
    """
    if layout_of(trainer.accelerator) != "fsdp2":
        trainer.save_model(str(folder))
        return
    # The Trainer would write each rank's shard, unless it was configured otherwise before training.
    model: Any = trainer.model
    gathered = trainer.accelerator.get_state_dict(model)
    if trainer.args.should_save:
        # On CPUs, gathered tensors may still be in flight; a copy waits for them.
        whole = {name: value.clone() for name, value in gathered.items()}
        trainer.accelerator.unwrap_model(model).save_pretrained(folder, state_dict=whole)
        if trainer.processing_class is not None:
            trainer.processing_class.save_pretrained(folder)


def _say_once(line: str) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(line, file=sys.stderr, flush=True)
