"""Inputs of checkpointed blocks that wait in host memory: the same bits in every order of copies, counted bytes.

The reference is transformers' own checkpointing, which keeps them on the device.
"""

import copy
import pickle
import re
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import slivertune as st
from slivertune.core import waiting_activations
from slivertune.core.checkpointing import disable_checkpointing
from slivertune.core.ledger import Ledger
from slivertune.core.offloaded_activations import OffloadedActivationsHandle
from slivertune.core.waiting_activations import WaitingActivations
from tests.core.test_kept_activations import (
    BLOCKS,
    CYCLE,
    METHODS,
    assert_same,
    batch,
    bert,
    blocks_of,
    checkpoint,
    llama,
    optimizer_of,
    train,
    with_lora,
)
from tests.helpers.delayed_streams import DelayedStreams, delayed
from tests.helpers.models import OddModel, differing, weights
from tests.helpers.pairwise import rotated

# Nor the head of the classifiers here.
pytestmark = pytest.mark.filterwarnings("ignore:SFT trains the linear layers of the blocks")

INPUT_BYTES = 3 * 14 * 32 * 4
"""Hidden states of `batch`: three sequences of 14 tokens of 32 fp32 numbers."""


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The places of the blocks whose inputs were stored, in order."""
    places, store = list[int](), WaitingActivations.store

    def noted(self: WaitingActivations, tensor: torch.Tensor, place: int) -> Any:
        places.append(place)
        return store(self, tensor, place)

    monkeypatch.setattr(WaitingActivations, "store", noted)
    return places


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The places of the blocks whose inputs have begun to come back, in order."""
    places, begin = list[int](), WaitingActivations._begin_load

    def noted(self: WaitingActivations, record: Any) -> None:
        if record.loading is None:
            places.append(record.place)
        begin(self, record)

    monkeypatch.setattr(WaitingActivations, "_begin_load", noted)
    return places


def taken(places: list[int]) -> list[int]:
    """What was noted since last asked."""
    found = places.copy()
    places.clear()
    return found


def checkpointed(make: Callable[[], nn.Module] = llama, *, reentrant: bool = False) -> Any:
    model = make()
    checkpoint(model, reentrant=reentrant)
    return model


# ---- the same bits


