"""Layers are found in models of many kinds, each of which stands in one table: longer than other files for that."""

import random
import sys
import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slivertune import Layer, find_layers, park_layers, tile_tokens
from slivertune.core.layers import find_blocks
from slivertune.core.typed_command import naming_options
from tests.helpers.architectures import (
    BART,
    CASES,
    HIDDEN,
    OPT,
    VOCAB,
    Batch,
    Case,
    hf,
    hybrid,
    ids,
    ids_and_decoder_ids,
    llama,
    paths,
    smolvlm,
    with_norm,
)

each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


class Attention(nn.Module):
    """Not one of transformers', but attention by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(HIDDEN))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.weight


class PlainModel(nn.Module):
    """A model that no library knows: a norm of the embedding behind the blocks, a final norm before them."""

    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.final_norm = nn.LayerNorm(HIDDEN)
        self.tokens = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(HIDDEN, HIDDEN), Attention()) for _ in range(num_blocks))
        self.first_norm = nn.LayerNorm(HIDDEN)
        self.output = nn.Linear(HIDDEN, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.first_norm(self.tokens(tokens))
        for block in self.blocks:
            hidden = block(hidden)
        output: torch.Tensor = self.output(self.final_norm(hidden))
        return output


@pytest.fixture
def model() -> nn.Module:
    return PlainModel()


PLAIN_EMBEDDING = {"tokens.weight", "first_norm.weight", "first_norm.bias"}
PLAIN_HEAD = {"final_norm.weight", "final_norm.bias", "output.weight", "output.bias"}


def by_name(layers: Iterable[Layer]) -> dict[str, set[str]]:
    return {layer.name: set(layer.parameter_names) for layer in layers}


def forward_with(model: nn.Module, case: Case, trainable: Iterable[str]) -> tuple[torch.Tensor, list[bool]]:
    """Train only some parameters: a scalar of the output, and for each block whether its output has a graph."""
    trainable = set(trainable)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trainable)
        parameter.grad = None
    recorded: dict[nn.Module, bool] = {}

    def record(module: nn.Module, args: Any, output: Any) -> None:
        recorded[module] = any(leaf.requires_grad for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor))

    blocks = [model.get_submodule(path) for path in case.blocks]
    hooks = [block.register_forward_hook(record) for block in blocks]
    torch.manual_seed(0)
    output = model(**case.batch())
    for hook in hooks:
        hook.remove()
    scores = output.logits_per_text if "logits_per_text" in output else output.logits
    return scores.float().square().sum(), [recorded[block] for block in blocks]


@each_case
def test_each_parameter_lands_where_it_is_expected_once_and_in_order(case: Case) -> None:
    model = case.build()
    layers = find_layers(model)
    found = by_name(layers)
    assert found.get("embedding", set()) == set(case.embedding.split())
    assert found.get("head", set()) == set(case.head.split())
    assert [layer.name for layer in layers if layer.kind == "block"] == case.blocks
    for path in case.blocks:
        assert found[path] == {name for name, _ in model.named_parameters() if name.startswith(f"{path}.")}
    kinds = ["embedding", *["block"] * len(case.blocks), *(["head"] if case.head else [])]
    assert [layer.kind for layer in layers] == kinds
    order = [name for name, _ in model.named_parameters()]
    assert sorted(name for layer in layers for name in layer.parameter_names) == sorted(order)
    for layer in layers:
        assert list(layer.parameter_names) == sorted(layer.parameter_names, key=order.index)


@each_case
def test_training_one_layer_records_nothing_below_it(case: Case) -> None:
    model = case.build().eval()
    stack_of = [index for index, (_, count) in enumerate(case.stacks) for _ in range(count)]
    for place, layer in enumerate(find_layers(model), start=-1):
        loss, recorded = forward_with(model, case, layer.parameter_names)
        loss.backward()
        got_gradient = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
        assert got_gradient and got_gradient <= set(layer.parameter_names)
        if layer.kind == "embedding":
            assert all(recorded)
        elif layer.kind == "head":
            assert recorded == [case.encoder_norm is not None and stack > 0 for stack in stack_of]
        else:
            above = [at >= place and (case.feeds or stack == stack_of[place]) for at, stack in enumerate(stack_of)]
            assert recorded == above


@each_case
def test_each_embedded_parameter_acts_before_the_blocks_and_each_of_the_head_after(case: Case) -> None:
    # The oracle is autograd: what feeds a block leaves a graph on its output, what comes after it does not.
    model = case.build().eval()
    acting = {"embedding": 0, "head": 0}
    for layer in find_layers(model):
        for name in layer.parameter_names if layer.kind != "block" else ():
            loss, recorded = forward_with(model, case, [name])
            if not loss.requires_grad:
                continue  # peft's original of what it saves with the adapter
            acting[layer.kind] += 1
            assert any(recorded) == (layer.kind == "embedding" or name == case.encoder_norm), name
            if name == case.encoder_norm:
                assert not any(recorded[: case.stacks[0][1]])
    assert acting["embedding"] and bool(acting["head"]) == bool(case.head)


def snapshot(model: nn.Module) -> dict[str, Any]:
    """All that a search could disturb: bits, versions, identities, flags, attributes, hooks, generators."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    hooks = {
        (path, name): list(value.items())
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name.endswith("_hooks") or "_hooks_" in name
    }
    return {
        "bits": {name: tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist() for name, tensor in tensors},
        "tensors": [(name, id(tensor), tensor._version, tensor.requires_grad, tensor.grad) for name, tensor in tensors],
        "training": [module.training for module in model.modules()],
        "modules": [(path, id(module), type(module)) for path, module in model.named_modules()],
        "attributes": {path: sorted(vars(module)) for path, module in model.named_modules()},
        "hooks": hooks,
        "generators": (torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())),  # noqa: NPY002
    }


