"""The copies of streamed state, checked on pretended streams: everything comes after what it depends on.

What is checked is the real code of `streamed.py`, `device_slots.py`, `offload_buffer.py` and `disk.py`; only its copy
streams and the disk's thread are pretended (`helpers/streams.py`).
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from slivertune import HiFT
from slivertune.core.copy_streams import streams_made_by
from slivertune.hift import disk, streamed
from slivertune.hift.group_file import GroupFile
from tests.helpers.models import assert_same_bits, tiny_llama, token_batches, twin
from tests.helpers.reference import train
from tests.helpers.streams import PretendedStreams, PretendedThread, Streams
from tests.hift.cases import BIG_VOCAB, DTYPES, Stumbling, hift_over


@contextmanager
def pretended(streams_class: type[PretendedStreams] = PretendedStreams) -> Iterator[Streams]:
    """Streams in force; every HiFT that is trained meanwhile copies on them."""
    streams = Streams()
    with streams_made_by(type("OnStreams", (streams_class,), {"streams": streams})), streams:
        yield streams


def run(name: str, dtype: torch.dtype, **config: Any) -> HiFT:
    """A cycle and more, the state read and loaded again in mid-cycle."""
    model, hift = hift_over(tiny_llama(dtype, vocab=BIG_VOCAB), name, **config)
    batches = token_batches(10, vocab=BIG_VOCAB)
    train(model, hift, batches, 7)
    saved = copy.deepcopy(hift.state_dict())
    train(model, hift, batches, 2)
    hift.load_state_dict(saved)
    train(model, hift, batches, num_updates(hift) - 7)
    return hift


def num_updates(hift: HiFT) -> int:
    """So many that state leaves and comes again in whole turns."""
    return max(12, 3 * hift.cycle_length // 2)


def assert_in_order(name: str, dtype: torch.dtype, **config: Any) -> None:
    with pretended() as streams:
        hift = run(name, dtype, **config)
    assert hift.updates == num_updates(hift)
    assert streams.violations == []
    assert min(streams.num_by_stream[name] for name in ("inbound", "outbound", "computing")) > 0


@pytest.mark.slow
@pytest.mark.parametrize("stream_bytes", [4096, 65_536, 0])
@pytest.mark.parametrize(
    ("name", "dtype", "master"),
    [
        ("AdamW", torch.float32, "fp32"),
        ("AdamW", torch.bfloat16, "fp32"),
        ("AdamW", torch.bfloat16, "none"),
        ("SGD", torch.bfloat16, "fp32"),
        ("torch Adafactor", torch.bfloat16, "fp32"),
        ("transformers Adafactor", torch.float32, "fp32"),
        ("AdamW8bit", torch.bfloat16, "fp32"),
    ],
)
def test_every_copy_comes_after_what_it_depends_on(
    name: str, dtype: torch.dtype, master: str, stream_bytes: int
) -> None:
    assert_in_order(name, dtype, master=master, stream_bytes=stream_bytes)


@pytest.mark.parametrize("state", ["host", "discard"])
def test_turns_of_several_steps_and_several_layers_are_in_order(state: str) -> None:
    config = {"state": state, "stream_bytes": 20_000, "steps_per_group": 2, "layers_per_group": 2}
    assert_in_order("AdamW", torch.bfloat16, **config)


@pytest.mark.slow
@pytest.mark.parametrize("layers_per_group", [1, 2])
@pytest.mark.parametrize("stream_bytes", [4096, 20_000, 0])
@pytest.mark.parametrize("name", ["AdamW", "AdamW8bit"])
def test_steps_in_the_backward_are_in_order(name: str, stream_bytes: int, layers_per_group: int) -> None:
    config = {"stream_bytes": stream_bytes, "layers_per_group": layers_per_group}
    assert_in_order(name, torch.bfloat16, gradients="stepped", **config)


def test_after_a_first_turn_the_next_weights_pieces_are_loaded_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = token_batches(5)
    model, hift = hift_over(
        tiny_llama(torch.bfloat16), torch.optim.AdamW, gradients="stepped", stream_bytes=8192, lr=1e-2
    )
    train(model, hift, batches, 5)
    loads: list[int] = []
    original = streamed.StreamedGroup._load
    monkeypatch.setattr(
        streamed.StreamedGroup,
        "_load",
        lambda self, index, at_least: original(self, index, at_least) and not loads.append(index),
    )
    for group in hift._residencies:
        loads.clear()
        train(model, hift, batches, 1)
        # Each once and in turn: nothing that was loaded had to give way.
        assert loads == list(range(len(group._pieces)))  # type: ignore[attr-defined]


def test_a_backward_pass_whose_step_is_skipped_leaves_the_order_whole() -> None:
    batches = token_batches(5)
    with pretended() as streams:
        model, hift = hift_over(tiny_llama(torch.bfloat16), torch.optim.AdamW, stream_bytes=8192, lr=1e-2)
        for _ in range(2):
            train(model, hift, batches, 5)
            model(**batches[0]).loss.backward()
            model.zero_grad()
            hift.step()  # no gradient: no update
        saved = copy.deepcopy(hift.state_dict())
        model(**batches[0]).loss.backward()
        hift.load_state_dict(saved)
        train(model, hift, batches, 5)
    assert hift.updates == 15
    assert streams.violations == []


def test_an_error_in_the_middle_of_a_step_leaves_no_copy_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = token_batches(5)
    with pretended() as streams:
        model, hift = hift_over(tiny_llama(torch.bfloat16), Stumbling, stream_bytes=8192, elementwise=True, lr=1e-2)
        train(model, hift, batches, 10)
        monkeypatch.setattr(Stumbling, "countdown", 4)
        with pytest.raises(RuntimeError, match="stumbled"):
            train(model, hift, batches, 1)
        assert streams.violations == []


class _Counting(PretendedStreams):
    """Counts what the computing stream waits for."""

    num_waits = 0

    def compute_after(self, event: Any) -> None:
        _Counting.num_waits += event is not None
        super().compute_after(event)


@DTYPES
def test_no_piece_waits_until_the_one_before_is_stored(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    batches = token_batches(5)
    with pretended(_Counting):
        model, hift = hift_over(tiny_llama(dtype), torch.optim.AdamW, stream_bytes=20_000, lr=1e-2)
        train(model, hift, batches, 5)
        for group in hift._residencies:
            monkeypatch.setattr(_Counting, "num_waits", 0)
            train(model, hift, batches, 1)
            num_pieces = len(group._pieces)
            assert num_pieces > 2
            # Each piece for its own arrival; and for the last store out of each slot, whose memory is given up.
            assert _Counting.num_waits == num_pieces + 2


def test_state_that_was_loaded_before_the_model_moved_goes_along() -> None:
    config, batches = {"stream_bytes": 8192, "prefetch_bytes": 0}, token_batches(5)
    model, hift = hift_over(tiny_llama(torch.bfloat16), torch.optim.AdamW, lr=1e-2, **config)
    train(model, hift, batches, 7)
    other, moved = hift_over(twin(model), torch.optim.AdamW, lr=1e-2, **config)
    moved.load_state_dict(copy.deepcopy(hift.state_dict()))
    for group in moved._residencies:
        group._offloaded_from = torch.device("cuda", 0)  # type: ignore[attr-defined]
    train(model, hift, batches, 8)
    train(other, moved, batches, 8)
    assert_same_bits(model, other)
    assert {group._offloaded_from for group in moved._residencies} == {torch.device("cpu")}  # type: ignore[attr-defined]


def assert_disk_is_in_order(
    monkeypatch: pytest.MonkeyPatch, folder: Path, streams_class: type[PretendedStreams], **config: Any
) -> Streams:
    """A cycle and more with state on disk, whose thread's reads and writes of host memory are noted."""
    with pretended(streams_class) as streams:
        monkeypatch.setattr(disk, "ThreadPoolExecutor", lambda *_: PretendedThread(streams))
        for name in ("read", "write"):
            monkeypatch.setattr(GroupFile, name, noted(streams, name, getattr(GroupFile, name)))
        hift = run("AdamW", torch.bfloat16, state="disk", state_dir=folder, stream_bytes=40_000, **config)
        hift.state_dict()
    assert hift.updates == num_updates(hift)
    assert streams.num_by_stream["thread"] > 20
    return streams


