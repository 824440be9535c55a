"""Comparison as a table, with the advice."""

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from slivertune.core.byte_text import format_bytes
from slivertune.planning.compare import Comparison, Row
from slivertune.planning.limits import describe_limits, unlimited_needs
from slivertune.planning.report import line_printer
from slivertune.planning.time_report import describe_rates, format_seconds

_GIB = 2**30
_UNITS = ((1e9, "B"), (1e6, "M"), (1e3, "K"))


def describe_row(row: Row) -> str:
    """Describe a row in one line, to be printed as soon as the row is ready.

    Args:
        row: Row to describe.
    """
    if row.requirement is None:
        return f"{row.title}: can't be planned: {row.reason}"
    request, need = row.requirement.plan.request, format_bytes(row.requirement.device_bytes)
    if row.time is None:
        return f"{row.title}: {need} with one sequence, which does not fit"
    return f"{row.title}: batch_size {request.batch_size}, {need}, {row.speed:,.0f} tokens/s"


def print_comparison(comparison: Comparison, num_tokens: float | None, console: Console) -> None:
    """Print the table and the advice.

    Args:
        comparison: Comparison to print.
        num_tokens: Tokens to train on, for the column of hours; None leaves the column out.
        console: Console to print to.
    """
    question = comparison.question
    request = next((row.requirement.plan.request for row in comparison.rows if row.requirement is not None), None)
    sizes = "" if request is None else f", {request.seq_length:,} tokens per sequence"
    title = f"{question.model.name} on a {question.card.name}, {describe_limits(question.limits)}{sizes}; planned"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("", "tokens", "trains"):
        table.add_column(name)
    seconds = "update" if num_tokens is None else "hours"
    for name in ("batch", "GPU\nGiB", "host\nGiB", seconds, "tokens/s", "per\nweight"):
        table.add_column(name, justify="right")
    for row in comparison.rows:
        table.add_row(*_cells(row, num_tokens))
    console.print(table)
    say = line_printer(console)
    say("tokens: those that keep activations and carry gradient (TokenTune selects a share)")
    say("batch: sequences in the largest batch that fits; one if none fits")
    say("per weight: tokens/s that each trained weight learns from")
    needs = [row.requirement for row in comparison.rows if row.requirement is not None]
    for need in unlimited_needs(max(needs, key=lambda each: each.host_bytes), question.limits) if needs else ():
        say(f"warning: {need}")
    say(describe_rates(question.rates()))
    if comparison.num_missing:
        say(f"interrupted: {comparison.num_missing} more ways were not planned")
    say(comparison.advice())


def _cells(row: Row, num_tokens: float | None) -> list[str]:
    if row.requirement is None:
        return [row.way.title, *[""] * 6, "no plan"]
    request = row.requirement.plan.request
    share = "all" if request.token_ratio is None else f"{request.token_ratio:.0%}"
    sizes = [f"{size / _GIB:,.1f}" for size in (row.requirement.device_bytes, row.requirement.host_bytes)]
    cells = [row.way.title, share, describe_trained(row), str(request.batch_size), *sizes]
    if row.time is None:
        return [*cells, "", "no fit"]
    seconds = row.time.seconds
    time = format_seconds(seconds) if num_tokens is None else f"{row.time.hours(num_tokens):,.1f}"
    return [*cells, time, f"{row.speed:,.0f}", f"{row.weight_speed:,.0f}"]


def describe_trained(row: Row) -> str:
    """Describe the parameters that an update trains.

    Args:
        row: Row that could be planned.
    """
    assert row.requirement is not None
    plan = row.requirement.plan
    number = _short(plan.num_trainable_peak)
    if not row.way.trains_all:
        return f"{number}, {plan.num_trainable_peak / plan.num_parameters:.1%}"
    return "all" if plan.num_trainable_peak >= plan.num_parameters else f"all, {number}/step"


def _short(number: int) -> str:
    for size, unit in _UNITS:
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)
