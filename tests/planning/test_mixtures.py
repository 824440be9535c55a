"""Mixtures of experts and hybrids with Mamba: the plan of a tiny one against a real run of it, and what has no plan.

Every head of queries has keys of its own, since a CPU and a GPU take different kernels in fp32 otherwise.
"""

from itertools import product
from typing import Any

import pytest
from transformers import (
    DeepseekV3Config,
    FalconH1Config,
    Gemma3nTextConfig,
    Gemma4TextConfig,
    Glm4MoeConfig,
    GptOssConfig,
    JambaConfig,
    JetMoeConfig,
    Mamba2Config,
    MambaConfig,
    MixtralConfig,
    NemotronHConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from slivertune.planning.make import make_plan
from tests.helpers.plan_requests import paper_request
from tests.helpers.ranks import quick
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
DECODER = {name: value for name, value in SIZES.items() if name != "num_experts_per_tok"} | {"intermediate_size": 256}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
GEMMA = {
    **DECODER,
    "head_dim": 32,
    "vocab_size_per_layer_input": 512,
    "hidden_size_per_layer_input": 32,
    "num_kv_shared_layers": 1,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
}
"""A second embedding, whose rows are added in each block."""
OTHERS: dict[str, PreTrainedConfig] = {
    "qwen3_next": Qwen3NextConfig(
        **DECODER,
        **EXPERTS,
        head_dim=32,
        num_experts=8,
        shared_expert_intermediate_size=64,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        layer_types=["linear_attention", "linear_attention", "full_attention"],
    ),
    "jamba": JambaConfig(
        **DECODER,
        num_experts=4,
        num_experts_per_tok=2,
        attn_layer_period=3,
        attn_layer_offset=2,
        expert_layer_period=2,
        expert_layer_offset=1,
        mamba_d_state=8,
    ),
    "nemotron_h": NemotronHConfig(
        **{name: value for name, value in DECODER.items() if name != "num_hidden_layers"},
        **EXPERTS,
        head_dim=32,
        layers_block_type=["mamba", "attention", "moe"],
        mamba_num_heads=8,
        mamba_head_dim=32,
        ssm_state_size=16,
        n_groups=2,
        chunk_size=32,
        n_routed_experts=8,
        moe_shared_expert_intermediate_size=64,
    ),
    "falcon_h1": FalconH1Config(
        **DECODER,
        head_dim=32,
        mamba_d_ssm=256,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_d_state=16,
        mamba_chunk_size=32,
    ),
    "glm4_moe": Glm4MoeConfig(
        **DECODER, **EXPERTS, head_dim=32, n_routed_experts=8, first_k_dense_replace=1, n_group=1, topk_group=1
    ),
    "mamba": MambaConfig(vocab_size=512, hidden_size=128, num_hidden_layers=3, state_size=8),
    "mamba2": Mamba2Config(
        vocab_size=512,
        hidden_size=128,
        num_hidden_layers=3,
        num_heads=8,
        head_dim=32,
        state_size=16,
        n_groups=2,
        chunk_size=32,
    ),
    "gemma3n": Gemma3nTextConfig(**GEMMA, laurel_rank=8, activation_sparsity_pattern=[0.0] * 3),
    "gemma4": Gemma4TextConfig(**GEMMA, global_head_dim=32),
}
SCALES_LOGITS = frozenset({"falcon_h1", "gemma3n"})
"""Models whose loss can't be chunked."""
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
NOT_OF_OTHERS = frozenset({"tokens", "lora in 4 bits"})
WITHOUT_ATTENTION = frozenset({"mamba", "mamba2"})
"""SFT asks there for the names of its targets."""
OF_OTHERS = [
    (model, run)
    for model, run in product(OTHERS, RUNS)
    if run not in NOT_OF_OTHERS and (run != "sft" or model not in WITHOUT_ATTENTION)
]
QUICK = [("qwen3_moe", "dense"), ("gpt_oss", "lora"), ("mamba2", "lora in bf16"), ("qwen3_next", "hift")]


@pytest.mark.parametrize(
    ("model", "run"),
    quick([*product(MIXTURES, RUNS), *OF_OTHERS], QUICK),
)
def test_a_model_of_experts_or_of_several_kinds_of_blocks_is_as_planned(model: str, run: str) -> None:
    chunked, config = model not in SCALES_LOGITS, {**MIXTURES, **OTHERS}[model]
    request = paper_request(batch_size=2, seq_length=64, chunked_cross_entropy=chunked, **RUNS[run])
    real = run_for_real(request, config).peak
    plan = make_plan(request, config)
    assert plan.peak_bytes == pytest.approx(real.device, rel=TOLERANCE), (plan.peak, real)


def test_experts_that_are_looked_up_one_by_one_are_refused_with_the_way_out() -> None:
    config = JetMoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_key_value_heads=2, kv_channels=16
    )
    with pytest.raises(ValueError, match=r"not those .* one expert after the other\. .* with the memory ledger"):
        make_plan(paper_request(method="dense", seq_length=16), config)
