import itertools
import random
from typing import Any

import pytest

from tests.helpers.pairwise import Row, assert_has_every_legal_pair, pairwise, pairwise_rows, product_rows, rotated


@pytest.mark.parametrize("seed", range(20))
def test_a_table_has_every_legal_pair_in_few_rows(seed: int) -> None:
    draw = random.Random(seed)
    sizes = [draw.randrange(1, 6) for _ in range(draw.randrange(2, 8))]
    factors = {
        f"factor {index}": tuple(f"{index}.{value}" for value in range(size)) for index, size in enumerate(sizes)
    }
    # First values go with everything, so that every legal pair has a row.
    others = [values[1:] for values in factors.values()]
    refused = {
        frozenset((draw.choice(one), draw.choice(other)))
        for one, other in itertools.combinations(others, 2)
        if one and other
    }

    def is_legal(row: Row) -> bool:
        return not any(pair <= set(row.values()) for pair in refused)

    rows = pairwise_rows(factors, is_legal)
    assert_has_every_legal_pair(rows, factors, is_legal)
    product = product_rows(factors, is_legal)
    assert all(row in product for row in rows)
    largest, next_to_it = sorted(sizes)[-1], sorted(sizes)[-2]
    assert len(rows) <= min(len(product), 2 * largest * next_to_it)


def test_a_missing_pair_is_noticed() -> None:
    factors = {"one": (1, 2), "other": ("a", "b", "c")}
    rows = pairwise_rows(factors)
    assert len(rows) == 6
    for index in range(6):
        with pytest.raises(AssertionError):
            assert_has_every_legal_pair(rows[:index] + rows[index + 1 :], factors)
    with pytest.raises(AssertionError):
        assert_has_every_legal_pair(rows, factors, lambda row: row.get("one") != 1 or row.get("other") != "a")


def test_combinations_beyond_the_table_are_slow() -> None:
    factors: dict[str, Any] = {"one": ({}, {"a": 1}), "other": (int, None, 3), "third": "xy", "last": (0, 1)}
    names, params = pairwise(**factors).args
    assert names == tuple(factors)
    found = [param.values for param in params]
    assert all(found.count(combination) == 1 for combination in itertools.product(*factors.values()))
    assert len(found) == 24 and len({param.id for param in params}) == 24
    quick = [dict(zip(names, param.values, strict=True)) for param in params if not param.marks]
    assert 6 <= len(quick) <= 8
    assert_has_every_legal_pair(quick, factors)
    assert {mark.name for param in params for mark in param.marks} == {"slow"}


def test_values_that_take_turns_are_each_run_and_the_others_are_slow() -> None:
    (names, params) = rotated(one="abc", other=(1, 2)).args
    quick = [param.values for param in params if not param.marks]
    assert names == ("one", "other") and quick == [("a", 1), ("b", 2), ("c", 1)]
    slow = [param.values for param in params if param.marks]
    assert sorted(slow) == [("a", 2), ("b", 1), ("c", 2)]
