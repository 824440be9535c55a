"""Reentrant checkpointing: no method loses the gradients of blocks whose input needs none.

The reference is dense fine-tuning without checkpointing. Dense fine-tuning under reentrant checkpointing is none: it
loses those gradients by itself.
"""

import copy
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from slivertune import SFT, HiFT, HiFTConfig, SFTConfig, TokenTune
from slivertune.core.checkpointing import enable_checkpointing
from slivertune.core.reentrant import RecordingCheck, ReentrantBlocks
from tests.helpers.model_types import MODEL_TYPES, OTHERS
from tests.tokentune.families import CHECKPOINTING, Batch

pytestmark = [
    pytest.mark.filterwarnings("ignore:SFT trains the linear layers of the blocks"),  # and no classifier's head
    pytest.mark.filterwarnings("ignore:no dummy batch"),  # of waves and spectrograms, to find the order of the blocks
    pytest.mark.filterwarnings("ignore:.* parameters do not require gradients, and HiFT keeps them frozen"),
]
Gradients = dict[str, torch.Tensor]

QUICK = (
    "llama",
    "qwen3_moe",
    "gpt2",
    "bert",
    "vit",
    "audio-spectrogram-transformer",
    "whisper",
    "dinov2",
    "gemma4_text",
)
"""The types whose rows are not slow; one speech model and two of vision are among them."""
SHARES_KEYS = r"Gemma4TextDecoderLayer passes tensors in .*blocks share.*'use_reentrant': False"
"""Later blocks read keys and values of earlier ones from a mapping, by which torch's reentrant checkpoint passes no
gradient."""
REFUSALS: dict[tuple[str, str, str], str] = {
    ("gemma4_text", "reentrant", "hift"): SHARES_KEYS,
    ("gemma4_text", "reentrant", "sft"): SHARES_KEYS,
    ("gemma4_text", "reentrant", "tokentune"): SHARES_KEYS,
}
"""By model type, checkpointing and method: the text of the error, where a method refuses. At most 20 rows."""


def gradients_of(model: nn.Module) -> Gradients:
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def dense(model: Any, batch: Batch) -> Gradients:
    model(**batch).loss.backward()
    return gradients_of(model)


def hift(model: Any, batch: Batch, **config: Any) -> Gradients:
    """The gradients of all groups, each in its turn; at rate 0 the weights stay."""
    optimizer, found = HiFT(model, torch.optim.SGD, config=HiFTConfig.paper(**config), lr=0.0), {}
    for _ in range(optimizer.num_groups):
        model(**batch).loss.backward()
        found |= gradients_of(model)
        optimizer.step()
    optimizer.detach()
    return found


def sft(model: Any, batch: Batch, **config: Any) -> Gradients:
    """The gradients of all targets, in their shapes; of a target that has none, zeros."""
    optimizer = SFT(model, config=SFTConfig(**{"density": 1.0, **config}), lr=0.0, total_steps=1)
    model(**batch).loss.backward()
    pairs = zip(optimizer.targets, optimizer.param_groups[0]["params"], strict=False)  # a witness comes last
    found = {
        target.name: (torch.zeros(delta.shape) if delta.grad is None else delta.grad.clone()).reshape(target.shape)
        for target, delta in pairs
    }
    optimizer.detach()
    return found


def tokentune(model: Any, batch: Batch, ratio: float = 1.0) -> Gradients:
    with TokenTune(ratio=ratio).attach(model):
        return dense(model, batch)


METHODS: dict[str, Callable[..., Gradients]] = {"hift": hift, "sft": sft, "tokentune": tokentune}


@cache
def reference(name: str) -> tuple[nn.Module, Batch, Gradients]:
    """A model that was not trained, its batch, and its dense gradients without checkpointing."""
    model, batch = {**MODEL_TYPES, **OTHERS}[name].make(), {**MODEL_TYPES, **OTHERS}[name].batch()
    return model, batch, dense(copy.deepcopy(model), batch)


def made(model: nn.Module, use_reentrant: bool | None) -> nn.Module:
    model = copy.deepcopy(model)
    if use_reentrant is not None:
        enable_checkpointing(model, {"use_reentrant": use_reentrant})
    return model


