"""Tiny bases and random adapters, and what a merge of them must be: summed by hand in fp64."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    SiglipConfig,
    SiglipForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

PREFIX = "base_model.model."
_PARTS = ("lora_A.weight", "lora_embedding_A", "token_adapter.trainable_tokens_delta")


def config(**more: Any) -> LlamaConfig:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaConfig(**{"vocab_size": 64, "num_hidden_layers": 2, "pad_token_id": 0, **sizes, **more})


def save_base(folder: Path, dtype: torch.dtype = torch.float32, **more: Any) -> Path:
    torch.manual_seed(0)
    LlamaForCausalLM(config(**more)).to(dtype).save_pretrained(folder)
    return folder


def _mixtral(tie: bool) -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    experts = {"num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    return MixtralForCausalLM(MixtralConfig(vocab_size=64, tie_word_embeddings=tie, **sizes, **experts))


def _gpt_oss(tie: bool) -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    experts = {"num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    return GptOssForCausalLM(GptOssConfig(vocab_size=64, pad_token_id=0, tie_word_embeddings=tie, **sizes, **experts))


def _siglip(tie: bool) -> nn.Module:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    return SiglipForImageClassification(
        SiglipConfig(vision_config={"image_size": 8, "patch_size": 4, **sizes}, text_config=sizes, num_labels=3)
    )


def _gpt2(tie: bool) -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=32, tie_word_embeddings=tie)
    )


def _bert(tie: bool) -> nn.Module:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    return BertForMaskedLM(BertConfig(vocab_size=64, tie_word_embeddings=tie, **sizes))


def _t5(tie: bool) -> nn.Module:
    sizes = {"d_model": 32, "d_ff": 48, "d_kv": 16, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=64, decoder_start_token_id=0, **sizes))


def _vit(tie: bool) -> nn.Module:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    return ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_labels=3, **sizes))


def _whisper(tie: bool) -> nn.Module:
    sizes = {"d_model": 32, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    lengths = {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    return WhisperForConditionalGeneration(WhisperConfig(vocab_size=64, **sizes, **layers, **lengths, **ids))


BASES: dict[str, Any] = {
    "llama": lambda tie: LlamaForCausalLM(config(tie_word_embeddings=tie)),
    "mixtral": _mixtral,
    "gpt2": _gpt2,
    "gpt_oss": _gpt_oss,
    "siglip": _siglip,
    "bert": _bert,
    "t5": _t5,
    "vit": _vit,
    "whisper": _whisper,
}
"""Makes a model of each architecture, with its embeddings tied or not."""


def save_adapter(folder: Path, model: Any, **more: Any) -> Path:
    """An adapter with random weights, also in what was trained whole, in biases and in rows of tokens."""
    torch.manual_seed(1)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    adapted = get_peft_model(model, LoraConfig(**{**settings, "init_lora_weights": False, **more}))
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad and "lora_A" not in name and "lora_B" not in name and "lora_embedding" not in name:
            with torch.no_grad():
                # A magnitude of DoRA stays near the norm that it begins with.
                parameter.mul_(1 + 0.1 * torch.rand_like(parameter)).add_(0.01 * torch.randn_like(parameter))
        if "modules_to_save" in name:
            nn.init.normal_(parameter)
    adapted.save_pretrained(folder)
    return folder


def naive_merge(base: Mapping[str, torch.Tensor], adapter: Path, tied: Sequence[str] = ()) -> dict[str, torch.Tensor]:
    """Merge by hand.

    Args:
        base: The base's tensors by all their names, as many times as they are tied.
        adapter: Folder of the adapter.
        tied: Names of the tied embeddings, which are resized together, and whose tokens PEFT trains together.

    Returns:
        Every tensor in fp64, not rounded.
    """
    said = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    stored = load_file(adapter / "adapter_model.safetensors")
    tensors = {name.removeprefix(PREFIX): each for name, each in stored.items()}
    merged = {name: each.double() for name, each in base.items()}
    for name, tensor in tensors.items():
        whole = re.sub(r"\.(token_adapter\.base_layer|base_layer|original_module)\.", ".", name)
        if whole in merged and (name == whole or whole not in tensors):
            is_one = whole in tied and (said["ensure_weight_tying"] or len(tensor) != len(base[whole]))
            for each in tied if is_one and not tensors.keys() >= set(tied) else [whole]:
                merged[each] = tensor.double()
    for name, tensor in tensors.items():
        if name.endswith(".lora_B.bias"):
            path = name.removesuffix(".lora_B.bias")
            merged[f"{path}.bias"] = merged[f"{path}.bias"] + _scale(path, said)[1] * tensor.double()
        part = next((each for each in _PARTS if name.endswith(f".{each}")), None)
        if part is None:
            continue
        path = name.removesuffix(f".{part}")
        if part == _PARTS[2]:
            rows = said["trainable_token_indices"]
            rows = rows if isinstance(rows, list) else rows[path.rpartition(".")[2]]
            for each in tied if f"{path}.weight" in tied else [f"{path}.weight"]:
                merged[each] = merged[each].index_copy(0, torch.tensor(rows), tensor.double())
            continue
        other = tensors[name.replace("_A", "_B")].double()
        target = f"{path}.weight" if f"{path}.weight" in merged else _parameter_of(path, said, merged)
        merged[target] = _sum(merged[target], tensor.double(), other, path, tensors, said)
    return merged


def _sum(
    weight: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    path: str,
    tensors: Mapping[str, torch.Tensor],
    said: Mapping[str, Any],
) -> torch.Tensor:
    rank, scale = _scale(path, said)
    if weight.ndim == 3 and b.ndim == 2:
        # Rows of A: the ranks of one expert after those of another; columns of B: the experts of each rank.
        num_experts = len(weight)
        pairs = ((a[e * rank : (e + 1) * rank], b[:, e::num_experts]) for e in range(num_experts))
        deltas = torch.stack([scale * (each_b @ each_a) for each_a, each_b in pairs])
        return weight + (deltas if deltas.shape == weight.shape else deltas.mT)
    delta = scale * (b.flatten(1) @ a.flatten(1))
    # A convolution's factors are one of its own size, and one of a single point.
    delta = delta.reshape(weight.shape) if b.ndim > 2 else delta
    # An embedding's factors, and those of a Conv1D of GPT-2, are of its transpose.
    is_turned = f"{path}.lora_embedding_A" in tensors or said["fan_in_fan_out"]
    total = weight + (delta.T if is_turned else delta)
    magnitude = next((each for key, each in tensors.items() if key.startswith(f"{path}.lora_magnitude_vector")), None)
    if magnitude is None:
        return total
    norms = total.norm(dim=0) if is_turned else total.flatten(1).norm(dim=1)
    factors = magnitude.double().flatten() / norms
    return total * (factors if is_turned else factors.view(-1, *[1] * (total.ndim - 1)))


def _scale(path: str, said: Mapping[str, Any]) -> tuple[int, float]:
    """The rank, and what the product of the factors is multiplied by."""
    rank = _of_pattern(said["rank_pattern"], path, said["r"])
    alpha = _of_pattern(said["alpha_pattern"], path, said["lora_alpha"])
    return rank, alpha / (math.sqrt(rank) if said["use_rslora"] else rank)


def _of_pattern(patterns: Mapping[str, int], path: str, default: int) -> int:
    found = [value for key, value in patterns.items() if re.fullmatch(rf"(.*\.)?{key}", path)]
    return found[0] if found else default


def _parameter_of(path: str, said: Mapping[str, Any], merged: Mapping[str, torch.Tensor]) -> str:
    """Targeted parameters of a module are wrapped one in the other, as it registers them: gate_up_proj, down_proj."""
    module, depth = path.replace(".base_layer", ""), path.count(".base_layer")
    names = [each.rpartition(".")[2] for each in sorted(said["target_parameters"], reverse=True)]
    return f"{module}.{names[::-1][depth]}" if len(names) > 1 else f"{module}.{names[0]}"


def half_spacing(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Half the distance of neighbouring numbers of a dtype: the most by which one rounding moves a value."""
    exponents = torch.frexp(exact).exponent.double()
    return torch.exp2(exponents) * torch.finfo(dtype).eps / 4
