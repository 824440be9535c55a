"""Blocks that keep their activations under checkpointing: the same bits, counted recomputations, counted bytes.

The reference sets transformers' own switch on each block by hand. One subject and one set of models, and so longer than
other files.
"""

import copy
import itertools
import pickle
import re
import warnings
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

import slivertune as st
from slivertune.core.checkpointed_blocks import find_checkpointed_blocks
from slivertune.core.checkpointing import disable_checkpointing, enable_checkpointing
from slivertune.core.kept_activations import KeptActivationsHandle
from slivertune.core.ledger import Ledger, claim
from tests.helpers.architectures import CASES
from tests.helpers.models import OddModel, differing, weights
from tests.helpers.pairwise import rotated
from tests.helpers.ranks import quick

BLOCKS = 4
CYCLE = BLOCKS + 2
"""HiFT's turns: the embedding, the blocks, the head."""
METHODS = ("hift", "dense", "sft", "lora", "hift with tokens", "dense with tokens")
Step = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""A loss, and the gradients by name."""


def llama(*, dropout: float = 0.1) -> nn.Module:
    """Four blocks whose attention drops."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=96,
        num_hidden_layers=BLOCKS,
        num_attention_heads=4,
        attention_dropout=dropout,
        use_cache=False,  # as under checkpointing; a cache lays keys out otherwise, and attention may round otherwise
    )
    return LlamaForCausalLM(config).train()


def bert() -> nn.Module:
    """Four blocks that drop everywhere."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=61, hidden_size=32, intermediate_size=96, num_hidden_layers=BLOCKS, num_attention_heads=4
    )
    return BertForSequenceClassification(config).train()


def with_lora(model: nn.Module) -> Any:
    peft = pytest.importorskip("peft")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft asks transformers for what is deprecated
        return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear"))


def batch(model: nn.Module, step: int = 0, *, size: int = 3, length: int = 14) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(1, 61, (size, length), generator=generator)
    is_classifier = any(isinstance(each, BertForSequenceClassification) for each in model.modules())
    return {"input_ids": ids, "labels": ids[:, 0] % 2 if is_classifier else ids}


def optimizer_of(method: str, model: nn.Module) -> torch.optim.Optimizer:
    if method.startswith("hift"):
        return st.HiFT(model, torch.optim.AdamW, config=st.HiFTConfig.paper(), lr=1e-2)
    if method == "sft":
        config = st.SFTConfig(density=0.1, estimation_steps=2, reselection_interval=4)
        return st.SFT(model, config=config, lr=1e-2, total_steps=100)
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)


def checkpoint(model: Any, *, reentrant: bool = False) -> None:
    enable_checkpointing(model, {"use_reentrant": reentrant})


def blocks_of(model: nn.Module) -> list[Any]:
    return list(next(each for each in model.modules() if isinstance(each, nn.ModuleList)))


def num_steps_of(method: str) -> int:
    """Over a cycle of HiFT, as many as SFT needs to choose twice, and three of what repeats itself."""
    return {"hift": CYCLE + 1, "sft": 5}.get(method.partition(" ")[0], 3)


def train(model: nn.Module, method: str) -> list[Step]:
    """Losses and gradients of as many updates as a method needs; last the weights."""
    optimizer = optimizer_of(method, model)
    torch.manual_seed(7)
    steps: list[Step] = []
    with ExitStack() as stack:
        if "tokens" in method:
            stack.enter_context(st.TokenTune(ratio=0.5).attach(model))
        for step in range(num_steps_of(method)):
            loss = model(**batch(model, step)).loss
            loss.backward()
            named = model.named_parameters()
            gradients = {name: each.grad.clone() for name, each in named if each.grad is not None}
            steps.append((loss.detach(), gradients))
            optimizer.step()
            optimizer.zero_grad()
    return [*steps, (torch.tensor(0.0), weights(model))]


def assert_same(one: Iterable[Step], other: Iterable[Step]) -> None:
    for step, ((loss, found), (other_loss, expected)) in enumerate(zip(one, other, strict=True)):
        assert torch.equal(loss, other_loss) and differing(found, expected) == [], f"in step {step}"
        assert expected, "nothing to compare"


# ---- the same bits


MODELS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "llama": (llama, False),
    "llama, reentrant": (llama, True),
    "bert": (bert, False),
}


@pytest.mark.filterwarnings("ignore:SFT trains the linear layers of the blocks")  # not the head of the classifier
@rotated(method=METHODS, name=MODELS, num_blocks=(1, 3, BLOCKS))
def test_losses_gradients_and_weights_are_those_of_plain_checkpointing_and_of_none(
    method: str, name: str, num_blocks: int
) -> None:
    make, reentrant = MODELS[name]

    def made(*, checkpointed: bool) -> Any:
        model = with_lora(make()) if method == "lora" else make()
        if checkpointed:
            checkpoint(model, reentrant=reentrant)
        return model

    plain = train(made(checkpointed=True), method)
    assert_same(plain, train(made(checkpointed=False), method))
    model = made(checkpointed=True)
    with st.keep_activations(model, num_blocks):
        assert_same(train(model, method), plain)


def test_dropout_drops_in_these_models() -> None:
    for make in (llama, bert):
        model = make()
        first, second = (model(**batch(model)).loss for _ in range(2))
        assert not torch.equal(first, second)


# ---- recomputed


class CountForwards:
    """How often the feed-forward part of each block runs; hooks of the block itself don't see a recomputation."""

    def __init__(self, model: nn.Module) -> None:
        self.counts = [0] * BLOCKS
        for index, block in enumerate(blocks_of(model)):
            # Before it: a recomputation ends as soon as it has the last tensor that the backward asked for.
            block.mlp.register_forward_pre_hook(lambda *_, index=index: self._count(index))

    def _count(self, index: int) -> None:
        self.counts[index] += 1

    def recomputed(self) -> list[int]:
        """Beyond the one run of the forward, since last asked."""
        found, self.counts = [each - 1 for each in self.counts], [0] * BLOCKS
        return found


