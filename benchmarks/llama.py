"""The randomly initialised Llama that the benchmarks of whole steps train; nothing is downloaded."""

import dataclasses

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LlamaSizes:
    """A Llama with untied embeddings, and the batch that it is trained on."""

    hidden: int
    intermediate: int
    blocks: int
    heads: int
    vocabulary: int
    batch_size: int
    length: int
    """Tokens of a sequence."""
    kv_heads: int | None = None
    """Heads of keys and values; None for as many as heads."""


def build_llama(sizes: LlamaSizes, *, dtype: torch.dtype, device: torch.device, seed: int) -> LlamaForCausalLM:
    """Make the model in its place: every weight is allocated once, in `dtype` on `device`, and drawn there.

    Args:
        sizes: Its sizes.
        dtype: Dtype of all weights.
        device: Where they lie.
        seed: Seed of the device's global generator, which is left advanced.

    Returns:
        The model in training mode; matrices are normal with deviation 0.02, norms one.
    """
    config = LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.blocks,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads or sizes.heads,
        max_position_embeddings=sizes.length,
        tie_word_embeddings=False,
        use_cache=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(dtype)
    model.to_empty(device=device)
    # The only buffers; they are computed by the constructor, so emptying lost them.
    model.model.rotary_emb = LlamaRotaryEmbedding(config).to(device)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                nn.init.normal_(parameter, std=0.02)
    return model.train()


def quantize_linears(model: nn.Module) -> None:
    """Put the linear layers of the blocks into nf4, in their places and where they lie."""
    from bitsandbytes.nn import Linear4bit, Params4bit  # type: ignore[attr-defined]

    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and "layers" in path:
            weight = module.weight.detach()
            in_4_bits = {"compute_dtype": weight.dtype, "quant_type": "nf4", "device": "meta"}
            layer = Linear4bit(module.in_features, module.out_features, bias=False, **in_4_bits)
            on_host = Params4bit(weight.cpu(), requires_grad=False, quant_type="nf4", module=layer)
            layer.weight = on_host.to(weight.device)  # which quantises
            model.set_submodule(path, layer)


def random_batch(sizes: LlamaSizes, *, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    """Draw token ids: int64 `input_ids` and `labels` of shape (batch_size, length)."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(sizes.vocabulary, (sizes.batch_size, sizes.length), generator=generator).to(device)
    return {"input_ids": tokens, "labels": tokens}


def num_parameters(model: nn.Module) -> int:
    """Elements of all parameters."""
    return sum(parameter.numel() for parameter in model.parameters())
