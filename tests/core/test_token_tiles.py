"""MLPs and norms in tiles of tokens: gradients of the whole module, bytes of one tile.

The reference is the same model without tiles. In fp64 the two differ in the order of a weight's sum over tokens alone.
"""

import copy
import pickle
import re
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import slivertune as st
from slivertune.core.ledger import Ledger
from slivertune.core.token_tiles import runs_in_tiles
from tests.core.test_kept_activations import (
    batch,
    bert,
    blocks_of,
    checkpoint,
    llama,
    num_steps_of,
    optimizer_of,
    with_lora,
)
from tests.helpers.model_types import MODEL_TYPES
from tests.helpers.models import tiny_gpt2, tiny_llama, tiny_mixtral, token_batches
from tests.helpers.pairwise import rotated
from tests.helpers.tolerance import sum_limit

Gradients = dict[str, torch.Tensor]
METHODS = ("dense", "hift", "sft", "lora", "dense with tokens", "hift with tokens")
TILES = (1, 11)
"""Of 42 tokens in three sequences, which are cut into 14 and 5 tiles."""


def made(method: str, dtype: torch.dtype = torch.float64, *, checkpointed: bool = True) -> Any:
    model = llama(dropout=0.0)
    model = (with_lora(model) if method == "lora" else model).to(dtype)
    if checkpointed:
        checkpoint(model)
    return model


def gradients_of(model: nn.Module, method: str, *, num_steps: int | None = None) -> list[Gradients]:
    """The gradients of some steps, by default as many as the method needs, and the losses under the name of none."""
    optimizer, steps = optimizer_of(method, model), list[Gradients]()
    for step in range(num_steps or num_steps_of(method)):
        loss = model(**batch(model, step)).loss
        loss.backward()
        named = model.named_parameters()
        gradients = {name: each.grad.clone() for name, each in named if each.grad is not None}
        steps.append({**gradients, "loss": loss.detach()})
        optimizer.step()
        optimizer.zero_grad()
    return steps


def assert_close(found: list[Gradients], expected: list[Gradients], limit: float) -> None:
    """Every gradient within a share of its largest element, or of the thousandth part of the step's largest.

    The gradient of keys' biases is a remainder of larger terms, nothing but rounding.
    """
    for step, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.keys() == other.keys() and len(one) > 1, f"in step {step}"
        floor = max(float(each.abs().max()) for each in other.values()) / 1000
        for name, gradient in one.items():
            distance = float((gradient - other[name]).abs().max())
            assert distance <= limit * max(floor, float(other[name].abs().max())), (step, name, distance)


@rotated(method=METHODS, checkpointed=(True, False), tile_size=TILES)
def test_losses_and_gradients_are_those_of_whole_batches(method: str, checkpointed: bool, tile_size: int) -> None:
    def run(tile_size: int | None) -> list[Gradients]:
        # SFT has no fp64.
        model = made(method, torch.float32 if method == "sft" else torch.float64, checkpointed=checkpointed)
        with ExitStack() as stack:
            if tile_size is not None:
                stack.enter_context(st.tile_tokens(model, tile_size))
            if "tokens" in method:
                stack.enter_context(st.TokenTune(ratio=0.5).attach(model))
            return gradients_of(model, method)

    # Sums over 42 tokens in another order, in each of up to seven steps that follow from one another.
    assert_close(run(tile_size), run(None), limit=1e-3 if method == "sft" else 1e-11)


def test_in_bf16_gradients_are_those_of_whole_batches_to_rounding() -> None:
    exact = gradients_of(made("dense"), "dense", num_steps=1)
    whole = gradients_of(made("dense", torch.bfloat16), "dense", num_steps=1)
    model = made("dense", torch.bfloat16)
    with st.tile_tokens(model, 6):
        tiled = gradients_of(model, "dense", num_steps=1)

    def distance(found: list[Gradients]) -> float:
        return max(float((found[0][name] - each).norm() / each.norm()) for name, each in exact[0].items())

    # Seven tiles' gradients of a weight are added in bf16: seven more roundings, beside those of the whole step.
    assert distance(tiled) <= distance(whole) + sum_limit(7, torch.bfloat16)
    # The forward of a token is the same arithmetic, whichever others it comes with.
    assert torch.equal(tiled[0]["loss"], whole[0]["loss"])


