import itertools
from typing import Any

import pytest
import torch

from slivertune.tokentune.config import Pattern
from slivertune.tokentune.selection import (
    count_selected,
    draw_positions,
    make_generator,
    segment_starts,
    shift_labels,
)
from tests.helpers.models import default_dtype

PATTERNS: tuple[Pattern, ...] = ("random", "chunks", "block")


def draw(real: torch.Tensor, k: int, pattern: Pattern = "random", *, number: int = 0, **options: Any) -> torch.Tensor:
    generator = make_generator(0, 0, number)
    return draw_positions(real, k, pattern=pattern, generator=generator, **options)


def padded(*lengths: int, total: int, left: bool = False) -> torch.Tensor:
    positions = torch.arange(total)[None, :].expand(len(lengths), -1)
    limits = torch.tensor(lengths)[:, None]
    return positions >= total - limits if left else positions < limits


@pytest.mark.parametrize(
    ("ratio", "num_tokens", "length", "num_always", "expected"),
    [
        (0.3, None, 100, 0, 30),
        (0.25, None, 10, 0, 2),  # round half to even, as Python does
        (0.35, None, 10, 0, 4),
        (0.01, None, 10, 0, 1),
        (0.01, None, 10, 2, 2),
        (1.0, None, 7, 0, 7),
        (None, 5, 9, 0, 5),
        (None, 1, 9, 2, 2),
        (0.5, None, 1, 2, 1),
    ],
)
def test_k_is_the_rounded_share_and_never_less_than_what_is_always_selected(
    ratio: float | None, num_tokens: int | None, length: int, num_always: int, expected: int
) -> None:
    assert count_selected(ratio, num_tokens, length, num_always) == expected


def test_more_tokens_than_positions_are_refused() -> None:
    with pytest.raises(ValueError, match=r"num_tokens=9 is more than the 8 positions of this batch\. Lower it"):
        count_selected(None, 9, 8, 0)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("k", [1, 5, 19, 40])
def test_positions_are_sorted_unique_and_in_range(pattern: Pattern, k: int) -> None:
    real = torch.ones(3, 40, dtype=torch.bool)
    for number in range(20):
        positions = draw(real, k, pattern, number=number)
        assert positions.dtype == torch.int64 and positions.shape == (3, k)
        assert (positions.diff(dim=1) > 0).all()
        assert positions.min() >= 0 and positions.max() < 40


@pytest.mark.parametrize("pattern", PATTERNS)
def test_rows_and_draws_differ_and_repeat_with_their_numbers(pattern: Pattern) -> None:
    real = torch.ones(2, 200, dtype=torch.bool)
    first = draw(real, 60, pattern, number=0)
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first, draw(real, 60, pattern, number=1))
    assert torch.equal(first, draw(real, 60, pattern, number=0))


def test_seed_rank_and_number_each_change_the_generator() -> None:
    generators = [make_generator(*key) for key in itertools.product((0, 1), repeat=3)]
    assert len({torch.rand((), generator=each, dtype=torch.float64).item() for each in generators}) == 8


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("left", [False, True])
def test_pads_are_drawn_only_when_real_tokens_run_out(pattern: Pattern, left: bool) -> None:
    real = padded(12, 7, 3, total=12, left=left)
    for number in range(20):
        positions = draw(real, 5, pattern, number=number)
        assert real.gather(1, positions).sum(dim=1).tolist() == [5, 5, 3]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("left", [False, True])
def test_what_is_always_selected_is_counted_in_real_tokens(pattern: Pattern, left: bool) -> None:
    real = padded(10, 6, 1, total=10, left=left)
    first = [0, 4, 9] if left else [0, 0, 0]
    last = [9, 9, 9] if left else [9, 5, 0]
    for number in range(20):
        positions = draw(real, 3, pattern, number=number, always=(0, -1))
        for row, each in enumerate(positions.tolist()):
            assert {first[row], last[row]} <= set(each)


