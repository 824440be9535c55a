"""Mixtures of experts: the plan of a tiny one against a real run of it, and what has no plan.

Every head of queries has keys of its own, since a CPU and a GPU take different kernels in fp32 otherwise.
"""

from typing import Any

import pytest
from transformers import (
    DeepseekV3Config,
    GptOssConfig,
    JetMoeConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

from slivertune.planning.make import make_plan
from tests.helpers.plan_requests import paper_request
from tests.planning.real import run_for_real

TOLERANCE = 0.03
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
}
MIXTURES: dict[str, PreTrainedConfig] = {
    "mixtral": MixtralConfig(**SIZES, intermediate_size=256, num_local_experts=4),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, moe_intermediate_size=64, num_experts=8, head_dim=32),
    "gpt_oss": GptOssConfig(
        **SIZES,
        intermediate_size=128,
        num_local_experts=4,
        head_dim=32,
        sliding_window=32,
        rope_parameters={"rope_type": "default", "rope_theta": 150000.0},
    ),
    # One dense block, then experts behind a choice among groups of them; queries and keys of 16 + 16 numbers a head.
    "deepseek_v3": DeepseekV3Config(
        **SIZES,
        intermediate_size=256,
        moe_intermediate_size=64,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=64,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=32,
    ),
}
RUNS: dict[str, dict[str, Any]] = {
    "dense": {"method": "dense"},
    "dense under autocast": {"method": "dense", "precision": "mixed"},
    "hift": {"method": "hift"},
    "hift with masters": {
        "method": "hift",
        "precision": "mixed_hi",
        "gradient_checkpointing": True,
        "stream_bytes": 2**18,
    },
    "lora": {"method": "lora"},
    "lora in bf16": {"method": "lora", "precision": "bf16"},
    "lora in 4 bits": {"method": "lora", "load_in_4bit": True},
    "sft": {"method": "sft", "density": 0.05, "precision": "bf16", "estimation_steps": 2, "reselection_interval": 100},
    "tokens": {"method": "dense", "token_ratio": 0.3},
}
QUICK = [("qwen3_moe", "dense"), ("gpt_oss", "lora")]


@pytest.mark.parametrize(
    ("model", "run"),
    [
        pytest.param(model, run, marks=() if (model, run) in QUICK else pytest.mark.slow)
        for model in MIXTURES
        for run in RUNS
    ],
)
def test_a_mixture_of_experts_is_as_planned(model: str, run: str) -> None:
    request = paper_request(batch_size=2, seq_length=64, **RUNS[run])
    real = run_for_real(request, MIXTURES[model]).peak
    plan = make_plan(request, MIXTURES[model])
    assert plan.peak_bytes == pytest.approx(real.device, rel=TOLERANCE), (plan.peak, real)


def test_experts_that_are_looked_up_one_by_one_are_refused_with_the_way_out() -> None:
    config = JetMoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_key_value_heads=2, kv_channels=16
    )
    with pytest.raises(ValueError, match=r"not those .* one expert after the other\. .* with the memory ledger"):
        make_plan(paper_request(method="dense", seq_length=16), config)