def viewing_llama() -> Any:
    """A Llama whose MLPs view their input by rows, as those of many other families do."""
    model: Any = tiny_llama(torch.float64)
    kind = type(model.model.layers[0].mlp)

    class ViewingMLP(kind):  # type: ignore[misc,valid-type]
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            rows: torch.Tensor = super().forward(hidden.view(-1, hidden.shape[-1]))
            return rows.view(hidden.shape)

    for layer in model.model.layers:
        layer.mlp.__class__ = ViewingMLP
    return model


class NormOverTokens(nn.Module):
    """A norm whose statistics are those of all tokens of a batch, and not of one."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.batchnorm = nn.BatchNorm1d(size, dtype=torch.float64)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.batchnorm(hidden.transpose(1, 2))
        return normed.transpose(1, 2)


def llama_with_norms_over_tokens() -> Any:
    model: Any = tiny_llama(torch.float64).train()
    for layer in model.model.layers:
        layer.post_attention_layernorm = NormOverTokens(32)
    model.model.norm = NormOverTokens(32)
    return model


@pytest.mark.parametrize("tile_size", [2, 9])
@pytest.mark.parametrize(
    ("make", "num_tiled"),
    [
        (lambda: tiny_llama(torch.float64), 3),
        (viewing_llama, 3),
        (lambda: tiny_gpt2(torch.float64), 3),
        (lambda: bert().eval().to(torch.float64), 2),  # the two parts of its MLP; no dropout
        (llama_with_norms_over_tokens, 2),
        (lambda: MODEL_TYPES["wav2vec2"].make().to(torch.float64), 3),  # whose convolutions have a norm of groups
    ],
    ids=["llama", "viewing llama", "gpt2", "bert", "norms over tokens", "wav2vec2"],
)
def test_models_of_other_shapes_have_the_same_gradients(
    make: Callable[[], Any], num_tiled: int, tile_size: int
) -> None:
    model = make()
    name = type(model).__name__
    values = batch(model) if "Bert" in name else token_batches(1, batch_size=3)[0]
    if "Wav2Vec2" in name:
        values = {
            key: each.double() if each.is_floating_point() else each
            for key, each in MODEL_TYPES["wav2vec2"].batch().items()
        }
    found = []
    for size in (None, tile_size):
        model.zero_grad()
        with nullcontext() if size is None else st.tile_tokens(model, size) as handle:
            model(**values).loss.backward()
            paths = () if handle is None else handle.paths
        found.append({name: each.grad for name, each in model.named_parameters() if each.grad is not None})
    assert_close([found[1]], [found[0]], limit=1e-12)
    assert len([path for path in paths if ".1." in path]) == num_tiled, paths


@pytest.mark.parametrize(
    ("shape", "tile"), [((3, 14), (3, 4)), ((14, 3), (4, 3)), ((1, 42), (1, 12)), ((40, 1), (12, 1))]
)
def test_a_tile_has_as_many_tokens_of_all_sequences_together(shape: tuple[int, int], tile: tuple[int, int]) -> None:
    model, seen = made("dense"), list[torch.Size]()
    model.model.layers[0].mlp.up_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[:2]))
    with st.tile_tokens(model, 12):
        model(input_ids=torch.ones(shape, dtype=torch.int64))
    assert seen[0] == tile and sum(each.numel() for each in seen) == shape[0] * shape[1]


def test_a_weights_gradient_is_accumulated_once_a_backward() -> None:
    model, counts = made("dense"), Counter[str]()
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: counts.update([name]))
    with st.tile_tokens(model, 6):
        model(**batch(model)).loss.backward()
    assert set(counts.values()) == {1} and "model.layers.0.mlp.up_proj.weight" in counts


def test_gradients_that_are_stepped_in_the_backward_are_whole() -> None:
    weights = []
    for tiled in (False, True):
        model = made("dense")
        hift = st.HiFT(
            model, torch.optim.SGD, config=st.HiFTConfig.paper(gradients="stepped", layers_per_group=3), lr=0.1
        )
        with st.tile_tokens(model, 6) if tiled else nullcontext():
            for step in range(4):
                model(**batch(model, step)).loss.backward()
                hift.step()
        weights.append({name: each.detach() for name, each in model.named_parameters()})
    assert_close([weights[1]], [weights[0]], limit=1e-12)


def test_dropout_in_an_mlp_drops_the_same_elements_in_both_forwards_of_a_tile() -> None:
    torch.manual_seed(0)
    model = bert().double()
    with st.tile_tokens(model, 5):
        torch.manual_seed(1)
        values = batch(model)
        model(**values).loss.backward()
        name, weight = "bert.encoder.layer.1.output.dense.weight", model.bert.encoder.layer[1].output.dense.weight
        losses = []
        for sign in (1, -1):
            with torch.no_grad():
                weight[3, 5] += sign * 1e-5 if sign == 1 else -2e-5
            torch.manual_seed(1)
            losses.append(model(**values).loss.detach())
    slope = (losses[0] - losses[1]) / 2e-5
    # A central difference in fp64: its error is some 1e-10 of the third derivative, and 1e-16 / 1e-5 of the loss.
    assert weight.grad[3, 5] != 0 and torch.isclose(weight.grad[3, 5], slope, rtol=1e-5, atol=1e-10), name


# ---- bytes


def wide_llama(*, checkpointed: bool) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 512, "num_attention_heads": 2, "num_hidden_layers": 2}
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=61, use_cache=False, **sizes)).train()
    if checkpointed:
        checkpoint(model)
    return model


def residual_of(tile_size: int | None, *, checkpointed: bool = True, length: int = 512) -> int:
    model = wide_llama(checkpointed=checkpointed)
    with nullcontext() if tile_size is None else st.tile_tokens(model, tile_size), Ledger(model) as ledger:
        model(**batch(model, size=1, length=length)).loss.backward()
    return ledger.highest.residual


@pytest.mark.parametrize("checkpointed", [True, False])
def test_an_mlp_takes_the_intermediate_results_of_one_tile(checkpointed: bool) -> None:
    whole, tiled, small = (residual_of(each, checkpointed=checkpointed) for each in (None, 128, 32))
    of_one_tensor = 512 * 512 * 4
    # Gate, its activation, up and their product, and gradients of some of them: one tensor of 512 tokens each.
    assert whole - tiled > 3 * of_one_tensor
    assert tiled - small < 6 * of_one_tensor * (128 - 32) / 512
    # One tile of 512 tokens is the whole module, run as it is.
    assert residual_of(512, checkpointed=checkpointed) == whole


# ---- on and off


def test_a_model_that_is_let_go_is_as_before() -> None:
    model = made("dense")
    before = [dict(vars(each)) for each in model.modules()]
    handle = st.tile_tokens(model, 6)
    tiled = {name for name, each in model.named_modules() if runs_in_tiles(each)}
    assert tiled == set(handle.paths) and "model.norm" in tiled and "model.layers.3.mlp" in tiled
    assert not any("self_attn" in name for name in tiled)
    handle.remove()
    handle.remove()
    assert [vars(each) for each in model.modules()] == before


def test_copies_of_the_model_run_whole_and_a_handle_is_not_copied() -> None:
    model = made("dense", checkpointed=False)
    with st.tile_tokens(model, 6) as handle:
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert not any(map(runs_in_tiles, twin.modules()))
            twin(**batch(twin)).loss.backward()
            st.tile_tokens(twin, 6).remove()
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="belongs to one model"):
                copied(handle)


def test_tiles_that_are_removed_under_token_selection_leave_it_in_force() -> None:
    expected = gradients_of_selected(None)
    assert_close([gradients_of_selected(lambda tiles: tiles.remove())], [expected], limit=1e-12)
    assert_close([gradients_of_selected(lambda tiles: None)], [expected], limit=1e-12)


def gradients_of_selected(then: Callable[[Any], None] | None) -> Gradients:
    model = made("dense")
    tiles = None if then is None else st.tile_tokens(model, 6)
    with st.TokenTune(ratio=0.5).attach(model):
        if then is not None:
            then(tiles)
        model(**batch(model)).loss.backward()
    if tiles is not None:
        tiles.remove()
        assert not any(map(runs_in_tiles, model.modules()))
    return {name: each.grad for name, each in model.named_parameters()}


def test_token_selection_still_skips_the_blocks_below_hifts_active_group() -> None:
    counts = []
    for tiled in (False, True):
        model, seen = made("dense", checkpointed=False), list[torch.Size]()
        optimizer = st.HiFT(model, torch.optim.SGD, config=st.HiFTConfig.paper(order="top2down"), lr=0.1)
        with st.tile_tokens(model, 1000) if tiled else nullcontext(), st.TokenTune(ratio=0.5).attach(model):
            blocks_of(model)[0].mlp.gate_proj.register_forward_pre_hook(
                lambda _, args, seen=seen: seen.append(args[0].shape)
            )
            model(**batch(model)).loss.backward()
            optimizer.step()
        counts.append(seen)
    assert counts[0] == counts[1] and len(counts[0]) == 1


# ---- what can't be


@pytest.mark.parametrize(
    ("tile_size", "message"),
    [
        (0, "token_tile_size=0 must be at least 1"),
        (-3, "token_tile_size=-3 must be at least 1"),
        (1.5, "token_tile_size=1.5 must be an integer"),
        (True, "token_tile_size=True must be an integer"),
    ],
)
def test_a_size_that_can_not_be_is_named(tile_size: Any, message: str) -> None:
    model = made("dense")
    with pytest.raises(ValueError, match=re.escape(message)):
        st.tile_tokens(model, tile_size)
    st.tile_tokens(model, 1).remove()


def test_mixtures_of_experts_are_left_whole_with_a_word() -> None:
    model: Any = tiny_mixtral()
    with pytest.raises(ValueError, match="no block of MixtralForCausalLM has an MLP that can run in tiles of tokens"):
        st.tile_tokens(model, 6)
    model.model.layers[0].mlp = tiny_llama().model.layers[0].mlp
    with pytest.warns(UserWarning, match=r"does not tile mixtures of experts: model.layers.1.mlp, of \d+ such modules"):
        handle = st.tile_tokens(model, 6)
    assert "model.layers.0.mlp" in handle.paths and "model.layers.1.mlp" not in handle.paths


def test_what_has_another_forward_already_is_named_and_nothing_is_changed() -> None:
    model = made("dense")
    refused = pytest.raises(RuntimeError, match=r"(?s)forward of model.layers.0.\S+ was replaced .* before anything")
    with st.TokenTune(ratio=0.5).attach(model), refused:
        st.tile_tokens(model, 6)
    with st.tile_tokens(model, 6), pytest.raises(RuntimeError, match="once per model"):
        st.tile_tokens(model, 6)
    assert not any("forward" in vars(each) for each in model.modules())


def test_a_module_that_is_given_more_than_its_tokens_or_returns_no_tensor_is_named() -> None:
    model = made("dense")
    mlp = model.model.layers[0].mlp
    hidden = torch.randn(1, 14, 32, dtype=torch.float64)
    with st.tile_tokens(model, 6):
        assert torch.equal(mlp(hidden[:, :6]), type(mlp).forward(mlp, hidden[:, :6]))
        for call in (lambda: mlp(x=hidden), lambda: mlp(hidden, hidden[:, :3]), lambda: mlp(hidden, 3)):
            with pytest.raises(RuntimeError, match=r"model.layers.0.mlp .* gets arguments other than tensors with one"):
                call()
        mlp.down_proj.register_forward_hook(lambda *_: (hidden,))
        with pytest.raises(RuntimeError, match=r"model.layers.0.mlp returns tuple, not a tensor\. Leave tile_tokens"):
            mlp(hidden)


def test_weights_that_zero_3_would_gather_for_every_tile_are_refused() -> None:
    model = made("dense")
    model.model.layers[0].mlp.up_proj.weight.ds_id = 7
    said = "tile_tokens does not go with ZeRO-3: .* again for every tile"
    with st.tile_tokens(model, 6), pytest.raises(RuntimeError, match=said):
        model(**batch(model))


def test_a_model_without_blocks_is_refused() -> None:
    with (
        warnings.catch_warnings(),
        pytest.raises(ValueError, match="Only models with blocks can run block by block"),
    ):
        st.tile_tokens(nn.Linear(2, 2), 6)
