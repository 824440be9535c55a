"""Pieces that stay on the device from one update of a turn to the next: no bit changes, and nothing is copied there."""

import copy
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from slivertune import HiFT
from slivertune.hift.chunk import Chunk
from slivertune.hift.offloaded_state import OffloadedState
from slivertune.hift.prefetch import Prefetcher
from tests.helpers.delayed_streams import delayed
from tests.helpers.hift_parts import part_of
from tests.helpers.models import (
    assert_all_moved,
    assert_same_bits,
    assert_same_tree,
    small_decoder,
    tiny_llama,
    token_batches,
    twin,
    weights,
)
from tests.helpers.pairwise import rotated
from tests.helpers.ranks import quick
from tests.helpers.reference import NaiveHiFT, naive_groups, train
from tests.hift.cases import BIG_VOCAB, OPTIMIZERS, Stumbling, hift_over

TURN = 3
PIECE = 20_000
SOME, ALL = 90_000, 10**9
"""Room for a few of the largest groups' pieces, and for all."""
ROOMS = pytest.mark.parametrize("room", [SOME, ALL], ids=["some stay", "all stay"])
BATCHES = token_batches(11, vocab=BIG_VOCAB)


def staying(model: Any, optimizer: Any, **config: Any) -> tuple[Any, HiFT]:
    return hift_over(model, optimizer, **{"steps_per_group": TURN, "stream_bytes": PIECE, **config})


def updates_of(hift: HiFT) -> int:
    """A cycle, a turn and a half: state is made, comes for the first time, and has given way to another group's."""
    return hift.cycle_length + TURN + 2


def kept(hift: HiFT) -> dict[int, Chunk]:
    """The active group's pieces that stay."""
    owner = hift.turns.states[hift.active_group]
    assert isinstance(owner, OffloadedState)
    return {index: chunk for index, chunk in enumerate(owner.chunks) if chunk.where == "device"}


def memory_of(chunk: Chunk) -> torch.Tensor:
    assert chunk.memory is not None
    return chunk.memory


def held_bytes(hift: HiFT) -> int:
    """Bytes of the device that are allocated for chunks."""
    return sum(slots.held_bytes for slots in part_of(hift, Prefetcher).slots.values())


# Of their pairs most are in test_pairwise.py.
@rotated(
    name=["AdamW", "AdamW amsgrad", "SGD momentum", "transformers Adafactor", "AdamW8bit"],
    layers_per_group=[1, 2],
    dtype=[torch.float32, torch.bfloat16],
    room=[SOME, ALL],
)
def test_weights_and_losses_are_those_of_masters_that_never_leave(
    name: str, layers_per_group: int, dtype: torch.dtype, room: int
) -> None:
    optimizer_class, options = OPTIMIZERS[name]
    model = small_decoder(dtype, vocab=BIG_VOCAB)
    dense = twin(model)
    naive = NaiveHiFT(
        dense, optimizer_class, groups=naive_groups(dense, layers_per_group), steps_per_group=TURN, **options
    )
    before = weights(model)
    model, hift = staying(model, name, layers_per_group=layers_per_group, prefetch_bytes=room)
    most, num_updates = 0, updates_of(hift)

    def count(update: int) -> None:
        nonlocal most
        most = max(most, len(kept(hift)))

    assert train(model, hift, BATCHES, num_updates, after_step=count) == train(dense, naive, BATCHES, num_updates)
    assert_all_moved(model, before)
    assert_same_bits(model, dense)
    assert most > 0


# Of late copies a few cases; test_pairwise.py has more.
CONFIGS: list[dict[str, Any]] = [
    {},
    {"layers_per_group": 2},
    {"gradients": "host", "max_grad_norm": 0.1},
    {"gradients": "stepped"},
    {"state": "discard"},
    {"waiting": "int8", "layers_per_group": 2},
    {"weights": "host", "resident_bytes": 0},
]


