"""Pieces loaded ahead of their step: no bit changes, no more bytes are held than allowed, and they give way.

Together with other settings they stand in test_pairwise.py; combinations that are listed here are slow.
"""

import copy
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from slivertune import HiFT, HiFTConfig, Ledger
from slivertune.hift import prefetch
from slivertune.hift.parts import Turn
from slivertune.hift.prefetch import Prefetcher
from tests.helpers.delayed_streams import DelayedStreams, delayed
from tests.helpers.hift_parts import part_of
from tests.helpers.models import assert_all_moved, assert_same_bits, small_decoder, token_batches, twin, weights
from tests.helpers.pairwise import rotated
from tests.helpers.ranks import quick
from tests.helpers.reference import train
from tests.hift.cases import BIG_VOCAB, hift_over

STREAM_BYTES = 20_000
ROOMS = [1, 20_000, 60_000, 10**9]
"""Less than a piece, about one, some, and all."""
STEPS = 17


def trained(model: nn.Module, name: str, steps: int | None = None, **config: Any) -> nn.Module:
    """A copy of a model, trained for two cycles and two updates, and for no more than `STEPS`."""
    other, hift = hift_over(twin(model), name, **{"stream_bytes": STREAM_BYTES, **config})
    train(other, hift, token_batches(STEPS, vocab=BIG_VOCAB), steps or min(STEPS, 2 * hift.cycle_length + 2))
    return other


CONFIGS: list[dict[str, Any]] = [
    {},
    {"layers_per_group": 2},
    {"steps_per_group": 3},
    {"state": "discard", "steps_per_group": 2},
    {"gradients": "stepped"},
    {"stream_bytes": 0, "layers_per_group": 5},
]


@rotated(config=CONFIGS, name=["AdamW", "SGD momentum", "AdamW8bit"], room=ROOMS)
def test_no_room_changes_a_bit(name: str, config: dict[str, Any], room: int) -> None:
    model = small_decoder(torch.bfloat16, vocab=BIG_VOCAB)
    expected = trained(model, name, prefetch_bytes=0, **config)
    assert_all_moved(expected, weights(model))
    assert_same_bits(trained(model, name, prefetch_bytes=room, **config), expected)


@functools.cache
def trained_in_order() -> nn.Module:
    return trained(small_decoder(torch.bfloat16, vocab=BIG_VOCAB), "AdamW", STEPS, prefetch_bytes=60_000)


