"""Without any one of the edges that order copies, a small run is reported to race."""

import re
from collections import Counter
from typing import Any

import pytest

from tests.helpers.ranks import quick
from tests.pretended_cuda.edges import PACKAGE, edges
from tests.pretended_cuda.on_device import on_device

EDGES: dict[str, dict[str, str]] = {
    "core/pinned_memory.py": {
        "_unpin: the host after the device": "a backward ends early",
    },
    "core/waiting_activations.py": {
        "WaitingActivations.store: the end of (stored, tensor) after its copy": "a backward ends early",
        "WaitingActivations.store: outbound copies after self._streams.record()": "a backward ends early",
        "WaitingActivations.settle: the computation after event": "a backward ends early",
        "WaitingActivations.load: the computation after loaded": "a backward ends early",
        "WaitingActivations._begin_load: inbound copies after self._streams.record()": "a backward ends early",
        "WaitingActivations._begin_load: inbound copies after record.stored": (
            "an activation is loaded before its copy is waited for"
        ),
        "WaitingActivations._end: the computation after record.loading[1]": "a backward ends early",
    },
    "hift/device_slots.py": {
        "DeviceSlots.__init__: the end of the object after all copies": "the optimizer is dropped",
        "DeviceSlots.shrink: the computation after free_after": "the optimizer is dropped",
    },
    "hift/disk.py": {
        "Disk._end_exchange: the host after buffer.exchange": "state on disk",
        "_exchange: the host after event": "state on disk",
    },
    "hift/host_gradients.py": {
        "GradientMemory.offload: outbound copies after self.streams.record()": "gradients leave",
        "GradientMemory.accumulate: inbound copies after self.streams.record()": "gradients are added",
        "GradientMemory.accumulate: inbound copies after offloaded.stored": "gradients are added",
        "GradientMemory.accumulate: outbound copies after loaded": "gradients are added",
        "GradientMemory.store: outbound copies after self.streams.record()": "ranks write gradients",
        "GradientMemory._keep_until: the end of (left, tensors) after its copy": "gradients leave",
        "GradientMemory._settle_first: the computation after self._leaving[0][0]": "gradients leave",
    },
    "parked/host_weights.py": {
        "HostWeights.bring: the computation after slot.ready": "a forward fails at once",
        "HostWeights.put_back: the computation after self._arrives.get(index)": "many blocks come from the host",
        "HostWeights.send_back: outbound copies after self.streams.record()": "weights come from the host",
        "HostWeights.settle: the host after event": "weights are read on the host",
        "HostWeights.take_all_back: the host after all copies of self.streams": (
            "the optimizer is dropped off its stream"
        ),
        "HostWeights._load: inbound copies after slot.free_after": "a forward fails at once",
    },
    "hift/offloaded_gradient.py": {
        "OffloadedGradient.copy_on_device: the computation after self.stored": "ranks write gradients",
        "OffloadedGradient.norm_of_two: the computation after self.stored": "gradients are added",
    },
    "hift/chunk.py": {
        "Chunk.load: inbound copies after free_after": "the optimizer is dropped",
        "Chunk.load_gradients: inbound copies after gradient.stored": "gradients leave",
        "Chunk.give_up: the computation after self.event": "the optimizer is dropped",
        "Chunk.write_back: outbound copies after streams.record()": "a forward fails at once",
        "Chunk.write_back: outbound copies after self.event": "a step fails in a turn",
        "Chunk.write_back: the computation after self.event": "a forward fails at once",
    },
    "hift/prefetch.py": {
        "Prefetcher.before_load: the host after all copies of slots.streams": "its own state is loaded",
    },
    "hift/offloaded_state.py": {
        "OffloadedState.load_weight: inbound copies after slots.streams.record()": "weights come from masters",
        "OffloadedState.load_weight: inbound copies after free_after": "weights come from masters",
        "OffloadedState._step_chunk: the computation after chunk.event": "the optimizer is dropped",
        "OffloadedState._synchronize: the host after all copies of self._slots.streams": "the optimizer is dropped",
    },
    "parked/exact_source.py": {
        "HostCopy.read: the host after all copies of self._streams": "waiting weights are replaced",
        "HostCopy.write: the host after all copies of self._streams": "waiting weights are replaced",
        "HostCopy.load: inbound copies after streams.record()": "weights come from codes",
        "HostCopy.load: inbound copies after self._stored": "a handle is removed after a step",
        "HostCopy.store: outbound copies after streams.record()": "a turn is broken off",
    },
    "parked/quantized_layers.py": {
        "QuantizedLayers._end_turn: the end of (held.parameter.data, left) after its copy": "weights come from codes",
        "QuantizedLayers.let_go: the computation after left": "weights come from codes",
    },
    "parked/quantized_weight.py": {
        "QuantizedWeight._arrived: the computation after ready": "weights come from codes",
    },
    "parallel/ddp/gradient_sync.py": {
        "_Bucket.settle: the computation after self.work": "gradients are averaged",
    },
    "parallel/zero/state_mover.py": {
        f"StateMover.{edge}": "ZeRO's state has no room" if "computation after spare" in edge else "ZeRO's state moves"
        for edge in (
            "to_host: outbound copies after self._streams.record()",
            "to_host: outbound copies after self._arrived",
            "to_host: the end of tensor.data after its copy",
            "release: the computation after self._left",
            "to_device: inbound copies after self._streams.record()",
            "to_device: inbound copies after spare_left",
            "to_device: the computation after spare_left",
            "wait: the computation after self._arrived",
            "wait: the host after all copies of self._streams",
        )
    },
}
"""By file, each edge and the case that is reported without it."""
UNREPORTED: dict[str, str] = {
    "parked/host_weights.py HostWeights._load: inbound copies after self._arrives.get(index)": (
        "a block is on its way to the host, its slot was given up, and it comes to another: else its slot was taken "
        "for another block, whose load has waited on the same stream"
    ),
    **dict.fromkeys(
        (
            "parked/host_weights.py HostWeights.put_all_back: the computation after free[0].ready",
            "parked/host_weights.py HostWeights.put_all_back: the computation after free[0].free_after",
        ),
        "there are more slots than usual, since a backward has gone through more blocks at once than a forward does",
    ),
    "hift/chunk.py Chunk.load: inbound copies after self.event": (
        "the first chunk of an update is the one that was stepped last in the update before, and no other was loaded "
        "ahead: else its slot has waited for a store that comes later on the same stream"
    ),
    "hift/offloaded_state.py OffloadedState.load_weight: inbound copies after *stored": (
        "two groups take turns, of which one has so many more chunks than the other that its last stores are in flight "
        "when its turn comes again, and its weights are fewer than its slots"
    ),
    "parallel/zero/schedule.py GroupSchedule.__init__: the end of the object after all copies": (
        "DeepSpeed's engine is dropped between a forward and its backward, and something else keeps the host's memory, "
        "whose end would wait, too"
    ),
}
"""Edges whose loss no case shows, and when it would matter; at most six."""
TABLE = {f"{file} {edge}": case for file, of_file in EDGES.items() for edge, case in of_file.items()}


