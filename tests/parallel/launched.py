"""What the launch tests start under each preset: HiFT on a tiny Llama, as a user's script would train it.

It reports, from inside of the run, what the launcher and the preset made of it.
"""

import argparse
import gc
import os
import sys
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DeepSpeedPlugin, DistributedType, FullyShardedDataParallelPlugin, InitProcessGroupKwargs
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

import slivertune as st
from slivertune.parallel.consistency.heartbeat import digest
from slivertune.parallel.layout import layout_of
from tests.helpers.launching import Report, report
from tests.parallel.reference import whole_weights

BATCH = 2
LENGTH = 12


def is_asked(variable: str) -> bool:
    return os.environ.get(variable, "false").lower() == "true"


def cpu_accelerator(deepspeed_config: str | None) -> Accelerator:
    """An Accelerator of what the launcher asked for, on CPUs.

    Args:
        deepspeed_config: A DeepSpeed configuration that the script itself asks for; None leaves it to the launcher.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the deepspeed launcher names devices, whatever they are
    if deepspeed_config or is_asked("ACCELERATE_USE_DEEPSPEED"):
        import deepspeed

        # DeepSpeed would first compile its shared-memory collectives for a minute; gloo does.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        gloo = InitProcessGroupKwargs(backend="gloo")
        if deepspeed_config is None:
            return Accelerator(kwargs_handlers=[gloo])
        return Accelerator(
            deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=deepspeed_config),
            mixed_precision="bf16",
            kwargs_handlers=[gloo],
        )
    accelerator = Accelerator(cpu=True)
    if is_asked("ACCELERATE_USE_FSDP"):
        # Accelerate chooses FSDP for GPUs alone. What it would have chosen is in the launcher's variables.
        state: Any = accelerator.state
        state.distributed_type = DistributedType.FSDP
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        state.fsdp_plugin = FullyShardedDataParallelPlugin()
        if state.mixed_precision != "no":
            state.fsdp_plugin.set_mixed_precision(state.mixed_precision)
    return accelerator


def is_sharded(parameter: nn.Parameter) -> bool:
    """Whether a rank keeps no more than its part of a parameter between the steps."""
    if hasattr(parameter, "ds_id"):
        return parameter.numel() == 0
    return hasattr(parameter, "to_local")


def engine_facts(model: Any, accelerator: Accelerator) -> Report:
    """What only some engines have."""
    if hasattr(model, "zero_optimization_stage"):
        return {
            "zero_stage": int(model.zero_optimization_stage()),
            "offload": [
                name
                for name, place in {
                    "optimizer": model.zero_offload_optimizer(),
                    "parameters": model.zero_offload_param(),
                }.items()
                if place is not None and "none" not in str(place.device)
            ],
            "clipping": model.gradient_clipping(),
            "accumulation": model.gradient_accumulation_steps(),
            "batch": model.train_micro_batch_size_per_gpu(),
            "bf16": model.bfloat16_enabled(),
        }
    if accelerator.distributed_type == DistributedType.FSDP:
        plugin: Any = accelerator.state.fsdp_plugin
        return {"fsdp_version": plugin.fsdp_version, "reshards": plugin.reshard_after_forward}
    return {}


def train(model_folder: str, deepspeed_config: str | None = None) -> tuple[Accelerator, Report]:
    """Train two cycles.

    Args:
        model_folder: A model in bf16.
        deepspeed_config: A DeepSpeed configuration, for launchers that have none.

    Returns:
        The accelerator, and what was seen.
    """
    accelerator = cpu_accelerator(deepspeed_config)
    model: Any = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16)
    before = whole_weights(model)
    optimizer: Any = st.HiFT(model, torch.optim.AdamW, config=st.HiFTConfig.paper(), lr=0.05, weight_decay=0.0)
    num_updates = 2 * optimizer.cycle_length
    rows = torch.randint(
        0, model.config.vocab_size, (8 * num_updates, LENGTH), generator=torch.Generator().manual_seed(1)
    )
    loader: Any = DataLoader(list(rows), batch_size=BATCH)  # type: ignore[arg-type]
    model, optimizer, loader = st.prepare(accelerator, model, optimizer, loader)

    losses = []
    for ids in islice(loader, num_updates):
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))

    network = accelerator.unwrap_model(model)
    after = whole_weights(network)
    return accelerator, {
        "layout": layout_of(accelerator),
        "distributed_type": accelerator.distributed_type.value,
        "engine": type(model).__name__,
        "engine_facts": engine_facts(model, accelerator),
        "world_size": dist.get_world_size() if dist.is_initialized() else 1,
        "num_processes": accelerator.num_processes,
        "mixed_precision": accelerator.mixed_precision,
        "is_sharded": all(is_sharded(parameter) for parameter in network.parameters()),
        "dtypes": sorted({str(parameter.dtype) for parameter in network.parameters()}),
        "num_updates": num_updates,
        "losses": losses,
        "unchanged": [name for name, value in before.items() if torch.equal(value, after[name])],
        "weights": digest(after),
        "buffers": sorted({str(buffer.dtype) for buffer in network.buffers()}),
    }


def main(model_folder: str, deepspeed_config: str | None = None) -> None:
    """Train and report, as a script that a launcher starts.

    Args:
        model_folder: A model in bf16.
        deepspeed_config: A DeepSpeed configuration, for launchers that have none.
    """
    accelerator, seen = train(model_folder, deepspeed_config)
    report(accelerator.process_index, seen)
    accelerator.wait_for_everyone()
    accelerator.end_training()
    sys.stdout.flush()
    # Engines leave threads behind whose teardown has aborted processes after their work was done.
    os._exit(0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model_folder")
    parser.add_argument("deepspeed_config", nargs="?")
    parser.add_argument(
        "--local_rank", type=int, help="what the deepspeed launcher passes; the environment has it, too"
    )
    arguments = parser.parse_args()
    gc.freeze()  # DeepSpeed collects garbage for each optimizer, and would look through all modules
    main(arguments.model_folder, arguments.deepspeed_config)