@each_case
def test_the_search_leaves_the_model_and_the_generators_as_they_were(case: Case) -> None:
    model = case.build().train()
    next(iter(model.children())).eval()
    ran: list[nn.Module] = []
    for module in model.modules():
        module.register_forward_pre_hook(lambda module, args: ran.append(module))
        module.register_forward_hook(lambda module, args, output: ran.append(module))
    next(model.parameters()).requires_grad_(False)
    before = snapshot(model)
    find_layers(model)
    for aspect, found in snapshot(model).items():
        assert found == before[aspect], aspect
    assert ran == []


class Moody(PlainModel):
    """Warns, draws random numbers, counts its forwards, and rewrites a buffer and a tensor of its own."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.own = torch.zeros(3)
        self.calls = [0]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        warnings.warn("moody", stacklevel=2)
        self.calls[0] += 1 + (random.randrange(9) if self.training else 0)
        self.seen.add_(1)
        self.own.add_(torch.rand(3, device="cpu").sum().item())
        return super().forward(tokens)


def test_a_model_that_changes_itself_in_its_forward_is_not_changed_by_the_search() -> None:
    model = Moody()
    generators = torch.get_rng_state(), random.getstate()
    with warnings.catch_warnings(record=True) as caught:
        found = by_name(find_layers(model))
    assert found["embedding"] == PLAIN_EMBEDDING
    assert model.seen == 0 and model.own.tolist() == [0, 0, 0] and model.calls == [0]
    assert torch.equal(torch.get_rng_state(), generators[0]) and random.getstate() == generators[1]
    assert caught == []


IDS_BYTES = 8 * torch.long.itemsize
"""The eight ids of the dummy batch, which have values."""


class Allocations(TorchDispatchMode):
    """Counts the bytes that operators return off the meta device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
                self.num_bytes += leaf.untyped_storage().nbytes()
        return output


