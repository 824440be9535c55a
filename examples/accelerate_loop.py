"""An ordinary Accelerate loop, dense and with HiFT: three lines differ, and what they change is printed.

    python examples/accelerate_loop.py
    accelerate launch examples/accelerate_loop.py

A byte-level Llama learns the Python language reference that ships inside Python; nothing is downloaded. HiFT trains one
layer in each step, so it is given twice the steps, at a higher learning rate.
"""

import argparse
import itertools
import time
from pydoc_data.topics import topics

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, get_scheduler

import slivertune as st  # HiFT, line 1 of 3
from slivertune.core.ledger import claim


def read_rows(length):
    """Read the language reference as bytes, in rows of `length`."""
    text = "\n".join(topics.values()).encode()
    tokens = torch.tensor(list(text[: len(text) // length * length])).view(-1, length)
    return [{"input_ids": row, "labels": row} for row in tokens]


def main(method, steps, arguments):
    """Train by one method, then print its line."""
    accelerator = Accelerator()
    torch.manual_seed(0)
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
    if method == "dense":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    else:
        config = st.HiFTConfig.paper()  # HiFT, line 2 of 3
        optimizer = st.HiFT(model, torch.optim.AdamW, config=config, lr=3e-3)  # HiFT, line 3 of 3
    rows = read_rows(arguments.length)
    loader = DataLoader(rows[64:], batch_size=8, shuffle=True, drop_last=True)
    held_out = DataLoader(rows[:64], batch_size=16)
    scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=0, num_training_steps=steps)
    model, optimizer, loader, held_out, scheduler = accelerator.prepare(model, optimizer, loader, held_out, scheduler)

    def train(num_steps):
        for batch in itertools.islice(itertools.cycle(loader), num_steps):
            accelerator.backward(model(**batch).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    start = time.perf_counter()
    train(steps)
    seconds = (time.perf_counter() - start) / steps
    with torch.no_grad():
        loss = sum(model(**batch).loss.item() for batch in held_out) / len(held_out)

    # Bytes on the device are counted over further steps, one for every layer, since counting takes time.
    for value in itertools.chain.from_iterable(state.values() for state in optimizer.state.values()):
        claim(value, "state")  # the dense optimizer's; HiFT says by itself what is state
    with st.Ledger(accelerator.unwrap_model(model)) as ledger:
        train(arguments.blocks + 2)
    highest = ledger.highest
    accelerator.print(
        f"{method:5}  {steps:4d} steps  {seconds:.4f} seconds per step  loss {loss:.3f}  on the device: "
        f"gradients {highest.gradients / 1e6:.3f} MB, optimizer state {highest.state / 1e6:.3f} MB"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="steps of dense training; HiFT does twice as many")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--length", type=int, default=128, help="bytes of a sequence")
    parsed = parser.parse_args()
    main("dense", parsed.steps, parsed)
    main("hift", 2 * parsed.steps, parsed)
