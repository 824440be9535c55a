"""Accelerators of every layout on CPUs; knows nothing of slivertune."""

from typing import Any


def make_accelerator(layout: str, accumulation: int = 1, *, bf16: bool = False) -> Any:
    """Make an Accelerator of a layout on CPUs, once the process's last one is gone.

    Args:
        layout: "single", "ddp", "fsdp2", "zero1", "zero2" or "zero3".
        accumulation: Micro-batches per update.
        bf16: Whether weights are bf16, which DeepSpeed must be told.
    """
    from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import DistributedType, InitProcessGroupKwargs

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    if layout.startswith("zero"):
        import deepspeed

        # Its shared-memory collectives would be compiled first, and hide from the count.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": accumulation,
            "gradient_clipping": 0.0,
            "steps_per_print": 10**9,
            "zero_optimization": {"stage": int(layout[-1]), "stage3_param_persistence_threshold": 0},
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": bf16},
        }
        backend = InitProcessGroupKwargs(backend="gloo")
        return Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), kwargs_handlers=[backend])
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    if layout == "fsdp2":
        # Accelerate chooses FSDP for accelerators alone.
        state: Any = accelerator.state
        state.distributed_type = DistributedType.FSDP
        state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            reshard_after_forward=True,
        )
    return accelerator