def test_a_meta_llama_of_7b_parameters_is_sorted_without_memory_and_in_time_linear_in_its_blocks() -> None:
    calls = []
    for num_blocks in (8, 32):
        with torch.device("meta"):
            model = hf.LlamaForCausalLM(hf.LlamaConfig(num_hidden_layers=num_blocks))
        with Allocations() as allocations:
            layers, num_calls = count_calls(find_layers, model)
        assert allocations.num_bytes == IDS_BYTES
        assert len(layers) == num_blocks + 2
        calls.append(num_calls)
    assert sum(parameter.numel() for parameter in model.parameters()) > 6.7e9
    # Counted, since seconds depend on the machine. Four times the blocks; what is quadratic in them would make 16.
    assert calls[1] < 5 * calls[0]


def count_calls(function: Any, *args: Any) -> tuple[Any, int]:
    """What a function returns, and the calls that it makes, in Python and in C."""
    calls = 0

    def count(_: Any, event: str, __: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        return function(*args), calls
    finally:
        sys.setprofile(None)


def test_the_search_copies_no_weights_buffers_or_other_tensors(model: Any) -> None:
    model.register_buffer("mask", torch.zeros(1 << 16))
    model.extra = torch.zeros(1 << 16)  # as quantised layers keep their scales
    model.output.weight.grad = torch.zeros_like(model.output.weight)
    with Allocations() as allocations:
        find_layers(model)
    assert allocations.num_bytes == IDS_BYTES


def test_a_plain_module_is_sorted_by_what_its_forward_reads_first() -> None:
    found = by_name(find_layers(PlainModel()))
    assert list(found) == ["embedding", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert found["embedding"] == PLAIN_EMBEDDING
    assert found["head"] == PLAIN_HEAD


def test_one_item_with_attention_makes_blocks_of_a_whole_list(model: Any) -> None:
    model.blocks[0] = nn.Linear(HIDDEN, HIDDEN)
    model.blocks[2] = nn.Linear(HIDDEN, HIDDEN)
    found = by_name(find_layers(model))
    assert found["blocks.0"] == {"blocks.0.weight", "blocks.0.bias"}
    assert found["blocks.2"] == {"blocks.2.weight", "blocks.2.bias"}


class Chain(nn.ModuleList):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for module in self:
            hidden = module(hidden)
        return hidden


def test_a_list_without_attention_holds_no_blocks(model: Any) -> None:
    model.output = Chain([nn.Linear(HIDDEN, VOCAB)])
    head = {"final_norm.weight", "final_norm.bias", "output.0.weight", "output.0.bias"}
    assert by_name(find_layers(model))["head"] == head


def test_a_block_without_parameters_is_left_out(model: Any) -> None:
    model.blocks[1] = nn.Identity()
    assert [layer.name for layer in find_layers(model)] == ["embedding", "blocks.0", "blocks.2", "head"]


@pytest.mark.parametrize(
    "name",
    [
        "class_token",  # beside the list of blocks
        "tokens.mask_token",  # goes with its neighbours
    ],
)
def test_what_a_dummy_batch_leaves_out_belongs_to_the_embedding(name: str, model: Any) -> None:
    owner, _, attribute = name.rpartition(".")
    model.get_submodule(owner).register_parameter(attribute, nn.Parameter(torch.zeros(HIDDEN)))
    assert name in by_name(find_layers(model))["embedding"]


class EncoderDecoder(nn.Module):
    """Neither half is a transformers model."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = PlainModel(num_blocks=1)
        self.decoder = PlainModel(num_blocks=1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        encoded = self.encoder(tokens).argmax(-1)
        decoded: torch.Tensor = self.decoder(encoded)
        return decoded


def test_a_decoder_is_reached_through_its_encoder() -> None:
    found = by_name(find_layers(EncoderDecoder()))
    for half in ("encoder", "decoder"):
        assert {f"{half}.{name}" for name in PLAIN_EMBEDDING} <= found["embedding"]
        assert {f"{half}.{name}" for name in PLAIN_HEAD} <= found["head"]


class Wrapper(nn.Module):
    """Takes a batch of its own kind, holds a transformers model, and adds parameters around it."""

    def __init__(self) -> None:
        super().__init__()
        self.probe = nn.Linear(VOCAB, 2)
        self.temperature = nn.Parameter(torch.ones(()))
        self.inner = llama()

    def forward(self, batch: Batch) -> torch.Tensor:
        scores: torch.Tensor = self.probe(self.inner(**batch).logits) * self.temperature
        return scores


def test_a_transformers_model_inside_another_gets_a_dummy_batch_of_its_own() -> None:
    found = by_name(find_layers(Wrapper()))
    assert list(found) == ["embedding", "inner.model.layers.0", "inner.model.layers.1", "head"]
    assert found["embedding"] == {"inner.model.embed_tokens.weight"}
    assert found["head"] == {
        "probe.weight",
        "probe.bias",
        "temperature",
        "inner.model.norm.weight",
        "inner.lm_head.weight",
    }


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"),
    reason="before transformers 5.23 these towers look for the pixels of an image, which a dummy batch has not",
)
@pytest.mark.parametrize("kind", ["SmolVLM", "Idefics3"])
def test_a_tower_that_names_the_input_of_its_whole_model_gets_its_own(kind: str) -> None:
    """A tower's `main_input_name` is "input_ids" there, and its forward takes pixels."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**sizes, "model_type": "llama", "vocab_size": 32, "num_key_value_heads": 2}
    vision = {**sizes, "image_size": 32, "patch_size": 8}
    config = getattr(transformers, f"{kind}Config")(
        text_config=text, vision_config=vision, scale_factor=2, pad_token_id=0
    )
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    embedding, *blocks, _ = find_layers(model)  # without a warning, which would be an error here
    assert "model.vision_model.embeddings.patch_embedding.weight" in embedding.parameter_names
    assert [block.name for block in blocks] == ["model.vision_model.encoder.layers.0", "model.text_model.layers.0"]


OF_PATCHES: dict[str, tuple[str, dict[str, Any], str]] = {
    "Qwen2VL": ("qwen2_vl_text", {"embed_dim": 16, "num_heads": 2, "depth": 1, "hidden_size": 16}, "patch_embed"),
    "Qwen2_5_VL": ("qwen2_5_vl_text", {"hidden_size": 16, "num_heads": 2, "depth": 2}, "patch_embed"),
    "Qwen3VL": ("qwen3_vl_text", {"hidden_size": 16, "num_heads": 2, "depth": 1}, "patch_embed"),
    # Its first weight is of positions, and a norm that its forward reads early is registered late.
    "Glm4v": ("glm4v_text", {"hidden_size": 16, "num_heads": 2, "depth": 1}, "post_conv_layernorm"),
}


@pytest.mark.parametrize("kind", OF_PATCHES)
def test_a_tower_that_takes_patches_and_their_grid_is_reached(kind: str) -> None:
    text, vision, early = OF_PATCHES[kind]
    config = getattr(transformers, f"{kind}Config")(
        text_config={
            "model_type": text,
            "vocab_size": 32,
            "hidden_size": 32,
            "intermediate_size": 16,
            "head_dim": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "pad_token_id": 0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
        },
        vision_config={**vision, "intermediate_size": 16, "out_hidden_size": 32},
    )
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    embedding, *_, head = find_layers(model)  # without a warning, which would be an error here
    assert any(name.startswith(f"model.visual.{early}.") for name in embedding.parameter_names)
    assert any(name.startswith("model.visual.merger.") for name in head.parameter_names)


class Tower(PlainModel):
    """Reads how many patches an image has from its grid."""

    def forward(self, hidden_states: torch.Tensor, grid_thw: torch.Tensor) -> torch.Tensor:
        height, width = int(grid_thw[0, 1]), int(grid_thw[0, 2])
        pixels = hidden_states.reshape(height, width, hidden_states.shape[1])
        scores: torch.Tensor = super().forward((pixels.sum(-1) > 0).long().reshape(1, height * width))
        return scores


def test_values_of_the_batch_can_be_read() -> None:
    found = by_name(find_layers(Tower()))
    assert (found["embedding"], found["head"]) == (PLAIN_EMBEDDING, PLAIN_HEAD)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_the_search_is_the_same_under_autocast_and_with_another_default_device(device: str) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    image = hf.ViTForImageClassification(hf.ViTConfig(**sizes, image_size=32, patch_size=8))
    with torch.device(device), torch.autocast("cpu", dtype=torch.bfloat16):
        for model in (image, Tower()):
            find_layers(model)  # a warning would be an error here


def test_an_image_whose_channels_the_configuration_leaves_out_has_three() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = hf.BlipConfig(
        text_config={**sizes, "vocab_size": 32, "encoder_hidden_size": 16, "bos_token_id": 1, "sep_token_id": 2},
        vision_config={**sizes, "image_size": 32, "patch_size": 8},
    )
    find_layers(hf.BlipForConditionalGeneration(config))  # a warning would be an error here


def test_a_tower_that_takes_patches_and_their_shapes_is_reached() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = hf.Lfm2VlConfig(
        text_config={**sizes, "model_type": "lfm2", "vocab_size": 32, "num_key_value_heads": 2, "block_ff_dim": 16},
        vision_config={**sizes, "model_type": "siglip2_vision_model", "patch_size": 4, "num_patches": 16},
        projector_hidden_size=16,
        downsample_factor=2,
    )
    embedding, *_ = find_layers(hf.Lfm2VlForConditionalGeneration(config))  # a warning would be an error here
    assert any(name.endswith("embeddings.patch_embedding.weight") for name in embedding.parameter_names)


def test_the_blocks_of_a_model_of_sound_are_reached() -> None:
    config = hf.Wav2Vec2ConformerConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        conv_dim=(16, 16),
        conv_stride=(5, 4),
        conv_kernel=(10, 4),
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        classifier_proj_size=8,
    )
    *_, head = find_layers(hf.Wav2Vec2ConformerForSequenceClassification(config))
    assert "wav2vec2_conformer.encoder.layer_norm.weight" in head.parameter_names  # registered before the blocks


def test_a_vision_language_model_has_one_embedding_for_both_and_its_connector_in_the_head() -> None:
    found = by_name(find_layers(smolvlm()))
    assert list(found) == [
        "embedding",
        *paths("model.vision_model.encoder.layers"),
        *paths("model.text_model.layers"),
        "head",
    ]
    assert {name.split(".")[1] for name in found["embedding"]} == {"vision_model", "text_model"}
    norms = with_norm("model.vision_model.post_layernorm").split()
    connector = "model.connector.modality_projection.proj.weight"
    assert found["head"] == {*norms, connector, "model.text_model.norm.weight", "lm_head.weight"}


def test_frozen_parameters_are_sorted_too() -> None:
    model = llama().requires_grad_(False)
    assert sum(len(layer.parameter_names) for layer in find_layers(model)) == len(list(model.parameters()))


def test_a_shared_parameter_belongs_to_the_lowest_of_its_layers(model: Any) -> None:
    model.blocks[2][0].weight = model.blocks[1][0].weight
    model.final_norm.bias = model.blocks[1][0].bias  # and has the name of the head, which is registered first
    found = by_name(find_layers(model))
    assert found["blocks.1"] == {"blocks.1.0.weight", "final_norm.bias", "blocks.1.1.weight"}
    assert found["blocks.2"] == {"blocks.2.0.bias", "blocks.2.1.weight"}
    assert found["head"] == PLAIN_HEAD - {"final_norm.bias"}


def test_a_tie_to_the_embedding_does_not_pull_the_rest_of_the_head_with_it(model: Any) -> None:
    model.output.weight = model.tokens.weight
    found = by_name(find_layers(model))
    assert found["embedding"] == PLAIN_EMBEDDING
    assert found["head"] == PLAIN_HEAD - {"output.weight"}


class Fussy(PlainModel):
    """Takes what no dummy batch has."""

    def forward(self, tokens: torch.Tensor, mood: str = "") -> torch.Tensor:
        if mood != "good":
            raise RuntimeError("not in the mood")
        return super().forward(tokens)


def test_where_no_dummy_batch_reaches_the_blocks_registration_decides_and_a_warning_says_so() -> None:
    with pytest.warns(UserWarning, match="not in the mood") as caught:
        found = by_name(find_layers(Fussy()))
    assert found["embedding"] == {"tokens.weight", "final_norm.weight", "final_norm.bias"}
    assert found["head"] == {"first_norm.weight", "first_norm.bias", "output.weight", "output.bias"}
    message = str(caught[0].message)
    assert len(caught) == 1 and "Fussy" in message and "layers=" in message
    assert "'final_norm', 'tokens' to the embedding" in message
    assert "'first_norm', 'output' to the head" in message
    assert caught[0].filename == __file__


class Tired(PlainModel):
    """Fails on its way to the blocks, when its tokens were read."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.tokens(tokens)
        raise RuntimeError("too tired")


def test_what_was_read_before_the_dummy_forward_failed_is_embedding_for_certain() -> None:
    with pytest.warns(UserWarning, match="too tired") as caught:
        find_layers(Tired())
    assert "'tokens'" not in str(caught[0].message)


class Unsociable(PlainModel):
    """Can't be copied, like a model that holds a process group."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("one of a kind")


def test_a_model_that_cannot_be_copied_is_sorted_by_registration() -> None:
    with pytest.warns(UserWarning, match="one of a kind"):
        found = by_name(find_layers(Unsociable()))
    assert "final_norm.weight" in found["embedding"]


attended: list[torch.device] = []


class SpyingAttention(Attention):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        attended.append(hidden.device)
        raise RuntimeError("no such kernel")


def test_blocks_need_not_run(model: Any) -> None:
    for block in model.blocks:
        block[1] = SpyingAttention()
    found = by_name(find_layers(model))
    assert attended == []
    assert found["embedding"] == PLAIN_EMBEDDING
    assert found["head"] == PLAIN_HEAD


def test_four_bit_weights_survive_and_do_not_hinder_the_search(caplog: pytest.LogCaptureFixture) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    model = hf.BartForConditionalGeneration(hf.BartConfig(**{**BART, "d_model": 64})).eval()
    for block in [*model.model.encoder.layers, *model.model.decoder.layers]:
        for linear in (block.fc1, block.fc2):
            quantised = bnb.nn.Linear4bit(linear.in_features, linear.out_features)
            quantised.weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False)
            setattr(block, "fc1" if linear is block.fc1 else "fc2", quantised)
    model.to("cpu")  # bitsandbytes quantises as it moves
    weight = model.model.encoder.layers[0].fc1.weight
    assert weight.dtype == torch.uint8
    state, logits = weight.quant_state, model(**ids_and_decoder_ids()).logits
    found = by_name(find_layers(model))
    assert found["embedding"] == set(CASES["bart"].embedding.split())
    assert model.model.encoder.layers[0].fc1.weight is weight and weight.quant_state is state
    assert torch.equal(model(**ids_and_decoder_ids()).logits, logits)
    assert "quantization state not initialized" not in caplog.text


