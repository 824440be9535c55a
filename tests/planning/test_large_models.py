"""Models too large for this machine: what their plans must stay under, and what a plan itself may cost."""

import resource
import time
from typing import Any

import pytest
from transformers import LlamaConfig

from slivertune.planning.make import make_plan
from slivertune.planning.request import PlanRequest

pytestmark = pytest.mark.slow

GB, GIB = 10**9, 2**30

LLAMA_2_7B = LlamaConfig()  # its defaults are those of the 7B model
LLAMA_3_8B = LlamaConfig(intermediate_size=14336, num_key_value_heads=8, vocab_size=128256)
LLAMA_3_70B = LlamaConfig(
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    vocab_size=128256,
)


def hift(**settings: Any) -> PlanRequest:
    return PlanRequest(precision="mixed_hi", gradient_checkpointing=True, **settings)


def most_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize(
    ("config", "settings", "limit"),
    [
        (LLAMA_2_7B, {"seq_length": 512}, 14.3 * GB),
        (LLAMA_2_7B, {"seq_length": 512, "step_in_backward": True}, 13.9 * GB),
        (LLAMA_3_8B, {"batch_size": 2, "seq_length": 2048}, 17.3 * GIB),
        (LLAMA_2_7B, {"seq_length": 16384}, 24 * GIB),
    ],
    ids=["7b", "7b-step-in-backward", "8b-long", "7b-longest"],
)
def test_full_parameter_training_fits_where_it_must(config: Any, settings: Any, limit: float) -> None:
    plan = make_plan(hift(**settings), config)
    assert sum(len(group.indices) for group in plan.groups) == 34, "every layer trains"
    assert plan.peak_bytes <= limit


def test_a_plan_of_70b_costs_blocks_times_that_of_8b_and_less_than_4_gb() -> None:
    # Time of this process alone, which other work does not stretch, and as a ratio, whatever the machine; 80 blocks
    # against 32, so that what is linear in them takes 2.5 times as long, and what is quadratic six times. Memory,
    # unless other tests took more before.
    make_plan(hift(), LlamaConfig(num_hidden_layers=2))  # what is imported once does not count
    start, before = time.process_time(), most_memory()
    make_plan(hift(), LLAMA_3_8B)
    middle = time.process_time()
    plan = make_plan(hift(), LLAMA_3_70B)
    assert time.process_time() - middle < 5 * (middle - start)
    assert most_memory() <= max(before, 4 * GB)
    assert plan.num_parameters == pytest.approx(70.55e9, rel=1e-3)
    assert plan.peak_bytes > 2 * plan.num_parameters
