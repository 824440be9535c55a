"""Searches against full sorts in numpy: every count, ties, zeros, NaN, and entries that are taken."""

from unittest import mock

import numpy as np
import pytest
import torch

from slivertune import Ledger
from slivertune.core.torch_internals import DataDependentOutputException, FakeTensorMode
from slivertune.sft import adam, largest
from slivertune.sft import optimizer as optimizer_of_sft
from slivertune.sft.largest import (
    NONE,
    PIECE,
    entries_at,
    largest_entries,
    largest_of,
    largest_positions,
    largest_products,
    product_scores,
)
from slivertune.sft.packing import Positions
from slivertune.sft.selection import contains
from tests.helpers.pairwise import rotated
from tests.helpers.tolerance import assert_sums_close
from tests.sft.runs import sft_over


@pytest.fixture(params=["on a host", "on a device"], autouse=True)
def searches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device's search, which no value decides the sizes of, and a host's."""
    if request.param == "on a device":
        monkeypatch.setattr(largest, "_is_on_host", lambda mask: False)


def naive_largest(values: torch.Tensor, count: int) -> list[int]:
    """Positions of the largest magnitudes by a full sort, ties to the lower position; sorted."""
    magnitudes = values.abs().double().numpy()
    return sorted(np.lexsort((np.arange(magnitudes.size), -magnitudes))[:count].tolist())


FLAT = {
    "normal": lambda n: torch.randn(n),
    "heavy tails": lambda n: torch.randn(n) * torch.exp(2 * torch.randn(n)),
    "bf16, many ties": lambda n: torch.randn(n).bfloat16(),
    "five values": lambda n: torch.randint(-2, 3, (n,)).float(),
    "nearly all zero": lambda n: torch.where(torch.rand(n) < 0.002, torch.randn(n), 0.0),
    "all zero": lambda n: torch.zeros(n),
    "all equal": lambda n: torch.full((n,), -3.0),
    "one column large": lambda n: torch.randn(n) * torch.tensor([1.0] * 63 + [1e4]).repeat(n // 64 + 1)[:n],
}


@pytest.mark.parametrize("kind", FLAT)
@pytest.mark.parametrize("size", [1, 50, 30_000])
def test_largest_entries_are_those_of_a_full_sort(kind: str, size: int) -> None:
    flat = FLAT[kind](size)
    for count in {0, 1, size // 100, size // 7, size // 2, size - 1, size, size + 5}:
        found = largest_entries(flat, count)
        assert found.dtype == torch.int64
        assert found.tolist() == naive_largest(flat, min(count, size))


def test_largest_entries_search_tensors_of_several_pieces() -> None:
    flat = torch.randn(2 * PIECE + 77)
    assert largest_entries(flat, 5000).tolist() == naive_largest(flat, 5000)


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(FLAT))
@pytest.mark.parametrize("size", [50, PIECE + 77])
@pytest.mark.parametrize("start", [0, 1000])
def test_positions_that_are_taken_do_not_take_part(kind: str, size: int, start: int) -> None:
    flat = FLAT[kind](size)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(1))
    elsewhere = torch.tensor([0, start - 1, start + size, start + size + 9])[: 4 if start else 0]
    taken = [
        torch.cat([order[: size // 5] + start, elsewhere]).sort().values.int(),
        torch.cat([order[size // 5 : size // 4] + start, torch.tensor([NONE])]).int(),
    ]
    free = order[size // 4 :].sort().values
    for count in (0, 1, size // 100, size // 3, free.numel() - 1, free.numel(), size):
        expected = free[naive_largest(flat[free], min(count, free.numel()))].tolist()
        found = largest_entries(flat, count, taken, start)
        assert found.tolist() == expected + [NONE] * (count - len(expected))


def test_an_infinite_or_undefined_gradient_is_found_and_not_searched_for_for_ever() -> None:
    flat = torch.randn(20_000)
    flat[[7, 70, 700]] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    assert {7, 70, 700} <= set(largest_entries(flat, 100).tolist())
    assert largest_entries(torch.full((9000,), float("nan")), 10).tolist() == list(range(10))


def test_the_search_takes_a_byte_an_element_and_a_pieces_keys() -> None:
    flat = torch.randn(16 * PIECE)
    with Ledger() as ledger:
        largest_entries(flat, flat.numel() // 100)
    # A dense copy would be 67.1 MB.
    assert ledger.peak.device - flat.nbytes < flat.numel() + 30 * PIECE


def test_the_smallest_and_the_largest_break_ties_by_position() -> None:
    values = torch.tensor([-2.0, 1.0, -1.0, 3.0, 1.0, -3.0])
    assert largest_of(values, 2, None, True).tolist() == [False, True, True, False, False, False]
    assert largest_of(values, 1).tolist() == [False, False, False, True, False, False]
    for count in range(7):
        for smallest in (False, True):
            assert int(largest_of(values, count, None, smallest).sum()) == count


@pytest.mark.parametrize("smallest", [False, True])
@pytest.mark.parametrize("kind", [*FLAT, "with signs of zero", "with NaN and infinity"])
@pytest.mark.parametrize("size", [0, 1, 5000, pytest.param(PIECE + 77, marks=pytest.mark.slow)])
def test_the_largest_of_some_are_those_of_a_full_sort(kind: str, size: int, smallest: bool) -> None:
    """Magnitudes in fp32; ties go to the lower position. NaN is as large as infinity, and dropped before all."""
    make = FLAT.get(kind, lambda n: torch.randn(n).round())
    values = make(size)
    if kind == "with NaN and infinity":
        values[torch.rand(size) < 0.1] = torch.inf
        values[torch.rand(size) < 0.1] = torch.nan
    among = torch.rand(size) < 0.6
    places = torch.nonzero(among).view(-1)
    found = values[places].double().abs()
    found = (-found if smallest else found).nan_to_num(
        nan=1.0 if smallest else torch.inf, posinf=torch.inf, neginf=-torch.inf
    )
    order = np.lexsort((np.arange(found.numel()), -found.numpy()))
    for count in {0, 1, size // 3, found.numel(), size}:
        expected = places[np.sort(order[:count])].tolist()
        mask = largest_of(values, torch.tensor(count), among, smallest)
        assert torch.nonzero(mask).view(-1).tolist() == expected
        if not smallest:
            positions = largest_positions(values, count, among)
            assert positions.dtype == torch.int64
            assert positions.tolist() == expected + [NONE] * (count - len(expected))


def test_entries_that_are_missing_have_the_value_that_is_given() -> None:
    assert entries_at(torch.tensor([5.0, 6.0]), torch.tensor([1, NONE, 0]), 0).tolist() == [6.0, 0.0, 5.0]


KINDS = {
    "uniform": lambda n: torch.rand(n),
    "skewed": lambda n: torch.rand(n) ** 6,
    "few values": lambda n: torch.randint(1, 4, (n,)).float(),
    "all equal": lambda n: torch.full((n,), 0.3),
    "tiny": lambda n: torch.rand(n) * 1e-30,
    "nearly equal": lambda n: 1 + torch.rand(n) * 1e-6,
    "of all magnitudes": lambda n: 10.0 ** (70 * torch.rand(n) - 35),
    "half of them zero": lambda n: torch.rand(n) * (torch.arange(n) % 2 == 0),
    "one of them positive": lambda n: 2.0 * (torch.arange(n) == n // 2),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 1), (40, 1), (1, 33), (60, 47)])
def test_positions_are_those_of_the_whole_outer_product(kind: str, shape: tuple[int, int]) -> None:
    rows, columns = KINDS[kind](shape[0]), KINDS[kind](shape[1])
    dense = np.outer(rows.double().numpy(), columns.double().numpy()).reshape(-1)
    order = np.lexsort((np.arange(dense.size), -dense))
    for count in {1, dense.size // 90 + 1, dense.size // 3 + 1, dense.size}:
        assert largest_products(rows, columns, count).tolist() == sorted(order[:count].tolist())


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@pytest.mark.parametrize("where", ["row", "column", "both", "all"])
def test_factors_that_are_not_finite_count_as_the_largest(where: str, value: float) -> None:
    rows, columns = torch.rand(6), torch.rand(5)
    rows[1] = columns[2] = 0  # zero times infinity is not a number, but no reason to grow
    for factors, name in ((rows, "row"), (columns, "column")):
        if where in (name, "both"):
            factors[4] = value
        elif where == "all":
            factors.fill_(value)
    most = torch.finfo(torch.float32).max
    finite = [factors.nan_to_num(nan=most, posinf=most) for factors in (rows, columns)]
    for count in (1, 5, 17, 30):
        positions = largest_products(rows, columns, count)
        assert positions.tolist() == largest_products(*finite, count).tolist()
        assert positions.unique().numel() == count and positions[0] >= 0
        assert torch.equal(product_scores(rows, columns, positions), product_scores(*finite, positions))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(40, 1), (3, 35), (60, 47)])
@pytest.mark.parametrize("are_leading", [False, True])
def test_what_grows_by_products_is_the_same_as_from_all_of_them(
    kind: str, shape: tuple[int, int], are_leading: bool
) -> None:
    """The frozen ones of the 2k largest products grow, by the fourth root in fp32, ties to the lower position."""
    rows, columns = KINDS[kind](shape[0]), KINDS[kind](shape[1])
    dense = np.outer(rows.double().numpy(), columns.double().numpy()).reshape(-1)
    scores = np.sqrt(np.sqrt(dense)).astype(np.float32)
    for num_trained in {1, dense.size // 8, dense.size // 2, dense.size - 1}:
        order = np.lexsort((np.arange(dense.size), -dense))
        trained = order if are_leading else np.random.default_rng(0).permutation(dense.size)
        barred = torch.from_numpy(np.sort(trained[:num_trained]))
        count = min(2 * num_trained, dense.size)
        free = np.sort(np.setdiff1d(order[:count], barred.numpy()))
        positions = largest_products(rows, columns, count)
        is_free = ~contains(barred, positions)
        assert positions[is_free].tolist() == free.tolist()
        found = product_scores(rows, columns, positions)
        assert found.tolist() == scores[positions.numpy()].tolist()
        for wanted in {1, num_trained // 5 + 1, num_trained}:
            expected = free[np.lexsort((free, -scores[free]))[:wanted]]
            grown = entries_at(positions, largest_positions(found, wanted, is_free), NONE)
            assert grown.tolist() == sorted(expected.tolist()) + [NONE] * (wanted - expected.size)


def test_scores_are_the_fourth_root_of_the_product() -> None:
    """MA's score of a weight is (r_i c_j)^(1/4) (SFT, equation 10), and has the same order."""
    rows, columns = torch.rand(9), torch.rand(8)
    positions = largest_products(rows, columns, 20)
    scores = (rows.double()[:, None] * columns.double()[None, :]).flatten() ** 0.25
    # A product and two roots, in fp64 of fp32 values.
    assert_sums_close(product_scores(rows, columns, positions), scores[positions].float(), 3)
    assert set(positions.tolist()) == set(scores.topk(20).indices.tolist())


