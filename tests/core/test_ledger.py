import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from slivertune.core.ledger import Census, FileBytes, Ledger, StateCount, claim, claimed_at_birth

MIB = 2**20


@pytest.fixture
def model() -> nn.Module:
    return linear()


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    """One without a model, entered."""
    with Ledger() as entered:
        yield entered


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))


def bytes_of(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def test_a_planted_leak_of_one_mebibyte_shows_until_it_is_gone(ledger: Ledger) -> None:
    before = ledger.current().residual
    leak = torch.zeros(MIB // 4)
    assert ledger.current().residual - before == MIB
    del leak
    assert ledger.current().residual == before
    assert ledger.peak.residual - before == MIB


def test_a_leak_that_autograd_holds_shows() -> None:
    weight = torch.ones(MIB // 4, requires_grad=True)
    with Ledger() as ledger:
        loss = weight.exp().sum()  # saves its output for backward
        assert ledger.current().residual == MIB + loss.nbytes
        loss.backward()
        del loss
        # The gradient: no model was given, so no one claimed it.
        assert ledger.current().residual == MIB


def test_weights_and_gradients_of_the_model_are_counted_as_such(model: nn.Module) -> None:
    weight_bytes = bytes_of(list(model.parameters()))
    with Ledger(model) as ledger:
        assert (ledger.current().parameters, ledger.current().gradients) == (weight_bytes, 0)
        model(torch.ones(4, 64)).sum().backward()
        assert ledger.current().gradients == weight_bytes
        model.zero_grad()
        assert ledger.current().gradients == 0
        assert ledger.highest.gradients == weight_bytes


def test_frozen_parameters_are_watched_and_stay_frozen() -> None:
    model = linear().requires_grad_(False)
    with Ledger(model) as ledger:
        assert not any(parameter.requires_grad for parameter in model.parameters())
        model[2].requires_grad_(True)
        model(torch.ones(4, 64)).sum().backward()
        assert ledger.highest.gradients == bytes_of(list(model[2].parameters()))
    assert not model[0].weight._post_accumulate_grad_hooks


def test_only_what_is_claimed_for_the_host_counts_there(ledger: Ledger) -> None:
    gc.collect()
    files = ledger.current().disk  # of other tests, as long as their owners live
    tensor = torch.zeros(MIB // 4)
    assert (ledger.current().residual, ledger.current().host) == (MIB, 0)
    claim(tensor, "state", "host")
    assert (ledger.current().residual, ledger.current().host) == (0, MIB)
    claim(tensor, "state", "disk")
    assert (ledger.current().host, ledger.current().disk) == (0, files + MIB)
    claim(tensor, "state")
    assert (ledger.current().state, ledger.current().disk) == (MIB, files)
    assert ledger.current().device == MIB


def test_files_count_as_long_as_their_owner_lives(ledger: Ledger) -> None:
    gc.collect()
    before, others = ledger.current().disk, StateCount()
    files = FileBytes()
    files.num_bytes = 3 * MIB
    files.num_bytes = MIB
    assert (ledger.current().disk, ledger.highest.disk) == (before + MIB, before + 3 * MIB)
    assert others.num_bytes()["disk"] == MIB and StateCount().num_bytes()["disk"] == 0
    del files
    assert ledger.current().disk == before


def test_a_claim_ends_with_its_storage(ledger: Ledger) -> None:
    for _ in range(20):  # the allocator hands out the same addresses again
        claimed = torch.zeros(MIB // 4)
        claim(claimed, "state", "host")
        del claimed
        fresh = torch.zeros(MIB // 4)
        assert (ledger.current().residual, ledger.current().host) == (MIB, 0)
        del fresh


def test_views_count_their_storage_once(ledger: Ledger) -> None:
    base = torch.zeros(MIB // 4)
    views = [base[i:] for i in range(10)]
    assert ledger.current().residual == MIB
    del base
    assert ledger.current().residual == MIB
    views.clear()
    assert ledger.current().residual == 0


def test_the_peak_is_of_one_moment_and_starts_anew(ledger: Ledger) -> None:
    first = torch.zeros(MIB)
    del first
    second = torch.zeros(MIB // 4)
    assert ledger.peak.device == 4 * MIB
    ledger.reset_peak()
    assert ledger.peak.device == ledger.highest.residual == MIB
    del second


def test_what_was_made_before_is_counted_when_shown() -> None:
    tensor = torch.zeros(MIB // 4)
    with Ledger() as ledger:
        assert ledger.current().device == 0
        ledger.track([tensor])
        assert ledger.current().device == MIB


def test_a_resized_storage_is_counted_anew(ledger: Ledger) -> None:
    tensor = torch.zeros(MIB // 4)
    tensor.untyped_storage().resize_(2 * MIB)
    tensor.add_(1)
    assert ledger.current().residual == 2 * MIB


def test_nothing_stays_behind_after_leaving(model: nn.Module) -> None:
    with Ledger(model):
        pass
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    kept = torch.zeros(MIB // 4)
    with Ledger() as ledger:
        gc.collect()
        assert ledger.current().device == 0
    assert kept.nbytes == MIB


def test_a_line_names_every_kind_in_megabytes() -> None:
    census = Census(state=1_000_000, host=2_000_000)
    expected = "weights 0.0 MB, gradients 0.0 MB, state on the device 1.0 MB, state on the host 2.0 MB"
    assert census.line() == expected
    assert replace(census, host=0, disk=2_000_000).line().endswith("state on the host 0.0 MB, state on disk 2.0 MB")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_training_step_adds_up(dtype: torch.dtype) -> None:
    model = linear().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    weight_bytes = bytes_of(list(model.parameters()))
    with Ledger(model) as ledger:
        for _ in range(2):
            model(torch.ones(4, 64, dtype=dtype)).sum().backward()
            optimizer.step()
        gc.collect()
        # Weights, gradients, two moments, and one step count of four bytes a parameter.
        assert ledger.current().device == 4 * weight_bytes + 4 * len(list(model.parameters()))


def test_what_is_claimed_at_birth_never_counts_as_residual(ledger: Ledger) -> None:
    with claimed_at_birth("state", "host"):
        waiting = torch.zeros(MIB // 4)
    assert (ledger.current().host, ledger.highest.residual) == (MIB, 0)
    after = torch.zeros(MIB // 4)
    assert ledger.current().residual == MIB
    assert waiting.nbytes == after.nbytes


def test_a_parameter_that_an_owner_claimed_as_state_stays_state(model: nn.Module) -> None:
    claim(model[0].weight, "state")
    with Ledger(model) as ledger:
        model[0].weight.data.add_(1)
        census = ledger.current()
    state = model[0].weight.nbytes
    assert (census.state, census.parameters) == (state, bytes_of(list(model.parameters())) - state)


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_of_a_weight_that_ranks_share_its_own_rows_count_once(mesh: Any) -> None:
    rows = torch.ones(4, 8)
    # As rank 0 of two would hold a weight of eight rows: the wrapper says that it has them all.
    weight = nn.Parameter(DTensor.from_local(rows, mesh, [Shard(0)], shape=torch.Size((8, 8)), stride=(8, 1)))
    with Ledger() as ledger:
        ledger.track([weight])
        assert ledger.current().residual == rows.nbytes
        kept = weight.detach()
        assert ledger.current().residual == rows.nbytes
        claim(weight, "parameters")
        assert (ledger.current().parameters, ledger.current().residual) == (rows.nbytes, 0)
        sum_of_rows = kept + 1
        assert ledger.current().residual == sum_of_rows.to_local().nbytes == rows.nbytes
