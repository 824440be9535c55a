"""A table in Markdown."""

from collections.abc import Iterable, Sequence


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A line of heads, the line under it, and a line a row; without a line's end after the last.

    Args:
        heads: Of the columns.
        rows: As many cells each.
    """
    lines = [heads, *rows]
    head, *rest = (f"| {' | '.join(cells)} |" for cells in lines)
    return "\n".join([head, f"|{'---|' * len(heads)}", *rest])
