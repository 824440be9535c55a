import numpy as np
import pytest
import torch

from slivertune import Ledger
from slivertune.sft.outer_product import largest_products
from tests.helpers.tolerance import assert_sums_close

KINDS = {
    "uniform": lambda n: torch.rand(n),
    "skewed": lambda n: torch.rand(n) ** 6,
    "few values": lambda n: torch.randint(1, 4, (n,)).float(),
    "all equal": lambda n: torch.full((n,), 0.3),
    "tiny": lambda n: torch.rand(n) * 1e-30,
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


def test_scores_are_the_fourth_root_of_the_product() -> None:
    """MA's score of a weight is (r_i c_j)^(1/4) (SFT, equation 10), and has the same order."""
    rows, columns = torch.rand(9), torch.rand(8)
    positions, products = largest_products(rows, columns, 20)
    scores = (rows.double()[:, None] * columns.double()[None, :]).flatten() ** 0.25
    # A product and two roots, in fp64 of fp32 values.
    assert_sums_close(products**0.25, scores[positions], 3, size=scores[positions])
    assert set(positions.tolist()) == set(scores.topk(20).indices.tolist())


def test_a_row_that_was_never_met_counts_as_the_weakest_one() -> None:
    rows, columns = torch.tensor([0.0, 4.0, 1.0]), torch.tensor([0.0, 9.0])
    positions, products = largest_products(rows, columns, 6)
    assert positions.tolist() == list(range(6))
    assert products.tolist() == [9.0, 9.0, 36.0, 36.0, 9.0, 9.0]
    positions, products = largest_products(torch.zeros(3), torch.zeros(2), 2)
    assert positions.tolist() == [0, 1]


@pytest.mark.parametrize("kind", ["skewed", "all equal"])
def test_memory_follows_the_count_and_not_the_matrix(kind: str) -> None:
    rows, columns = KINDS[kind](2000), KINDS[kind](3000)
    count = 6000
    with Ledger() as ledger:
        largest_products(rows, columns, count)
    # Some int64 and fp64 vectors along the survivors; the matrix in fp32 has 24 MB.
    assert ledger.peak.device < 2.5e6