def assert_same(method: str, found: Gradients, expected: Gradients, tolerance: float | None = None) -> None:
    """Equal to the bit, or within a tolerance; SFT's targets are a part of the parameters."""
    names = found.keys() if method == "sft" else expected.keys()
    assert len(names) > 2 and names <= found.keys()
    far = 0.0 if tolerance is None and method != "tokentune" else tolerance or 1e-5
    for name in names:
        # A parameter without a gradient (of an expert that no token takes) is SFT's zero.
        wanted = expected.get(name, torch.zeros_like(found[name]))
        torch.testing.assert_close(
            found[name], wanted, rtol=0.0, atol=far, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", CHECKPOINTING)
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MODEL_TYPES]
)
def test_gradients_are_those_of_dense_fine_tuning_without_checkpointing(name: str, kind: str, method: str) -> None:
    model, batch, expected = reference(name)
    assert model.config.model_type == name  # type: ignore[union-attr]
    train = partial(METHODS[method], made(model, CHECKPOINTING[kind]), batch)
    if (name, kind, method) in REFUSALS:
        with pytest.raises(RuntimeError, match=REFUSALS[name, kind, method]):
            train()
    else:
        # TokenTune splits rows and puts them together again, in other matrix products: 1e-5 is some hundred roundings.
        assert_same(method, train(), expected)


def test_refusals_are_few_and_none_is_without_checkpointing() -> None:
    assert len(MODEL_TYPES) >= 40 and len(REFUSALS) <= 20
    assert all(kind != "plain" and name in MODEL_TYPES for name, kind, _ in REFUSALS)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["hift", "sft"])
@pytest.mark.parametrize("kind", CHECKPOINTING)
@pytest.mark.parametrize("name", OTHERS)
def test_models_that_tokentune_does_not_hook_have_dense_gradients_too(name: str, kind: str, method: str) -> None:
    model, batch, expected = reference(name)
    found = METHODS[method](made(model, CHECKPOINTING[kind]), batch)
    # What all decoder blocks read is added up block by block, which is another order: one rounding a block of 1e-2.
    is_added_up = kind == "reentrant" and name in ("t5", "bart", "whisper seq2seq")
    assert_same(method, found, expected, 1e-7 if is_added_up else None)


# ---- frozen below the blocks


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["vit", "whisper"])
def test_blocks_above_frozen_patches_and_waves_train(name: str, method: str) -> None:
    model, batch, _ = reference(name)
    model = copy.deepcopy(model)
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_("layers" in parameter_name or "classifier" in parameter_name)
    expected = dense(made(model, None), batch)
    with pytest.warns(UserWarning, match="None of the inputs"):
        lost = expected.keys() - dense(made(without_input_gradients(model), True), batch).keys()
    assert any("layers.0." in each for each in lost), "plain reentrant checkpointing loses what is tested here"
    assert_same(method, METHODS[method](made(model, True), batch), expected)


def without_input_gradients(model: Any) -> Any:
    model = copy.deepcopy(model)
    model.enable_input_require_grads = lambda: None
    return model


@pytest.mark.parametrize("kind", ["not reentrant", "reentrant"])
@pytest.mark.parametrize("name", ["vit", "beit", "audio-spectrogram-transformer", "bert"])
def test_checkpointed_layers_below_a_pooled_output_select_the_same_tokens_again(name: str, kind: str) -> None:
    model, batch, _ = reference(name)
    expected = tokentune(made(model, None), batch, ratio=0.5)
    assert_same("tokentune", tokentune(made(model, CHECKPOINTING[kind]), batch, ratio=0.5), expected, 1e-6)


# ---- models that call torch's checkpoint by themselves