@pytest.mark.parametrize("num_blocks", range(BLOCKS + 1))
def test_in_every_turn_of_hift_only_recording_blocks_that_keep_nothing_are_recomputed(num_blocks: int) -> None:
    model: Any = llama()
    checkpoint(model)
    hift, counter = st.HiFT(model, torch.optim.AdamW, config=st.HiFTConfig.paper(), lr=1e-2), CountForwards(model)
    with st.keep_activations(model, num_blocks):
        for step in range(2 * CYCLE):
            # Of the turns of a cycle the first is the embedding's, the last the head's.
            lowest = max(0, step % CYCLE - 1)
            model(**batch(model, step)).loss.backward()
            assert counter.recomputed() == [int(lowest <= index < BLOCKS - num_blocks) for index in range(BLOCKS)]
            hift.step()
            hift.zero_grad()


@rotated(num_blocks=[0, 1, 3, BLOCKS], method=["dense", "sft", "lora"])
def test_other_methods_recompute_all_but_the_uppermost(method: str, num_blocks: int) -> None:
    model = with_lora(llama()) if method == "lora" else llama()
    checkpoint(model)
    optimizer, counter = optimizer_of(method, model), CountForwards(model)
    with st.keep_activations(model, num_blocks):
        for step in range(3):
            model(**batch(model, step)).loss.backward()
            assert counter.recomputed() == [1] * (BLOCKS - num_blocks) + [0] * num_blocks
            optimizer.step()
            optimizer.zero_grad()


# ---- bytes


def peak_of(model: nn.Module, method: str) -> int:
    """The largest total of forward and backward; what an update takes is another matter."""
    optimizer, peaks = optimizer_of(method, model), []
    num_steps, length = CYCLE + 2 if method == "hift" else 2, 64
    with Ledger(model) as ledger:
        for step in range(num_steps):
            ledger.reset_peak()
            model(**batch(model, step, size=4, length=length)).loss.backward()
            peaks.append(ledger.peak.device)
            optimizer.step()
            optimizer.zero_grad()
            for values in optimizer.state.values():
                for value in values.values():
                    if isinstance(value, torch.Tensor):
                        claim(value, "state")
    return max(peaks)


def kept_by_hand(places: Iterable[int]) -> nn.Module:
    """A model in which the blocks at some places keep their activations, by transformers' switch."""
    model: Any = llama(dropout=0.0)
    checkpoint(model)
    for place in places:
        blocks_of(model)[place].gradient_checkpointing = False
    return model


@pytest.mark.parametrize("method", quick(["hift", "dense", "sft"], []))
def test_peaks_grow_with_the_blocks_that_keep_from_checkpointing_to_none(method: str) -> None:
    peaks = []
    for num_blocks in range(BLOCKS + 1):
        model: Any = llama(dropout=0.0)
        checkpoint(model)
        with st.keep_activations(model, num_blocks):
            peaks.append(peak_of(model, method))
        assert peaks[-1] == peak_of(kept_by_hand(range(BLOCKS - num_blocks, BLOCKS)), method)
    assert peaks == sorted(peaks) and len(set(peaks)) > 2
    none: Any = llama(dropout=0.0)
    none.enable_input_require_grads()  # as transformers do along with checkpointing
    assert peaks[-1] == peak_of(none, method)


