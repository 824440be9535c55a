from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.planning.real import attached


@pytest.fixture(autouse=True)
def no_selection_outlives_its_test() -> Iterator[None]:
    yield
    while attached:
        attached.pop().remove()
