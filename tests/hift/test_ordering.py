"""When the chunks of streamed state come, and what waits for them; that each copy is in order: `pretended_cuda`."""

import copy

import pytest
import torch

from slivertune.core.copy_streams import CopyStreams, Direction, Event, streams_made_by
from slivertune.hift.chunk import Chunk
from tests.helpers.models import assert_same_bits, small_decoder, token_batches, twin
from tests.helpers.reference import train
from tests.hift.cases import DTYPES, hift_over


def test_after_a_first_turn_the_next_weights_pieces_are_loaded_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = token_batches(5)
    model, hift = hift_over(
        small_decoder(torch.bfloat16), torch.optim.AdamW, gradients="stepped", stream_bytes=8192, lr=1e-2
    )
    train(model, hift, batches, 5)
    loads: list[Chunk] = []
    original = Chunk.load
    monkeypatch.setattr(
        Chunk,
        "load",
        lambda self, *arguments: (original(self, *arguments), loads.append(self)),
    )
    for group in hift.turns.states:
        loads.clear()
        train(model, hift, batches, 1)
        # Each once and in turn: nothing that was loaded had to give way.
        assert loads == group.chunks


class _Counting(CopyStreams):
    """Counts what the computation waits for, on a CPU."""

    num_waits = 0

    def record(self, direction: Direction | None = None) -> Event:
        return object()

    def compute_after(self, event: Event) -> None:
        _Counting.num_waits += event is not None


@DTYPES
def test_no_piece_waits_until_the_one_before_is_stored(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    batches = token_batches(5)
    with streams_made_by(_Counting):
        model, hift = hift_over(small_decoder(dtype), torch.optim.AdamW, stream_bytes=20_000, lr=1e-2)
        train(model, hift, batches, 5)
        for group in hift.turns.states:
            monkeypatch.setattr(_Counting, "num_waits", 0)
            train(model, hift, batches, 1)
            num_pieces = len(group.chunks)
            assert num_pieces > 2
            # Each piece for its own arrival; and for the last store out of each slot, whose memory is given up.
            assert _Counting.num_waits == num_pieces + 2


def test_state_that_was_loaded_before_the_model_moved_goes_along() -> None:
    config, batches = {"stream_bytes": 8192, "prefetch_bytes": 0}, token_batches(5)
    model, hift = hift_over(small_decoder(torch.bfloat16), torch.optim.AdamW, lr=1e-2, **config)
    train(model, hift, batches, 7)
    other, moved = hift_over(twin(model), torch.optim.AdamW, lr=1e-2, **config)
    moved.load_state_dict(copy.deepcopy(hift.state_dict()))
    for group in moved.turns.states:
        group._store.device = torch.device("cuda", 0)  # type: ignore[attr-defined]
    train(model, hift, batches, 8)
    train(other, moved, batches, 8)
    assert_same_bits(model, other)
    assert {group._store.device for group in moved.turns.states} == {torch.device("cpu")}  # type: ignore[attr-defined]
