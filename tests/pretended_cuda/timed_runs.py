"""HiFT on a model with the proportions of an 8B, by the pretended device's time and by the plan's formula.

Widths are 1/64 of Llama-3.1-8B's, so weights are 1/64^2 of its weights, and sequences have 1/16 of its tokens. The
card's bandwidths are 1/64^2 of an RTX 4090's, and its FLOP/s 1/16 of that: layers' computation, their copies and their
updates have the 8B's ratios. Then all rates are divided by 100, so that launches, which the formula does not count,
take next to nothing.
"""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from slivertune import HiFT, HiFTConfig
from slivertune.planning.cards import Rates
from slivertune.planning.make import make_plan
from slivertune.planning.time_formula import mean_update
from tests.helpers.plan_requests import paper_request

_WIDTH, _TOKENS, _SLOWER = 64, 16, 100
_SHARE = 1 / _WIDTH**2
RATES = {  # of an RTX 4090 at half its peak, and of what its bus reaches
    "flops": 165.2e12 / 2 * _SHARE / _TOKENS / _SLOWER,
    "memory_bandwidth": 1.008e12 * _SHARE / _SLOWER,
    "bus_bandwidth": 25e9 * _SHARE / _SLOWER,
}
_CYCLES = 3
"""Two in which state and its chunks come to their places, and one that is timed."""


def narrow_8b(num_blocks: int) -> LlamaConfig:
    """A Llama with the 8B's proportions."""
    return LlamaConfig(
        vocab_size=128_256 // _WIDTH,
        hidden_size=4096 // _WIDTH,
        intermediate_size=14_336 // _WIDTH,
        num_hidden_layers=num_blocks,
        num_attention_heads=4,
        num_key_value_heads=1,
        attn_implementation="eager",
        tie_word_embeddings=False,
        use_cache=False,
    )


def scaled(tokens: int, gib_ahead: float, **settings: Any) -> tuple[int, dict[str, Any]]:
    """The 8B's tokens and HiFT's settings, in this model's size; chunks have 256 MiB there."""
    sizes = {"prefetch_bytes": int(gib_ahead * 2**30 * _SHARE), "stream_bytes": int(2**28 * _SHARE)}
    return tokens // _TOKENS, {**sizes, **settings}


def timed(num_blocks: int, tokens: int, settings: dict[str, Any]) -> tuple[float, float]:
    """Seconds of an update on the device, and of those the exposed ones: means over a cycle."""
    from tests.pretended_cuda.virtual_time import Card, VirtualTime

    model: Any = LlamaForCausalLM(narrow_8b(num_blocks)).to("cuda", torch.bfloat16).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = HiFT(model, torch.optim.AdamW, lr=1e-4, fused=True, config=HiFTConfig.paper(**settings))
    ids = torch.randint(0, model.config.vocab_size, (1, tokens), device="cuda")
    marks = []
    with VirtualTime(Card(**RATES)) as time:
        for cycle in range(_CYCLES + 1):
            marks.append((time.of_stream(), time.busy_seconds("computation")))
            for _ in range(optimizer.cycle_length if cycle < _CYCLES else 0):
                loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
                loss.item()  # as the Trainer does
                optimizer.step()
                optimizer.zero_grad()
    assert not time.races
    (begin, before), (end, after) = marks[-2:]
    seconds = (end - begin) / optimizer.cycle_length
    return seconds, seconds - (after - before) / optimizer.cycle_length


def planned(num_blocks: int, tokens: int, settings: dict[str, Any]) -> float:
    """Exposed seconds of an update by the formula."""
    request = paper_request(
        method="hift",
        precision="mixed_hi",
        optimizer="adamw",
        seq_length=tokens,
        gradient_checkpointing=True,
        attn_implementation="eager",
        chunked_cross_entropy=False,
        **settings,
    )
    return sum(mean_update(make_plan(request, narrow_8b(num_blocks)), Rates(**RATES)).waiting.values())
