"""Tiny random models of many architectures, and which of their parameters are embedding and which are head."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import nn

Batch = dict[str, torch.Tensor]

hf: Any = transformers  # half of its classes carry types

VOCAB, HIDDEN, BLOCKS = 32, 16, 2
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 2,
}
ENCODER: dict[str, Any] = {**SIZES, "intermediate_size": 24, "max_position_embeddings": 24}
DECODER: dict[str, Any] = {**ENCODER, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0}
GPT2: dict[str, Any] = {"vocab_size": VOCAB, "n_embd": HIDDEN, "n_layer": BLOCKS, "n_head": 2, "n_positions": 24}
GPT_NEO: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_layers": BLOCKS,
    "num_heads": 2,
    "attention_types": [[["global", "local"], 1]],
    "max_position_embeddings": 24,
}
OPT: dict[str, Any] = {**SIZES, "ffn_dim": 24, "max_position_embeddings": 24}
BLOOM: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "n_layer": BLOCKS, "n_head": 2}
DISTILBERT: dict[str, Any] = {"vocab_size": VOCAB, "dim": HIDDEN, "n_layers": BLOCKS, "n_heads": 2, "hidden_dim": 24}
T5: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": HIDDEN,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": BLOCKS,
    "num_heads": 2,
}
BART: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": HIDDEN,
    "encoder_layers": BLOCKS,
    "decoder_layers": 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 24,
}
VISION: dict[str, Any] = {
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 2,
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
}
VIT: dict[str, Any] = {**VISION, "image_size": 8, "patch_size": 4}


def ids() -> Batch:
    return {"input_ids": torch.arange(1, 13).reshape(2, 6)}


def ids_and_decoder_ids() -> Batch:
    return {**ids(), "decoder_input_ids": torch.arange(3, 11).reshape(2, 4)}


def pixels() -> Batch:
    return {"pixel_values": torch.randn(2, 3, 8, 8)}


def ids_and_pixels() -> Batch:
    return {**ids(), **pixels()}


def llama(**options: Any) -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**{**DECODER, "tie_word_embeddings": False, **options}))


MOE: dict[str, Any] = {"num_experts_per_tok": 1, "moe_intermediate_size": 8, "tie_word_embeddings": False}
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": (
        "Qwen3Next",
        {
            **DECODER,
            **MOE,
            "num_experts": 2,
            "shared_expert_intermediate_size": 8,
            **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
            **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "jamba": (
        "Jamba",
        {
            **{name: value for name, value in DECODER.items() if name != "head_dim"},
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 4,
        },
    ),
    "nemotron_h": (
        "NemotronH",
        {
            **{name: value for name, value in DECODER.items() if name != "num_hidden_layers"},
            "layers_block_type": ["mamba", "attention"],
            "mamba_num_heads": 2,
            "mamba_head_dim": 8,
            "ssm_state_size": 4,
            "n_groups": 1,
            "chunk_size": 4,
        },
    ),
    "falcon_h1": (
        "FalconH1",
        {
            **DECODER,
            "mamba_d_ssm": 16,
            "mamba_n_heads": 2,
            "mamba_d_head": 8,
            "mamba_d_state": 4,
            "mamba_chunk_size": 4,
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
        {**DECODER, **MOE, "n_routed_experts": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    ),
    "mamba": ("Mamba", {**SIZES, "state_size": 4, "tie_word_embeddings": False}),
    "mamba2": (
        "Mamba2",
        {**SIZES, "num_heads": 4, "head_dim": 8, "state_size": 4, "n_groups": 1, "chunk_size": 4},
    ),
    "bamba, without attention": (
        "Bamba",
        {
            **{name: value for name, value in DECODER.items() if name != "head_dim"},
            "attn_layer_indices": [],
            "use_cache": False,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_d_state": 4,
            "mamba_chunk_size": 4,
        },
    ),
    "xlstm": (
        "xLSTM",
        {**SIZES, "num_heads": 2, "use_cache": False},
    ),
}
"""Decoders with several kinds of blocks, or without attention: start of the class's name, and its configuration."""


def hybrid(name: str) -> nn.Module:
    stem, sizes = HYBRIDS[name]
    return getattr(hf, f"{stem}ForCausalLM")(getattr(hf, f"{stem}Config")(**sizes))  # type: ignore[no-any-return]


def smolvlm() -> nn.Module:
    text = {**DECODER, "model_type": "llama", "tie_word_embeddings": False}
    sizes = {"image_token_id": 3, "pad_token_id": 0, "scale_factor": 2, "tie_word_embeddings": False}
    config = hf.SmolVLMConfig(**sizes, text_config=text, vision_config=VIT)
    return hf.SmolVLMForConditionalGeneration(config)  # type: ignore[no-any-return]


