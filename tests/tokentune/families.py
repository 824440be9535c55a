"""Tiny random models of the families that TokenTune is tested on, and batches for them.

Weights are large enough that attention is uneven and gradients are well scaled; biases and norms are drawn, too.
Unless a case says otherwise, no two of the batch size 3, the key heads 2, the heads 4, the selected positions 5, the
head size 8 and the length 13 are the same number, since what a dimension means must not be guessed from its size.
One table of some fifty models, and so longer than other files.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
import transformers
from torch import nn

from slivertune.core.checkpointing import enable_checkpointing

Batch = dict[str, torch.Tensor]
Head = Literal["causal", "token", "pooled"]
Mask = Literal["no mask", "padded right", "padded left", "packed"]

hf: Any = transformers  # half of its classes carry types

BATCH, LENGTH, VOCAB, HIDDEN, HEADS, KEY_HEADS = 3, 13, 61, 32, 4, 2
HEAD_SIZE = HIDDEN // HEADS
LENGTHS = (13, 9, 6)
PAD, FIRST_ID = 0, 3

UNPADDED: tuple[Mask, ...] = ("no mask",)
RIGHT: tuple[Mask, ...] = ("no mask", "padded right")
BOTH_SIDES: tuple[Mask, ...] = (*RIGHT, "padded left")
ALL_MASKS: tuple[Mask, ...] = (*BOTH_SIDES, "packed")
CHECKPOINTING = {"plain": None, "not reentrant": False, "reentrant": True}
"""Whether layers that are computed again in the backward are so by a reentrant one; None: they keep what they saved."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A module, by its path in a layer, whose output is or holds keys or values: their norm where there is one."""

    module: str
    token_dim: int = 1
    channels: torch.Tensor | None = None
    """Which of the last dimension are keys or values, bool; None: all."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A tiny model, and where the reference finds its layers, keys and values."""

    build: Callable[[str], nn.Module]
    """Makes it, with the attention named."""
    layers: str
    """The end of the path of its list of layers."""
    cuts: tuple[Cut, ...]
    head: Head = "causal"
    attentions: tuple[str, ...] = ("sdpa", "eager")
    masks: tuple[Mask, ...] = ALL_MASKS
    length: int = LENGTH
    makes_batch: Callable[[], Batch] | None = None