@pytest.mark.parametrize(
    ("method", "num_blocks"),
    quick(itertools.product(("hift", "dense"), (1, 2, 3)), [("hift", 1), ("dense", 2)]),
)
def test_no_choice_of_as_many_blocks_has_a_lower_peak_than_the_uppermost(method: str, num_blocks: int) -> None:
    peaks = {
        places: peak_of(kept_by_hand(places), method) for places in itertools.combinations(range(BLOCKS), num_blocks)
    }
    uppermost = tuple(range(BLOCKS - num_blocks, BLOCKS))
    assert peaks[uppermost] == min(peaks.values()) < peaks[tuple(range(num_blocks))]


def test_no_choice_of_as_many_blocks_spares_hift_more_than_the_uppermost() -> None:
    recomputed = {}
    for places in itertools.combinations(range(BLOCKS), 2):
        model = kept_by_hand(places)
        hift, counter = st.HiFT(model, torch.optim.AdamW, config=st.HiFTConfig.paper(), lr=1e-2), CountForwards(model)
        recomputed[places] = 0
        for step in range(CYCLE):
            model(**batch(model, step)).loss.backward()
            recomputed[places] += sum(counter.recomputed())
            hift.step()
            hift.zero_grad()
    # The embedding's turn and the lowest block's record all four blocks, the next ones three, two and one.
    assert min(recomputed, key=lambda places: recomputed[places]) == (2, 3)
    assert (recomputed[2, 3], recomputed[0, 1]) == (2 + 2 + 1, 2 + 2 + 2 + 2 + 1)


# ---- on and off


def recomputed_in_a_step(model: Any) -> list[int]:
    counter = CountForwards(model)
    model(**batch(model)).loss.backward()
    return counter.recomputed()


def test_checkpointing_that_is_switched_off_and_on_again_is_followed() -> None:
    model: Any = llama()
    checkpoint(model)
    with st.keep_activations(model, 1):
        assert recomputed_in_a_step(model) == [1, 1, 1, 0]
        disable_checkpointing(model)
        assert recomputed_in_a_step(model) == [0, 0, 0, 0]
        # As the Trainer does, which gives each block a function anew.
        checkpoint(model, reentrant=True)
        assert recomputed_in_a_step(model) == [1, 1, 1, 0]
        checkpoint(model)
        assert recomputed_in_a_step(model) == [1, 1, 1, 0]
        # A part that is called by itself.
        checkpoint(model)
        counter = CountForwards(model)
        model.model(input_ids=batch(model)["input_ids"]).last_hidden_state.sum().backward()
        assert counter.recomputed() == [1, 1, 1, 0]
        assert any(block.gradient_checkpointing for block in blocks_of(model))


def test_a_model_that_is_let_go_is_as_before() -> None:
    model: Any = llama()
    checkpoint(model)

    def attributes() -> list[dict[str, Any]]:
        return [{**vars(each), "hooks": len(each._forward_pre_hooks)} for each in model.modules()]

    before = attributes()
    handle = st.keep_activations(model, 2)
    assert attributes() != before
    handle.remove()
    handle.remove()
    assert attributes() == before
    assert recomputed_in_a_step(model) == [1, 1, 1, 1]
    with st.keep_activations(model, 3):
        assert recomputed_in_a_step(model) == [1, 0, 0, 0]


def test_an_evaluation_and_a_forward_that_fails_leave_it_on() -> None:
    model: Any = llama()
    checkpoint(model)
    with st.keep_activations(model, 2):
        model.eval()
        with torch.no_grad():
            model(**batch(model))
        model.train()
        failing = model.model.layers[3].mlp.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(**batch(model))
        failing.remove()
        assert recomputed_in_a_step(model) == [1, 1, 0, 0]


def test_a_cache_is_left_out_by_blocks_that_keep_as_by_those_that_do_not() -> None:
    model: Any = llama()
    checkpoint(model)
    with st.keep_activations(model, 2):
        cache = model(**batch(model), use_cache=True).past_key_values
    assert cache is None or cache.get_seq_length(3) == 0


def test_copies_of_the_model_are_checkpointed_whole_and_a_handle_is_not_copied() -> None:
    model: Any = llama()
    checkpoint(model)
    model.disable_input_require_grads()  # by a local function, which is not pickled
    with st.keep_activations(model, 2) as handle:
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert recomputed_in_a_step(twin) == [1, 1, 1, 1]
            with st.keep_activations(twin, 1):
                assert recomputed_in_a_step(twin) == [1, 1, 1, 0]
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="belongs to one model"):
                copied(handle)


# ---- what can't be


