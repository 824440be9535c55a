"""Where the bytes are, by the census of living storages."""

import gc
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from slivertune import HiFT
from slivertune.core.copy_streams import Event
from slivertune.core.ledger import Census, Ledger, StateCount
from slivertune.hift.device_slots import DeviceSlots
from tests.helpers.models import assert_same_bits, small_decoder, token_batches
from tests.hift.cases import hift_over

FP32, BF16 = torch.float32, torch.bfloat16
NUM_GROUPS = 5
VOCAB = 4001
"""Makes the embedding and the head, of 3 MB each with their state, a dozen pieces."""
STREAM_BYTES = 256 * 1024
STEP_BYTES = 4
"""An AdamW step count, one for each slice of a weight."""


def build(dtype: torch.dtype, **config: Any) -> tuple[nn.Module, HiFT]:
    return hift_over(
        small_decoder(dtype, vocab=VOCAB), torch.optim.AdamW, lr=1e-2, **{"stream_bytes": STREAM_BYTES, **config}
    )


def active_bytes(model: nn.Module, optimizer: HiFT) -> int:
    """Bytes of the active group's weights, and so of its gradients."""
    names = optimizer.groups[optimizer.active_group].parameter_names
    return sum(parameter.nbytes for name, parameter in model.named_parameters() if name in names)


def backward(model: nn.Module, index: int) -> None:
    model(**token_batches(index + 1)[index]).loss.backward()


def censuses(model: nn.Module, optimizer: HiFT, count: int) -> Iterator[Census]:
    """Train for so many steps, and tell where the bytes are after each."""
    with Ledger(model) as ledger:
        for index in range(count):
            backward(model, index)
            optimizer.step()
            yield ledger.current()


def assert_only_weights_on_the_device(census: Census, model: nn.Module) -> None:
    """What must hold after every step."""
    num_bytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    assert (census.parameters, census.gradients) == (num_bytes, 0)
    assert census.state == 0, f"{census.state} bytes of state stayed on the device"
    assert census.residual == 0, f"{census.residual} bytes of no one's stayed on the device"


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_step_holds_the_weights_the_active_gradients_and_two_pieces(dtype: torch.dtype) -> None:
    model, optimizer = build(dtype)
    largest = 0
    with Ledger(model) as ledger:
        for index in range(3 * NUM_GROUPS):
            backward(model, index)
            gradients = active_bytes(model, optimizer)
            assert ledger.current().gradients == gradients
            fixed = ledger.current().parameters + gradients
            ledger.reset_peak()
            optimizer.step()
            assert ledger.peak.device <= fixed + 2 * STREAM_BYTES
            largest = max(largest, ledger.peak.device - fixed)
    # The bound is no idle one: the embedding and its state are far larger than two pieces.
    assert largest > STREAM_BYTES


def test_whole_groups_on_the_device_would_break_that_bound() -> None:
    model, optimizer = build(BF16, stream_bytes=0)
    with Ledger(model) as ledger:
        for index in range(2 * NUM_GROUPS):
            backward(model, index)
            optimizer.step()
        assert ledger.highest.state > 2 * STREAM_BYTES


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_between_steps_all_state_waits_on_the_host(dtype: torch.dtype) -> None:
    model, optimizer = build(dtype)
    num_elements = {name: parameter.numel() for name, parameter in model.named_parameters()}
    bytes_each = 8 if dtype == FP32 else 12  # two moments, and a master for 16-bit weights
    visited = 0
    for index, census in enumerate(censuses(model, optimizer, 2 * NUM_GROUPS)):
        assert_only_weights_on_the_device(census, model)
        if index < NUM_GROUPS:
            visited += sum(num_elements[name] for name in optimizer.groups[index].parameter_names)
        # Beside it: step counts, and the gaps that keep tensors aligned.
        assert visited * bytes_each <= census.host <= visited * bytes_each * 1.25 + 100_000


