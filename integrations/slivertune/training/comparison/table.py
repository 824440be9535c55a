"""Table of a comparison, and notes for its reader."""

from collections.abc import Sequence

from rich.table import Table

from slivertune.core.byte_text import format_bytes
from slivertune.training.comparison.comparison import RowResult
from slivertune.training.comparison.outcome import Outcome, mean


def comparison_table(results: Sequence[RowResult], title: str) -> Table:
    """Make a table with a line for each row: means over the seeds, and the range of the metric.

    Args:
        results: Results of all rows. The first is the baseline for the others.
        title: Description of the equal budget.
    """
    metric = next((each.outcomes[0].metric for each in results if each.outcomes), "eval_loss")
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for name in ("rate", "updates", "seconds", metric.removeprefix("eval_"), "against", "peak", "host", "tokens/s"):
        table.add_column(name, justify="right")
    first = results[0]
    for result in results:
        if not result.outcomes:
            table.add_row(result.row.name, "failed")
            continue
        table.add_row(*_cells(result, first))
    return table


def _cells(result: RowResult, first: RowResult) -> list[str]:
    outcomes = result.outcomes
    metric = outcomes[0].metric
    seconds, tokens = mean([each.seconds for each in outcomes]), mean([each.num_tokens for each in outcomes])
    updates = sorted({each.num_updates for each in outcomes})
    return [
        result.row.name + (" (not all seeds)" if result.failure else ""),
        f"{outcomes[0].rate:g}",
        " to ".join(dict.fromkeys(f"{each:,}" for each in (updates[0], updates[-1]))),
        "" if seconds is None else f"{seconds:,.1f}",
        _metric(outcomes, metric),
        "" if result is first or not first.outcomes else _against(outcomes, first.outcomes, metric),
        _bytes(outcomes, "device"),
        _bytes(outcomes, "host"),
        "" if not seconds or tokens is None else f"{tokens / seconds:,.0f}",
    ]


def _metric(outcomes: Sequence[Outcome], metric: str) -> str:
    values = [each.after[metric] for each in outcomes]
    average = _value(sum(values) / len(values), metric)
    spread = f" ({_value(min(values), metric)} to {_value(max(values), metric)})"
    return average + (spread if len(values) > 1 else "")


def _against(outcomes: Sequence[Outcome], first: Sequence[Outcome], metric: str) -> str:
    """Return the mean difference over the seeds that both have."""
    known = {each.seed: each.after[metric] for each in first}
    differences = [each.after[metric] - known[each.seed] for each in outcomes if each.seed in known]
    return _value(sum(differences) / len(differences), metric, sign="+")


def _value(value: float, metric: str, sign: str = "") -> str:
    return f"{value:{sign}.2%}" if metric == "eval_accuracy" else f"{value:{sign}.4f}"


def _bytes(outcomes: Sequence[Outcome], place: str) -> str:
    sizes = [each.peak_bytes[place] for each in outcomes if place in each.peak_bytes]
    return format_bytes(max(sizes)) if sizes else ""


def notes(results: Sequence[RowResult], *, is_searched: bool) -> list[str]:
    """Collect notes for a reader of the table.

    Args:
        results: Results of all rows.
        is_searched: Whether rates were searched.
    """
    lines = []
    if not is_searched:
        lines.append("rates are each row's own and were not searched, so they may decide the order. See --search_rates")
    edges = [each.row.name for each in results if each.outcomes and each.is_at_edge]
    if edges:
        lines.append(f"the best rate is the largest or the smallest tried: {', '.join(edges)}. Search further")
    if max((len(each.outcomes) for each in results), default=0) == 1:
        lines.append("one seed: differences as small as between two seeds mean nothing. See --seeds")
    lines += [f"{each.row.name} failed: {each.failure}" for each in results if each.failure]
    return lines