def noted(streams: Streams, name: str, function: Any) -> Any:
    def move(self: GroupFile, memory: torch.Tensor) -> None:
        if self.used_bytes:
            streams.touch(memory[: self.used_bytes], writes=name == "read", what=f"{name} of a file")
        function(self, memory)

    return move


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"prefetch_bytes": 10**6, "steps_per_group": 2},
        {"layers_per_group": 2, "order": "random"},
        {"waiting": "int8"},
        {"gradients": "stepped", "state_ram_bytes": 150_000},
    ],
    ids=str,
)
def test_reads_and_writes_of_files_come_after_the_copies_and_before_the_next(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    streams = assert_disk_is_in_order(monkeypatch, tmp_path, PretendedStreams, **config)
    assert streams.violations == []


class _NoWaitOnHost(PretendedStreams):
    def wait_on_host(self, event: Any) -> None:
        """The disk's thread does not wait for the copies."""


def test_the_check_sees_that_the_thread_does_not_wait(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    violations = assert_disk_is_in_order(monkeypatch, tmp_path, _NoWaitOnHost, prefetch_bytes=10**6).violations
    assert any("write of a file" in each and "outbound" in each for each in violations)
    assert any("read of a file" in each and "inbound" in each for each in violations)


class _NoComputeAfter(PretendedStreams):
    def compute_after(self, event: Any) -> None:
        """The computing stream waits for no copy."""


class _NoWaitOnCopyStreams(PretendedStreams):
    @contextmanager
    def on(self, direction: str, *after: Any) -> Iterator[None]:
        """The copy streams wait for nothing."""
        with super().on(direction):
            yield


class _NoWaitForSlot(PretendedStreams):
    @contextmanager
    def on(self, direction: str, *after: Any) -> Iterator[None]:
        """A load does not wait for the store that empties its slot, nor for who had its memory before."""
        with super().on(direction, *(after[1:] if direction == "inbound" else after)):
            yield


class _NoWaitForStore(PretendedStreams):
    @contextmanager
    def on(self, direction: str, *after: Any) -> Iterator[None]:
        """A load does not wait for the store of what it loads."""
        with super().on(direction, *(after[:1] if direction == "inbound" else after)):
            yield


class _NoSynchronize(PretendedStreams):
    def synchronize(self) -> None:
        """The host does not wait before it reads."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "streams_class", [_NoComputeAfter, _NoWaitOnCopyStreams, _NoWaitForSlot, _NoWaitForStore, _NoSynchronize]
)
def test_the_check_sees_a_missing_wait(streams_class: type[PretendedStreams]) -> None:
    with pretended(streams_class) as streams:
        # Two steps a turn, and room for all pieces: a piece is loaded again while its store may be on its way.
        hift = run("AdamW", torch.float32, stream_bytes=4096, steps_per_group=2, prefetch_bytes=10**6)
    assert hift.updates == num_updates(hift)
    assert streams.violations