@pytest.mark.parametrize("config", quick(CONFIGS, [CONFIGS[1], CONFIGS[2], CONFIGS[-1]]), ids=str)
@pytest.mark.parametrize(("room", "seed"), quick(itertools.product([SOME, ALL], [None, 1, 2]), [(SOME, None)]), ids=str)
def test_every_legal_order_gives_the_bits_of_pieces_that_all_leave(
    config: dict[str, Any], room: int, seed: int | None
) -> None:
    start = small_decoder(torch.bfloat16, vocab=BIG_VOCAB)
    model, hift = staying(twin(start), "AdamW", **config)
    losses = train(model, hift, BATCHES, updates_of(hift))
    with delayed(seed) as streams:
        late, other = staying(twin(start), "AdamW", prefetch_bytes=room, **config)
        assert train(late, other, BATCHES, updates_of(hift)) == losses
        assert_same_bits(late, model)
        assert_same_tree(other.state_dict()["state"], hift.state_dict()["state"])
    assert sum(each.num_late for each in streams) > 100


def test_no_more_stays_than_there_is_room_for() -> None:
    model, hift = staying(
        small_decoder(torch.bfloat16, vocab=BIG_VOCAB), "AdamW", prefetch_bytes=SOME, layers_per_group=2
    )
    seen = set()

    def check(update: int) -> None:
        pieces = kept(hift)
        assert sum(memory_of(each).numel() for each in pieces.values()) <= held_bytes(hift) <= SOME
        seen.add(len(pieces))

    train(model, hift, BATCHES, updates_of(hift), after_step=check)
    owner = hift.turns.states[0]
    assert 0 in seen and 0 < max(seen) < max(len(each.chunks) for each in hift.turns.states) and owner.is_offloaded


def test_what_passes_is_spread_evenly_among_what_stays() -> None:
    model, hift = staying(
        small_decoder(torch.bfloat16, vocab=BIG_VOCAB),
        "AdamW",
        stream_bytes=PIECE // 4,
        prefetch_bytes=SOME,
        layers_per_group=2,
    )
    train(model, hift, BATCHES, hift.cycle_length + 2)
    num_pieces = len(hift.turns.states[hift.active_group].chunks)
    passing = sorted(set(range(num_pieces)) - kept(hift).keys())
    gaps = {after - before for before, after in itertools.pairwise([-1, *passing])}
    assert len(kept(hift)) > 10 and len(passing) > 3
    assert max(gaps) - min(gaps) <= 1


# ---- what happens between two updates of a turn


def in_mid_turn(build: Callable[..., Any] = small_decoder, **config: Any) -> tuple[Any, HiFT, Any, HiFT]:
    """Two models after a cycle and two updates of a turn, of the second of which nothing stays."""
    config = {"layers_per_group": 2, **config}
    start = build(torch.bfloat16, vocab=BIG_VOCAB)
    model, hift = staying(twin(start), "AdamW", prefetch_bytes=ALL, **config)
    other, plain = staying(twin(start), "AdamW", **config)
    for each, optimizer in ((model, hift), (other, plain)):
        train(each, optimizer, BATCHES, hift.cycle_length + 2)
    assert len(kept(hift)) > 0 and len(kept(plain)) == 0
    return model, hift, other, plain


def go_on(model: Any, hift: HiFT, other: Any, plain: HiFT) -> None:
    """They go on alike."""
    assert train(model, hift, BATCHES, 2 * TURN + 1) == train(other, plain, BATCHES, 2 * TURN + 1)
    assert_same_bits(model, other)


def test_a_state_dict_has_the_last_update_and_the_run_goes_on() -> None:
    model, hift, other, plain = in_mid_turn()
    assert_same_tree(hift.state_dict()["state"], plain.state_dict()["state"])
    assert len(kept(hift)) == 0
    go_on(model, hift, other, plain)