def t5gemma() -> nn.Module:
    parts = {part: hf.T5GemmaModuleConfig(**DECODER) for part in ("encoder", "decoder")}
    return hf.T5GemmaForConditionalGeneration(hf.T5GemmaConfig(**parts, vocab_size=VOCAB))


def lora_llama() -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj", "embed_tokens"], modules_to_save=["lm_head"], task_type="CAUSAL_LM"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft asks transformers for what is deprecated
        return peft.get_peft_model(llama(), config)


def paths(stem: str, count: int = BLOCKS) -> list[str]:
    return [f"{stem}.{index}" for index in range(count)]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A tiny model, and where each of its parameters belongs."""

    build: Callable[[], nn.Module]
    embedding: str
    """Names, separated by blanks."""
    head: str
    stacks: tuple[tuple[str, int], ...]
    """Path and length of each list of blocks, in order."""
    batch: Callable[[], Batch] = ids
    feeds: bool = True
    """Whether each stack's output enters the next, as an encoder's does."""
    encoder_norm: str | None = None
    """A parameter of the head that lies between the first stack and the second."""

    @property
    def blocks(self) -> list[str]:
        return [path for stem, count in self.stacks for path in paths(stem, count)]


def llama_like(build: Callable[[], nn.Module], head: str = "model.norm.weight lm_head.weight") -> Case:
    return Case(build=build, embedding="model.embed_tokens.weight", head=head, stacks=(("model.layers", BLOCKS),))


def with_norm(name: str) -> str:
    return f"{name}.weight {name}.bias"


CASES = {
    "llama": llama_like(llama),
    "llama, tied": llama_like(lambda: llama(tie_word_embeddings=True), head="model.norm.weight"),
    "llama, bf16": llama_like(lambda: llama().to(torch.bfloat16)),
    "llama, classification": llama_like(
        lambda: hf.LlamaForSequenceClassification(hf.LlamaConfig(**DECODER)), head="model.norm.weight score.weight"
    ),
    "llama, lora": Case(
        build=lora_llama,
        embedding=(
            "base_model.model.model.embed_tokens.base_layer.weight "
            "base_model.model.model.embed_tokens.lora_embedding_A.default "
            "base_model.model.model.embed_tokens.lora_embedding_B.default"
        ),
        head=(
            "base_model.model.model.norm.weight base_model.model.lm_head.original_module.weight "
            "base_model.model.lm_head.modules_to_save.default.weight"
        ),
        stacks=(("base_model.model.model.layers", BLOCKS),),
    ),
    "qwen2": llama_like(lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**DECODER))),
    "qwen3": llama_like(lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**DECODER))),
    "mistral": llama_like(lambda: hf.MistralForCausalLM(hf.MistralConfig(**DECODER))),
    "mixtral": llama_like(lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**DECODER, num_local_experts=2))),
    "gemma": llama_like(lambda: hf.GemmaForCausalLM(hf.GemmaConfig(**DECODER)), head="model.norm.weight"),
    "gemma2": llama_like(lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**DECODER)), head="model.norm.weight"),
    "gemma3": llama_like(lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**DECODER)), head="model.norm.weight"),
    "gpt2": Case(
        build=lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)),
        embedding="transformer.wte.weight transformer.wpe.weight",
        head=with_norm("transformer.ln_f"),
        stacks=(("transformer.h", BLOCKS),),
    ),
    "gpt-neo": Case(
        build=lambda: hf.GPTNeoForCausalLM(hf.GPTNeoConfig(**GPT_NEO)),
        embedding="transformer.wte.weight transformer.wpe.weight",
        head=with_norm("transformer.ln_f"),
        stacks=(("transformer.h", BLOCKS),),
    ),
    "opt": Case(  # registers its final norm before its blocks
        build=lambda: hf.OPTForCausalLM(hf.OPTConfig(**OPT, word_embed_proj_dim=HIDDEN)),
        embedding="model.decoder.embed_tokens.weight model.decoder.embed_positions.weight",
        head=with_norm("model.decoder.final_layer_norm"),
        stacks=(("model.decoder.layers", BLOCKS),),
    ),
    "opt, projected": Case(  # registers the projection out of its blocks before the one into them
        build=lambda: hf.OPTForCausalLM(hf.OPTConfig(**OPT, word_embed_proj_dim=8)),
        embedding=(
            "model.decoder.embed_tokens.weight model.decoder.embed_positions.weight model.decoder.project_in.weight"
        ),
        head="model.decoder.project_out.weight " + with_norm("model.decoder.final_layer_norm"),
        stacks=(("model.decoder.layers", BLOCKS),),
    ),
    "gpt-neox": Case(
        build=lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**ENCODER)),
        embedding="gpt_neox.embed_in.weight",
        head="lm_head.weight " + with_norm("gpt_neox.final_layer_norm"),
        stacks=(("gpt_neox.layers", BLOCKS),),
    ),
    "falcon": Case(
        build=lambda: hf.FalconForCausalLM(hf.FalconConfig(**SIZES)),
        embedding="transformer.word_embeddings.weight",
        head=with_norm("transformer.ln_f"),
        stacks=(("transformer.h", BLOCKS),),
    ),
    "bloom": Case(
        build=lambda: hf.BloomForCausalLM(hf.BloomConfig(**BLOOM)),
        embedding="transformer.word_embeddings.weight " + with_norm("transformer.word_embeddings_layernorm"),
        head=with_norm("transformer.ln_f"),
        stacks=(("transformer.h", BLOCKS),),
    ),
    "bert, masked": Case(
        build=lambda: hf.BertForMaskedLM(hf.BertConfig(**ENCODER)),
        embedding=(
            "bert.embeddings.word_embeddings.weight bert.embeddings.position_embeddings.weight "
            "bert.embeddings.token_type_embeddings.weight " + with_norm("bert.embeddings.LayerNorm")
        ),
        head=(
            "cls.predictions.bias "
            f"{with_norm('cls.predictions.transform.dense')} {with_norm('cls.predictions.transform.LayerNorm')}"
        ),
        stacks=(("bert.encoder.layer", BLOCKS),),
    ),
    "bert, classification": Case(
        build=lambda: hf.BertForSequenceClassification(hf.BertConfig(**ENCODER)),
        embedding=(
            "bert.embeddings.word_embeddings.weight bert.embeddings.position_embeddings.weight "
            "bert.embeddings.token_type_embeddings.weight " + with_norm("bert.embeddings.LayerNorm")
        ),
        head=f"{with_norm('bert.pooler.dense')} {with_norm('classifier')}",
        stacks=(("bert.encoder.layer", BLOCKS),),
    ),
    "roberta": Case(
        build=lambda: hf.RobertaForMaskedLM(hf.RobertaConfig(**ENCODER)),
        embedding=(
            "roberta.embeddings.word_embeddings.weight roberta.embeddings.position_embeddings.weight "
            "roberta.embeddings.token_type_embeddings.weight " + with_norm("roberta.embeddings.LayerNorm")
        ),
        head=f"lm_head.bias {with_norm('lm_head.dense')} {with_norm('lm_head.layer_norm')}",
        stacks=(("roberta.encoder.layer", BLOCKS),),
    ),
    "camembert": Case(  # registers its head before its backbone, so that the tie carries the head's name
        build=lambda: hf.CamembertForCausalLM(hf.CamembertConfig(**ENCODER, is_decoder=True)),
        embedding=(
            "lm_head.decoder.weight roberta.embeddings.position_embeddings.weight "
            "roberta.embeddings.token_type_embeddings.weight " + with_norm("roberta.embeddings.LayerNorm")
        ),
        head=f"lm_head.bias {with_norm('lm_head.dense')} {with_norm('lm_head.layer_norm')}",
        stacks=(("roberta.encoder.layer", BLOCKS),),
    ),
    "distilbert": Case(
        build=lambda: hf.DistilBertForSequenceClassification(hf.DistilBertConfig(**DISTILBERT)),
        embedding=(
            "distilbert.embeddings.word_embeddings.weight distilbert.embeddings.position_embeddings.weight "
            + with_norm("distilbert.embeddings.LayerNorm")
        ),
        head=f"{with_norm('pre_classifier')} {with_norm('classifier')}",
        stacks=(("distilbert.transformer.layer", BLOCKS),),
    ),
    "albert": Case(  # all its layers are one block: they share their weights
        build=lambda: hf.AlbertForMaskedLM(hf.AlbertConfig(**ENCODER, embedding_size=8)),
        embedding=(
            "albert.embeddings.word_embeddings.weight albert.embeddings.position_embeddings.weight "
            f"albert.embeddings.token_type_embeddings.weight {with_norm('albert.embeddings.LayerNorm')} "
            + with_norm("albert.encoder.embedding_hidden_mapping_in")
        ),
        head=f"predictions.bias {with_norm('predictions.LayerNorm')} {with_norm('predictions.dense')}",
        stacks=(("albert.encoder.albert_layer_groups", 1),),
    ),
    "t5": Case(
        build=lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5)),
        embedding="shared.weight",
        head="encoder.final_layer_norm.weight decoder.final_layer_norm.weight",
        stacks=(("encoder.block", BLOCKS), ("decoder.block", BLOCKS)),
        batch=ids_and_decoder_ids,
        encoder_norm="encoder.final_layer_norm.weight",
    ),
    "t5gemma": Case(  # registers its decoder's final norm before its blocks, and its decoder does not run alone
        build=t5gemma,
        embedding="model.encoder.embed_tokens.weight model.decoder.embed_tokens.weight",
        head="model.encoder.norm.weight model.decoder.norm.weight",
        stacks=(("model.encoder.layers", BLOCKS), ("model.decoder.layers", BLOCKS)),
        batch=ids_and_decoder_ids,
        encoder_norm="model.encoder.norm.weight",
    ),
    "bart": Case(  # registers its embedding's norm after its blocks; all of its head is tied
        build=lambda: hf.BartForConditionalGeneration(hf.BartConfig(**BART)),
        embedding=(
            "model.shared.weight model.encoder.embed_positions.weight model.decoder.embed_positions.weight "
            f"{with_norm('model.encoder.layernorm_embedding')} {with_norm('model.decoder.layernorm_embedding')}"
        ),
        head="",
        stacks=(("model.encoder.layers", BLOCKS), ("model.decoder.layers", 3)),
        batch=ids_and_decoder_ids,
    ),
    "bart, decoder": Case(  # asks whether its mask is true all over, which a meta tensor does not know
        build=lambda: hf.BartForCausalLM(hf.BartConfig(**{**BART, "decoder_layers": BLOCKS})),
        embedding=(
            "model.decoder.embed_tokens.weight model.decoder.embed_positions.weight "
            + with_norm("model.decoder.layernorm_embedding")
        ),
        head="",
        stacks=(("model.decoder.layers", BLOCKS),),
    ),
    **{
        name: Case(
            build=partial(hybrid, name),
            embedding=f"model.{'embeddings' if name == 'nemotron_h' else 'embed_tokens'}.weight",
            head=f"model.{norm}.weight lm_head.weight",
            stacks=(("model.layers", BLOCKS),),
        )
        for name, norm in {
            "qwen3_next": "norm",
            "jamba": "final_layernorm",
            "nemotron_h": "norm_f",
            "falcon_h1": "final_layernorm",
            "glm4_moe": "norm",
            "bamba, without attention": "final_layernorm",
        }.items()
    },
    **{
        name: Case(
            build=partial(hybrid, name),
            embedding="backbone.embeddings.weight",
            head=f"backbone.{norm}.weight lm_head.weight",
            stacks=((f"backbone.{stem}", BLOCKS),),
        )
        for name, norm, stem in [
            ("mamba", "norm_f", "layers"),
            ("mamba2", "norm_f", "layers"),
            ("xlstm", "out_norm", "blocks"),
        ]
    },
    "vit": Case(
        build=lambda: hf.ViTForImageClassification(hf.ViTConfig(**VIT)),
        embedding=(
            "vit.embeddings.cls_token vit.embeddings.position_embeddings "
            + with_norm("vit.embeddings.patch_embeddings.projection")
        ),
        head=f"{with_norm('vit.layernorm')} {with_norm('classifier')}",
        stacks=(("vit.layers", BLOCKS),),
        batch=pixels,
    ),
    "clip": Case(  # two towers side by side, each of which takes a batch of its own
        build=lambda: hf.CLIPModel(hf.CLIPConfig(text_config={**ENCODER}, vision_config=VIT, projection_dim=8)),
        embedding=(
            "text_model.embeddings.token_embedding.weight text_model.embeddings.position_embedding.weight "
            "vision_model.embeddings.class_embedding vision_model.embeddings.patch_embedding.weight "
            f"vision_model.embeddings.position_embedding.weight {with_norm('vision_model.pre_layrnorm')}"
        ),
        head=(
            "logit_scale visual_projection.weight text_projection.weight "
            f"{with_norm('text_model.final_layer_norm')} {with_norm('vision_model.post_layernorm')}"
        ),
        stacks=(("text_model.encoder.layers", BLOCKS), ("vision_model.encoder.layers", BLOCKS)),
        batch=ids_and_pixels,
        feeds=False,
    ),
}