def test_weights_that_accelerate_offloads_do_not_hinder_the_search() -> None:
    accelerate = pytest.importorskip("accelerate")
    # The copies on the meta device that stay in the model are no longer tied.
    model = hf.OPTForCausalLM(hf.OPTConfig(**OPT, word_embed_proj_dim=HIDDEN, tie_word_embeddings=False)).eval()
    logits = model(**ids()).logits
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    found = by_name(find_layers(model))
    assert found["embedding"] == set(CASES["opt"].embedding.split())
    assert found["head"] == {*CASES["opt"].head.split(), "lm_head.weight"}
    assert torch.equal(model(**ids()).logits, logits)


PLAIN_LAYERS = [["tokens", "first_norm"], ["blocks.0"], ["blocks.1", "blocks.2"], ["final_norm", "output.weight"]]


def test_listed_layers_replace_the_search(model: Any) -> None:
    layers = find_layers(model, layers=[*PLAIN_LAYERS, ["output.bias"]])
    assert {layer.kind for layer in layers} == {"custom"}
    assert [layer.name for layer in layers] == ["custom.0", "blocks.0", "custom.2", "custom.3", "output.bias"]
    assert layers[0].parameter_names == ("tokens.weight", "first_norm.weight", "first_norm.bias")
    assert layers[1].parameter_names == ("blocks.0.0.weight", "blocks.0.0.bias", "blocks.0.1.weight")
    assert layers[3].parameter_names == ("final_norm.weight", "final_norm.bias", "output.weight")


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ([["ab"], ["a.bias", "a.weight"]], {"ab": ("ab.weight", "ab.bias"), "custom.1": ("a.weight", "a.bias")}),
        (
            [["a"], ["ab"]],
            {"a": ("a.weight", "a.bias"), "ab": ("ab.weight", "ab.bias")},
        ),  # a path, and no prefix of others
    ],
)
def test_listed_layers_need_no_blocks_and_keep_the_order_of_the_list(layers: Any, expected: Any) -> None:
    found = find_layers(nn.ModuleDict({"a": nn.Linear(2, 2), "ab": nn.Linear(2, 2)}), layers=layers)
    assert [(layer.name, layer.parameter_names) for layer in found] == list(expected.items())