def test_negative_positions_count_from_the_last_real_token() -> None:
    real = padded(6, 9, total=10)
    for number in range(10):
        assert draw(real, 2, number=number, always=(1, -2)).tolist() == [[1, 4], [1, 7]]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_preferred_positions_come_before_all_others(pattern: Pattern) -> None:
    real = padded(16, 16, 9, total=16)
    preferred = torch.zeros(3, 16, dtype=torch.bool)
    preferred[0, 11:14] = True
    preferred[1, 5:15] = True
    preferred[2, 7:12] = True  # three of them are pads, which never count
    for number in range(20):
        positions = draw(real, 4, pattern, number=number, preferred=preferred)
        assert preferred.gather(1, positions).sum(dim=1).tolist() == [3, 4, 2]
        assert real.gather(1, positions).all()


def runs(positions: list[int]) -> list[list[int]]:
    found: list[list[int]] = []
    for each in positions:
        if found and found[-1][-1] == each - 1:
            found[-1].append(each)
        else:
            found.append([each])
    return found


def test_a_block_is_one_run_that_can_begin_anywhere_it_fits() -> None:
    real = padded(12, 20, total=20, left=True)
    begins = set()
    for number in range(200):
        positions = draw(real, 8, "block", number=number).tolist()
        assert all(len(runs(row)) == 1 for row in positions)
        begins.add(positions[0][0])
    assert begins == set(range(8, 13))


def test_chunks_are_runs_of_their_size_with_one_cut_short() -> None:
    real = torch.ones(1, 400, dtype=torch.bool)
    offsets = set()
    for number in range(50):
        found = runs(draw(real, 50, "chunks", number=number, chunk_size=16)[0].tolist())
        lengths = [len(run) % 16 for run in found]  # neighbours may both be drawn
        inner = [run for run in found if run[0] > 0 and run[-1] < 399]
        assert len(found) <= 5
        assert sum(length != 0 for length in lengths) <= 3
        offsets |= {run[0] % 16 for run in inner if len(run) == 16}
    assert len(offsets) > 8  # the cut is drawn anew


@pytest.mark.parametrize("pattern", PATTERNS)
def test_what_torch_makes_tensors_of_by_default_changes_no_draw(pattern: Pattern) -> None:
    real = torch.ones(2, 600, dtype=torch.bool)  # more positions than bf16 tells apart
    expected = [draw(real, 200, pattern, number=number, chunk_size=500) for number in range(8)]
    with default_dtype(torch.bfloat16), torch.device("meta"):
        assert all(torch.equal(draw(real, 200, pattern, number=n, chunk_size=500), e) for n, e in enumerate(expected))


def test_no_position_is_selected_much_more_often_than_another() -> None:
    real = torch.ones(1, 64, dtype=torch.bool)
    for pattern in ("random", "chunks"):
        counts = torch.zeros(64)
        for number in range(1500):
            counts[draw(real, 20, pattern, number=number, chunk_size=8)[0]] += 1
        # 20 / 64 = 0.3125, with a standard error of 0.012; four of them, and chunks' short ends are a little favoured.
        assert (counts / 1500 - 20 / 64).abs().max() < 0.06, pattern


def test_no_chunk_reaches_over_the_beginning_of_a_packed_segment() -> None:
    position_ids = torch.cat([torch.arange(10), torch.arange(23), torch.arange(15)])[None, :]
    starts = segment_starts(position_ids, 1)
    assert starts is not None
    real = torch.ones(1, 48, dtype=torch.bool)
    options: dict[str, Any] = {"chunk_size": 8, "starts": starts}
    chosen = [set(draw(real, 8, "chunks", number=number, **options)[0].tolist()) for number in range(300)]
    # Both sides are selected together only when two chunks were drawn; within a chunk it would be almost always.
    num_nine = sum(9 in each for each in chosen)
    assert num_nine > 0
    assert sum({9, 10} <= each for each in chosen) < num_nine / 2


def test_segments_begin_where_positions_are_zero() -> None:
    assert segment_starts(None, 2) is None
    assert segment_starts(torch.zeros(3, 1, 4), 1) is None
    starts = segment_starts(torch.tensor([[0, 1, 0, 1, 2]]), 2)
    assert starts is not None
    assert starts.tolist() == [[True, False, True, False, False]] * 2


def test_position_i_is_scored_on_token_i_plus_one() -> None:
    labels = torch.tensor([[1, 2, 3], [-100, 5, 6]])
    assert shift_labels(labels).tolist() == [[2, 3, -100], [5, 6, -100]]
