"""Configurations drawn from a seed: any model family, method, layout, precision and setting that go together."""

from dataclasses import dataclass
from random import Random
from typing import Any

from transformers import (
    BertConfig,
    GemmaConfig,
    GPT2Config,
    GPTBigCodeConfig,
    GPTNeoConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PhiConfig,
    PreTrainedConfig,
    Qwen3Config,
    RobertaConfig,
)

from slivertune.planning.request import PlanRequest
from tests.helpers.plan_requests import paper_request

HIDDEN, HEADS, LENGTH = 128, 4, 130
_PLAIN: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": HIDDEN,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": HEADS,
    "max_position_embeddings": LENGTH,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_GPT: dict[str, Any] = {
    "vocab_size": 512,
    "n_embd": HIDDEN,
    "n_inner": 256,
    "n_layer": 4,
    "n_head": HEADS,
    "n_positions": LENGTH,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_GPT_NO_DROPOUT: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_PLAIN),
    "llama, shared keys": LlamaConfig(**_PLAIN, num_key_value_heads=2),
    "mistral, window": MistralConfig(**_PLAIN, num_key_value_heads=2, sliding_window=24),
    "qwen3": Qwen3Config(**_PLAIN, num_key_value_heads=2, head_dim=32, tie_word_embeddings=True),
    "gemma": GemmaConfig(**_PLAIN, num_key_value_heads=1, head_dim=32),
    "phi": PhiConfig(**_PLAIN, resid_pdrop=0.0, embd_pdrop=0.0),
    "opt": OPTConfig(**_PLAIN, ffn_dim=256, word_embed_proj_dim=HIDDEN, dropout=0.0),
    "gpt2": GPT2Config(**_GPT, **_GPT_NO_DROPOUT),
    "gpt2, dropout": GPT2Config(**_GPT),
    "gpt_bigcode": GPTBigCodeConfig(**_GPT, **_GPT_NO_DROPOUT),
    "gpt_neo": GPTNeoConfig(
        **_PLAIN,
        num_layers=4,
        num_heads=HEADS,
        attention_types=[[["global", "local"], 2]],
        window_size=24,
        resid_dropout=0.0,
        embed_dropout=0.0,
        attention_dropout=0.0,
    ),
    "gpt_neox": GPTNeoXConfig(**_PLAIN),
    "roberta": RobertaConfig(**_PLAIN, **_NO_DROPOUT),
    "bert, dropout": BertConfig(**_PLAIN),
}
CLASSIFIERS = ("roberta", "bert, dropout")
_ON_RANKS = ("llama", "llama, shared keys", "qwen3", "gpt2")
_ON_FSDP2 = ("llama", "llama, shared keys")
"""Families whose blocks are those that `on_fsdp2_ranks` names."""
_IN_4BIT = ("llama", "llama, shared keys", "mistral, window", "qwen3", "gemma")
_PHASES = ((2, 100), (3, 5), (1, 2), (5, 0))
"""gamma and S of SFT by accumulated gradients."""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A configuration."""

    family: str
    request: PlanRequest

    @property
    def config(self) -> PreTrainedConfig:
        """The model."""
        return FAMILIES[self.family]

    @property
    def num_steps(self) -> int | None:
        """Updates that show all that SFT's phases and reselections hold; None for the default of another method."""
        steps, interval = self.request.estimation_steps, self.request.reselection_interval
        if self.request.method != "sft" or interval == 0:
            return None
        if not self.request.has_phases:
            return interval + 1
        return steps + 2 if interval > 2 * steps else 2 * interval - steps

    def __str__(self) -> str:
        defaults = paper_request()
        changed = {name: getattr(self.request, name) for name in self.request.__dataclass_fields__}
        told = [f"{name}={value}" for name, value in changed.items() if value != getattr(defaults, name)]
        return f"{self.family}: {' '.join(told)}"