@pytest.mark.parametrize(
    ("make", "reentrant"),
    [
        (llama, False),
        pytest.param(llama, True, marks=pytest.mark.slow),
        pytest.param(bert, False, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_losses_gradients_and_weights_are_those_of_plain_checkpointing(
    method: str, make: Callable[[], nn.Module], reentrant: bool, stored: list[int]
) -> None:
    def made() -> Any:
        return checkpointed((lambda: with_lora(make())) if method == "lora" else make, reentrant=reentrant)

    plain = train(made(), method)
    assert not stored
    model = made()
    with st.offload_activations(model):
        assert_same(train(model, method), plain)
    assert stored


@pytest.mark.parametrize("keeps_first", [True, False])
def test_blocks_that_keep_their_activations_offload_nothing(keeps_first: bool, stored: list[int]) -> None:
    plain = train(checkpointed(), "dense")
    model = checkpointed()
    attach = [lambda: st.keep_activations(model, 1), lambda: st.offload_activations(model)]
    with ExitStack() as stack:
        for each in attach if keeps_first else reversed(attach):
            stack.enter_context(each())
        assert_same(train(model, "dense"), plain)
    assert set(stored) == {0, 1, 2}
    assert all(block._gradient_checkpointing_func.keywords == {"use_reentrant": False} for block in blocks_of(model))


def test_forward_after_forward_each_stands_before_a_block_once() -> None:
    model = checkpointed()
    own = vars(model.model.layers[0])["_gradient_checkpointing_func"]
    with st.offload_activations(model), st.keep_activations(model, 1):
        for step in range(3):
            model(**batch(model, step)).loss.backward()
        outer = vars(model.model.layers[0])["_gradient_checkpointing_func"]
        assert outer.function.function is own


@pytest.mark.parametrize("first", [0, 1])
def test_either_of_two_handles_may_be_removed_first(first: int, stored: list[int]) -> None:
    model = checkpointed()
    before = [vars(each)["_gradient_checkpointing_func"] for each in blocks_of(model)]
    handles = [st.keep_activations(model, 1), st.offload_activations(model)]
    handles[first].remove()
    model(**batch(model)).loss.backward()
    assert taken(stored) == ([0, 1, 2, 3] if first == 0 else [])
    handles[1 - first].remove()
    model(**batch(model)).loss.backward()
    assert not stored
    assert [vars(each)["_gradient_checkpointing_func"] for each in blocks_of(model)] == before


# ---- what is offloaded


def test_in_every_turn_of_hift_nothing_of_a_block_below_the_active_group_leaves(stored: list[int]) -> None:
    model = checkpointed()
    hift = st.HiFT(model, torch.optim.AdamW, config=st.HiFTConfig.paper(), lr=1e-2)
    with st.offload_activations(model):
        for step in range(2 * CYCLE):
            # Of the turns of a cycle the first is the embedding's, the last the head's.
            lowest = max(0, step % CYCLE - 1)
            model(**batch(model, step)).loss.backward()
            assert taken(stored) == list(range(lowest, BLOCKS))
            hift.step()
            hift.zero_grad()


def test_without_gradients_in_evaluation_and_without_checkpointing_nothing_leaves(stored: list[int]) -> None:
    model = checkpointed()
    with st.offload_activations(model):
        with torch.no_grad():
            model(**batch(model))
        model.eval()
        model(**batch(model)).loss.backward()
        model.train()
        disable_checkpointing(model)
        model(**batch(model)).loss.backward()
        assert not stored
        checkpoint(model)  # which gives each block a function anew
        model(**batch(model)).loss.backward()
        assert stored == [0, 1, 2, 3]


def test_masks_and_places_that_are_given_by_position_stay(stored: list[int]) -> None:
    model = checkpointed(bert)
    with st.offload_activations(model):
        mask = torch.ones(3, 14, dtype=torch.int64)
        mask[1, 9:] = 0
        model(**batch(model), attention_mask=mask).loss.backward()
    assert stored == [0, 1, 2, 3]


# ---- bytes


def deep_llama(num_blocks: int) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 96, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=61, num_hidden_layers=num_blocks, use_cache=False, **sizes)).train()


def peak_of(num_blocks: int, *, offloads: bool, turn: int = 0) -> tuple[int, int]:
    """The most that no one claims on the device, and that waits on the host, in one of HiFT's turns."""
    model: Any = deep_llama(num_blocks)
    checkpoint(model)
    hift = st.HiFT(model, torch.optim.AdamW, config=st.HiFTConfig.paper(), lr=1e-2)
    with st.offload_activations(model) if offloads else nullcontext():
        for step in range(turn + 1):
            with Ledger(model) as ledger:
                model(**batch(model)).loss.backward()
            if step < turn:
                hift.step()
                hift.zero_grad()
    return ledger.highest.residual, ledger.highest.host_activations


def test_the_device_keeps_two_inputs_whatever_the_number_of_blocks() -> None:
    plain = {number: peak_of(number, offloads=False)[0] for number in (4, 8, 12)}
    offloaded = {number: peak_of(number, offloads=True) for number in (4, 8, 12)}
    assert plain[8] - plain[4] == plain[12] - plain[8] == 4 * INPUT_BYTES
    assert offloaded[4][0] == offloaded[8][0] == offloaded[12][0]
    # The top block's, which is worked on, and that of the one below.
    assert plain[12] - offloaded[12][0] == 10 * INPUT_BYTES
    assert {number: host for number, (_, host) in offloaded.items()} == {n: n * INPUT_BYTES for n in (4, 8, 12)}


def test_memory_of_the_host_is_kept_for_later_steps_and_grows_with_the_sequences() -> None:
    model = checkpointed()

    def step(length: int) -> int:
        model(**batch(model, length=length)).loss.backward()
        return sum(each.nbytes for each in handle._waiting[torch.device("cpu")]._free)

    with st.offload_activations(model) as handle:
        assert step(14) == step(14) == step(7) == BLOCKS * INPUT_BYTES
        assert step(28) == step(7) == 2 * BLOCKS * INPUT_BYTES
        with Ledger(model) as ledger:
            step(28)
        assert ledger.current().host_activations == 2 * BLOCKS * INPUT_BYTES
        assert ledger.current().host == 0 and "activations on the host" in ledger.current().line()
    assert not handle._waiting


def test_a_graph_that_is_dropped_gives_its_memory_back_and_one_that_is_kept_can_be_used_twice() -> None:
    model = checkpointed(lambda: llama(dropout=0.0))
    with st.offload_activations(model) as handle:
        model(**batch(model))
        waiting = handle._waiting[torch.device("cpu")]
        assert len(waiting._free) == BLOCKS and not waiting._waiting
        loss = model(**batch(model)).loss
        loss.backward(retain_graph=True)
        once = {name: each.grad.clone() for name, each in model.named_parameters()}
        loss.backward()
        assert (
            differing({name: each.grad for name, each in model.named_parameters()}, {n: 2 * g for n, g in once.items()})
            == []
        )


def test_two_forwards_before_a_backward_are_told_apart(begun: list[int]) -> None:
    gradients = []
    for offloads in (False, True):
        model = checkpointed(lambda: llama(dropout=0.0))
        with st.offload_activations(model) if offloads else nullcontext():
            losses = [model(**batch(model, step)).loss for step in (0, 1)]
            losses[0].backward()  # that of the earlier forward first
            assert taken(begun) == ([3, 2, 1, 0] if offloads else [])
            (losses[1] * 2).backward()
            # What waits for the backward of an earlier forward stays on the host.
            waiting = model(**batch(model, 4)).loss
            model(**batch(model, 5)).loss.backward()
            assert taken(begun)[4:] == ([3, 2, 1, 0] if offloads else [])
            del waiting
            both = sum(model(**batch(model, step)).loss for step in (2, 3))
            both.backward()
        gradients.append({name: each.grad for name, each in model.named_parameters()})
    assert differing(*gradients) == []


# ---- in every order of copies


@rotated(seed=[None, 0, 1, 2], method=["hift", "dense"])
def test_every_legal_order_of_copies_gives_the_same_bits(method: str, seed: int | None) -> None:
    plain = train(checkpointed(), method)
    with delayed(seed) as made:
        model = checkpointed()
        with st.offload_activations(model):
            assert_same(train(model, method), plain)
    assert sum(streams.num_late for streams in made) > 20


def test_a_missing_wait_changes_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = train(checkpointed(), "dense")
    monkeypatch.setattr(DelayedStreams, "compute_after", lambda self, event: None)
    with delayed(None):
        model = checkpointed()
        with st.offload_activations(model), pytest.raises(AssertionError):
            assert_same(train(model, "dense"), plain)


def test_an_input_comes_back_under_the_backward_of_the_block_above(begun: list[int]) -> None:
    model = checkpointed()
    seen = []
    for index, block in enumerate(blocks_of(model)):
        block.mlp.register_forward_pre_hook(lambda *_, index=index: seen.append((index, begun.copy())))
    with st.offload_activations(model):
        model(**batch(model)).loss.backward()
    # While a block is computed again, its own is there and the one below is on its way.
    assert seen[BLOCKS:] == [(3, [3, 2]), (2, [3, 2, 1]), (1, [3, 2, 1, 0]), (0, [3, 2, 1, 0])]


# ---- on and off


def test_a_model_that_is_let_go_is_as_before() -> None:
    model = checkpointed()

    def attributes() -> list[dict[str, Any]]:
        return [{**vars(each), "hooks": len(each._forward_pre_hooks)} for each in model.modules()]

    before = attributes()
    handle = st.offload_activations(model)
    assert attributes() != before
    handle.remove()
    handle.remove()
    assert attributes() == before
    st.offload_activations(model).remove()


def test_copies_of_the_model_offload_nothing_and_a_handle_is_not_copied(stored: list[int]) -> None:
    model = checkpointed()
    model.disable_input_require_grads()  # by a local function, which is not pickled
    with st.offload_activations(model) as handle:
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            twin(**batch(twin)).loss.backward()
            assert not stored
            with st.offload_activations(twin):
                twin(**batch(twin)).loss.backward()
            assert taken(stored) == [0, 1, 2, 3]
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="belongs to one model"):
                copied(handle)