def races_of(case: str, without: str | None) -> dict[str, Any]:
    """What is reported of a case, and how often an edge came into force, or would have."""
    import torch

    from tests.pretended_cuda import edges
    from tests.pretended_cuda.detector import Detector
    from tests.pretended_cuda.edge_cases import CASES

    torch.manual_seed(0)
    error = ""
    with edges.counted() if without is None else edges.without(without) as reached, Detector() as found:
        try:
            CASES[case]()
        except Exception as raised:
            if without is None:
                raise
            error = str(raised)  # of what was read too early
    return {"races": dict(found.races), "reached": reached, "error": error}


def test_every_edge_of_the_package_is_in_the_table() -> None:
    assert {*TABLE, *UNREPORTED} == {*edges()}
    assert not TABLE.keys() & UNREPORTED and len(UNREPORTED) <= 6


def test_every_call_that_orders_copies_is_an_edge() -> None:
    calls = re.compile(r"\.(on\(\s*\"(?:in|out)bound\"|compute_after\(|wait_on_host\(|synchronize\b|work\.wait\()")
    written = {
        path.relative_to(PACKAGE).as_posix(): len(calls.findall(path.read_text(encoding="utf-8")))
        for path in PACKAGE.rglob("*.py")
    }
    found = Counter(file for file, _ in {(edge.file, place[0]) for edge in edges().values() for place in edge.places})
    kept = Counter(name.split()[0] for name in edges() if "the end of" in name and "of the object" not in name)
    learnt = {"hift/disk.py": 2}  # of the thread
    assert {file: number for file, number in written.items() if number and file != "core/copy_streams.py"} == {
        file: number - kept[file] - learnt.get(file, 0) for file, number in found.items()
    }


DROPPED = (
    "core/waiting_activations.py WaitingActivations._end: the computation after record.loading[1]",
    "hift/prefetch.py Prefetcher.before_load: the host after all copies of slots.streams",
    "parked/exact_source.py HostCopy.store: outbound copies after streams.record()",
    "hift/chunk.py Chunk.load_gradients: inbound copies after gradient.stored",
    "hift/chunk.py Chunk.write_back: outbound copies after streams.record()",
    "parallel/zero/state_mover.py StateMover.to_host: outbound copies after self._streams.record()",
    "parallel/ddp/gradient_sync.py _Bucket.settle: the computation after self.work",
)
"""Edges that `make test` drops; it also runs their cases whole. `make test-all` drops every edge. The loss
of the first three is shown by no quick row or program of this folder."""


@pytest.mark.parametrize("case", quick(dict.fromkeys(TABLE.values()), {TABLE[edge] for edge in DROPPED}))
def test_a_case_has_no_race(case: str) -> None:
    found = on_device(races_of, case, None)
    assert found["races"] == {}
    assert all(found["reached"][edge] for edge, own in TABLE.items() if own == case)


@pytest.mark.parametrize("edge", quick(TABLE, DROPPED))
def test_without_an_edge_a_race_is_reported(edge: str) -> None:
    found = on_device(races_of, TABLE[edge], edge)
    assert found["reached"][edge] and found["races"]
