"""Tiny random models of forty-six `model_type`s that all three methods train, each with a batch.

`OTHERS` are models that TokenTune does not hook: encoder-decoders, and models of several towers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.tokentune.families import (
    BATCH,
    ENCODER,
    FAMILIES,
    GROUPED,
    HEADS,
    HIDDEN,
    LENGTH,
    NAMED,
    PAD,
    SIZES,
    VIT,
    VOCAB,
    Batch,
    Family,
    hf,
    make_batch,
    make_model,
)

_SEED = 1


@dataclass(frozen=True, kw_only=True)
class ModelType:
    """Functions that make a model and its batch."""

    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]


def _of_family(name: str) -> ModelType:
    family = FAMILIES[name]
    return ModelType(make=lambda: make_model(family), batch=lambda: make_batch(family))


def _of_class(
    model: str, config: str, batch: Callable[[], Batch], attention: str, options: dict[str, Any]
) -> ModelType:
    def build(_: str) -> nn.Module:
        made: nn.Module = getattr(hf, model)(getattr(hf, config)(**options, attn_implementation=attention))
        return made

    family = Family(build=build, layers="", cuts=(), makes_batch=batch)
    return ModelType(make=lambda: make_model(family, "any"), batch=batch)


def _ids(num_labels: int | None = None) -> Callable[[], Batch]:
    def batch() -> Batch:
        generator = torch.Generator().manual_seed(_SEED)
        ids = torch.randint(3, VOCAB, (BATCH, LENGTH), generator=generator)
        if num_labels is None:
            return {"input_ids": ids, "labels": ids}
        return {"input_ids": ids, "labels": torch.randint(0, num_labels, (BATCH,), generator=generator)}

    return batch


def _inputs(name: str, *shape: int) -> Callable[[], Batch]:
    def batch() -> Batch:
        generator = torch.Generator().manual_seed(_SEED)
        return {name: torch.randn(BATCH, *shape, generator=generator), "labels": torch.tensor([2, 0, 1])}

    return batch


def _encoder_decoder() -> Batch:
    generator = torch.Generator().manual_seed(_SEED)
    ids = torch.randint(3, VOCAB, (BATCH, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": torch.randint(3, VOCAB, (BATCH, 5), generator=generator)}


def _speech_and_text() -> Batch:
    return {**_inputs("input_features", 6, 20)(), "labels": _encoder_decoder()["labels"]}


def _decoder(name: str, attention: str = "sdpa", **options: Any) -> ModelType:
    return _of_class(f"{name}ForCausalLM", f"{name}Config", _ids(), attention, {**GROUPED, **options})


def _encoder(name: str, head: str = "SequenceClassification", **options: Any) -> ModelType:
    labels = None if head == "MaskedLM" else 3
    return _of_class(f"{name}For{head}", f"{name}Config", _ids(labels), "sdpa", {**ENCODER, **options})


def _vision(name: str, **options: Any) -> ModelType:
    batch = _inputs("pixel_values", 3, 8, 8)
    return _of_class(f"{name}ForImageClassification", f"{name}Config", batch, "sdpa", {**VIT, **options})


_MOE = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
_WAVES: dict[str, Any] = {
    **ENCODER,
    "hidden_dropout": 0.0,
    "activation_dropout": 0.0,
    "attention_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "final_dropout": 0.0,
    "layerdrop": 0.0,
    "mask_time_prob": 0.0,
    "conv_dim": (8, 8),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 8,
}
_WHISPER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": HIDDEN,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40,
    "num_mel_bins": 6,
    "max_source_positions": 10,
    "max_target_positions": 24,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "classifier_proj_size": 8,
    "num_labels": 3,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "use_cache": False,
}
_T5: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": HIDDEN,
    "d_kv": 8,
    "d_ff": 40,
    "num_layers": 2,
    "num_heads": HEADS,
    "dropout_rate": 0.0,
    "decoder_start_token_id": PAD,
    "pad_token_id": PAD,
    "eos_token_id": 1,
    "use_cache": False,
}
_BART: dict[str, Any] = {
    **{name: value for name, value in _WHISPER.items() if "mel" not in name and "max" not in name},
    "max_position_embeddings": 24,
}
_GEMMA4: dict[str, Any] = {
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size": 16,
    "hidden_size_per_layer_input": 8,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 2,
    "head_dim": 8,
    "global_head_dim": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "pad_token_id": PAD,
    "use_cache": False,
}
"""The last two blocks read the keys and values of earlier ones, which blocks pass on in a mapping."""
_BY_FAMILY = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "mistral": "mistral",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi": "phi",
    "mixtral": "mixtral",
    "gpt_oss": "gpt_oss",
    "deepseek_v2": "deepseek_v2",
    "deepseek_v3": "deepseek_v3",
    "glm4_moe_lite": "glm4_moe_lite",
    "minicpm3": "minicpm3",
    "gpt2": "gpt2",
    "opt": "opt",
    "gpt_neox": "gpt_neox",
    "gpt_neo": "gpt_neo",
    "falcon": "falcon, grouped",
    "bloom": "bloom",
    "bert": "bert, sequences",
    "roberta": "roberta, masked",
    "distilbert": "distilbert, sequences",
    "vit": "vit",
}
MODEL_TYPES: dict[str, ModelType] = {
    **{model_type: _of_family(name) for model_type, name in _BY_FAMILY.items()},
    "cohere": _decoder("Cohere"),
    "olmo2": _decoder("Olmo2"),
    "granite": _decoder("Granite"),
    "stablelm": _decoder("StableLm"),
    "starcoder2": _decoder("Starcoder2", residual_dropout=0.0, embedding_dropout=0.0),
    "smollm3": _decoder("SmolLM3"),
    "phi3": _decoder("Phi3"),
    "qwen3_moe": _decoder("Qwen3Moe", **NAMED, **_MOE),
    "olmoe": _decoder("Olmoe", **_MOE),
    "electra": _encoder("Electra", embedding_size=16),
    "xlm-roberta": _encoder("XLMRoberta", head="MaskedLM"),
    "camembert": _encoder("Camembert", head="MaskedLM"),
    "deit": _vision("DeiT"),
    "dinov2": _vision("Dinov2", mlp_ratio=1),
    "beit": _vision("Beit", drop_path_rate=0.0),
    "modernbert": _of_class("ModernBertForMaskedLM", "ModernBertConfig", _ids(), "sdpa", SIZES),
    "exaone4": _decoder("Exaone4", **NAMED),
    "wav2vec2": _of_class(
        "Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", _inputs("input_values", 200), "sdpa", _WAVES
    ),
    "hubert": _of_class(
        "HubertForSequenceClassification", "HubertConfig", _inputs("input_values", 200), "sdpa", _WAVES
    ),
    "whisper": _of_class(
        "WhisperForAudioClassification",
        "WhisperConfig",
        _inputs("input_features", 6, 20),
        "sdpa",
        {**_WHISPER, "is_encoder_decoder": False},
    ),
    "gemma4_text": _of_class("Gemma4ForCausalLM", "Gemma4TextConfig", _ids(), "sdpa", _GEMMA4),
    "audio-spectrogram-transformer": _of_class(
        "ASTForAudioClassification",
        "ASTConfig",
        _inputs("input_values", 12, 8),
        "sdpa",
        {**VIT, "num_mel_bins": 8, "max_length": 12, "patch_size": 4, "time_stride": 4, "frequency_stride": 4},
    ),
}
_LLAVA: dict[str, Any] = {
    "text_config": {**GROUPED, "model_type": "llama"},
    "vision_config": {**VIT, "model_type": "clip_vision_model", "projection_dim": 8, "patch_size": 4},
    "image_token_index": 2,
    "image_seq_length": 4,
    "vision_feature_select_strategy": "default",
    "vision_feature_layer": -2,
}


def _ids_and_pixels() -> Batch:
    generator = torch.Generator().manual_seed(_SEED)
    ids = torch.randint(3, VOCAB, (BATCH, LENGTH), generator=generator)
    ids[:, 1:5] = 2
    return {"input_ids": ids, "labels": ids, "pixel_values": torch.randn(BATCH, 3, 8, 8, generator=generator)}


OTHERS: dict[str, ModelType] = {
    "llava": _of_class("LlavaForConditionalGeneration", "LlavaConfig", _ids_and_pixels, "sdpa", _LLAVA),
    "t5": _of_class("T5ForConditionalGeneration", "T5Config", _encoder_decoder, "eager", _T5),
    "bart": _of_class("BartForConditionalGeneration", "BartConfig", _encoder_decoder, "sdpa", _BART),
    "whisper seq2seq": _of_class(
        "WhisperForConditionalGeneration", "WhisperConfig", _speech_and_text, "sdpa", _WHISPER
    ),
}
