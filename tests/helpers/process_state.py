"""State that libraries keep for the life of a process, and how to forget it, so that no test depends on another."""

import gc
import random
import sys
from typing import Any

import torch
import torch.distributed as dist


def seed_all(seed: int = 0) -> None:
    """Seed the generators of Python, torch and, if it was imported, NumPy."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def forget_accelerate() -> None:
    """Forget accelerate's shared state, in which precision, engine and device are."""
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    axolotl: Any = sys.modules.get("axolotl.utils.distributed")
    if axolotl is not None:
        axolotl.distributed_state = None  # a PartialState, whose attributes are gone now


def release_attention() -> None:
    """Give transformers its attention back after a model that keeps its selection of tokens, as a trainer's does."""
    if "slivertune.tokentune.attention" in sys.modules:
        from slivertune.tokentune import attention

        for dispatcher in tuple(attention._dispatched.values()):
            dispatcher.num_users = 1
            dispatcher.release()


def forget_engines() -> None:
    """Drop DeepSpeed's engines and all process groups but the default one; no rank may be in a collective.

    Without the groups that DeepSpeed's engines, FSDP2 and slivertune make for each run, a process would end up with
    hundreds of threads. DeepSpeed's variables, in which it keeps its groups, are set back by `Baseline`.
    """
    unset = getattr(sys.modules.get("transformers.integrations.deepspeed"), "unset_hf_deepspeed_config", None)
    if unset is not None:
        unset()
    offload: Any = sys.modules.get("deepspeed.runtime.zero.parameter_offload")
    if offload is not None:
        offload.FWD_MODULE_STACK.clear()  # of a forward that raised
    gc.collect()
    for group in list(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else ():
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def reset_torch() -> None:
    """Set back torch's switches that hold for a whole process."""
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.autograd.set_detect_anomaly(False)
    torch.set_float32_matmul_precision("highest")
    torch.set_autocast_enabled("cpu", False)
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
