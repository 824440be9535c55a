"""Values in a saved state, each with those that stand beside it and must not pass for it."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from slivertune.core.saved_state import StateMismatchError, is_count
from slivertune.core.saved_values import check_hyperparameters, fits_sign, is_finite, is_rate, is_same, is_step


@pytest.mark.parametrize(
    ("value", "fits"),
    [(0, True), (2**61, True), (True, False), (-1, False), (2**80, False), (1.0, False), ("1", False)],
)
def test_a_count_is_an_integer_from_zero_on(value: Any, fits: bool) -> None:
    assert is_count(value) == fits


@pytest.mark.parametrize(
    ("value", "fits"),
    [
        (0.0, True),
        (1, True),
        (None, True),
        (np.float64(0.5), True),
        (np.float32(0.5), True),
        (torch.tensor(0.5), True),
        (True, False),
        (-1e-3, False),
        (math.nan, False),
        (math.inf, False),
        ("x", False),
        (torch.tensor([0.5, 0.5]), False),
        (torch.tensor(math.nan), False),
        (torch.tensor(1), False),
    ],
)
def test_a_rate_is_finite_and_not_below_zero(value: Any, fits: bool) -> None:
    assert is_rate(value) == fits


@pytest.mark.parametrize(
    ("value", "fits"),
    [(3, True), (3.0, True), (torch.tensor(3.0), True), (torch.tensor([3]), True)]
    + [(each, False) for each in (True, -1, math.nan, "3", None, torch.ones(3), torch.tensor(True), 2.0**80)],
)
def test_steps_are_counted_by_a_number_or_a_tensor_of_one(value: Any, fits: bool) -> None:
    assert is_step(value) == fits


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (0, False),
        (1, torch.ones(())),
        ([0, 1], [False, True]),
        ({"a": 1}, {"a": True}),
        ([1], [1, 1]),
        ({}, None),
    ],
)
def test_values_of_two_types_are_not_the_same(one: Any, other: Any) -> None:
    assert not is_same(one, other) and not is_same(other, one)
    assert is_same(one, one) and is_same({"a": (1, [one])}, {"a": [1.0, (one,)]})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float64])
def test_one_nan_in_a_tensor_is_found_wherever_it_lies(dtype: torch.dtype) -> None:
    tensor = torch.zeros(4, 6)
    assert is_finite({"a": [tensor.to(dtype).t(), torch.zeros(0), torch.ones(3, dtype=torch.int8), "word", None]})
    tensor[3, 1] = math.nan
    assert not is_finite({"a": [tensor.to(dtype).t()]})


@pytest.mark.parametrize(
    ("key", "value", "fits"),
    [
        ("exp_avg_sq", torch.tensor([0.0, 1.0]), True),
        ("exp_avg_sq", torch.tensor([0.0, -1e-9]), False),
        ("rows", -torch.ones(3, dtype=torch.bfloat16), False),
        ("row_var", torch.zeros(0), True),
        ("exp_avg", -torch.ones(3), True),
        ("variance", None, True),
        ("exp_avg_sq", -torch.ones(3, dtype=torch.int32), True),
    ],
)
def test_squares_are_not_negative(key: str, value: Any, fits: bool) -> None:
    assert fits_sign(key, value) == fits


@pytest.mark.parametrize(
    ("key", "own", "value", "fits"),
    [
        ("lr", 1e-3, 1e-4, True),
        ("lr", 1e-3, -1e-4, False),
        ("lr", 1e-3, torch.tensor(1e-4), True),
        ("betas", (0.9, 0.99), [0.9, 0.95], True),
        ("betas", (0.9, 0.99), [0.9], False),
        ("betas", (0.9, 0.99), [0.9, True], False),
        ("amsgrad", False, True, True),
        ("amsgrad", False, 1, False),
        ("foreach", None, True, True),
        ("weight_decay", 0.1, None, True),
        ("weight_decay", 0.1, math.nan, False),
        ("weight_decay", 0.1, "0.1", False),
        ("growth_rate", math.inf, 1.5, True),
        ("growth_rate", math.inf, math.inf, True),
        ("growth_rate", 1.5, math.inf, False),
    ],
)
def test_a_hyperparameter_is_of_the_kind_that_the_optimizer_has(key: str, own: Any, value: Any, fits: bool) -> None:
    groups = [{"params": [], key: value}], [{"params": [], key: own}]
    if fits:
        check_hyperparameters(*groups)
        return
    with pytest.raises(StateMismatchError, match=f"damaged: {key} of param group 0 is .* Use another checkpoint"):
        check_hyperparameters(*groups)