class Attention(nn.Linear):
    """By whose name blocks are found."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(8), Attention(8, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.inner(self.norm(hidden))


class Own(nn.Module):
    """Three blocks on an embedding or on rows of numbers, checkpointed by a function of its own."""

    def __init__(self, run: Callable[["Own", torch.Tensor], torch.Tensor], *, embeds: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8) if embeds else nn.Identity()
        self.blocks, self.head, self.run = nn.ModuleList(Block() for _ in range(3)), nn.Linear(8, 3), run

    def forward(self, rows: torch.Tensor) -> Any:
        logits = self.head(self.run(self, self.embedding(rows)))
        return SimpleNamespace(loss=logits.square().mean())


def each_block(call: Callable[..., Any]) -> Callable[[Own, torch.Tensor], torch.Tensor]:
    def run(model: Own, hidden: torch.Tensor) -> torch.Tensor:
        for block in model.blocks:
            hidden = call(block, hidden)
        return hidden

    return run


class OwnFunction(torch.autograd.Function):
    """A checkpoint whose context is set up after its forward."""

    @staticmethod
    def forward(function: Callable[..., Any], given: torch.Tensor) -> torch.Tensor:
        return function(given)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(context: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        context.function = inputs[0]
        context.save_for_backward(inputs[1])

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        given = context.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            output = context.function(given)
        torch.autograd.backward(output, gradients)
        return None, given.grad


reentrant = partial(checkpoint, use_reentrant=True)
WAYS: dict[str, Callable[[Own, torch.Tensor], torch.Tensor]] = {
    "blocks": each_block(reentrant),
    "forwards": each_block(lambda block, hidden: reentrant(block.forward, hidden)),
    "a function": each_block(lambda block, hidden: reentrant(lambda given: block(given) * 2.0, hidden)),
    "a tuple": each_block(lambda block, hidden: reentrant(lambda given: block(given[0]), (hidden,))),
    "a part": each_block(lambda block, hidden: hidden + reentrant(block.inner, block.norm(hidden).detach())),
    "several at once": lambda model, hidden: reentrant(nn.Sequential(*model.blocks), hidden),
    "a sequence": lambda model, hidden: checkpoint_sequential(model.blocks, 2, hidden, use_reentrant=True),
    "a method of a linear layer": each_block(lambda block, hidden: hidden + reentrant(block.inner.forward, hidden)),
    "a function of the weight": each_block(lambda block, hidden: reentrant(lambda x: x @ block.inner.weight, hidden)),
    "a function of a list": each_block(
        lambda block, hidden: reentrant(lambda x: torch.cat([x, block.inner.weight[None]], 1)[:, :6], hidden)
    ),
    "an own function": each_block(OwnFunction.apply),
    "one in another": each_block(lambda block, hidden: reentrant(lambda given: reentrant(block, given), hidden)),
}


def own_model(way: Callable[[Own, torch.Tensor], torch.Tensor], **options: Any) -> Own:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Own(way, **options).train()


@pytest.mark.filterwarnings("ignore:None of the inputs")
@pytest.mark.filterwarnings("ignore:no gradient reached group 0")  # torch loses what lies below a tuple, too
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("embeds", [True, False], ids=["integers", "numbers"])
@pytest.mark.parametrize("method", ["hift", "sft"])
def test_what_an_own_checkpoint_would_lose_is_refused_in_the_forward(method: str, embeds: bool, way: str) -> None:
    model = own_model(WAYS[way], embeds=embeds)
    rows = torch.arange(6)[None] if embeds else torch.randn(1, 6, 8)
    before = {name: each.clone() for name, each in model.named_parameters() if name.startswith("blocks")}
    with pytest.raises(RuntimeError, match=r"blocks\.0.*reentrant checkpointing.*use_reentrant=False"):
        METHODS[method](model, {"rows": rows})
    assert all(torch.equal(each, before[name]) for name, each in model.named_parameters() if name in before)


@pytest.mark.filterwarnings("ignore:None of the inputs")
@pytest.mark.parametrize("compiled", [("head",), ("blocks.1.norm", "blocks.2")], ids=str)
@pytest.mark.parametrize("method", ["hift", "sft"])
def test_modules_beside_compiled_ones_are_refused_too(method: str, compiled: tuple[str, ...]) -> None:
    model = own_model(WAYS["blocks"])
    for path in compiled:
        model.get_submodule(path).compile(backend="eager")
    with pytest.raises(RuntimeError, match=r"blocks\.0.*reentrant checkpointing.*use_reentrant=False"):
        METHODS[method](model, {"rows": torch.arange(6)[None]})


@pytest.mark.filterwarnings("ignore:None of the inputs")
@pytest.mark.parametrize("kind", [Block, Attention])
def test_compiled_modules_whose_gradients_are_lost_are_warned_of_at_the_first_step(kind: type[nn.Module]) -> None:
    model = own_model(WAYS["blocks"])
    for module in model.modules():
        if isinstance(module, kind):
            module.compile(backend="eager")
    optimizer = SFT(model, config=SFTConfig(density=0.5, reselection_interval=0), lr=0.1, total_steps=3)
    model(torch.arange(6)[None]).loss.backward()
    with pytest.warns(UserWarning, match=r"no gradient has reached any of the 3 trained tensors .* this step"):
        optimizer.step()
    assert optimizer.updates == 0


class OwnLayer(LlamaDecoderLayer):
    """A layer that is called inside of a checkpoint of the model's own."""

    def __call__(self, hidden: torch.Tensor, **named: Any) -> Any:
        return reentrant(partial(super().__call__, **named), hidden)


@pytest.mark.filterwarnings("ignore:None of the inputs")
def test_layers_that_an_own_checkpoint_would_lose_are_refused_in_the_forward_of_tokentune() -> None:
    model: Any = copy.deepcopy(reference("llama")[0])
    model.get_input_embeddings().requires_grad_(False)
    for layer in model.model.layers:
        layer.__class__ = OwnLayer
    with pytest.raises(RuntimeError, match=r"OwnLayer.*reentrant checkpointing.*use_reentrant=False"):
        tokentune(model, reference("llama")[1])
    assert not gradients_of(model)


