"""Rows of a comparison: methods and settings, each as options of `slivertune train`."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from slivertune.core.suggestions import did_you_mean
from slivertune.planning.compare import TOKEN_RATIO

_TOKENS = ("--token_ratio", str(TOKEN_RATIO))
_NAME = re.compile(r"[\w.+-]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row of a comparison."""

    name: str
    """Name of the row and of its runs' folder."""
    options: tuple[str, ...]
    """Options of `slivertune train`, beside those of all rows."""


NAMED_ROWS = {
    "dense": ("--method", "dense"),
    "hift": ("--method", "hift"),
    "sft-ag": ("--method", "sft", "--selection", "accumulated_gradient"),
    "sft-ma": ("--method", "sft", "--selection", "momentum"),
    "tokentune": ("--method", "dense", *_TOKENS),
    "hift+tokentune": ("--method", "hift", *_TOKENS),
    "lora": ("--method", "lora"),
    "qlora": ("--method", "lora", "--load_in_4bit"),
    "full": ("--method", "full"),
}
"""Name of a row, as typed -> its options."""
DEFAULT_ROWS = tuple(NAMED_ROWS)[:6]
"""Rows that need no library besides torch and transformers. The first is the baseline for the others."""


def parse_rows(words: Sequence[str]) -> tuple[Row, ...]:
    """Parse the rows to compare.

    Args:
        words: Names of `NAMED_ROWS`, or `NAME:OPTIONS` such as `"m4:--method hift --layers_per_group 4"`. With the name
            of one of `NAMED_ROWS`, the options are added to its own.

    Returns:
        One row per word, in their order.

    Raises:
        ValueError: If a name is unknown, unfit for a folder, or given twice.
    """
    rows = tuple(_parse_row(word) for word in words)
    names = [row.name for row in rows]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"--rows names {name!r} twice. Give settings a name of their own: 'NAME:--option value'")
    return rows


def _parse_row(word: str) -> Row:
    name, colon, options = word.partition(":")
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"--rows {word!r}: a name may have only letters, digits, '.', '+', '_' and '-', for its folder. Write "
            "NAME:OPTIONS with such a name"
        )
    if not colon and name not in NAMED_ROWS:
        raise ValueError(
            f"--rows {name!r} is unknown. Use {', '.join(NAMED_ROWS)}, or write it with its options: "
            f"'NAME:--option value'{did_you_mean(name, NAMED_ROWS)}"
        )
    return Row(name=name, options=(*NAMED_ROWS.get(name, ()), *shlex.split(options)))
