"""The figures of well-known models, so that they can be planned without a network; no weights.

Each table is what the model's `config.json` on the hub says about sizes; tests/planning/test_configs.py builds every
one without memory and compares its number of parameters with the published one.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class ShippedModel:
    """A model whose figures come with this library."""

    hub_id: str
    """Where its weights are, for the command that trains it; not looked at for a plan."""
    figures: dict[str, Any]
    """Arguments of `transformers.AutoConfig.for_model`."""


def _llama(
    *,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int,
    num_key_value_heads: int | None = None,
    vocabulary: int = 32000,
    max_positions: int = 4096,
    rope_theta: float = 10000.0,
) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocabulary,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads if num_key_value_heads is None else num_key_value_heads,
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": rope_theta,
        "tie_word_embeddings": False,
    }


def _llama_3(*, hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int) -> dict[str, Any]:
    return {
        **_llama(
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_key_value_heads=8,
            vocabulary=128256,
            max_positions=8192,
            rope_theta=500000.0,
        ),
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    }


def _roberta(*, hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int) -> dict[str, Any]:
    return {
        "model_type": "roberta",
        "architectures": ["RobertaForMaskedLM"],
        "vocab_size": 50265,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        # 512 positions, counted from the padding token's 1.
        "max_position_embeddings": 514,
        "type_vocab_size": 1,
        "layer_norm_eps": 1e-5,
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }


SHIPPED_MODELS: dict[str, ShippedModel] = {
    "llama-2-7b": ShippedModel(
        hub_id="meta-llama/Llama-2-7b-hf",
        figures=_llama(hidden_size=4096, intermediate_size=11008, num_layers=32, num_heads=32),
    ),
    "llama-2-13b": ShippedModel(
        hub_id="meta-llama/Llama-2-13b-hf",
        figures=_llama(hidden_size=5120, intermediate_size=13824, num_layers=40, num_heads=40),
    ),
    "llama-3-8b": ShippedModel(
        hub_id="meta-llama/Meta-Llama-3-8B",
        figures=_llama_3(hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32),
    ),
    "llama-3-70b": ShippedModel(
        hub_id="meta-llama/Meta-Llama-3-70B",
        figures=_llama_3(hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64),
    ),
    "qwen3-8b": ShippedModel(
        hub_id="Qwen/Qwen3-8B",
        figures={
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "attention_bias": False,
            "tie_word_embeddings": False,
        },
    ),
    "mistral-7b": ShippedModel(
        hub_id="mistralai/Mistral-7B-v0.1",
        figures={
            "model_type": "mistral",
            "architectures": ["MistralForCausalLM"],
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
        },
    ),
    "roberta-base": ShippedModel(
        hub_id="FacebookAI/roberta-base",
        figures=_roberta(hidden_size=768, intermediate_size=3072, num_layers=12, num_heads=12),
    ),
    "roberta-large": ShippedModel(
        hub_id="FacebookAI/roberta-large",
        figures=_roberta(hidden_size=1024, intermediate_size=4096, num_layers=24, num_heads=16),
    ),
    "gpt2-large": ShippedModel(
        hub_id="openai-community/gpt2-large",
        figures={
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "vocab_size": 50257,
            "n_positions": 1024,
            "n_embd": 1280,
            "n_layer": 36,
            "n_head": 20,
        },
    ),
    "gpt-neo-2.7b": ShippedModel(
        hub_id="EleutherAI/gpt-neo-2.7B",
        figures={
            "model_type": "gpt_neo",
            "architectures": ["GPTNeoForCausalLM"],
            "vocab_size": 50257,
            "max_position_embeddings": 2048,
            "hidden_size": 2560,
            "num_layers": 32,
            "num_heads": 20,
            "attention_types": [[["global", "local"], 16]],
            "window_size": 256,
        },
    ),
    "opt-13b": ShippedModel(
        hub_id="facebook/opt-13b",
        figures={
            "model_type": "opt",
            "architectures": ["OPTForCausalLM"],
            "vocab_size": 50272,
            "hidden_size": 5120,
            "ffn_dim": 20480,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
            "max_position_embeddings": 2048,
            "word_embed_proj_dim": 5120,
            "do_layer_norm_before": True,
        },
    ),
}
"""By the name that `slivertune plan --model` takes."""
