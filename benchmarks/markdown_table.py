"""A table in Markdown, and what its cells have in common."""

import statistics
from collections.abc import Iterable, Mapping, Sequence


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Make a line of heads, the line under it, and a line per row, without a newline after the last.

    Args:
        heads: Of the columns.
        rows: As many cells each.
    """
    lines = [heads, *rows]
    head, *rest = (f"| {' | '.join(cells)} |" for cells in lines)
    return "\n".join([head, f"|{'---|' * len(heads)}", *rest])


def titled(tables: Mapping[str, str]) -> str:
    """Put tables below each other, each under its title in bold: several narrow ones in place of a wide one.

    Args:
        tables: By title, whose first letter is shown large.
    """
    return "\n\n".join(f"**{title[0].upper()}{title[1:]}**\n\n{table}" for title, table in tables.items())


def mean_and_range(figure: str, values: Sequence[float], *, digits: int = 3) -> str:
    """Write a loss in nats or an accuracy in percent: the mean, and of several seeds the least and the largest.

    Args:
        figure: `loss` or `accuracy`.
        values: By seed.
        digits: Of a loss.
    """
    unit = "" if figure == "loss" else " %"
    mean, low, high = (
        f"{value:.{digits}f}" if figure == "loss" else f"{100 * value:.1f}"
        for value in (statistics.fmean(values), min(values), max(values))
    )
    return f"{mean}{unit}" + (f" ({low} to {high})" if len(values) > 1 else "")
