"""What is equal in a comparison."""

import pytest

from slivertune.training.comparison.budget import Budget, parse_budget


@pytest.mark.parametrize(
    ("words", "budget"),
    [
        (["steps"], Budget()),
        (["steps=200"], Budget(length="steps", amount=200)),
        (["tokens=1e6"], Budget(length="tokens", amount=1e6)),
        (["seconds=0.5", "bytes=24GiB"], Budget(length="seconds", amount=0.5, limit_bytes=24 * 2**30)),
        (["bytes=200MB"], Budget(limit_bytes=200_000_000)),
    ],
)
def test_a_budget_is_read(words: list[str], budget: Budget) -> None:
    assert parse_budget(words) == budget


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["second"], r"'second' is unknown\. Use steps, tokens, seconds, bytes,.*did you mean seconds"),
        (["steps", "seconds"], "Keep steps or seconds"),
        (["steps=1.5"], "a whole number, at least 1"),
        (["seconds=-1"], "a number, more than 0"),
        (["seconds=nan"], "a number, more than 0"),
        (["tokens=many"], "a number, more than 0"),
        (["bytes"], "needs a limit"),
        (["bytes=24"], "did you mean 24GiB"),
        (["bytes=0"], "bytes=0 must be more than 0"),
    ],
)
def test_what_is_no_budget_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_budget(words)