def draw(random: Random, *, on_ranks: bool = False) -> Drawn:
    """Draw until something holds together.

    Args:
        random: Where from.
        on_ranks: Whether it runs on two ranks, by what can be run there: HiFT and SFT.
    """
    while True:
        layout = random.choice(("ddp", "fsdp2", "zero1", "zero2", "zero3")) if on_ranks else "single"
        families = {"single": tuple(FAMILIES), "fsdp2": _ON_FSDP2}.get(layout, _ON_RANKS)
        settings = _settings(random, family := random.choice(families), layout)
        try:
            return Drawn(family=family, request=paper_request(**settings))
        except ValueError:
            continue


def _settings(random: Random, family: str, layout: str) -> dict[str, Any]:
    method = random.choice(("hift", "sft") if layout != "single" else ("dense", "hift", "sft", "lora"))
    checkpointing = random.random() < 0.5
    settings: dict[str, Any] = {
        "kernels": "cpu",
        "method": method,
        "task": "classification" if family in CLASSIFIERS else "causal_lm",
        "precision": random.choice(("fp32", "mixed", "mixed_hi", "bf16")),
        "batch_size": random.choice((1, 2, 3)),
        "seq_length": random.choice((32, 64, 96)),
        "gradient_checkpointing": checkpointing,
        "chunked_cross_entropy": random.random() < 0.7,
        "token_ratio": random.choice((None, None, 0.3, 0.5)) if "dropout" not in family else None,
    }
    if method != "sft":
        settings["optimizer"] = random.choice(("adamw", "adamw", "adamw8bit", "sgd_momentum", "adafactor", "adagrad"))
    if method == "hift":
        settings |= {
            "layers_per_group": random.choice((1, 1, 2, 6)),
            "state": random.choice(("host", "host", "device", "discard")),
            "stream_bytes": random.choice((0, 2**17, 2**18, 2**27)),
            "gradients": random.choice(("device", "host", "stepped")),
        }
    elif method == "sft":
        settings |= {
            "density": random.choice((0.02, 0.1, 0.3)),
            "selection": random.choice(("accumulated_gradient", "momentum")),
        }
        if settings["selection"] == "momentum":
            settings["reselection_interval"] = random.choice((2, 4, 0))
        else:
            settings["estimation_steps"], settings["reselection_interval"] = random.choice(_PHASES)
    elif method == "lora":
        settings["lora_rank"] = random.choice((4, 16, 64))
    if layout != "single":
        return settings | _on_two_ranks(random, method, layout)
    settings["gradient_accumulation_steps"] = random.choice((1, 1, 1, 2))
    settings["keep_activations"] = random.choice((0, 0, 2)) if checkpointing else 0
    settings["load_in_4bit"] = method in ("lora", "sft") and family in _IN_4BIT and random.random() < 0.4
    return settings | _for_long_sequences(Random(str(settings)), family, is_checkpointed=checkpointing)


def _for_long_sequences(random: Random, family: str, *, is_checkpointed: bool) -> dict[str, Any]:
    """Settings with a generator of their own, so that all else is drawn as it was."""
    return {
        "offload_activations": is_checkpointed and random.random() < 0.5,
        # OPT has no module for its MLP.
        "token_tile_size": random.choice((None, None, 24)) if family != "opt" else None,
    }


def _on_two_ranks(random: Random, method: str, layout: str) -> dict[str, Any]:
    """What takes the place of a setting there: tests/planning/layout_runs.py runs neither all of them nor autocast."""
    settings: dict[str, Any] = {
        "layout": layout,
        "num_gpus": 2,
        "token_ratio": None,
        "precision": random.choice(("mixed_hi", "bf16", "fp32")),
    }
    if method == "hift":
        settings |= {"optimizer": "adamw", "state": "host", "gradients": "device"}
    else:
        settings |= {"selection": "accumulated_gradient", "estimation_steps": 2, "reselection_interval": 100}
    return settings | ({"chunked_cross_entropy": False} if layout in ("fsdp2", "zero3") else {})


def draw_all(seed: int, *, num_alone: int, num_on_ranks: int) -> tuple[list[Drawn], list[Drawn]]:
    """All configurations: on one device, and on two ranks.

    Args:
        seed: Decides all of them.
        num_alone: On one device.
        num_on_ranks: On two ranks.
    """
    random = Random(seed)
    alone = [draw(random) for _ in range(num_alone)]
    return alone, [draw(random, on_ranks=True) for _ in range(num_on_ranks)]
