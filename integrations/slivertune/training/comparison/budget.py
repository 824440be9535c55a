"""Equal budget of the rows of a comparison, in updates, tokens, seconds or bytes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from slivertune.core.byte_text import format_bytes, parse_memory_size
from slivertune.core.number_rule import COUNT, RULES, NumberRule
from slivertune.core.suggestions import did_you_mean

Length = Literal["steps", "tokens", "seconds"]
LENGTHS: tuple[Length, ...] = get_args(Length)


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Budget of each row."""

    length: Length = "steps"
    """Unit in which the length of a run is counted."""
    amount: float | None = None
    """Length in this unit. None for the length of the first row."""
    limit_bytes: int | None = None
    """Maximum number of bytes on the device during an update. None for no limit."""

    def describe(self) -> str:
        """Describe the budget in words."""
        amount = "as many as the first row's" if self.amount is None else f"{self.amount:,.6g}"
        limit = "" if self.limit_bytes is None else f", at most {format_bytes(self.limit_bytes)} on the device"
        return f"{self.length}: {amount}{limit}"


def parse_budget(words: Sequence[str]) -> Budget:
    """Parse a budget.

    Args:
        words: Words `steps`, `tokens` or `seconds`, alone or with an amount, such as `seconds=60`. `bytes=24GiB` may
            stand beside such a word or alone.

    Raises:
        ValueError: If a word is unknown, an amount is not a positive number, or two words contradict each other.
    """
    values: dict[str, str | None] = {}
    for word in words:
        name, equals, amount = word.partition("=")
        known = (*LENGTHS, "bytes")
        if name not in known:
            raise ValueError(
                f"--budget {word!r} is unknown. Use {', '.join(known)}, alone or with an amount: seconds=60"
                f"{did_you_mean(name, known)}"
            )
        values[name] = amount if equals else None
    lengths = [name for name in LENGTHS if name in values]
    if len(lengths) > 1:
        raise ValueError(f"--budget {' '.join(words)}: a run has one length. Keep {' or '.join(lengths)}")
    length = lengths[0] if lengths else "steps"
    return Budget(length=length, amount=_amount(length, values.get(length)), limit_bytes=_limit(values))


def _amount(length: Length, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        amount = float(text)
    except ValueError:
        amount = math.nan
    rule = COUNT if length == "steps" else NumberRule(0, excludes_least=True)
    if not rule.allows(amount) or (length == "steps" and not amount.is_integer()):
        kind = "a whole number" if length == "steps" else "a number"
        raise ValueError(f"--budget {length}={text} must be {kind}, {rule.describe()}, as {length}=200")
    return amount


def _limit(values: dict[str, str | None]) -> int | None:
    if "bytes" not in values:
        return None
    text = values["bytes"]
    if not text:
        raise ValueError("--budget bytes needs a limit. Give one: bytes=24GiB")
    try:
        limit = parse_memory_size(text)
    except ValueError as error:
        raise ValueError(f"--budget bytes: {error}") from error
    rule = RULES["fit"]
    if not rule.allows(limit):
        raise ValueError(f"--budget bytes={text} must be {rule.describe()}. Give a size such as 24GiB")
    return limit