def make_model(family: Family, attention: str = "", *, seed: int = 0) -> nn.Module:
    """The family's model in training mode, with weights from a seed of its own."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = family.build(attention or family.attentions[0])
        with torch.no_grad():
            for parameter in model.parameters():
                is_scale = parameter.ndim == 1 and bool((parameter == 1).all())
                _ = parameter.uniform_(0.5, 1.5) if is_scale else parameter.normal_(std=0.15)
    return model.train()


def checkpointed(model: Any, use_reentrant: bool | None) -> Any:
    """The model itself, whose layers are computed again in the backward; None leaves it as it is."""
    if use_reentrant is not None:
        enable_checkpointing(model, {"use_reentrant": use_reentrant})
    return model


def make_batch(family: Family, mask: Mask = "no mask", *, seed: int = 1) -> Batch:
    """Input and labels of `BATCH` sequences; all tokens differ in a sequence."""
    if family.makes_batch is not None:
        return family.makes_batch()
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(VOCAB - FIRST_ID, generator=generator)[: family.length] for _ in range(BATCH)]
    ids = torch.stack(rows) + FIRST_ID
    batch = {"input_ids": ids}
    if mask == "packed":
        batch["position_ids"] = torch.stack([_packed(family.length, first) for first in (4, 7, 5)])
    elif mask != "no mask":
        lengths = torch.tensor([max(1, length + family.length - LENGTH) for length in LENGTHS])[:, None]
        place = torch.arange(family.length)[None]
        real = place < lengths if mask == "padded right" else place >= family.length - lengths
        batch |= {"input_ids": ids.where(real, PAD), "attention_mask": real.long()}
    batch["labels"] = _labels(family, batch, generator)
    return batch


def _packed(length: int, first: int) -> torch.Tensor:
    return torch.cat([torch.arange(first), torch.arange(length - first)])


def _labels(family: Family, batch: Batch, generator: torch.Generator) -> torch.Tensor:
    ids = batch["input_ids"]
    if family.head == "pooled":
        return torch.randint(0, 3, (BATCH,), generator=generator)
    ignored = torch.rand(ids.shape, generator=generator) < 0.2
    if "attention_mask" in batch:
        ignored |= batch["attention_mask"] == 0
    if "position_ids" in batch:
        ignored |= batch["position_ids"] == 0
    targets = ids if family.head == "causal" else torch.randint(0, VOCAB, ids.shape, generator=generator)
    return targets.masked_fill(ignored, -100)


def families(*names: str) -> list[Any]:
    """The families of these names; every one where none is given."""
    return [pytest.param(FAMILIES[name], id=name) for name in names or FAMILIES]


def _pixels() -> Batch:
    generator = torch.Generator().manual_seed(1)
    return {"pixel_values": torch.randn(BATCH, 3, 8, 8, generator=generator), "labels": torch.tensor([2, 0, 1])}


def _channels(*shape: int, last: int = 2) -> torch.Tensor:
    """Keys and values in a fused projection: the last two (or `last`) along the second to last dimension."""
    chosen = torch.zeros(shape, dtype=torch.bool)
    chosen[..., -last:, :] = True
    return chosen.flatten()


def _make(model: str, config: str, **options: Any) -> Callable[[str], nn.Module]:
    return lambda attention: getattr(hf, model)(getattr(hf, config)(**options, attn_implementation=attention))


SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 24,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DECODER = {**SIZES, "use_cache": False, "tie_word_embeddings": False}
GROUPED = {**DECODER, "num_key_value_heads": KEY_HEADS}
NAMED = {"head_dim": HEAD_SIZE}
WINDOW = {"sliding_window": 5}
ENCODER = {
    **SIZES,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "type_vocab_size": 2,
    "num_labels": 3,
}
AS_MANY_HEADS_AS_TOKENS = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 6}
GPT_NEO = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 40,
    "num_layers": 3,
    "num_heads": HEADS,
    "attention_types": [[["local", "global", "local"], 1]],
    "window_size": 5,
    "max_position_embeddings": 24,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "resid_dropout": 0.0,
    "embed_dropout": 0.0,
    "attention_dropout": 0.0,
    "use_cache": False,
}
GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": HIDDEN,
    "n_layer": 3,
    "n_head": HEADS,
    "n_positions": 24,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "use_cache": False,
}
OPT = {
    **DECODER,
    "ffn_dim": 40,
    "word_embed_proj_dim": HIDDEN,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}
GPT_NEOX = {**DECODER, "hidden_dropout": 0.0, "attention_dropout": 0.0}
FALCON = {**DECODER, "hidden_dropout": 0.0, "attention_dropout": 0.0, "bias": True}
BLOOM = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "n_layer": 3,
    "n_head": HEADS,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "pad_token_id": PAD,
    "use_cache": False,
}
DISTILBERT = {
    "vocab_size": VOCAB,
    "dim": HIDDEN,
    "hidden_dim": 40,
    "n_layers": 3,
    "n_heads": HEADS,
    "max_position_embeddings": 24,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "seq_classif_dropout": 0.0,
    "pad_token_id": PAD,
    "num_labels": 3,
}
VIT = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
    "intermediate_size": 40,
    "image_size": 8,
    "patch_size": 2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "num_labels": 3,
}

# Queries and keys of 10, values of 7, from latents of 14 and 20; no two are the same number. DeepSeek-V2 pairs keys as
# complex numbers where they lie, so that 20 + 4 must be even.
LATENT = {
    **DECODER,
    "num_key_value_heads": HEADS,
    "q_lora_rank": 14,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 7,
}
LATENT_EXPERTS = {
    **LATENT,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
}
LONGCAT = {
    **{name: value for name, value in LATENT.items() if name not in ("intermediate_size", "num_hidden_layers")},
    "num_layers": 2,
    "ffn_hidden_size": 40,
    "expert_ffn_hidden_size": 12,
    "n_routed_experts": 4,
    "zero_expert_num": 1,
    "moe_topk": 2,
    "head_dim": 4,
}

VALUES = Cut(module="self_attn.v_proj")
PROJECTIONS = (Cut(module="self_attn.k_proj"), VALUES)
NORMED_BY_TOKEN = (Cut(module="self_attn.k_norm"), VALUES)
NORMED_BY_HEAD = (Cut(module="self_attn.k_norm", token_dim=2), VALUES)
# The rotary part of all keys comes straight from the first projection, all else by way of the second.
LATENTS = (Cut(module="self_attn.kv_a_proj_with_mqa"), Cut(module="self_attn.kv_b_proj", token_dim=2))
LAYERS = "model.layers"


def bert_like(path: str, head: Head, model: str, config: str, options: dict[str, Any], **fields: Any) -> Family:
    return Family(
        build=_make(model, config, **options),
        layers=f"{path}.encoder.layer",
        cuts=(Cut(module="attention.self.key"), Cut(module="attention.self.value")),
        head=head,
        **{"masks": RIGHT if head == "pooled" else BOTH_SIDES, **fields},
    )


def llama_like(model: str, config: str, options: dict[str, Any], **fields: Any) -> Family:
    return Family(build=_make(model, config, **options), **{"layers": LAYERS, "cuts": PROJECTIONS, **fields})


def gpt2(**options: Any) -> Family:
    return Family(
        build=_make("GPT2LMHeadModel", "GPT2Config", **{**GPT2, **options}),
        layers="transformer.h",
        cuts=(Cut(module="attn.c_attn", channels=_channels(3, HIDDEN)),),
    )


def falcon(channels: torch.Tensor, **options: Any) -> Family:
    return Family(
        build=_make("FalconForCausalLM", "FalconConfig", **{**FALCON, **options}),
        layers="transformer.h",
        cuts=(Cut(module="self_attention.query_key_value", channels=channels),),
        masks=BOTH_SIDES if options.get("alibi") else ALL_MASKS,
    )


def gpt_neox(**options: Any) -> Family:
    return Family(
        build=_make("GPTNeoXForCausalLM", "GPTNeoXConfig", **{**GPT_NEOX, **options}),
        layers="gpt_neox.layers",
        cuts=(Cut(module="attention.query_key_value", channels=_channels(HEADS, 3, HEAD_SIZE)),),
    )


def distilbert(model: str, head: Head, masks: tuple[Mask, ...]) -> Family:
    return Family(
        build=_make(model, "DistilBertConfig", **DISTILBERT),
        layers="distilbert.transformer.layer",
        cuts=(Cut(module="attention.k_lin"), Cut(module="attention.v_lin")),
        head=head,
        masks=masks,
    )


FAMILIES: dict[str, Family] = {
    "llama": llama_like("LlamaForCausalLM", "LlamaConfig", DECODER),
    "llama, grouped": llama_like("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "llama, tied": llama_like(
        "LlamaForCausalLM",
        "LlamaConfig",
        {**GROUPED, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama, n = heads": llama_like("LlamaForCausalLM", "LlamaConfig", {**DECODER, **AS_MANY_HEADS_AS_TOKENS}, length=8),
    "llama, k = heads": llama_like("LlamaForCausalLM", "LlamaConfig", GROUPED, length=10),
    "qwen2": llama_like("Qwen2ForCausalLM", "Qwen2Config", GROUPED),
    "qwen3": llama_like("Qwen3ForCausalLM", "Qwen3Config", {**GROUPED, **NAMED}, cuts=NORMED_BY_TOKEN),
    "qwen3, n = heads": llama_like(
        "Qwen3ForCausalLM", "Qwen3Config", {**DECODER, **AS_MANY_HEADS_AS_TOKENS}, cuts=NORMED_BY_TOKEN, length=8
    ),
    "qwen3, k = heads": llama_like(
        "Qwen3ForCausalLM",
        "Qwen3Config",
        {**DECODER, **NAMED, "num_key_value_heads": HEADS},
        cuts=NORMED_BY_TOKEN,
        length=10,
    ),
    "mistral": llama_like("MistralForCausalLM", "MistralConfig", {**GROUPED, **WINDOW}),
    "gemma": llama_like("GemmaForCausalLM", "GemmaConfig", {**GROUPED, **NAMED}),
    "gemma2": llama_like(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**GROUPED, **NAMED, **WINDOW, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": HEAD_SIZE},
        attentions=("eager",),  # transformers does not cap the scores in sdpa
    ),
    "gemma3": llama_like(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {
            **GROUPED,
            **NAMED,
            **WINDOW,
            "query_pre_attn_scalar": HEAD_SIZE,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        cuts=NORMED_BY_HEAD,
    ),
    "gemma3, n = heads": llama_like(
        "Gemma3ForCausalLM", "Gemma3TextConfig", {**DECODER, **AS_MANY_HEADS_AS_TOKENS}, cuts=NORMED_BY_HEAD, length=8
    ),
    "gemma3, k = heads": llama_like(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**DECODER, **NAMED, "num_key_value_heads": HEADS},
        cuts=NORMED_BY_HEAD,
        length=10,
    ),
    "phi": llama_like("PhiForCausalLM", "PhiConfig", {**GROUPED, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "phi, normed": llama_like(
        "PhiForCausalLM",
        "PhiConfig",
        {**GROUPED, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "qk_layernorm": True},
        cuts=(Cut(module="self_attn.k_layernorm", token_dim=2), VALUES),
    ),
    "mixtral": llama_like(
        "MixtralForCausalLM", "MixtralConfig", {**GROUPED, **WINDOW, "num_local_experts": 3, "num_experts_per_tok": 2}
    ),
    "gpt_oss": llama_like(
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            **GROUPED,
            **NAMED,
            **WINDOW,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "num_local_experts": 3,
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        attentions=("eager",),  # sdpa has no sinks
    ),
    "deepseek_v2": llama_like("DeepseekV2ForCausalLM", "DeepseekV2Config", LATENT_EXPERTS, cuts=LATENTS),
    "deepseek_v3": llama_like("DeepseekV3ForCausalLM", "DeepseekV3Config", LATENT_EXPERTS, cuts=LATENTS),
    "deepseek_v3, no latent queries": llama_like(
        "DeepseekV3ForCausalLM", "DeepseekV3Config", {**LATENT_EXPERTS, "q_lora_rank": None}, cuts=LATENTS
    ),
    "deepseek_v3.2": llama_like(
        "DeepseekV32ForCausalLM",
        "DeepseekV32Config",
        {**LATENT_EXPERTS, "index_topk": 5, "index_n_heads": 2, "index_head_dim": 8},
        cuts=LATENTS,
        masks=BOTH_SIDES,
    ),
    "glm4_moe_lite": llama_like("Glm4MoeLiteForCausalLM", "Glm4MoeLiteConfig", LATENT_EXPERTS, cuts=LATENTS),
    "longcat_flash": llama_like(
        "LongcatFlashForCausalLM",
        "LongcatFlashConfig",
        LONGCAT,
        cuts=tuple(
            Cut(module=f"self_attn.{index}.{each.module.removeprefix('self_attn.')}", token_dim=each.token_dim)
            for index in range(2)
            for each in LATENTS
        ),
    ),
    "minicpm3": llama_like("MiniCPM3ForCausalLM", "MiniCPM3Config", LATENT, cuts=LATENTS),
    "gpt2": gpt2(),
    "opt": Family(build=_make("OPTForCausalLM", "OPTConfig", **OPT), layers="model.decoder.layers", cuts=PROJECTIONS),
    "opt, normed after": Family(
        build=_make("OPTForCausalLM", "OPTConfig", **{**OPT, "do_layer_norm_before": False}),
        layers="model.decoder.layers",
        cuts=PROJECTIONS,
    ),
    "gpt_neox": gpt_neox(),
    "gpt_neox, one after the other": gpt_neox(use_parallel_residual=False),
    "gpt_neo": Family(
        build=_make("GPTNeoForCausalLM", "GPTNeoConfig", **GPT_NEO),
        layers="transformer.h",
        cuts=(Cut(module="attn.attention.k_proj"), Cut(module="attn.attention.v_proj")),
        attentions=("eager",),
    ),
    "falcon, one key head": falcon(_channels(HEADS + 2, HEAD_SIZE)),
    "falcon, grouped": falcon(
        _channels(KEY_HEADS, HEADS // KEY_HEADS + 2, HEAD_SIZE), new_decoder_architecture=True, num_kv_heads=KEY_HEADS
    ),
    "falcon, alibi": falcon(_channels(HEADS, 3, HEAD_SIZE), alibi=True, multi_query=False, parallel_attn=False),
    "bloom": Family(
        build=_make("BloomForCausalLM", "BloomConfig", **BLOOM),
        layers="transformer.h",
        cuts=(Cut(module="self_attention.query_key_value", channels=_channels(HEADS, 3, HEAD_SIZE)),),
        attentions=("eager",),
        masks=BOTH_SIDES,
    ),
    "bert, masked": bert_like("bert", "token", "BertForMaskedLM", "BertConfig", ENCODER),
    "bert, tokens": bert_like(
        "bert", "token", "BertForTokenClassification", "BertConfig", {**ENCODER, "num_labels": VOCAB}
    ),
    "bert, sequences": bert_like("bert", "pooled", "BertForSequenceClassification", "BertConfig", ENCODER),
    "bert, n = heads": bert_like(
        "bert",
        "pooled",
        "BertForSequenceClassification",
        "BertConfig",
        {**ENCODER, "num_attention_heads": 8},
        length=8,
    ),
    "eurobert, masked": llama_like("EuroBertForMaskedLM", "EuroBertConfig", GROUPED, head="token", masks=BOTH_SIDES),
    "roberta, masked": bert_like("roberta", "token", "RobertaForMaskedLM", "RobertaConfig", ENCODER),
    "roberta, sequences": bert_like("roberta", "pooled", "RobertaForSequenceClassification", "RobertaConfig", ENCODER),
    "layoutlm, masked": bert_like("layoutlm", "token", "LayoutLMForMaskedLM", "LayoutLMConfig", ENCODER),
    "distilbert, masked": distilbert("DistilBertForMaskedLM", "token", BOTH_SIDES),
    "distilbert, sequences": distilbert("DistilBertForSequenceClassification", "pooled", RIGHT),
    "llama, sequences": llama_like(
        "LlamaForSequenceClassification",
        "LlamaConfig",
        {**GROUPED, "num_labels": 3},
        head="pooled",
        masks=BOTH_SIDES,
    ),
    "gpt2, sequences": Family(
        build=_make("GPT2ForSequenceClassification", "GPT2Config", **GPT2, pad_token_id=PAD, num_labels=3),
        layers="transformer.h",
        cuts=(Cut(module="attn.c_attn", channels=_channels(3, HIDDEN)),),
        head="pooled",
        masks=BOTH_SIDES,
    ),
    "vit": Family(
        build=_make("ViTForImageClassification", "ViTConfig", **VIT),
        layers="vit.layers",
        cuts=(Cut(module="attention.k_proj"), Cut(module="attention.v_proj")),
        head="pooled",
        masks=UNPADDED,
        makes_batch=_pixels,
        length=17,
    ),
}