def test_a_run_that_is_resumed_offloading_goes_on_with_the_same_bits() -> None:
    plain, offloading = checkpointed(), checkpointed()
    optimizers = [optimizer_of("hift", each) for each in (plain, offloading)]

    def step(model: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
        torch.manual_seed(number)
        model(**batch(model, number)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for number in range(8):
        step(plain, optimizers[0], number)
    offloading.load_state_dict(plain.state_dict())
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    with st.offload_activations(offloading):
        for number in range(8, 2 * CYCLE + 1):
            step(plain, optimizers[0], number)
            step(offloading, optimizers[1], number)
    assert differing(weights(plain), weights(offloading)) == []


# ---- what can't be


def test_a_model_that_is_not_checkpointed_is_refused_with_the_way_out(stored: list[int]) -> None:
    model: Any = llama()
    with pytest.raises(ValueError, match=r"checkpointing is off in LlamaForCausalLM.*activation_checkpointing_enable"):
        st.offload_activations(model)
    # It may be switched on later, by a Trainer; and is not taken already.
    with OffloadedActivationsHandle(model):
        checkpoint(model)
        model(**batch(model)).loss.backward()
    assert stored == [0, 1, 2, 3]


def test_a_second_handle_and_a_model_without_such_blocks_are_refused() -> None:
    model = checkpointed()
    with st.offload_activations(model), pytest.raises(RuntimeError, match=r"offloaded already\. Call remove\(\)"):
        st.offload_activations(model.model)
    with pytest.raises(ValueError, match="OddModel has no block that transformers checkpoints by itself"):
        st.offload_activations(OddModel(with_empty=False))


def test_a_block_that_writes_into_its_input_is_named() -> None:
    model = checkpointed()
    attention = model.model.layers[1].self_attn
    forward = attention.forward

    def writing(*args: Any, **kwargs: Any) -> Any:
        written.append(seen[-1].detach().add_(1))
        return forward(*args, **kwargs)

    seen, written = list[torch.Tensor](), list[torch.Tensor]()
    model.model.layers[1].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    attention.forward = writing
    with st.offload_activations(model), pytest.raises(RuntimeError, match="LlamaDecoderLayer writes into its hidden"):
        model(**batch(model))


def test_hidden_states_that_are_given_by_name_are_refused() -> None:
    model = checkpointed()
    block = model.model.layers[0]
    hidden, places = torch.randn(1, 4, 32), torch.arange(4)[None]
    rotary = model.model.rotary_emb(hidden, places)
    with st.offload_activations(model), pytest.raises(RuntimeError, match="not get its hidden states as its first"):
        block(hidden_states=hidden, position_embeddings=rotary)


def test_a_host_without_room_is_an_error_before_it_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_activations, "available_host_bytes", lambda: INPUT_BYTES - 1)
    model = checkpointed()
    expected = f"a block's input takes {INPUT_BYTES:,} bytes, and the host has {INPUT_BYTES - 1:,} left"
    with st.offload_activations(model), pytest.raises(MemoryError, match=re.escape(expected)):
        model(**batch(model))