@pytest.mark.parametrize(
    ("layers", "written_out"),
    [
        (
            [["tokens", "first_norm"], ["blocks.*"], ["final_norm", "output"]],
            [["tokens", "first_norm"], ["blocks.0"], ["blocks.1"], ["blocks.2"], ["final_norm", "output"]],
        ),
        (
            [["*.weight", "*.bias"], ["blocks.*.0", "blocks.*.1.weight"]],
            [
                ["final_norm.weight", "final_norm.bias"],
                ["tokens.weight"],
                ["first_norm.weight", "first_norm.bias"],
                ["output.weight", "output.bias"],
                *([f"blocks.{index}"] for index in range(3)),
            ],
        ),
        ([["*"]], [["final_norm"], ["tokens"], ["blocks"], ["first_norm"], ["output"]]),
    ],
    ids=["blocks", "parts that belong together", "all"],
)
def test_a_star_repeats_a_layer_for_each_part_of_a_path(layers: Any, written_out: Any, model: Any) -> None:
    model.shape = nn.Identity()  # holds no parameter, and so is no layer
    found, expected = (find_layers(model, each) for each in (layers, written_out))
    assert [each.parameter_names for each in found] == [each.parameter_names for each in expected]


def test_a_layer_may_be_a_text_with_plus_signs(model: Any) -> None:
    lists = [["tokens", "first_norm"], ["blocks"], ["final_norm", "output"]]
    assert find_layers(model, ["+".join(each) for each in lists]) == find_layers(model, lists)


