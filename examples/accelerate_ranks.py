"""HiFT on several ranks: an Accelerate loop under DDP, FSDP2 or ZeRO, saved in the middle, resumed, and saved whole.

    accelerate launch --config_file $(slivertune path ddp) examples/accelerate_ranks.py
    torchrun --nproc_per_node 2 examples/accelerate_ranks.py

The second works without a GPU as well. `slivertune.prepare` stands in place of `accelerator.prepare`; every layout then
makes the updates that one process would make on the whole batch. A byte-level Llama learns the Python language
reference that ships inside Python; nothing is downloaded.
"""

import argparse
import itertools
from pathlib import Path
from pydoc_data.topics import topics

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, get_scheduler

import slivertune as st


def read_rows(length):
    """Read the language reference as bytes, in rows of `length`."""
    text = "\n".join(topics.values()).encode()
    tokens = torch.tensor(list(text[: len(text) // length * length])).view(-1, length)
    return [{"input_ids": row, "labels": row} for row in tokens]


def prepared(arguments):
    """Everything that trains, made anew and prepared."""
    accelerator = Accelerator(cpu=not torch.accelerator.is_available())
    torch.manual_seed(0)  # the same weights, or at least the same new ones, on every rank
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=arguments.hidden,
        intermediate_size=2 * arguments.hidden,
        num_hidden_layers=arguments.blocks,
        num_attention_heads=4,
        max_position_embeddings=arguments.length,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    optimizer = st.HiFT(model, torch.optim.AdamW, config=st.HiFTConfig.paper(), lr=3e-3)
    rows = read_rows(arguments.length)
    loader = DataLoader(rows[64:], batch_size=4, shuffle=True, drop_last=True)
    held_out = DataLoader(rows[:64], batch_size=8)
    # The wrapped scheduler ticks once a rank in each step.
    num_ticks = arguments.steps * accelerator.num_processes
    scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=0, num_training_steps=num_ticks)
    return accelerator, *st.prepare(accelerator, model, optimizer, loader, held_out, scheduler)  # the line that differs


def train(accelerator, model, optimizer, loader, scheduler, num_steps):
    """Train in an ordinary loop: every rank sees other rows."""
    for batch in itertools.islice(itertools.cycle(loader), num_steps):
        accelerator.backward(model(**batch).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


@torch.no_grad()
def evaluated(accelerator, model, held_out):
    """Compute the mean loss of the held-out rows over all ranks."""
    losses = [model(**batch).loss for batch in held_out]
    return accelerator.gather(torch.stack(losses)).mean().item()


def main(arguments):
    """Train half of the steps, save, train the other half from what was saved."""
    accelerator, model, optimizer, loader, held_out, scheduler = prepared(arguments)
    begin = evaluated(accelerator, model, held_out)
    train(accelerator, model, optimizer, loader, scheduler, arguments.steps // 2)
    half = evaluated(accelerator, model, held_out)
    accelerator.save_state(arguments.folder / "half")
    accelerator.wait_for_everyone()

    accelerator.free_memory()
    accelerator, model, optimizer, loader, held_out, scheduler = prepared(arguments)
    accelerator.load_state(arguments.folder / "half")
    resumed = evaluated(accelerator, model, held_out)
    train(accelerator, model, optimizer, loader, scheduler, arguments.steps - arguments.steps // 2)
    end = evaluated(accelerator, model, held_out)
    state_dict = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(
        arguments.folder / "model", is_main_process=accelerator.is_main_process, state_dict=state_dict
    )
    accelerator.print(
        f"{accelerator.distributed_type.value}, {accelerator.num_processes} ranks, {arguments.steps} steps: "
        f"loss {begin:.4f} at first, {half:.4f} half way, {resumed:.4f} resumed, {end:.4f} at the end"
    )
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--length", type=int, default=128, help="bytes of a sequence")
    parser.add_argument("--folder", type=Path, default=Path("ranks"), help="where the checkpoint and the model go")
    main(parser.parse_args())