def test_keeping_a_groups_state_alive_after_the_step_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[torch.Tensor] = []
    give_back = DeviceSlots.give_back

    def forgetful(slots: DeviceSlots, memory: torch.Tensor, free_after: Event) -> None:
        kept.append(memory)
        give_back(slots, memory, free_after)

    monkeypatch.setattr(DeviceSlots, "give_back", forgetful)
    model, optimizer = build(BF16)
    *_, last = censuses(model, optimizer, NUM_GROUPS + 1)
    with pytest.raises(AssertionError, match="bytes of state stayed on the device"):
        assert_only_weights_on_the_device(last, model)


def test_the_first_pieces_arrive_during_backward() -> None:
    model, optimizer = build(BF16)
    with Ledger(model) as ledger:
        for index in range(NUM_GROUPS):
            backward(model, index)
            assert ledger.current().state == 0  # nothing waits yet
            optimizer.step()
        for index in range(NUM_GROUPS):
            backward(model, index)
            assert 0 < ledger.current().state <= 2 * STREAM_BYTES
            optimizer.step()


def test_prefetched_pieces_survive_a_skipped_step() -> None:
    results = []
    for skip in (False, True):
        model, optimizer = build(BF16)
        for index in range(3 * NUM_GROUPS):
            if skip:
                backward(model, 50 + index)
                model.zero_grad()
                optimizer.step()  # nothing to apply
            backward(model, index)
            optimizer.step()
        assert optimizer.updates == 3 * NUM_GROUPS
        results.append(model)
    assert_same_bits(*results)


def test_state_on_the_device_stays_there() -> None:
    model, optimizer = build(BF16, state="device")
    *_, last = censuses(model, optimizer, 2 * NUM_GROUPS)
    state_bytes = sum(12 * parameter.numel() + STEP_BYTES for parameter in model.parameters())
    assert (last.state, last.host, last.gradients, last.residual) == (state_bytes, 0, 0, 0)


def test_state_on_disk_is_in_files_without_names(tmp_path: Any) -> None:
    own = StateCount()  # other tests' optimizers may still live
    model, optimizer = build(BF16, state="disk", state_dir=tmp_path / "state")
    sizes = [sum(12 * w.parameter.numel() for w in optimizer.weights_of(index)) for index in range(NUM_GROUPS)]
    gaps = [1024 * len(optimizer.weights_of(index)) for index in range(NUM_GROUPS)]
    for census in censuses(model, optimizer, 3 * NUM_GROUPS):
        assert (census.gradients, census.residual, census.state) == (0, 0, 0)
        # Two groups are in memory at most, whatever the number of groups; the space of all files is taken at once.
        assert census.host <= 2 * (max(sizes) + max(gaps)) + 20_000  # step counts of the slices
        in_files = own.num_bytes()["disk"]
        assert sum(sizes) <= in_files <= sum(sizes) + sum(gaps)
        assert in_files <= census.disk
    assert list((tmp_path / "state").iterdir()) == []
    del optimizer
    # The disk's thread may hold the files until its last job has ended.
    end = time.monotonic() + 60
    while own.num_bytes()["disk"] and time.monotonic() < end:
        time.sleep(0.01)
        gc.collect()
    assert own.num_bytes()["disk"] == 0


def test_discarded_state_waits_nowhere() -> None:
    model, optimizer = build(BF16, state="discard", steps_per_group=2)
    for index, census in enumerate(censuses(model, optimizer, 4 * NUM_GROUPS)):
        assert_only_weights_on_the_device(census, model)
        assert (census.host == 0) == (index % 2 == 1)


@pytest.mark.parametrize(("master", "bytes_per_parameter"), [("fp32", 3 * 4), ("none", 2 * 2)])
def test_a_master_and_two_moments_wait_or_two_moments_in_16_bits(master: str, bytes_per_parameter: int) -> None:
    model, optimizer = build(BF16, master=master)
    *_, last = censuses(model, optimizer, NUM_GROUPS)
    num_elements = sum(parameter.numel() for parameter in model.parameters())
    assert last.host == pytest.approx(bytes_per_parameter * num_elements, rel=0.05)
