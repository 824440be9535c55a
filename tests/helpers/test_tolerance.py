"""The limits let other orders of the same sums pass, and nothing that has a term too many, too few, or doubled."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.tolerance import (
    assert_step_close,
    assert_sums_close,
    distance,
    exact_sums,
    step_limit,
    sum_limit,
    with_exact,
)

TERMS = 400


def reordered(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    order = torch.randperm(a.shape[1])
    return a[:, order] @ b[order]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_in_any_order_are_within_the_bound(dtype: torch.dtype) -> None:
    for _ in range(50):
        a, b = torch.randn(7, TERMS, dtype=dtype), torch.randn(TERMS, 5, dtype=dtype)
        assert_sums_close(reordered(a, b), a @ b, TERMS, a.abs().double() @ b.abs().double())


@pytest.mark.parametrize("factor", [0.0, 2.0], ids=["missing", "doubled"])
def test_a_missing_or_doubled_term_of_a_sum_is_beyond_the_bound(factor: float) -> None:
    a, b = torch.randn(7, TERMS), torch.randn(TERMS, 5)
    wrong = a.clone()
    wrong[:, 17] *= factor
    with pytest.raises(AssertionError, match="beyond the bound of sums of 400 terms"):
        assert_sums_close(wrong @ b, a @ b, TERMS, a.abs().double() @ b.abs().double())


def test_the_bound_is_the_lesser_of_the_certain_and_the_likely_one() -> None:
    unit = 2**-24
    assert sum_limit(4, torch.float32) == 2 * 4 * unit
    assert sum_limit(10_000, torch.float32) == 2 * 4 * 100 * unit
    assert sum_limit(4, torch.bfloat16) == 2 * 4 * 2**-8
    assert torch.equal(sum_limit(1, torch.float32, torch.tensor([1.0, 3.0])), torch.tensor([1.0, 3.0]) * 2 * unit)


# ---- whole steps


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(48, 96), nn.SiLU(), nn.LayerNorm(96), nn.Linear(96, 3))


def gradients(inputs: torch.Tensor, weights: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """Of a weighted mean over rows: a weight of 2 doubles a row's term, 0 leaves it out."""
    model = network()
    (model(inputs).square().mean(dim=1) * weights).mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_a_step_with_its_rows_in_another_order_is_within_the_limit() -> None:
    for _ in range(20):
        inputs, ones = torch.randn(64, 48), torch.ones(64)
        expected, exact = with_exact(lambda inputs=inputs, ones=ones: gradients(inputs, ones))  # type: ignore[misc]
        assert_step_close(gradients(inputs[torch.randperm(64)], ones), expected, exact, cap=1e-4)


@pytest.mark.parametrize("factor", [0.0, 2.0], ids=["missing", "doubled"])
def test_a_step_with_a_missing_or_doubled_term_exceeds_limit_and_cap_by_far(factor: float) -> None:
    inputs, ones = torch.randn(64, 48), torch.ones(64)
    expected, exact = with_exact(lambda: gradients(inputs, ones))
    wrong = gradients(inputs, ones.index_fill(0, torch.tensor(5), factor))
    assert distance(wrong, expected) > 100 * 1e-4
    with pytest.raises(AssertionError, match="apart, beyond"):
        assert_step_close(wrong, expected, exact, cap=1e-4)


def test_the_cap_holds_where_the_reference_is_far_from_itself() -> None:
    assert step_limit([1.0], [2.0], cap=1e-3) == 1e-3
    assert step_limit([1.0], [1.0 + 1e-4], cap=1e-2) == pytest.approx(4e-4, rel=1e-3)
    assert step_limit([1.0], [1.0], cap=1e-2) == 4 * 2**-23


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({"a": torch.ones(2)}, {"a": torch.ones(2), "b": torch.ones(2)}),
        ({"a": None}, {"a": torch.ones(2)}),
        ({"a": torch.ones(1)}, {"a": torch.ones(2)}),
        ([1.0], [1.0, 1.0]),
        ({"a": torch.zeros(2)}, {"a": torch.zeros(2)}),
    ],
    ids=["other names", "none", "other shapes", "other counts", "zeros"],
)
def test_what_can_not_be_compared_is_no_match(found: Any, expected: Any) -> None:
    with pytest.raises(AssertionError):
        distance(found, expected)


def test_what_is_no_number_is_beyond_every_limit() -> None:
    assert distance([float("nan"), 1.0], [1.0, 1.0]) > 1e30
    assert distance([1.0, float("inf")], [1.0, 1.0]) > 1e30


# ---- exact sums


def test_exact_sums_are_those_of_fp64_rounded_once() -> None:
    a, b = torch.randn(7, TERMS), torch.randn(TERMS, 5)
    with exact_sums():
        product, total, half = a @ b, a.sum(), (a.bfloat16() @ b.bfloat16())
    assert torch.equal(product, (a.double() @ b.double()).float())
    assert torch.equal(total, a.double().sum().float())
    assert torch.equal(half, (a.bfloat16().double() @ b.bfloat16().double()).bfloat16())


def test_exact_sums_reach_attention_and_every_backward() -> None:
    given = [torch.randn(1, 2, 9, 8, requires_grad=True) for _ in range(3)]
    outward = torch.randn(1, 2, 9, 8)

    def attend(*tensors: torch.Tensor) -> list[torch.Tensor]:
        out = nn.functional.scaled_dot_product_attention(*tensors, is_causal=True)
        return [out.detach(), *torch.autograd.grad(out, tensors, outward.to(out.dtype))]

    truth = attend(*(tensor.detach().double().requires_grad_() for tensor in given))
    with exact_sums():
        exact = attend(*given)
    for one, other in zip(exact, truth, strict=True):
        assert one.dtype == torch.float32
        assert_sums_close(one, other.float(), 9)


def test_exact_sums_draw_the_same_numbers_and_give_them_back() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    inputs = torch.randn(4, 8)
    expected, exact = with_exact(lambda: model(inputs))
    assert torch.equal(expected == 0, exact == 0)
    assert_step_close(exact, expected, exact, cap=1e-5)
