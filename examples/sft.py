"""SFT in an ordinary Accelerate loop: one weight in a hundred is trained, and the result is a small file of deltas.

    python examples/sft.py
    accelerate launch examples/sft.py

A byte-level Llama learns the Python language reference that ships inside Python; nothing is downloaded. Three lines are
SFT's. In the end the deltas are saved, the model is made anew, and the deltas are put on it and taken off again.
"""

import argparse
import itertools
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import slivertune as st  # SFT, line 1 of 3
from slivertune import deltas


def read_rows(length):
    """Read the language reference as bytes, in rows of `length`."""
    text = "\n".join(topics.values()).encode()
    tokens = torch.tensor(list(text[: len(text) // length * length])).view(-1, length)
    return [{"input_ids": row, "labels": row} for row in tokens]


def make_model(arguments):
    """Make a model with the same random weights every time."""
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
    return LlamaForCausalLM(config)


def main(arguments):
    """Train, save the deltas, and use them."""
    accelerator = Accelerator()
    model = make_model(arguments)
    config = st.SFTConfig(density=0.01, selection=arguments.selection)  # SFT, line 2 of 3
    optimizer = st.SFT(model, config=config, lr=1e-2, total_steps=arguments.steps)  # SFT, line 3 of 3
    rows = read_rows(arguments.length)
    loader = DataLoader(rows[64:], batch_size=8, shuffle=True, drop_last=True)
    held_out = DataLoader(rows[:64], batch_size=16)
    model, optimizer, loader, held_out = accelerator.prepare(model, optimizer, loader, held_out)

    @torch.no_grad()
    def evaluate(each):
        return sum(each(**batch).loss.item() for batch in held_out) / len(held_out)

    before = evaluate(model)
    for batch in itertools.islice(itertools.cycle(loader), arguments.steps):
        accelerator.backward(model(**batch).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    after = evaluate(model)

    trained = optimizer.optimizer  # under Accelerate's own wrapper
    with tempfile.TemporaryDirectory() as folder:
        trained.save_pretrained(folder)
        size = sum(path.stat().st_size for path in Path(folder).iterdir())
        fresh = make_model(arguments)
        with deltas.apply(fresh, folder):
            applied = evaluate(fresh)
        removed = evaluate(fresh)
    num_parameters = sum(parameter.numel() for parameter in fresh.parameters())
    accelerator.print(f"{trained.num_weights:,} of {num_parameters:,} weights trained; {size / 1e3:.1f} kB of deltas")
    accelerator.print(
        f"loss {before:.3f} before, {after:.3f} after; applied to a new model {applied:.3f}, removed {removed:.3f}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--length", type=int, default=128, help="bytes of a sequence")
    parser.add_argument("--selection", choices=("accumulated_gradient", "momentum"), default="accumulated_gradient")
    main(parser.parse_args())
