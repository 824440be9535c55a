from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F

from slivertune.core.copy_streams import CopyStreams
from slivertune.planning.fake import FakeOverrides, without_data
from slivertune.planning.kernels import attend
from slivertune.planning.schedule import Begin, Record, Synchronize, Transfer, Wait, Work
from slivertune.planning.schedule_recorder import ScheduleRecorder


@contextmanager
def recorded() -> Iterator[tuple[ScheduleRecorder, CopyStreams]]:
    """What runs inside is the forward of a step."""
    recorder = ScheduleRecorder()
    streams = recorder.streams(torch.device("cpu"))
    with without_data(), recorder.recording("forward", 3):
        yield recorder, streams
    assert recorder.entries.pop(0) == Begin(0, 3, "forward")


def test_copies_between_host_and_device_pass_the_bus_and_others_do_not() -> None:
    with recorded() as (recorder, streams):
        on_host, on_device = streams.host_memory(40), torch.empty(40, dtype=torch.uint8)
        with streams.on("inbound"):
            on_device.view(torch.int32)[:5].copy_(on_host.view(torch.int32)[5:], non_blocking=True)
            on_device[:8].copy_(on_host[:8], non_blocking=True)
        with streams.on("outbound"):
            on_host.copy_(on_device, non_blocking=True)
        on_device[:3].copy_(on_device[3:6])
        on_host[:3].copy_(on_host[3:6])
    assert recorder.entries == [
        Transfer("inbound", "inbound", 28),
        Transfer("outbound", "outbound", 40),
        Work("computing", {(0, 6): 1}),
    ]


def test_a_copy_that_blocks_lets_the_host_wait_for_its_stream() -> None:
    with recorded() as (recorder, streams):
        on_host, on_device = streams.host_memory(40), torch.empty(40, dtype=torch.uint8)
        with streams.on("outbound"):
            on_host.copy_(on_device)
        on_device.copy_(on_host)
    assert recorder.entries == [
        *(Transfer("outbound", "outbound", 40), Synchronize("outbound")),
        *(Transfer("computing", "inbound", 40), Synchronize("computing")),
    ]


def test_operators_on_a_copy_stream_are_its_work() -> None:
    with recorded() as (recorder, streams):
        sums, on_host = torch.empty(10), streams.host_memory(40).view(torch.float32)
        with streams.on("outbound"):
            arrived = torch.empty(10).copy_(on_host, non_blocking=True)
            sums.add_(arrived)
            on_host.copy_(sums, non_blocking=True)
        sums.zero_()
    assert recorder.entries == [
        Transfer("outbound", "inbound", 40),
        Work("outbound", {(0, 120): 1}),
        Transfer("outbound", "outbound", 40),
        Work("computing", {(0, 40): 1}),
    ]


def test_events_and_waits_stand_where_they_were_queued() -> None:
    with recorded() as (recorder, streams):
        x = torch.ones(4)
        done = streams.record()
        with streams.on("outbound", done, None):
            x.add_(1)
        left = streams.record("outbound")
        x.add_(1)
        streams.compute_after(left)
        streams.compute_after(None)
        x.add_(1)
        streams.synchronize()
    add = {(0, 32): 1}
    assert recorder.entries == [
        Work("computing", {(0, 16): 1}),
        *(Record("computing", done), Wait("outbound", done), Work("outbound", add), Record("outbound", left)),
        *(Work("computing", add), Wait("computing", left), Work("computing", add)),
        *(Synchronize("inbound"), Synchronize("outbound")),
    ]
    assert done != left


def test_what_the_host_reads_of_the_device_it_waits_for_and_what_is_its_own_it_does_not() -> None:
    recorder = ScheduleRecorder()
    streams = recorder.streams(torch.device("cpu"))
    with without_data(), FakeOverrides(), recorder.recording("step", 0):
        on_host, on_device = streams.host_memory(4).view(torch.float32), torch.empty(1)
        on_host.item()
        assert recorder.entries == [Begin(0, 0, "step")]
        on_device.item()
        on_device.nonzero()
    assert recorder.entries == [
        *(Begin(0, 0, "step"), Synchronize("computing"), Synchronize("computing")),
        Work("computing", {(0, 4): 1}),  # the search
    ]


def test_memory_of_the_host_that_is_gone_is_the_devices_again() -> None:
    recorder = ScheduleRecorder()
    for _ in range(20):
        with without_data():
            recorder.note_host_memory(torch.empty(4))
    assert not recorder._on_host


def test_views_and_forms_take_nothing_and_what_is_expanded_is_read_once() -> None:
    with recorded() as (recorder, _):
        x = torch.empty(8, 4)
        x.t().view(4, 8)[1:].expand(3, 8)
        torch.empty_like(x).new_empty(3)
        x.is_contiguous()
        assert recorder.entries == [Begin(0, 3, "forward")] and not recorder._operators
        torch.empty(4).expand(1000, 4).contiguous()
        torch.embedding(torch.empty(1000, 4), torch.empty(3, dtype=torch.int64))
        torch._foreach_mul_([x, x], 2.0)
    assert recorder.entries == [
        # Four numbers read and 4,000 written; three rows read and written and their three numbers; x twice.
        Work("computing", {(0, 16 * 1001): 1, (0, 2 * 48 + 24): 1, (0, 4 * 128): 1})
    ]


def test_products_count_two_operations_each() -> None:
    with recorded() as (recorder, _):
        weight = torch.empty(5, 3, requires_grad=True)
        F.linear(torch.empty(2, 7, 3), weight).backward(torch.empty(2, 7, 5))
    # The result, and the weight's gradient; each reads two of the three tensors and writes the third.
    num_bytes = 4 * (2 * 7 * 3 + 5 * 3 + 2 * 7 * 5)
    costs = Counter(
        {cost: n for each in recorder.entries if isinstance(each, Work) for cost, n in each.operators.items()}
    )
    assert {cost: n for cost, n in costs.items() if cost[0]} == {(2 * 14 * 3 * 5, num_bytes): 2}


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_attention_that_stores_no_scores_counts_its_products(is_causal: bool, key_heads: int) -> None:
    batch, heads, length, size = 2, 4, 16, 8
    with recorded() as (recorder, _):
        query = torch.empty(batch, heads, length, size, dtype=torch.bfloat16, requires_grad=True)
        key = torch.empty(batch, key_heads, length, size, dtype=torch.bfloat16, requires_grad=True)
        value = torch.empty_like(key).requires_grad_()
        out = attend(query, key, value, is_causal=is_causal, enable_gqa=key_heads != heads)
        out.backward(torch.empty_like(out))
    costs = [cost for each in recorder.entries if isinstance(each, Work) for cost in each.operators if cost[0]]
    product = 2 * batch * heads * length * length * size // (2 if is_causal else 1)
    of_queries, of_keys = (2 * each.numel() for each in (query, key))
    assert costs == [
        (2 * product, 2 * of_queries + 2 * of_keys),
        # Queries, output and its gradient, and the queries' gradient; keys, values, and their gradients.
        (5 * product, 4 * of_queries + 4 * of_keys),
    ]
