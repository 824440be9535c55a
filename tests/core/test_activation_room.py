"""`keep_activations(model, "auto")`: on a device that is a ledger's count of bytes with a limit of its own."""

import re
from typing import Any

import pytest
import torch

import slivertune as st
from slivertune.core import activation_room
from slivertune.core.activation_room import MARGIN_SHARE, DeviceMemory, check_can_measure
from slivertune.core.ledger import Ledger, claim
from tests.core.test_kept_activations import BLOCKS, CYCLE, batch, checkpoint, llama, optimizer_of, recomputed_in_a_step

LENGTH = 48


class Device:
    """Stands for a CUDA device: what a ledger counts is allocated, and there is a limit."""

    def __init__(self) -> None:
        self.limit = 0
        self.ledger = Ledger()
        self.num_peaks_begun = 0
        self.last_allocated = 0

    def read(self, device: torch.device, *, begin_peak: bool = False) -> DeviceMemory:
        if begin_peak:
            self.num_peaks_begun += 1
            self.ledger.reset_peak()
        self.last_allocated = self.ledger.current().device
        return DeviceMemory(allocated=self.last_allocated, highest=self.ledger.peak.device, limit=self.limit)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(activation_room, "read_memory", device.read)
    monkeypatch.setattr(activation_room, "check_can_measure", lambda *_: None)
    return device


class Training:
    """Updates of a model on the device, whose peaks and kept blocks are noted."""

    def __init__(self, device: Device, method: str, num_blocks: int | str, *, limit: int = 2**40) -> None:
        self.device, self.model = device, llama(dropout=0.0)
        device.limit = limit
        checkpoint(self.model)
        self.optimizer = optimizer_of(method, self.model)
        device.ledger = self.ledger = Ledger(self.model)
        self.handle = st.keep_activations(self.model, num_blocks)
        self.peaks: list[int] = []
        self.kept: list[int] = []

    def step(self, *, size: int = 4, length: int = LENGTH, num_batches: int = 1) -> None:
        with self.ledger:
            for index in range(num_batches):
                self.ledger.reset_peak()
                self.model(**batch(self.model, index, size=size, length=length)).loss.backward()
                self.peaks.append(self.ledger.peak.device)
                self.kept.append(self.handle.num_kept)
            self.optimizer.step()
            self.optimizer.zero_grad()
            for values in self.optimizer.state.values():
                for value in values.values():
                    if isinstance(value, torch.Tensor):
                        claim(value, "state")

    def steps(self, count: int, **sizes: int) -> "Training":
        for _ in range(count):
            self.step(**sizes)
        return self


def free_for(limit: int) -> int:
    return limit - round(MARGIN_SHARE * limit)


def test_a_device_with_room_for_all_keeps_all_after_two_measured_forwards(device: Device) -> None:
    training = Training(device, "dense", "auto").steps(4)
    assert training.kept == [0, 0, BLOCKS, BLOCKS]
    assert device.num_peaks_begun == 2


def test_a_device_without_room_keeps_none(device: Device) -> None:
    training = Training(device, "dense", "auto", limit=2**10).steps(4)
    assert training.kept == [0] * 4