def test_a_second_handle_is_refused_and_the_first_stays() -> None:
    model: Any = llama()
    checkpoint(model)
    with st.keep_activations(model, 2):
        for again in (model, model.model):
            with pytest.raises(RuntimeError, match=r"keeps activations of some blocks already\. Call remove\(\)"):
                st.keep_activations(again, 1)
        assert recomputed_in_a_step(model) == [1, 1, 0, 0]


@pytest.mark.parametrize(
    ("num_blocks", "message"),
    [
        (-1, "keep_activations=-1 must be at least 0"),
        (BLOCKS + 1, "keep_activations=5 must be at most 4, the number of blocks of LlamaForCausalLM"),
        (1.5, "keep_activations=1.5 must be an integer"),
        (True, "keep_activations=True must be an integer"),
        ("many", "keep_activations='many' must be an integer or 'auto'"),
        ("auto", "and the model is on 'cpu'. Give a number of blocks, from 0"),
    ],
)
def test_a_number_that_can_not_be_is_named_and_leaves_the_model_as_it_is(num_blocks: Any, message: str) -> None:
    model: Any = llama()
    checkpoint(model)
    with pytest.raises(ValueError, match=re.escape(message)):
        st.keep_activations(model, num_blocks)
    assert recomputed_in_a_step(model) == [1, 1, 1, 1]
    st.keep_activations(model, 0).remove()


def test_a_model_that_is_not_checkpointed_is_refused_with_the_way_out() -> None:
    model: Any = llama()
    with pytest.raises(ValueError, match=r"checkpointing is off in LlamaForCausalLM.*activation_checkpointing_enable"):
        st.keep_activations(model, 1)
    # It may be switched on later, by a Trainer; and is not taken already.
    with KeptActivationsHandle(model, 1):
        checkpoint(model)
        assert recomputed_in_a_step(model) == [1, 1, 1, 0]


def test_a_model_without_such_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="OddModel has no block that transformers checkpoints by itself"):
        st.keep_activations(OddModel(with_empty=False), 1)


# ---- which blocks


@pytest.mark.parametrize("name", CASES)
def test_what_is_checkpointed_are_the_blocks_that_find_layers_finds(name: str) -> None:
    model: Any = CASES[name].build()
    if not model.supports_gradient_checkpointing:
        with pytest.raises(ValueError, match="has no block that transformers checkpoints by itself"):
            find_checkpointed_blocks(model)
        return
    expected = [model.get_submodule(each.name) for each in st.find_layers(model) if each.kind == "block"]
    assert list(find_checkpointed_blocks(model)) == expected


class Inner(GradientCheckpointingLayer):
    """Counts its runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.count = nn.Linear(4, 4), 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.linear(hidden).tanh()


class Outer(GradientCheckpointingLayer):
    """A block with a layer that is checkpointed by itself as well, as those of Swin are."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden).tanh()


@pytest.mark.parametrize("num_blocks", [0, 1, 2])
def test_layers_inside_of_a_block_keep_with_it_and_are_no_blocks(num_blocks: int) -> None:
    model = nn.Sequential(Outer(), Outer())
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    assert find_checkpointed_blocks(model) == tuple(model)
    with st.keep_activations(model, num_blocks):
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    # Once in the forward, and where nothing is kept at least once more: each of the two levels computes it again.
    assert [block.inner.count > 1 for block in model] == [True] * (2 - num_blocks) + [False] * num_blocks


@pytest.mark.parametrize("reentrant", [False, True])
def test_it_can_still_be_told_whether_a_block_is_checkpointed_by_the_reentrant_kind(reentrant: bool) -> None:
    model: Any = llama()
    checkpoint(model, reentrant=reentrant)
    with st.keep_activations(model, 2):
        for block in blocks_of(model):
            assert block._gradient_checkpointing_func.keywords == {"use_reentrant": reentrant}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_compiled_model_has_the_same_bits_and_is_compiled_once() -> None:
    model: Any = llama(dropout=0.0)
    model.config.use_cache = False
    checkpoint(model)
    plain = copy.deepcopy(model)
    torch._dynamo.reset()
    counter, frames = CompileCounter(), []
    compiled: Any = torch.compile(model, backend=counter)
    with st.keep_activations(model, 2):
        for step in range(4):
            losses = [each(**batch(model, step)).loss for each in (compiled, plain)]
            assert torch.equal(*losses)
            for loss in losses:
                loss.backward()
            pairs = zip(model.parameters(), plain.parameters(), strict=True)
            assert all(torch.equal(one.grad, other.grad) for one, other in pairs)
            frames.append(counter.frame_count)
    assert frames[0] > 0 and frames == frames[:1] * 4
