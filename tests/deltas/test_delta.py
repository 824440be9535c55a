from typing import Any

import pytest
import torch

from slivertune import SparseDelta
from slivertune.deltas.additions import add_rounded
from slivertune.deltas.delta import read_flat, write_flat
from tests.helpers.models import deterministic


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("strided", [False, True])
def test_entries_are_written_where_algorithms_must_be_deterministic(strided: bool) -> None:
    before = torch.arange(12.0).view(3, 4)
    tensor = before.t().contiguous().t() if strided else before.clone()
    with deterministic():
        write_flat(tensor, ints(1, 6, 11), torch.tensor([-1.0, -2.0, -3.0]))
        write_flat(tensor, ints(), torch.zeros(0))
    assert tensor.flatten().tolist() == [0, -1, 2, 3, 4, 5, -2, 7, 8, 9, 10, -3]


@pytest.mark.parametrize(
    ("indices", "values", "text"),
    [
        (torch.tensor([1]), torch.ones(1), "int32 indices and float32 values, not torch.int64"),
        (ints(1), torch.ones(1).half(), "not torch.int32 and torch.float16"),
        (ints(1, 2), torch.ones(1), "as many values as indices"),
        (ints(2, 1), torch.ones(2), "strictly increasing"),
        (ints(1, 1), torch.ones(2), "strictly increasing"),
        (ints(-1, 1), torch.ones(2), "from -1 to 1, and the tensor has positions 0 to 5"),
        (ints(0, 6), torch.ones(2), "from 0 to 6, and the tensor has positions 0 to 5"),
    ],
)
def test_a_delta_that_does_not_fit_its_tensor_is_refused(indices: Any, values: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        SparseDelta(indices=indices, values=values, shape=(2, 3))


def test_positions_beyond_int32_are_refused() -> None:
    with pytest.raises(ValueError, match="exceeds the 2147483647 that int32 positions reach"):
        SparseDelta(indices=ints(), values=torch.ones(0), shape=(2**16, 2**15))


@pytest.mark.parametrize("transposed", [False, True])
def test_entries_are_read_and_written_row_major_whatever_the_strides(transposed: bool) -> None:
    tensor = torch.arange(12.0).view(3, 4)
    tensor = tensor.t() if transposed else tensor
    indices = ints(0, 3, 7, 11)
    assert read_flat(tensor, indices).tolist() == tensor.reshape(-1)[indices.long()].tolist()
    expected = tensor.reshape(-1).clone()
    expected[indices.long()] = -1.0
    write_flat(tensor, indices, torch.full((4,), -1.0))
    assert torch.equal(tensor.reshape(-1), expected)


def test_a_small_delta_is_added_in_fp32_and_rounded_once() -> None:
    """In bf16 arithmetic 0.02 + 5e-5 is 0.02 where fp32 is a step further."""
    base = torch.full((1000,), 0.02).bfloat16()
    values = torch.linspace(-2e-4, 2e-4, 1000)
    weight = add_rounded("weight", base, values)
    error = (weight.double() - (base.double() + values.double())).abs().max()
    assert error <= 2.0**-14  # half a unit of bf16 at 0.02
    assert weight.unique().numel() > 2


def test_a_delta_of_zero_leaves_the_sign_of_zero() -> None:
    assert add_rounded("weight", torch.tensor([-0.0, 0.0]), torch.zeros(2)).signbit().tolist() == [True, False]