@pytest.mark.parametrize("method", ["dense", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sft", "hift"))])
def test_no_limit_is_passed_and_room_that_is_there_is_used(method: str, device: Device) -> None:
    """Against fixed numbers of blocks: what fits by its own peaks, beside the margin, in all later updates."""
    num_steps = 3 * CYCLE if method == "hift" else 5
    fixed = [Training(device, method, num_blocks).steps(num_steps) for num_blocks in range(BLOCKS + 1)]
    worst = [max(each.peaks) for each in fixed]
    # Here the peak is where the uppermost block is computed again, so that to keep it takes no more.
    assert worst[1] <= worst[0] and worst[1:] == sorted(set(worst[1:]))
    found = []
    for share in (0.0, 0.3, 0.6, 0.9, 1.6):
        limit = round((worst[0] + share * (worst[-1] - worst[0]) + 1) / (1 - MARGIN_SHARE))
        training = Training(device, method, "auto", limit=limit).steps(num_steps)
        assert max(training.peaks) <= free_for(limit) + 1
        # Of HiFT's turns the embedding's, in which all blocks record.
        settled = training.kept[-CYCLE if method == "hift" else -1]
        fits = max(count for count in range(BLOCKS + 1) if worst[count] <= free_for(limit))
        # One fewer, since the highest moment of plain checkpointing may be that in which the uppermost block lives.
        assert fits - 1 <= settled <= fits, (share, training.kept)
        found.append(settled)
    assert found == sorted(found) and found[0] < found[-1] == BLOCKS, found


def test_a_share_of_the_device_stays_free_to_the_byte(device: Device) -> None:
    training = Training(device, "dense", "auto").steps(3)
    room: Any = training.handle._room
    (kind,) = room._kinds.values()
    for num_blocks in (1, 2, 3):
        kept = sum(kind.bytes_of_block[place] for place in range(BLOCKS - num_blocks, BLOCKS))
        needed = device.last_allocated + kind.need_bytes + kept
        device.limit = next(limit for limit in range(needed, 2 * needed) if limit - round(0.05 * limit) >= needed)
        training.step()
        device.limit -= 1
        training.step()
        assert training.kept[-2:] == [num_blocks, num_blocks - 1]


def test_larger_and_longer_batches_than_were_measured_keep_none_and_are_measured(device: Device) -> None:
    training = Training(device, "dense", "auto").steps(3)
    for sizes, expected in (
        ({"size": 5}, [0, BLOCKS]),
        ({"size": 4}, [BLOCKS]),
        ({"size": 1, "length": LENGTH + 8}, [0, BLOCKS]),
        # No more tokens than the first, and no longer than the second; yet attention may take more than in either.
        ({"size": 4, "length": LENGTH + 8}, [0, BLOCKS]),
        ({"size": 5, "length": LENGTH + 8}, [0, BLOCKS]),
        ({"size": 1, "length": 8}, [BLOCKS]),
    ):
        training.kept.clear()
        training.steps(len(expected), **sizes)
        assert training.kept == expected, sizes


def test_a_batch_that_grows_never_passes_the_limit_by_what_is_kept(device: Device) -> None:
    """Once with all the room there is taken by smaller batches, a larger one needs no more than checkpointed whole."""
    small, large = {"size": 2}, {"size": 6}
    plain = Training(device, "dense", 0).steps(3, **small).steps(3, **large)
    limit = round((max(plain.peaks) + 1) / (1 - MARGIN_SHARE)) + 1
    training = Training(device, "dense", "auto", limit=limit).steps(4, **small).steps(4, **large)
    assert training.kept[3] > 0 and training.kept[4] == 0
    assert max(training.peaks) <= free_for(limit)


def test_every_turn_of_hift_is_measured_by_itself(device: Device) -> None:
    """In the two upper blocks' turns the lower ones record nothing, and take no room."""
    training = Training(device, "hift", "auto").steps(3 * CYCLE)
    first, second, third = (training.kept[CYCLE * index : CYCLE * (index + 1)] for index in range(3))
    assert first == second == [0] * CYCLE
    # The head's turn records no block, so that there is nothing to keep.
    assert third == [BLOCKS] * (CYCLE - 1) + [0]


def test_micro_batches_after_the_first_are_measured_by_themselves(device: Device) -> None:
    training = Training(device, "dense", "auto").steps(3, num_batches=3)
    # After the first micro-batch gradients are there, and not once more: two of one update are measured.
    assert training.kept == [0, 0, 0, 0, BLOCKS, BLOCKS, BLOCKS, BLOCKS, BLOCKS]


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_block_takes_is_what_it_adds_when_it_is_kept(reentrant: bool, device: Device) -> None:
    training = Training(device, "dense", "auto")
    checkpoint(training.model, reentrant=reentrant)
    training.steps(2)
    room: Any = training.handle._room
    (kind,) = room._kinds.values()
    kept = []
    for num_blocks in (0, BLOCKS):
        other: Any = llama(dropout=0.0)
        checkpoint(other, reentrant=reentrant)
        with st.keep_activations(other, num_blocks), Ledger(other) as ledger:
            loss = other(**batch(other, size=4, length=LENGTH)).loss
            kept.append(ledger.current().device)
            del loss
    # The state of the random numbers, which a checkpoint keeps, is counted as well.
    assert sorted(kind.bytes_of_block) == list(range(BLOCKS))
    assert sum(kind.bytes_of_block.values()) == pytest.approx(kept[1] - kept[0], rel=0.05)


def test_bits_are_those_of_plain_checkpointing(device: Device) -> None:
    found = []
    for num_blocks in (0, "auto"):
        training = Training(device, "hift", num_blocks).steps(3 * CYCLE)
        found.append({name: each.detach().clone() for name, each in training.model.named_parameters()})
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_parts_that_are_called_by_themselves_and_evaluations_are_checkpointed_as_ever(device: Device) -> None:
    training = Training(device, "dense", "auto").steps(3)
    model: Any = training.model
    with training.ledger:
        assert recomputed_in_a_step(model) == [0] * BLOCKS
        hidden = model.model(input_ids=batch(model)["input_ids"]).last_hidden_state
        with torch.no_grad():
            model(**batch(model))
        model.eval()(**batch(model))
        model.train()
        num_ran = [0]
        model.model.layers[3].mlp.register_forward_pre_hook(lambda *_: num_ran.append(1))
        hidden.sum().backward()
        assert sum(num_ran) == 1, "computed again"
        model.zero_grad()
        assert recomputed_in_a_step(model) == [0] * BLOCKS


@pytest.mark.parametrize(
    ("device_type", "world_size", "message"),
    [
        ("cpu", 1, "and the model is on 'cpu'. Give a number of blocks, from 0"),
        ("cuda", 2, "is measured in one process, and 2 processes might choose different"),
    ],
)
def test_where_nothing_can_be_measured_a_number_is_asked_for(device_type: str, world_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        check_can_measure(device_type, world_size)
    check_can_measure("cuda", 1)


def test_a_cuda_device_is_asked_by_torchs_own_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[torch.device] = []
    values = {"memory_allocated": 5, "max_memory_allocated": 7, "memory_reserved": 11, "mem_get_info": (100, 1000)}
    for name, value in {**values, "get_per_process_memory_fraction": 1.0}.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", begun.append)
    device = torch.device("cuda", 0)
    expected = DeviceMemory(allocated=5, highest=7, limit=111)
    assert activation_room.read_memory(device) == expected and begun == []
    assert activation_room.read_memory(device, begin_peak=True) == expected and begun == [device]
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 0.1)
    assert activation_room.read_memory(device).limit == 100, "a tenth of the device was allowed"
