"""What a block multiplies by is a target, whatever kind of module holds it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from slivertune import deltas
from slivertune.deltas.merge import merge, unmerge
from tests.helpers.models import (
    EXPERTS,
    HIDDEN,
    assert_same_bits,
    differing,
    tiny_gpt_oss,
    tiny_llama,
    tiny_mixtral,
    token_batches,
    twin,
    weights,
)
from tests.sft.runs import in_4_bits, sft_over, train

hf: Any = transformers  # half of its classes carry types

SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 24,
    "pad_token_id": 0,
}
LATENT: dict[str, Any] = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "first_k_dense_replace": 0,
    "n_group": 2,
    "topk_group": 1,
}


make = partial(sft_over, reselection_interval=20, estimation_steps=5)


def built(kind: Any, config: Any, **options: Any) -> nn.Module:
    model: nn.Module = kind(config(vocab_size=32, **options))
    return model


MIXTURE: dict[str, Any] = {**SMALL, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
qwen3_moe = partial(built, hf.Qwen3MoeForCausalLM, hf.Qwen3MoeConfig, **MIXTURE, num_experts=3, head_dim=8)
deepseek_v3 = partial(
    built, hf.DeepseekV3ForCausalLM, hf.DeepseekV3Config, **MIXTURE, **LATENT, n_routed_experts=4, head_dim=4
)
jetmoe = partial(
    built,
    hf.JetMoeForCausalLM,
    hf.JetMoeConfig,
    hidden_size=16,
    num_hidden_layers=2,
    num_key_value_heads=2,
    kv_channels=8,
    intermediate_size=24,
    num_local_experts=4,
)
xlnet = partial(built, hf.XLNetLMHeadModel, hf.XLNetConfig, d_model=16, n_layer=2, n_head=2, d_inner=24)
recurrent_gemma = partial(
    built,
    hf.RecurrentGemmaForCausalLM,
    hf.RecurrentGemmaConfig,
    hidden_size=16,
    num_hidden_layers=3,
    num_attention_heads=2,
    intermediate_size=24,
    lru_width=16,
)


class TransformerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, kdim=6, vdim=4)
        self.self_attention = nn.MultiheadAttention(8, 2)
        self.convolution = nn.Conv1d(8, 8, 3)


class DbrxLikeExpertGLU(nn.Module):
    """Two experts' matrices one below the other, as DBRX has them."""

    def __init__(self) -> None:
        super().__init__()
        self.moe_num_experts = 2
        self.w1 = nn.Parameter(torch.randn(2 * 5, 8))
        self.gate_bias = nn.Parameter(torch.randn(2, 8))


class DbrxLikeBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)
        self.experts = DbrxLikeExpertGLU()


def of_one(block: type[nn.Module]) -> nn.Module:
    model = nn.Module()
    model.layers = nn.ModuleList([block()])
    return model


@pytest.mark.parametrize(
    ("build", "wanted", "unwanted"),
    [
        (tiny_mixtral, "mlp.experts.gate_up_proj mlp.experts.down_proj self_attn.q_proj.weight", "mlp.gate.weight"),
        (qwen3_moe, "mlp.experts.gate_up_proj mlp.experts.down_proj", "mlp.gate.weight self_attn.q_norm.weight"),
        (
            tiny_gpt_oss,
            "mlp.experts.gate_up_proj mlp.experts.down_proj",
            "mlp.experts.gate_up_proj_bias mlp.experts.down_proj_bias mlp.router.weight self_attn.sinks",
        ),
        (deepseek_v3, "mlp.experts.gate_up_proj mlp.shared_experts.up_proj.weight", "mlp.gate.weight"),
        (jetmoe, "mlp.input_linear.weight self_attention.experts.output_linear.weight", "mlp.bias"),
        (xlnet, "rel_attn.q rel_attn.k rel_attn.v rel_attn.o rel_attn.r ff.layer_1.weight", "rel_attn.r_r_bias"),
        (
            recurrent_gemma,
            "rg_lru.input_gate_weight rg_lru.recurrent_gate_weight",
            "rg_lru.input_gate_bias temporal_block.conv_1d.weight",
        ),
        (
            partial(of_one, TransformerBlock),
            "attention.q_proj_weight attention.k_proj_weight attention.v_proj_weight self_attention.in_proj_weight",
            "convolution.weight self_attention.in_proj_bias",
        ),
        (partial(of_one, DbrxLikeBlock), "experts.w1", "experts.gate_bias"),
    ],
)
def test_by_default_what_a_block_multiplies_by_is_trained(
    build: Callable[[], nn.Module], wanted: str, unwanted: str
) -> None:
    model = build()
    every = [name for name, _ in model.named_parameters()]
    found = make(model).deltas()
    for end in wanted.split():
        named = {name for name in every if name.endswith(f".{end}")}
        assert named and named <= found.keys(), end
    for end in unwanted.split():
        named = {name for name in every if name.endswith(f".{end}")}
        assert named and not named & found.keys(), end


@pytest.mark.parametrize(
    "target", ["experts", "mlp", "experts.gate_up_proj", type(tiny_mixtral().model.layers[0].mlp.experts)]
)
def test_experts_are_named_by_their_module_parameter_or_class(target: Any) -> None:
    ends = ["gate_up_proj"] if target == "experts.gate_up_proj" else ["gate_up_proj", "down_proj"]
    wanted = [f"model.layers.{block}.mlp.experts.{end}" for block in range(2) for end in ends]
    assert list(make(tiny_mixtral(), targets=[target]).deltas()) == wanted


