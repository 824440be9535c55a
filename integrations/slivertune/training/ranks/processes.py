"""How the processes of a run find each other's devices and train together: what each layout needs, and refuses.

All beside what `slivertune.attach` does.
"""

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import Trainer, TrainingArguments
from transformers.utils.import_utils import is_torch_bf16_gpu_available, is_torch_tf32_available

from slivertune.core.layout import Layout
from slivertune.parallel.accelerate_internals import forget_state
from slivertune.parallel.consistency.heartbeat import guard, world_size
from slivertune.parallel.layout import layout_of
from slivertune.parallel.zero.shm_comm import check_build
from slivertune.parallel.zero.unsupported import fill_buckets
from slivertune.planning.methods import clash_with_zero3

_LOG = logging.getLogger(__name__)


def asks_for(engine: Literal["deepspeed", "fsdp"], values: dict[str, Any]) -> bool:
    """Whether the command line or the launcher asks for DeepSpeed, or for FSDP.

    Args:
        engine: Which of the two.
        values: What the user typed, by name.
    """
    asked = os.environ.get(f"ACCELERATE_USE_{engine.upper()}", "false")
    return bool(values.get(engine)) or asked.lower() in ("1", "true", "yes")


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
    settled: dict[str, Any] = {"ddp_find_unused_parameters": values.get("ddp_find_unused_parameters", False)}
    if has_gpu:
        return settled
    if asks_for("fsdp", values):
        raise ValueError("FSDP is asked for, and accelerate shards weights over GPUs alone; take DDP or DeepSpeed here")
    if asks_for("deepspeed", values):
        check_build(_say_once)
        settled |= {"use_cpu": False, "ddp_backend": "gloo"}
        if values.get("deepspeed"):
            # With --deepspeed, `TrainingArguments` takes the backend for GPUs, whatever `ddp_backend` says.
            from accelerate.state import PartialState

            forget_state()
            os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
            PartialState(backend="gloo")
            settled["accelerator_config"] = {"use_configured_state": True}
        return settled
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


def precision_values(values: dict[str, Any], mixed: Sequence[str]) -> dict[str, Any]:
    """Say alike for all methods where a precision is computed that was asked for by an option or a launcher.

    Args:
        values: What the user typed, by name.
        mixed: What is asked of the Trainer by `--bf16` or a launcher, and what follows for its autocast.

    Returns:
        Fields of `TrainingArguments` and their values: without a GPU, bf16 is computed on the CPU.

    Raises:
        ValueError: If there is a GPU that has no bf16, or none for TF32.
    """
    if values.get("tf32") and not is_torch_tf32_available():
        raise ValueError("--tf32 needs an NVIDIA GPU of compute capability 8 or later, and none is here; leave it out")
    is_bf16 = "bf16" in mixed or values.get("bf16_full_eval", False)
    has_place = values.get("use_cpu", False) or asks_for("deepspeed", values) or is_torch_bf16_gpu_available()
    if has_place or not is_bf16:
        return {}
    if torch.accelerator.is_available():
        raise ValueError(
            "--bf16 needs a GPU with bf16, and the one that is here has none; leave it out, or add --use_cpu"
        )
    _LOG.info("no GPU is here; --bf16 computes on the CPU")
    return {"use_cpu": True}


def check_fp16(values: dict[str, Any]) -> None:
    """Refuse fp16 autocast on a CPU, where accelerate would refuse it once the model is loaded.

    Args:
        values: What the user typed, by name, `fp16` as the launcher may have it.

    Raises:
        ValueError: If there is no GPU, or it is not used.
    """
    on_cpu = values.get("use_cpu", False) or not torch.accelerator.is_available()
    if values.get("fp16", False) and on_cpu and not asks_for("deepspeed", values):
        raise ValueError("--fp16 needs a GPU, and this run has none; leave it out, or take --bf16")


def check_processes(training: TrainingArguments, world_size: int, *, four_bit: bool = False) -> None:
    """Refuse to let each process train by itself, and to share out 4-bit weights.

    Args:
        training: Knows how many processes torch.distributed has joined, and DeepSpeed's stage.
        world_size: Processes that were started.
        four_bit: Whether there are such weights.

    Raises:
        ValueError: If these differ, or 4-bit weights meet ZeRO-3.
    """
    if training.world_size != world_size:
        raise ValueError(
            f"{world_size} processes were started, and torch.distributed has joined {training.world_size}: each would "
            "train by itself; start them by torchrun, accelerate launch or deepspeed"
        )
    plugin: Any = training.deepspeed_plugin if four_bit else None
    if plugin is not None and plugin.zero_stage == 3:
        raise ValueError(clash_with_zero3())


def is_on_any_rank(is_here: bool, device: torch.device, doing: str) -> bool:
    """Ask all ranks whether something is so on one of them. A collective.

    Args:
        is_here: Whether it is so on this one.
        device: Where the ranks' numbers are reduced.
        doing: What the ranks are doing, for the error of one that does not come.
    """
    return are_on_any_rank([is_here], device, doing)[0]


def are_on_any_rank(are_here: Sequence[bool], device: torch.device, doing: str) -> list[bool]:
    """As `is_on_any_rank`, of several things at once."""
    if world_size() == 1:
        return list(are_here)
    found = torch.tensor(are_here, dtype=torch.float32, device=device)
    with guard(doing):
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
    return found.bool().tolist()


def settle_layout(trainer: Trainer) -> Layout:
    """Name a Trainer's layout; see that ZeRO takes buckets by the model's width, and ZeRO-3 gathers what is saved.

    Args:
        trainer: Has not trained yet.

    Returns:
        The layout.

    Raises:
        ValueError: If nothing can be trained under it.
    """
    layout = layout_of(trainer.accelerator)
    if layout.startswith("zero"):
        plugin: Any = trainer.accelerator.state.deepspeed_plugin
        model: Any = trainer.model
        # Whatever the method: a preset can't name them, and a plan takes them so.
        fill_buckets(plugin.deepspeed_config, model)
        # What accelerate does when it prepares the engine, with a warning that one of the two is wrong.
        trainer.accelerator.gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
        if layout == "zero3":
            plugin.deepspeed_config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    return layout


def save_whole_model(trainer: Trainer, folder: Path) -> None:
    """Save the model as a plain checkpoint, whatever it is sharded into. All processes call it, and the first writes.

    Args:
        trainer: Has trained.
        folder: Where to; the same on all processes.
    """
    if layout_of(trainer.accelerator) != "fsdp2":
        trainer.save_model(str(folder))
        return
    # The Trainer would write what each rank holds, unless it was told otherwise before it began.
    model: Any = trainer.model
    gathered = trainer.accelerator.get_state_dict(model)
    if trainer.args.should_save:
        # On CPUs gathered tensors may still be on their way, which a copy waits for.
        whole = {name: value.clone() for name, value in gathered.items()}
        trainer.accelerator.unwrap_model(model).save_pretrained(folder, state_dict=whole)
        if trainer.processing_class is not None:
            trainer.processing_class.save_pretrained(folder)


def _say_once(line: str) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(line, file=sys.stderr, flush=True)
