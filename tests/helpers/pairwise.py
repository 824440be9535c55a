"""Tables of settings in which each legal pair of values has a row, in place of all their combinations.

Nearly every fault that needs a combination needs two settings, and the pairs of five factors fit into as many rows as
the two largest factors have pairs.
"""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import pytest

Row = Mapping[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]
Factors = Mapping[str, Collection[Any]]
IsLegal = Callable[[Row], bool]
"""Takes rows in which factors are missing, too."""


def pairs_of(row: Row) -> set[Pair]:
    return set(itertools.combinations(row.items(), 2))


def legal_pairs(factors: Factors, is_legal: IsLegal) -> set[Pair]:
    """Every pair of values of two factors that may stand in a row."""
    return {
        pair
        for (one, values), (other, more) in itertools.combinations(factors.items(), 2)
        for pair in itertools.product(((one, value) for value in values), ((other, value) for value in more))
        if is_legal(dict(pair))
    }


def pairwise_rows(factors: Factors, is_legal: IsLegal = lambda row: True) -> list[Row]:
    """Make a table with every legal pair.

    Each row starts from a pair that is missing, and takes of each further factor the value that adds most pairs, or
    the one used least.

    Args:
        factors: Values of each, which can be hashed.
        is_legal: False for a row, or a part of one, that is not to be run. Whatever is legal has to fit into a row.
    """
    missing = dict.fromkeys(sorted(legal_pairs(factors, is_legal), key=str))
    used: Counter[tuple[str, Any]] = Counter()
    rows: list[Row] = []
    while missing:
        row = _filled(dict(next(iter(missing))), factors, is_legal, missing, used)
        assert row is not None, f"no row has {next(iter(missing))}"
        rows.append({name: row[name] for name in factors})
        used.update(rows[-1].items())
        for pair in pairs_of(rows[-1]):
            missing.pop(pair, None)
    return rows


def _filled(
    row: Row, factors: Factors, is_legal: IsLegal, missing: Collection[Pair], used: Counter[tuple[str, Any]]
) -> Row | None:
    """The row with values of all factors; None if it has no legal ones."""
    name = next((name for name in factors if name not in row), None)
    if name is None:
        return row

    def merit(value: Any) -> tuple[int, int]:
        placed = {**row, name: value}
        pairs = pairs_of({each: placed[each] for each in factors if each in placed})
        return sum(pair in missing for pair in pairs), -used[name, value]

    for value in sorted((each for each in factors[name] if is_legal({**row, name: each})), key=merit, reverse=True):
        if (filled := _filled({**row, name: value}, factors, is_legal, missing, used)) is not None:
            return filled
    return None


def product_rows(factors: Factors, is_legal: IsLegal = lambda row: True) -> list[Row]:
    """Every legal combination."""
    rows = (dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values()))
    return [row for row in rows if is_legal(row)]


def drawn_rows(factors: Factors, is_legal: IsLegal, *, num_rows: int, seed: int = 0) -> list[Row]:
    """Legal combinations, drawn where there are too many for all of them to be run."""
    draw = random.Random(seed)
    drawn = ({name: draw.choice(list(values)) for name, values in factors.items()} for _ in itertools.count())
    return list(itertools.islice(filter(is_legal, drawn), num_rows))


def row_params(quick: Iterable[Row], slow: Iterable[Row] = ()) -> list[Any]:
    """The values of a parametrized test: rows that `make test` runs, and others that are left to `make test-all`."""
    rows = list(quick)
    marked = [(row, ()) for row in rows] + [(row, pytest.mark.slow) for row in slow if row not in rows]
    return [pytest.param(row, id=", ".join(map(str, row.values())), marks=marks) for row, marks in marked]


def pairwise(**factors: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test by a table with every pair; the other combinations are slow.

    Args:
        **factors: Values of each argument, of any kind.
    """
    return _parametrized(factors, pairwise_rows)


def rotated(**factors: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test by as many rows as the longest factor has values; the other combinations are slow.

    The values of each factor take turns, so that all of them are run, and few of their pairs.

    Args:
        **factors: Values of each argument, of any kind.
    """

    def rows(indices: Mapping[str, range]) -> list[Row]:
        longest = max(map(len, indices.values()))
        return [{name: row % len(each) for name, each in indices.items()} for row in range(longest)]

    return _parametrized(factors, rows)


def _parametrized(
    factors: Mapping[str, Iterable[Any]], choose: Callable[[Mapping[str, range]], list[Row]]
) -> pytest.MarkDecorator:
    values = {name: list(each) for name, each in factors.items()}
    indices = {name: range(len(each)) for name, each in values.items()}
    params = []
    for param in row_params(choose(indices), product_rows(indices)):
        chosen = [values[name][index] for name, index in param.values[0].items()]
        names = [str(getattr(value, "__name__", value)) for value in chosen]
        params.append(pytest.param(*chosen, id=", ".join(names), marks=param.marks))
    return pytest.mark.parametrize(tuple(factors), params)


def assert_has_every_legal_pair(rows: Iterable[Row], factors: Factors, is_legal: IsLegal = lambda row: True) -> None:
    """Compare the rows' pairs with all that there are, one by one."""
    rows = list(rows)
    for (one, values), (other, more) in itertools.combinations(factors.items(), 2):
        for value, another in itertools.product(values, more):
            is_found = any(row[one] == value and row[other] == another for row in rows)
            assert is_found == is_legal({one: value, other: another}), (one, value, other, another)