def test_lora_of_a_rank_has_two_factors_for_each_experts_matrix() -> None:
    rank, inner = 2, 24
    optimizer = make(tiny_mixtral(), density=None, equivalent_lora_rank=rank)
    attention = 2 * (HIDDEN + HIDDEN) + 2 * (HIDDEN + HIDDEN // 2)
    experts = EXPERTS * ((2 * inner + HIDDEN) + (HIDDEN + inner))
    assert optimizer.num_weights == 2 * rank * (attention + experts)


def test_a_frozen_layers_experts_are_no_targets() -> None:
    model = tiny_mixtral()
    model.model.layers[0].mlp.requires_grad_(False)
    assert not any("layers.0.mlp" in name for name in make(model).deltas())


def test_the_layer_form_names_its_way_out_for_experts() -> None:
    with pytest.raises(
        ValueError,
        match=r'gate_up_proj belongs to MixtralExperts, and .* Use form="optimizer" \("auto" beside 4-bit layers\)',
    ):
        make(tiny_mixtral(), form="layer")


@pytest.mark.parametrize("selection", ["accumulated_gradient", "momentum"])
@pytest.mark.parametrize("packed", [False, True])
def test_training_experts_with_reselection_learns_and_leaves_what_is_frozen(selection: str, packed: bool) -> None:
    model = tiny_mixtral()
    before = weights(model)
    optimizer = make(model, selection=selection, packed=packed, reselection_interval=6, estimation_steps=2)
    first = {name: delta.indices for name, delta in optimizer.deltas().items()}
    losses = train(model, optimizer, token_batches(1) * 20)
    assert losses[-1] < 0.99 * losses[0]
    for name, delta in optimizer.deltas().items():
        assert not torch.equal(delta.indices, first[name])
        assert delta.values.isfinite().all()
        changed = (model.get_parameter(name).detach() != before[name]).view(-1)
        changed[delta.indices.long()] = False
        assert not changed.any()
    optimizer.detach(merge=False)
    assert differing(weights(model), before) == []


@pytest.mark.parametrize("build", [tiny_mixtral, tiny_gpt_oss])
def test_deltas_of_experts_are_saved_applied_and_taken_off(build: Any, tmp_path: Path) -> None:
    model = build(torch.bfloat16)
    base = twin(model)
    optimizer = make(model)
    train(model, optimizer, token_batches(6))
    optimizer.save_pretrained(tmp_path / "deltas")
    other = twin(base)
    optimizer.detach()
    with deltas.apply(other, tmp_path / "deltas"):
        assert_same_bits(model, other)
    assert_same_bits(other, base)


def test_deltas_of_stored_stacks_are_merged_and_unmerged_and_others_name_their_way_out(tmp_path: Path) -> None:
    """GPT-OSS's checkpoints hold the stacks; Mixtral's hold a tensor for each expert, which transformers stacks."""
    for name, build in (("oss", tiny_gpt_oss), ("mixtral", tiny_mixtral)):
        model: Any = build(torch.bfloat16)
        model.save_pretrained(tmp_path / name)
        optimizer = make(model)
        train(model, optimizer, token_batches(4))
        optimizer.save_pretrained(tmp_path / f"{name}-deltas")
        optimizer.detach()
        if name == "mixtral":
            with pytest.raises(ValueError, match=r"experts.* names no tensor of .*slivertune\.deltas\.apply and save"):
                merge(tmp_path / name, tmp_path / f"{name}-deltas", tmp_path / f"{name}-merged")
            continue
        merge(tmp_path / name, tmp_path / f"{name}-deltas", tmp_path / f"{name}-merged")
        assert_same_bits(type(model).from_pretrained(tmp_path / f"{name}-merged", dtype=torch.bfloat16), model)
        unmerge(tmp_path / f"{name}-merged", tmp_path / "base")
        for file in (tmp_path / name).glob("*.safetensors"):
            assert (tmp_path / "base" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize("frozen", [False, True])
def test_beside_4_bit_layers_experts_are_trained_in_16_bits(frozen: bool) -> None:
    """As PEFT prepares models for QLoRA, everything is frozen; then `requires_grad` tells nothing of the experts."""
    model = in_4_bits(tiny_mixtral(torch.bfloat16))
    if frozen:
        model.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = make(model)
    experts = [name for name in optimizer.deltas() if ".experts." in name]
    assert len(experts) == 4 and len(optimizer.deltas()) == 12
    losses = train(model, optimizer, token_batches(1) * 8)
    assert losses[-1] < losses[0]
    after = model.state_dict()
    assert {name for name, value in before.items() if not torch.equal(value, after[name])} == set(experts)
    with pytest.raises(ValueError, match=r'MixtralExperts, .*"auto" beside 4-bit layers'):
        make(in_4_bits(tiny_mixtral(torch.bfloat16)), form="layer")


def test_a_dense_model_has_the_targets_that_it_had() -> None:
    linear = {name for name, _ in tiny_llama().named_parameters() if name.endswith("_proj.weight")}
    assert set(make(tiny_llama()).deltas()) == linear
