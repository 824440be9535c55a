"""TokenTune beside any optimizer: a training loop, dense and with 30 % of the tokens, and what differs is printed.

    python examples/tokentune.py
    accelerate launch examples/tokentune.py

A byte-level Llama learns the Python language reference that ships inside Python; nothing is downloaded. Two lines are
TokenTune's; a third lets Accelerate save the state of its draws with everything else.
"""

import argparse
import itertools
import time
from pydoc_data.topics import topics

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import slivertune as st  # TokenTune, line 1 of 3
from slivertune.core.ledger import claim


def read_rows(length):
    """Read the language reference as bytes, in rows of `length`."""
    text = "\n".join(topics.values()).encode()
    tokens = torch.tensor(list(text[: len(text) // length * length])).view(-1, length)
    return [{"input_ids": row, "labels": row} for row in tokens]


def main(ratio, arguments):
    """Train with a share of the tokens, or with all, then print a line."""
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
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = read_rows(arguments.length)
    loader = DataLoader(rows[64:], batch_size=8, shuffle=True, drop_last=True)
    held_out = DataLoader(rows[:64], batch_size=16)
    model, optimizer, loader, held_out = accelerator.prepare(model, optimizer, loader, held_out)
    if ratio < 1:
        handle = st.TokenTune(ratio=ratio).attach(model)  # TokenTune, line 2 of 3
        accelerator.register_for_checkpointing(handle)  # TokenTune, line 3 of 3

    def train(num_steps):
        for batch in itertools.islice(itertools.cycle(loader), num_steps):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()

    start = time.perf_counter()
    train(arguments.steps)
    seconds = (time.perf_counter() - start) / arguments.steps
    model.eval()  # everything but training runs on all tokens
    with torch.no_grad():
        loss = sum(model(**batch).loss.item() for batch in held_out) / len(held_out)
    model.train()
    for value in itertools.chain.from_iterable(state.values() for state in optimizer.state.values()):
        claim(value, "state")
    with st.Ledger(accelerator.unwrap_model(model)) as ledger:
        train(2)
    accelerator.print(
        f"{ratio:4.0%} of the tokens  {seconds:.4f} seconds per step  loss {loss:.3f}  "
        f"activations at the peak {ledger.highest.residual / 1e6:.3f} MB"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--length", type=int, default=256, help="bytes of a sequence")
    parsed = parser.parse_args()
    main(1.0, parsed)
    main(0.3, parsed)