def test_a_tied_parameter_may_be_listed_under_any_of_its_names(model: Any) -> None:
    model.output.weight = model.tokens.weight
    layers = find_layers(model, layers=[["first_norm"], ["blocks"], ["final_norm"], ["output.weight", "output.bias"]])
    assert layers[3].parameter_names == ("tokens.weight", "output.bias")


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (PLAIN_LAYERS, r"leaves out 'output\.bias'\. Name each parameter"),
        ([], r"leaves out 'final_norm\.weight', .*'blocks\.1\.0\.weight', .* and 6 more\. Name each parameter"),
        (
            [*PLAIN_LAYERS, ["output"]],
            r"'output\.weight' is in layers\[3\] and, through 'output', in layers\[4\]\. Keep",
        ),
        (
            [*PLAIN_LAYERS, ["outptu"]],
            r"layers\[4\] names 'outptu', which is neither .* of PlainModel\. See model\.named",
        ),
        ([*PLAIN_LAYERS, ["blocks.0.0.weigh"]], r"layers\[4\] names 'blocks\.0\.0\.weigh', which is neither"),
        ([[], *PLAIN_LAYERS, ["output.bias"]], r"layers\[0\]=\[\] is empty: it holds no parameter\. Drop"),
        ("tokens", r"layers is the string 'tokens'\. Write a list, \['tokens'\]"),
        ([["block.*"]], r"layers= has 'block\.\*', which fits no module and no parameter of PlainModel"),
        ([["blocks.*"], ["tokens"]], r"layers= leaves out 'final_norm\.weight'"),
        ([["tokens", "blocks.*"]], r"'tokens\.weight' is in layers\[0\] and, through 'tokens', in layers\[1\]"),
    ],
    ids=[
        *("orphan", "many orphans", "twice", "unknown module", "unknown parameter", "empty", "string"),
        *("star that fits nothing", "orphan beside a star", "twice through a star"),
    ],
)
def test_a_list_that_is_no_partition_is_refused(layers: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_layers(PlainModel(), layers=layers)


def test_a_tied_parameter_listed_in_two_layers_is_refused(model: Any) -> None:
    model.output.weight = model.tokens.weight
    with pytest.raises(ValueError, match=r"'tokens\.weight' is in layers\[0\] and, through 'output'.*tied parameter"):
        find_layers(model, layers=[["tokens", "first_norm"], ["blocks"], ["final_norm", "output"]])


def test_without_attention_the_lists_that_repeat_one_class_and_hold_most_weights_are_blocks() -> None:
    plain = PlainModel()
    plain.blocks = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(9))
    plain.tail = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN), nn.LayerNorm(HIDDEN)])
    plain.alone = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN)])
    assert [layer.name for layer in find_layers(plain)] == ["embedding", *paths("blocks", 9), "head"]
    plain.output = nn.Linear(HIDDEN, 9 * HIDDEN)
    with pytest.raises(ValueError, match=r"^PlainModel has no nn\.ModuleList .* none repeats one class and holds most"):
        find_layers(plain)