@pytest.mark.parametrize("method", ["hift", "sft"])
def test_an_own_checkpoint_whose_input_requires_a_gradient_trains(method: str) -> None:
    rows = torch.randn(1, 6, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
    model = own_model(WAYS["blocks"], embeds=False)
    expected = dense(own_model(each_block(lambda block, hidden: block(hidden)), embeds=False), {"rows": rows})
    assert_same(method, METHODS[method](model, {"rows": rows}), expected)


@pytest.mark.parametrize("method", ["hift", "sft"])
def test_a_part_that_runs_without_gradients_is_not_refused(method: str) -> None:
    def run(model: Own, hidden: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            hidden = model.blocks[0](hidden)
        return model.blocks[2](model.blocks[1](hidden))

    model, batch = own_model(run), {"rows": torch.arange(6)[None]}
    expected = dense(copy.deepcopy(model), batch)
    with pytest.warns(UserWarning, match="no gradient reached group 1") if method == "hift" else nullcontext():
        found = METHODS[method](model, batch)
    assert_same(method, found, expected)


# ---- what blocks are given and return


class Odd(GradientCheckpointingLayer):
    """A block that is called in ways that torch's reentrant checkpoint does not follow."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.inner, self.unused = way, nn.Linear(8, 8), nn.Linear(8, 8)
        self.table = nn.Embedding(11, 8)

    def forward(self, *args: Any, **named: Any) -> Any:
        given = named.get("hidden", args[0] if args else None)
        given = self.table(given) if self.way == "integers" else given
        hidden = given["hidden"] if isinstance(given, dict) else given[0] if isinstance(given, tuple) else given
        side = named.get("side", 1.0)
        hidden = hidden if self.way == "nothing used" else torch.tanh(self.inner(hidden)) * side
        return {"hidden": hidden, "more": [hidden * 2]} if self.way == "a nest returned" else hidden


CALLS: dict[str, Callable[[Odd, torch.Tensor, torch.Tensor], Any]] = {
    "by position": lambda block, hidden, side: block(hidden),
    "by keyword": lambda block, hidden, side: block(hidden=hidden),
    "a tuple": lambda block, hidden, side: block((hidden, 1)),
    "a mapping by keyword": lambda block, hidden, side: block(hidden={"hidden": hidden}),
    "one of both": lambda block, hidden, side: block(hidden, side=side),
    "twice": lambda block, hidden, side: block(hidden, side=hidden),
    "a nest returned": lambda block, hidden, side: sum(block(hidden)["more"]) + block(hidden)["hidden"],
    "integers": lambda block, hidden, side: block(torch.arange(6)) * side + hidden,
    "nothing used": lambda block, hidden, side: block(hidden) * side,
}


@pytest.mark.parametrize("needs", [True, False], ids=["below trains", "below is frozen"])
@pytest.mark.parametrize("way", CALLS)
def test_blocks_are_recorded_whatever_they_are_given_and_return(way: str, needs: bool) -> None:
    found = []
    for is_checkpointed in (False, True):
        torch.manual_seed(0)
        blocks = nn.ModuleList(Odd(way) for _ in range(2))
        hidden = torch.randn(6, 8).requires_grad_(needs)
        side = torch.randn(6, 8, requires_grad=True)
        if is_checkpointed:
            for block in blocks:
                block.gradient_checkpointing, block._gradient_checkpointing_func = True, reentrant
        handle = ReentrantBlocks(blocks)
        handle.prepare()
        state = hidden * 1.0 if needs else hidden
        for block in blocks:
            state = CALLS[way](block, state, side)
        state.sum().backward()
        handle.remove()
        leaves = {"hidden": hidden, "side": side, **dict(blocks.named_parameters())}
        found.append({name: each.grad for name, each in leaves.items() if each.grad is not None})
        assert not is_checkpointed or all(block._gradient_checkpointing_func is reentrant for block in blocks)
    assert found[0].keys() == found[1].keys() and found[0]
    for name, each in found[0].items():
        assert torch.equal(each, found[1][name]), name


class TwoParts(nn.Module):
    """Runs its layer without gradients, and then with them; notes whether a tensor in between is still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.is_alive = True

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        large = inputs + 1
        noted = weakref.ref(large)
        with torch.no_grad():
            self.layer(large)
        del large
        self.is_alive = noted() is not None
        return self.layer(inputs)


def test_the_check_keeps_no_tensor_of_a_running_forward() -> None:
    model, check = TwoParts(), RecordingCheck()
    check.begin(model, {model.layer: "layer.weight"})
    model(torch.ones(2, 4))
    check.end()
    assert not model.is_alive