def test_products_of_zero_come_after_all_positive_ones_by_position() -> None:
    rows, columns = torch.tensor([0.0, 4.0, 1.0]), torch.tensor([0.0, 9.0])
    for count, expected in ((2, [3, 5]), (3, [0, 3, 5]), (5, [0, 1, 2, 3, 5])):
        assert largest_products(rows, columns, count).tolist() == expected
    assert largest_products(torch.zeros(3), torch.zeros(2), 2).tolist() == [0, 1]


@pytest.mark.parametrize("kind", ["skewed", "all equal"])
def test_a_search_of_products_takes_a_byte_each_and_some_vectors(kind: str) -> None:
    rows, columns = KINDS[kind](2000), KINDS[kind](3000)
    count = 6000
    with Ledger() as ledger:
        product_scores(rows, columns, largest_products(rows, columns, count))
    # The matrix in fp32 has 24 MB.
    assert ledger.peak.device < 6e6 + 13 * PIECE


@rotated(selection=["accumulated_gradient", "momentum"], packed=[False, True], form=["optimizer", "layer"])
def test_no_size_and_no_step_of_a_reselection_depends_on_a_value(
    selection: str, packed: bool, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors without data run whole phases and reselections, so that a GPU has nothing to wait for."""
    # The first, random choice is made on the host; where chunks begin is read once after each reselection.
    monkeypatch.setattr(optimizer_of_sft, "random_indices", lambda name, size, count, seed: torch.arange(count).int())
    monkeypatch.setattr(Positions, "cuts", lambda self, edges: [self.get().numel() // 2] * len(edges))
    monkeypatch.setattr(adam, "_corrections", adam._corrections.__wrapped__)  # which keeps tensors
    with FakeTensorMode():
        model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 20))
        optimizer = sft_over(model, targets=["0", "1"], selection=selection, packed=packed, form=form)
        reselections = mock.Mock(side_effect=optimizer._reselection.reselect)
        monkeypatch.setattr(optimizer._reselection, "reselect", reselections)
        for _ in range(13):
            for _ in range(2):
                model(torch.empty(8, 40)).sum().backward()
            optimizer.step()
        assert reselections.call_count == 3 - (selection == "momentum")
        with pytest.raises(DataDependentOutputException):
            optimizer.positions()["0.weight"][0].item()
