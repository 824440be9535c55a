import itertools

import numpy as np
import pytest
import torch

from slivertune import Ledger
from slivertune.sft.selection import (
    PIECE,
    contains,
    largest_entries,
    largest_of,
    largest_products,
    leading_products,
    random_indices,
    spread_weights,
    true_positions,
)
from tests.helpers.tolerance import assert_sums_close


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
def test_barred_positions_do_not_take_part(kind: str, size: int) -> None:
    flat = FLAT[kind](size)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(1))
    barred = [order[: size // 5].sort().values, order[size // 5 : size // 4].sort().values]
    free = order[size // 4 :].sort().values
    for count in (0, 1, size // 100, size // 3, free.numel() - 1, free.numel(), size):
        expected = free[naive_largest(flat[free], min(count, free.numel()))].tolist()
        assert largest_entries(flat, count, barred).tolist() == expected


def test_an_infinite_or_undefined_gradient_is_found_and_not_searched_for_for_ever() -> None:
    flat = torch.randn(20_000)
    flat[[7, 70, 700]] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    assert {7, 70, 700} <= set(largest_entries(flat, 100).tolist())
    assert largest_entries(torch.full((9000,), float("nan")), 10).tolist() == list(range(10))


def test_the_search_makes_no_dense_temporary() -> None:
    flat = torch.randn(8 * PIECE)
    with Ledger() as ledger:
        largest_entries(flat, flat.numel() // 100)
    # A piece's magnitudes and masks, and what survived; a dense copy would be 33.6 MB.
    assert ledger.peak.device - flat.nbytes < 12e6


def test_the_smallest_and_the_largest_break_ties_by_position() -> None:
    values = torch.tensor([2.0, 1.0, 1.0, 3.0, 1.0, 3.0])
    assert largest_of(-values, 2).tolist() == [False, True, True, False, False, False]
    assert largest_of(values, 1).tolist() == [False, False, False, True, False, False]
    for count in range(7):
        assert int(largest_of(values, count).sum()) == int(largest_of(-values, count).sum()) == count


@pytest.mark.parametrize("size", [0, 1, 5000, 2 * PIECE + 77])
def test_true_positions_are_those_of_nonzero(size: int) -> None:
    mask = torch.rand(size) < 0.3
    found = true_positions(mask)
    assert found.dtype == torch.int64
    assert torch.equal(found, torch.nonzero(mask).view(-1))


def test_contains_finds_members_alone() -> None:
    members = torch.tensor([2, 5, 9], dtype=torch.int32)
    values = torch.tensor([0, 2, 3, 9, 11], dtype=torch.int32)
    assert contains(members, values).tolist() == [False, True, False, True, False]
    assert contains(members[:0], values).tolist() == [False] * 5


@pytest.mark.parametrize("count", [1, 30, 499, 500, 900, 1000])
def test_random_indices_are_sorted_unique_and_the_same_again(count: int) -> None:
    drawn = random_indices("a.weight", 1000, count, seed=3)
    assert drawn.dtype == torch.int32
    assert drawn.tolist() == sorted(set(drawn.tolist())) and len(drawn) == count
    assert drawn[0] >= 0 and drawn[-1] < 1000
    assert torch.equal(drawn, random_indices("a.weight", 1000, count, seed=3))
    if count < 1000:
        assert not torch.equal(drawn, random_indices("b.weight", 1000, count, seed=3))
        assert not torch.equal(drawn, random_indices("a.weight", 1000, count, seed=4))


def test_random_indices_are_uniform() -> None:
    hits = torch.zeros(200)
    for seed in range(400):
        hits[random_indices("x", 200, 20, seed).long()] += 1
    # Binomial(400, 0.1): mean 40, standard deviation 6; five of them.
    assert hits.min() > 10 and hits.max() < 70


def test_spread_weights_adds_up_and_keeps_the_share() -> None:
    for sizes, total in itertools.product([[7], [100, 300, 600], [3, 1000, 5, 40]], [4, 7]):
        shares = spread_weights(sizes, total)
        assert sum(shares) == total
        assert all(1 <= share <= size for share, size in zip(shares, sizes, strict=True))
    assert spread_weights([100, 300, 600], 100) == [10, 30, 60]
    assert spread_weights([5, 5], 10) == [5, 5]


@pytest.mark.parametrize("total", [1, 1001])
def test_spread_weights_says_what_does_not_fit(total: int) -> None:
    with pytest.raises(ValueError, match=rf"{total} weights do not fit: the 2 target tensors .* hold 1000"):
        spread_weights([400, 600], total)


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
        positions, products = largest_products(rows, columns, count)
        assert positions.tolist() == sorted(order[:count].tolist())
        assert products.tolist() == dense[positions.numpy()].tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(40, 1), (3, 35), (60, 47)])
@pytest.mark.parametrize("are_leading", [False, True])
def test_what_grows_by_products_is_the_same_as_from_all_of_them(
    kind: str, shape: tuple[int, int], are_leading: bool
) -> None:
    """Of the 2k largest products those that are not trained, by the fourth root in fp32, ties to the lower position."""
    rows, columns = KINDS[kind](shape[0]), KINDS[kind](shape[1])
    dense = np.outer(rows.double().numpy(), columns.double().numpy()).reshape(-1)
    scores = np.sqrt(np.sqrt(dense)).astype(np.float32)
    for num_trained in {1, dense.size // 8, dense.size // 2, dense.size - 1}:
        order = np.lexsort((np.arange(dense.size), -dense))
        trained = order if are_leading else np.random.default_rng(0).permutation(dense.size)
        barred = torch.from_numpy(np.sort(trained[:num_trained]))
        count = min(2 * num_trained, dense.size)
        free = np.sort(np.setdiff1d(order[:count], barred.numpy()))
        for wanted in {1, num_trained // 5 + 1, num_trained}:
            positions, products = leading_products(rows, columns, barred, wanted, count)
            assert products.tolist() == dense[positions.numpy()].tolist()
            assert set(positions.tolist()) <= set(free.tolist())
            num_grown = min(wanted, free.size)
            expected = free[np.lexsort((free, -scores[free]))[:num_grown]]
            grown = positions[largest_of(products.pow(0.25).float(), num_grown)]
            assert grown.tolist() == sorted(expected.tolist())


def test_a_search_for_few_products_returns_few() -> None:
    rows, columns, barred = torch.rand(300), torch.rand(200), torch.arange(0, 60_000, 6)
    positions, _ = leading_products(rows, columns, barred, 500, 2 * barred.numel())
    # The bisection stops within an eighth, which has some trained ones in it.
    assert 500 <= positions.numel() <= 700


def test_scores_are_the_fourth_root_of_the_product() -> None:
    """MA's score of a weight is (r_i c_j)^(1/4) (SFT, equation 10), and has the same order."""
    rows, columns = torch.rand(9), torch.rand(8)
    positions, products = largest_products(rows, columns, 20)
    scores = (rows.double()[:, None] * columns.double()[None, :]).flatten() ** 0.25
    # A product and two roots, in fp64 of fp32 values.
    assert_sums_close(products**0.25, scores[positions], 3, size=scores[positions])
    assert set(positions.tolist()) == set(scores.topk(20).indices.tolist())


def test_products_of_zero_come_after_all_positive_ones_by_position() -> None:
    rows, columns = torch.tensor([0.0, 4.0, 1.0]), torch.tensor([0.0, 9.0])
    for count, expected in ((2, [3, 5]), (3, [0, 3, 5]), (5, [0, 1, 2, 3, 5])):
        assert largest_products(rows, columns, count)[0].tolist() == expected
    assert largest_products(torch.zeros(3), torch.zeros(2), 2)[0].tolist() == [0, 1]


@pytest.mark.parametrize("kind", ["skewed", "all equal"])
def test_memory_follows_the_count_and_not_the_matrix(kind: str) -> None:
    rows, columns = KINDS[kind](2000), KINDS[kind](3000)
    count = 6000
    with Ledger() as ledger:
        largest_products(rows, columns, count)
    # Some int64 and fp64 vectors along the survivors; the matrix in fp32 has 24 MB.
    assert ledger.peak.device < 2.5e6
