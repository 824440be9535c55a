import pytest
import torch

from slivertune.sft.linear import CHUNK_ROWS, chunked_gradient, sampled_gradient
from tests.helpers.tolerance import assert_sums_close, sum_limit, unit_roundoff


def case(rows: int, dtype: torch.dtype, density: float = 0.02) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    output_gradient, inputs = torch.randn(24, rows).to(dtype), torch.randn(24, 50).to(dtype)
    count = max(1, int(density * rows * 50))
    return output_gradient, inputs, torch.randperm(rows * 50)[:count].sort().values.int()


def assert_products_close(
    found: torch.Tensor, output_gradient: torch.Tensor, inputs: torch.Tensor, indices: torch.Tensor | None = None
) -> None:
    """Entries of the dense gradient, whose kernel may sum fewer rows in another order and round once to their dtype."""
    exact = output_gradient.double().t() @ inputs.double()
    size = output_gradient.double().abs().t() @ inputs.double().abs()
    exact, size = (each.flatten() if indices is None else each.flatten()[indices.long()] for each in (exact, size))
    limit = sum_limit(len(inputs), torch.float32, size) + 2 * unit_roundoff(inputs.dtype) * exact.abs()
    assert found.shape == exact.shape and bool(((found.double() - exact).abs() <= limit).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 100, CHUNK_ROWS, CHUNK_ROWS + 1, 3 * CHUNK_ROWS - 5])
def test_entries_are_those_of_the_dense_gradient(rows: int, dtype: torch.dtype) -> None:
    output_gradient, inputs, indices = case(rows, dtype)
    seen = []
    gradient = chunked_gradient(
        output_gradient, inputs, indices, lambda chunk, start: seen.append((start, chunk.clone()))
    )
    assert gradient.dtype == torch.float32
    assert_products_close(gradient, output_gradient, inputs, indices)
    assert len(seen) == -(-rows // CHUNK_ROWS)
    assert all(chunk.numel() <= CHUNK_ROWS * 50 for _, chunk in seen)
    assert [start for start, _ in seen] == [0, *[start + chunk.numel() for start, chunk in seen][:-1]]
    whole = torch.cat([chunk for _, chunk in seen])
    assert_products_close(whole, output_gradient, inputs)
    assert torch.equal(gradient, whole[indices.long()].float())


def test_rows_without_an_active_weight_cost_nothing_wrong() -> None:
    output_gradient, inputs, _ = case(3 * CHUNK_ROWS, torch.float32)
    indices = torch.tensor([3, 2 * CHUNK_ROWS * 50 + 7], dtype=torch.int32)
    assert_products_close(chunked_gradient(output_gradient, inputs, indices), output_gradient, inputs, indices)


@pytest.mark.parametrize("rows", [1, 300])
def test_sampled_products_are_the_same_sums_in_another_order(rows: int) -> None:
    output_gradient, inputs, indices = case(rows, torch.float32)
    dense = (output_gradient.t() @ inputs).flatten()[indices.long()]
    sizes = (output_gradient.double().abs().t() @ inputs.double().abs()).flatten()[indices.long()]
    assert_sums_close(sampled_gradient(output_gradient, inputs, indices), dense, len(inputs), sizes)
