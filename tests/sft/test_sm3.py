import pytest
import torch

from slivertune.sft.sm3 import matrix_shape, sm3_
from tests.helpers.tolerance import assert_sums_close


@pytest.mark.parametrize(
    ("shape", "matrix"),
    [
        ((), (1, 1)),
        ((7,), (7, 1)),
        ((3, 4), (3, 4)),
        ((2, 3, 5), (6, 5)),
        ((16, 2, 8), (16, 16)),
        ((64, 8, 3, 3), (64, 72)),
        ((4, 0), (4, 0)),
    ],
)
def test_a_tensor_is_seen_as_the_matrix_with_the_fewest_rows_and_columns(
    shape: tuple[int, ...], matrix: tuple[int, int]
) -> None:
    assert matrix_shape(shape) == matrix


def test_one_update_by_hand() -> None:
    """Two entries of a 2 x 3 matrix, (0, 1) and (1, 1); they share column 1."""
    delta, gradient = torch.tensor([0.5, -1.0]), torch.tensor([3.0, 4.0])
    rows, columns = torch.tensor([7.0, 0.0]), torch.tensor([100.0, 9.0, 100.0])
    indices = torch.tensor([1, 4], dtype=torch.int32)
    sm3_(delta, gradient, indices, rows, columns, None, lr=0.1, momentum=0.0, eps=0.0, weight_decay=0.5)
    # nu = min(7, 9) + 9 = 16 and min(0, 9) + 16 = 16.
    assert rows.tolist() == [16.0, 16.0] and columns.tolist() == [100.0, 16.0, 100.0]
    assert_sums_close(delta, torch.tensor([0.5 * 0.95 - 0.1 * 3 / 4, -0.95 - 0.1 * 4 / 4]), 6)


def test_a_weight_without_a_gradient_does_not_move() -> None:
    delta, rows, columns = torch.zeros(1), torch.zeros(1), torch.zeros(1)
    index = torch.zeros(1, dtype=torch.int32)
    sm3_(delta, torch.zeros(1), index, rows, columns, None, lr=0.1, momentum=0.0, eps=1e-30, weight_decay=0.0)
    assert delta.tolist() == [0.0]


@pytest.mark.parametrize("size", [1e-15, 3e-22, 6e-24, 4e-26])
def test_no_update_is_larger_than_the_rate_where_squares_underflow(size: float) -> None:
    delta, gradient = torch.zeros(2), torch.tensor([size, -size])
    indices = torch.tensor([0, 3], dtype=torch.int32)
    rows, columns = torch.zeros(2), torch.zeros(2)
    sm3_(delta, gradient, indices, rows, columns, None, lr=0.5, momentum=0.0, eps=0.0, weight_decay=0.0)
    assert_sums_close(delta, torch.tensor([-0.5, 0.5]), 6)


def test_momentum_averages_the_updates() -> None:
    delta, average = torch.zeros(1), torch.tensor([2.0])
    index, one = torch.zeros(1, dtype=torch.int32), torch.ones(1)
    sm3_(delta, one, index, torch.zeros(1), torch.zeros(1), average, lr=1.0, momentum=0.75, eps=0.0, weight_decay=0.0)
    assert average.tolist() == [0.75 * 2.0 + 0.25 * 1.0] and delta.tolist() == [-1.75]