@pytest.mark.parametrize("missing", ["compute_after", "slot", "compute"])
def test_a_missing_wait_changes_bits(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained_in_order()
    on = DelayedStreams.on

    def without_slot(self: DelayedStreams, direction: Any, *after: Any) -> Any:
        return on(self, direction, *(after[1:] if direction == "inbound" else after))

    if missing == "compute_after":
        monkeypatch.setattr(DelayedStreams, "compute_after", lambda self, event: None)
    elif missing == "slot":
        monkeypatch.setattr(DelayedStreams, "on", without_slot)
    else:
        monkeypatch.setattr(DelayedStreams, "synchronize", lambda self: None)
    with delayed(None):
        other, hift = hift_over(
            small_decoder(torch.bfloat16, vocab=BIG_VOCAB), "AdamW", stream_bytes=STREAM_BYTES, prefetch_bytes=60_000
        )
        batches = token_batches(STEPS, vocab=BIG_VOCAB)
        train(other, hift, batches, 11)
        if missing == "compute":  # what the host reads too early
            hift.load_state_dict(copy.deepcopy(hift.state_dict()))
        train(other, hift, batches, STEPS - 11, start=11)
    with pytest.raises(AssertionError):
        assert_same_bits(other, expected)


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    """A count of all that is allocated in the test."""
    with Ledger() as entered:
        yield entered


def build(num_updates: int = 10, **config: Any) -> tuple[Any, HiFT, list[dict[str, torch.Tensor]]]:
    """A model after two cycles, whose embedding and head are many pieces."""
    model, hift = hift_over(
        small_decoder(torch.bfloat16, vocab=4001), torch.optim.AdamW, lr=1e-3, **{"stream_bytes": 2**18, **config}
    )
    batches = token_batches(40, vocab=4001)
    train(model, hift, batches, num_updates)
    return model, hift, batches


def state_in_forward(
    ledger: Ledger, model: Any, hift: HiFT, batch: dict[str, torch.Tensor], *, backward: bool = True
) -> int:
    """Bytes of state on the device at the end of a forward; the step is made."""
    loss = model(**batch).loss
    held = ledger.current().state
    if backward:
        loss.backward()
        hift.step()
    return held


@pytest.mark.parametrize("prefetch_bytes", quick([0, 2**18, 2**20, 2**30], [0, 2**20, 2**30]))
def test_a_forward_finds_no_more_than_the_budget_and_what_it_can_use(prefetch_bytes: int) -> None:
    with Ledger() as ledger:
        model, hift, batches = build(prefetch_bytes=prefetch_bytes)
        held = []
        for index in range(10, 20):
            ledger.reset_peak()
            loss = model(**batches[index]).loss
            held.append(ledger.peak.state)
            loss.backward()
            hift.step()
    largest = max(12 * sum(p.numel() for p in layer) for layer in _parameters_by_group(model, hift))
    assert max(held) <= min(prefetch_bytes, 1.1 * largest)  # slots are of one size
    assert prefetch_bytes < 2**18 or max(held) > 0.7 * min(prefetch_bytes, largest)


def _parameters_by_group(model: nn.Module, hift: HiFT) -> list[list[nn.Parameter]]:
    return [[model.get_parameter(name) for name in group.parameter_names] for group in hift.groups]


def larger(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: torch.cat([value, value]) for key, value in batch.items()}


def longer(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value.flatten()[None, : 2 * value.shape[1]].contiguous() for key, value in batch.items()}


@pytest.mark.parametrize("change", [larger, longer])
def test_a_batch_that_is_larger_than_all_before_finds_nothing_held_and_the_same_again_does(
    ledger: Ledger, change: Any
) -> None:
    model, hift, batches = build(prefetch_bytes=2**30)
    assert state_in_forward(ledger, model, hift, batches[10]) > 0
    big = change(batches[11])
    for _ in range(hift.num_groups):  # each group sees it for the first time
        assert state_in_forward(ledger, model, hift, big) == 0
    for _ in range(hift.num_groups):
        assert state_in_forward(ledger, model, hift, big) > 0


def test_a_forward_without_gradients_finds_nothing_held_and_the_next_that_trains_does(ledger: Ledger) -> None:
    model, hift, batches = build(prefetch_bytes=2**30)
    with torch.no_grad():
        assert state_in_forward(ledger, model, hift, batches[10], backward=False) == 0
    assert state_in_forward(ledger, model, hift, batches[10]) > 0


def test_a_forward_that_lacks_memory_leaves_nothing_held(ledger: Ledger) -> None:
    model, hift, batches = build(prefetch_bytes=2**30)
    expected, usual, _ = build(prefetch_bytes=0)

    def fail(*ignored: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    hook = model.lm_head.register_forward_pre_hook(fail)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        model(**batches[10])
    hook.remove()
    assert ledger.current().state == 0
    # And a backward that does.
    handle = model.model.norm.register_full_backward_hook(fail)
    loss = model(**batches[10]).loss
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        loss.backward()
    handle.remove()
    del loss
    hift.zero_grad()
    loss = model(**batches[10]).loss
    assert ledger.current().state == 0
    loss.backward()
    hift.step()
    train(model, hift, batches, 8, start=11)
    train(expected, usual, batches, 9, start=10)
    assert_same_bits(model, expected)


def test_a_slot_that_finds_no_memory_lets_what_is_held_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    model, hift, batches = build(prefetch_bytes=2**30)
    expected, usual, _ = build(prefetch_bytes=0)
    slots = next(iter(part_of(hift, Prefetcher).slots.values()))
    new_memory, limit = type(slots)._new_memory, 2**20

    def allocate(self: Any, num_bytes: int) -> torch.Tensor:
        if self.held_bytes + num_bytes > limit:
            raise torch.OutOfMemoryError("no room")
        return new_memory(self, num_bytes)

    monkeypatch.setattr(type(slots), "_new_memory", allocate)
    part_of(hift, Prefetcher).out_of_memory()
    train(model, hift, batches, 10, start=10)
    train(expected, usual, batches, 10, start=10)
    assert_same_bits(model, expected)
    assert slots.held_bytes <= limit


def test_auto_takes_what_the_first_cycle_has_left_and_nothing_elsewhere(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, hift, batches = build()
    assert state_in_forward(ledger, model, hift, batches[10]) == 0, "a CPU has no memory of its own"
    del model, hift
    monkeypatch.setattr(prefetch.PeakMemory, "unused_bytes", lambda _, device: 2**20 - ledger.current().state)
    monkeypatch.setattr(prefetch, "has_own_memory", lambda device: True)
    model, hift = hift_over(small_decoder(torch.bfloat16, vocab=4001), torch.optim.AdamW, lr=1e-3, stream_bytes=2**18)
    held = [state_in_forward(ledger, model, hift, batches[index]) for index in range(15)]
    assert held[:5] == [0] * 5 and 2**19 < max(held[5:]) <= 2**20
    monkeypatch.setattr(prefetch.PeakMemory, "unused_bytes", lambda _, device: 0)
    assert [state_in_forward(ledger, model, hift, batches[index]) for index in range(15, 25)][5:] == [0] * 5


def test_dropping_the_optimizer_detaching_and_loading_leave_nothing_held(ledger: Ledger) -> None:
    model, hift, batches = build(prefetch_bytes=2**30)
    train(model, hift, batches, 1, start=10)
    assert ledger.current().state > 0
    saved = copy.deepcopy(hift.state_dict())
    hift.load_state_dict(saved)
    hift.detach()
    assert ledger.current().state == 0
    hift.reattach()
    train(model, hift, batches, 1, start=11)
    assert ledger.current().state > 0
    del hift
    assert ledger.current().state == 0


@pytest.mark.parametrize("value", ["all", -1, 1.5, True])
def test_a_wrong_budget_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="prefetch_bytes="):
        HiFTConfig.paper(prefetch_bytes=value)
    with pytest.raises(ValueError, match=r'prefetch_bytes=5 is for offloaded state, and state="device" offloads none'):
        HiFTConfig.paper(prefetch_bytes=5, state="device")


class _WithoutState:
    """A group that has no state yet: it asks for the slots of its device the first time that it must release some."""

    def __init__(self, prefetcher: prefetch.Prefetcher, device: str) -> None:
        self._prefetcher, self._device = prefetcher, torch.device(device)

    def release(self, num_bytes: int) -> None:
        self._prefetcher.slots_of(self._device).shrink(num_bytes)

    def prefetch(self) -> None:
        pass


def turn_of(state: Any) -> Turn:
    return Turn(0, (0,), state)


def test_a_group_without_state_on_a_new_device_ends_no_run() -> None:
    prefetcher = prefetch.Prefetcher(100)
    prefetcher.slots_of(torch.device("cpu")).prefetch_bytes = 100
    prefetcher.begin_turn(turn_of(_WithoutState(prefetcher, "meta")))
    prefetcher.out_of_memory()
    assert [slots.prefetch_bytes for slots in prefetcher.slots.values()] == [0, 0]


def test_auto_holds_what_every_gpu_has_left_whatever_the_host_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that was moved from the host, or lies on two GPUs, has slots on each; the host's have no memory."""
    free = {torch.device("cpu"): 0, torch.device("cuda", 0): 300, torch.device("cuda", 1): 200}
    monkeypatch.setattr(prefetch.PeakMemory, "unused_bytes", lambda _, device: free[device])
    prefetcher = prefetch.Prefetcher("auto")
    for device in free:
        prefetcher.slots_of(device).held_bytes = 7
    prefetcher.begin_turn(turn_of(_WithoutState(prefetcher, "cpu")))
    prefetcher.end_step(ends_cycle=True)
    assert {slots.prefetch_bytes for slots in prefetcher.slots.values()} == {207}
    free[torch.device("cuda", 1)] = 0
    prefetcher.end_step(ends_cycle=True)
    assert {slots.prefetch_bytes for slots in prefetcher.slots.values()} == {0}


def test_a_group_has_the_slots_of_its_models_device_before_it_has_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, slots on the host would end the run or count as a device without memory."""
    hift = HiFT(small_decoder(), torch.optim.AdamW, config=HiFTConfig.paper(prefetch_bytes=100), lr=1e-3)
    part_of(hift, Prefetcher).slots.clear()
    residency = hift.turns.states[0]
    monkeypatch.setattr(residency, "_device", lambda: torch.device("meta"))  # where the model has been moved
    residency.release()
    assert list(part_of(hift, Prefetcher).slots) == [torch.device("meta")]
