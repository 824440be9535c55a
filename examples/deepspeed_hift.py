"""HiFT on bare DeepSpeed: two lines differ from `deepspeed.initialize`, and what a rank holds is printed.

    deepspeed --num_gpus 2 examples/deepspeed_hift.py --stage 3
    torchrun --nproc_per_node 2 examples/deepspeed_hift.py --stage 2

A byte-level Llama learns the Python language reference that ships inside Python; nothing is downloaded. Without a GPU:
`DS_ACCELERATOR=cpu`. Started again with the same folder, it goes on where it ended.
"""

import argparse
import itertools
import time
from pathlib import Path
from pydoc_data.topics import topics

import deepspeed
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import slivertune as st


def read_rows(length):
    """Read the language reference as bytes, in rows of `length`."""
    text = "\n".join(topics.values()).encode()
    tokens = torch.tensor(list(text[: len(text) // length * length])).view(-1, length)
    return [{"input_ids": row, "labels": row} for row in tokens]


def main(arguments):
    """Train, or go on training; save the run, and the model as anyone can load it."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=arguments.hidden,
            intermediate_size=2 * arguments.hidden,
            num_hidden_layers=arguments.blocks,
            num_attention_heads=4,
            max_position_embeddings=arguments.length,
            use_cache=False,
        )
    )
    optimizer = st.HiFT(model, torch.optim.AdamW, config=st.HiFTConfig(steps_per_group=2), lr=3e-3)  # HiFT, line 1 of 2
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "zero_optimization": {
            "stage": arguments.stage,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": arguments.steps, "warmup_num_steps": 4},
        },
    }
    engine, optimizer, loader, _ = st.initialize(  # HiFT, line 2 of 2
        model=model, optimizer=optimizer, config=config, training_data=read_rows(arguments.length)
    )
    folder = Path(arguments.folder)
    if (folder / "latest").exists():
        engine.load_checkpoint(folder)
    start = time.perf_counter()
    for batch in itertools.islice(itertools.cycle(loader), arguments.steps):
        loss = engine(**{key: value.to(engine.device) for key, value in batch.items()}).loss
        engine.backward(loss)
        engine.step()
    seconds = (time.perf_counter() - start) / arguments.steps
    engine.save_checkpoint(folder)
    engine.save_16bit_model(folder / "model", "pytorch_model.bin")

    schedule = engine.hift_schedule
    on_host = sum(schedule.movers[group].host_bytes() for group in range(optimizer.num_groups))
    if dist.get_rank() == 0:
        print(
            f"ZeRO-{arguments.stage} on {dist.get_world_size()} ranks  {optimizer.updates} updates  loss {loss:.3f}  "
            f"{seconds:.4f} seconds per step  on a rank: masters and state on the device "
            f"{schedule.movers[schedule.active].device_bytes() / 1e6:.3f} MB, on the host {on_host / 1e6:.3f} MB"
        )
        model.config.save_pretrained(folder / "model")
        loaded = AutoModelForCausalLM.from_pretrained(folder / "model")
        print(f"{sum(parameter.numel() for parameter in loaded.parameters()):,} weights load without slivertune")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", type=int, default=2, choices=(1, 2, 3), help="of ZeRO")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--length", type=int, default=128, help="bytes of a sequence")
    parser.add_argument("--folder", default="deepspeed_hift", help="of the checkpoint and the model")
    parser.add_argument("--local_rank", type=int, default=0, help="from DeepSpeed's launcher")
    main(parser.parse_args())
    deepspeed.comm.destroy_process_group()