def test_a_state_dict_between_a_forward_and_its_step_has_the_last_update() -> None:
    model, hift, other, plain = in_mid_turn()
    for each in (model, other):
        each(**BATCHES[0]).loss.backward()
    assert_same_tree(hift.state_dict()["state"], plain.state_dict()["state"])
    for optimizer in (hift, plain):
        optimizer.step()
        optimizer.zero_grad()
    go_on(model, hift, other, plain)


def test_a_run_that_is_resumed_in_mid_turn_goes_on_with_the_same_bits() -> None:
    model, hift, other, plain = in_mid_turn()
    resumed, third = staying(
        small_decoder(torch.bfloat16, vocab=BIG_VOCAB, seed=5), "AdamW", prefetch_bytes=ALL, layers_per_group=2
    )
    train(resumed, third, BATCHES, third.cycle_length + 1)
    resumed.load_state_dict(model.state_dict())
    third.load_state_dict(hift.state_dict())
    go_on(resumed, third, other, plain)


def test_a_weight_that_others_write_counts() -> None:
    model, hift, other, plain = in_mid_turn()
    for each in (model, other):
        with torch.no_grad():
            for parameter in each.parameters():
                parameter.view(-1)[::3] *= 0.5
    go_on(model, hift, other, plain)


def test_a_batch_that_is_larger_than_any_before_finds_nothing_held() -> None:
    model, hift, other, plain = in_mid_turn()
    large = {name: torch.cat([value, value]) for name, value in BATCHES[0].items()}
    for each, optimizer in ((other, plain), (model, hift)):
        loss = each(**large).loss
        if optimizer is hift:
            assert len(kept(hift)) == 0 and held_bytes(hift) == 0
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    go_on(model, hift, other, plain)


def test_an_evaluation_finds_nothing_held_and_changes_nothing() -> None:
    model, hift, other, plain = in_mid_turn()
    with torch.no_grad():
        model(**BATCHES[0])
    assert len(kept(hift)) == 0
    go_on(model, hift, other, plain)


def test_a_turn_whose_last_step_is_skipped_leaves_nothing_behind() -> None:
    model, hift, other, plain = in_mid_turn(tiny_llama, layers_per_group=1)
    before = hift.active_group
    assert before == 0, "the embedding, which a batch of embeddings does not reach"
    for each, optimizer in ((model, hift), (other, plain)):
        for step in range(2):
            embeddings = each.get_input_embeddings()(BATCHES[0]["input_ids"]).detach().requires_grad_()
            each(inputs_embeds=embeddings, labels=BATCHES[0]["labels"]).loss.backward()
            with nullcontext() if step else pytest.warns(UserWarning, match="no gradient reached group 0"):
                optimizer.step()
            optimizer.zero_grad()
    assert hift.active_group != before and kept(hift) == {}
    assert {chunk.memory for chunk in hift.turns.states[before].chunks} == {None}
    go_on(model, hift, other, plain)


def test_detach_writes_back_and_reattach_goes_on() -> None:
    model, hift, other, plain = in_mid_turn()
    hift.detach()
    assert kept(hift) == {} and held_bytes(hift) == 0
    hift.reattach()
    go_on(model, hift, other, plain)


@ROOMS
def test_after_an_error_in_a_step_the_state_is_that_of_pieces_that_all_leave(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = small_decoder(torch.bfloat16, vocab=BIG_VOCAB)
    states = []
    for prefetch_bytes in (0, room):
        model, hift = staying(twin(start), Stumbling, prefetch_bytes=prefetch_bytes, elementwise=True, lr=1e-2)
        train(model, hift, BATCHES, hift.cycle_length + 2)
        monkeypatch.setattr(Stumbling, "countdown", 3)
        with pytest.raises(RuntimeError, match="stumbled"):
            train(model, hift, BATCHES, 1)
        assert kept(hift) == {}
        with pytest.raises(RuntimeError, match="half changed"):
            hift.state_dict()
        states.append(copy.deepcopy([each.export() for each in hift.turns.states]))
    assert_same_tree(*states)
