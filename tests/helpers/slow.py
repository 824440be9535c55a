"""Cases that `make test` leaves to `make test-all`, and fixtures that run only the cases that are asked for."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def quick(cases: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """The values of a parametrized test, all but a few of them marked as slow.

    Args:
        cases: Names, or tuples of several arguments.
        kept: Those that `make test` runs; each is one of `cases`.

    Returns:
        What `pytest.mark.parametrize` takes.
    """
    cases = list(cases)
    unknown = [case for case in kept if case not in cases]
    assert not unknown, f"{unknown} are none of {cases}"
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in kept else pytest.mark.slow)
        for case in cases
    ]


def asked_for(request: pytest.FixtureRequest, *arguments: str) -> set[Any]:
    """The values with which the tests of this run call for a fixture's results.

    Args:
        request: Of a fixture of a module.
        *arguments: Names of arguments that its tests are parametrized by.

    Returns:
        The value, or a tuple of several, of each test of the module that is parametrized by all of them.
    """
    found = set()
    for item in request.session.items:
        values = getattr(getattr(item, "callspec", None), "params", {})
        if item.path == request.path and all(name in values for name in arguments):
            asked = tuple(values[name] for name in arguments)
            found.add(asked if len(asked) > 1 else asked[0])
    return found