def test_lists_inside_of_a_list_of_several_classes_are_no_blocks() -> None:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(4))

    plain = PlainModel()
    plain.blocks = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN), Mixture(), nn.Linear(HIDDEN, HIDDEN), Mixture()])
    with pytest.raises(ValueError, match=r"^PlainModel has no nn\.ModuleList"):
        find_layers(plain)


def test_what_runs_block_by_block_asks_for_attention() -> None:
    model = hybrid("mamba2")
    assert find_blocks(model, are_needed=False) == []
    assert [path for path, _ in find_blocks(model, with_attention=False)] == paths("backbone.layers")
    for runs in (lambda: find_blocks(model), lambda: tile_tokens(model, 4), lambda: park_layers(model, form="nf4")):
        with pytest.raises(ValueError, match=r"^Mamba2ForCausalLM has no nn\.ModuleList .* can run block by block"):
            runs()


def test_a_model_without_blocks_is_refused_by_name_in_the_words_of_a_script_or_of_a_command() -> None:
    model = nn.Sequential(nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB))
    with pytest.raises(ValueError, match=r"^Sequential has no nn\.ModuleList .* with layers="):
        find_layers(model)
    with naming_options(), pytest.raises(ValueError, match=r"^Sequential has no .* with --layers MODULE_PATH"):
        find_layers(model)
    with naming_options(), pytest.raises(ValueError, match=r"^--layers leaves out '0\.weight'"):
        find_layers(model, [["1"]])
