import shutil
from types import SimpleNamespace

import pytest
import torch

from slivertune.planning import limits as module
from slivertune.planning.limits import describe_limits, fit_json, limits_json, limits_of, trains_here, unlimited_needs
from slivertune.planning.plan import Limits, MemoryRequirement, add_allowance
from tests.helpers.plan_requests import paper_request
from tests.planning.made import GIB, moment, simple_plan


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two cards, 90 GiB of host memory and 700 GiB of disk free."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA GeForce RTX 4090")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(total_memory=24 * GIB))
    monkeypatch.setattr(module, "available_host_bytes", lambda: 90 * GIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=700 * GIB))


def needs(*, host: int = 0, disk: int = 0, **settings: object) -> MemoryRequirement:
    """A plan of which so much waits."""
    request = paper_request(**settings)  # type: ignore[arg-type]
    return add_allowance(simple_plan(request, moment(parameters=GIB), host_bytes=host, disk_bytes=disk))


def test_elsewhere_nothing_is_assumed() -> None:
    assert limits_of(24 * GIB) == Limits(device_bytes=24 * GIB)
    given = limits_of(24 * GIB, host_bytes=GIB, disk_bytes=2 * GIB)
    assert given == Limits(device_bytes=24 * GIB, host_bytes=GIB, disk_bytes=2 * GIB)


def test_on_the_machine_that_trains_what_was_not_given_is_what_is_free(machine: None) -> None:
    limits = limits_of(24 * GIB, here=True)
    assert (limits.host_bytes, limits.disk_bytes) == (90 * GIB, 700 * GIB)
    assert limits.assumed == {"host_bytes", "disk_bytes"}
    limits = limits_of(24 * GIB, host_bytes=GIB, here=True)
    assert (limits.host_bytes, limits.assumed) == (GIB, {"disk_bytes"})


def test_the_processes_of_a_machine_share_what_is_free(machine: None) -> None:
    # Of four GPUs the other two are in another machine.
    for num_gpus, share in ((1, 90 * GIB), (2, 45 * GIB), (4, 45 * GIB)):
        assert limits_of(24 * GIB, here=True, num_gpus=num_gpus).host_bytes == share
    assert limits_of(24 * GIB, host_bytes=GIB, here=True, num_gpus=2).host_bytes == GIB


def test_a_machine_that_does_not_tell_its_memory_gives_no_limit(machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_host_bytes", lambda: None)
    limits = limits_of(24 * GIB, here=True)
    assert (limits.host_bytes, limits.assumed) == (None, {"disk_bytes"})


def test_it_trains_here_where_the_card_is(machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert trains_here(None) and trains_here("4090") and not trains_here("H100")
    with pytest.raises(ValueError, match="gpu='5090x' must be one of"):
        trains_here("5090x")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not trains_here(None) and not trains_here("4090")


def test_what_waits_without_a_limit_is_said_with_the_option_that_sets_one() -> None:
    limits = Limits(device_bytes=24 * GIB)
    host = "needs 75.00 GiB of host memory, and no limit was given. Give one by --fit_host 64GiB"
    disk = "needs 9.00 GiB of disk for each process, and no limit was given. Give one by --fit_disk 500GiB"
    assert unlimited_needs(needs(), limits) == []
    assert unlimited_needs(needs(host=75 * GIB), limits) == [host]
    assert unlimited_needs(needs(disk=9 * GIB, layout="ddp", num_gpus=2), limits) == [disk]
    assert unlimited_needs(needs(host=75 * GIB), Limits(device_bytes=24 * GIB, host_bytes=GIB)) == []


def test_the_json_says_what_was_assumed_and_whether_each_limit_is_kept() -> None:
    limits = Limits(device_bytes=24 * GIB, host_bytes=64 * GIB, assumed=frozenset({"host_bytes"}))
    expected = {"limit_bytes": 24 * GIB, "host_limit_bytes": 64 * GIB, "disk_limit_bytes": None}
    assert limits_json(limits) == {**expected, "assumed": ["host_limit_bytes"]}
    values = fit_json(needs(host=75 * GIB), limits)
    names = ("fits", "fits_device", "fits_host", "fits_disk", "warnings")
    assert [values[name] for name in names] == [False, True, False, None, []]
    assert fit_json(needs(disk=GIB), limits)["warnings"] == unlimited_needs(needs(disk=GIB), limits)


def test_limits_are_described_with_their_places_and_where_they_come_from() -> None:
    assert describe_limits(Limits(device_bytes=24 * GIB)) == "24.00 GiB"
    limits = Limits(device_bytes=24 * GIB, host_bytes=GIB, disk_bytes=2 * GIB, assumed=frozenset({"disk_bytes"}))
    expected = "24.00 GiB, 1.00 GiB of host memory and 2.00 GiB of disk that this machine has free"
    assert describe_limits(limits) == expected
