"""Text output of planned times for people."""

from rich.console import Console
from rich.table import Table

from slivertune.core.byte_text import format_bytes
from slivertune.planning.cards import Card, Rates
from slivertune.planning.planned_time import EFFICIENCIES, PlannedTime

_TITLES = {"forward": "forward", "backward": "backward", "step": "update"}


def print_time(
    time: PlannedTime, card: Card, num_tokens: float | None, console: Console, *, at_least: bool = False
) -> None:
    """Print the seconds of an update by part, the speed, and the hours of the run.

    Args:
        time: Planned time of an update.
        card: GPU of the run.
        num_tokens: Tokens to train on; None if they were not given.
        console: Console to print to.
        at_least: Whether weights learn from other tokens, too, in turns of other groups.
    """
    rates = time.rates
    table = Table(title=f"update time on a {card.name}", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    for phase, seconds in time.update.computing.items():
        table.add_row(_TITLES[phase], format_seconds(seconds), "")
    for reason, seconds in time.update.waiting.items():
        table.add_row(f"stalls for {reason}", format_seconds(seconds), f"{seconds / time.seconds:.1%} of the total")
    table.add_section()
    speed = f"{time.tokens_per_second:,.0f} tokens/s"
    table.add_row("total", f"[bold]{format_seconds(time.seconds)}[/]", f"{time.num_tokens:,} tokens, {speed}")
    if time.weight_share < 1:
        speed = f"{time.weight_tokens_per_second:,.0f} tokens/s"
        table.add_row("each weight", f"{time.weight_share:.1%}", f"learns from {'at least ' * at_least}{speed}")
    if num_tokens is not None:
        table.add_section()
        table.add_row("run", f"{time.hours(num_tokens):,.1f} h", f"{num_tokens:,.0f} tokens")
    if time.disk_bytes_per_update:
        table.add_row("writes to disk", format_bytes(round(time.disk_bytes_per_hour)), "per hour")
    console.print(table)
    uses_disk = time.disk_bytes_per_update > 0
    for line in (describe_rates(rates, uses_disk=uses_disk), describe_range(time)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def describe_rates(rates: Rates, *, uses_disk: bool = False) -> str:
    """Describe the assumptions behind planned seconds in one line.

    Args:
        rates: Rates that the GPU is assumed to reach.
        uses_disk: Whether state is offloaded to files.
    """
    disk = f", {rates.disk_bandwidth / 1e9:.3g} GB/s of disk (--disk_bandwidth)" if uses_disk else ""
    return (
        f"note: assumes {rates.flops / 1e12:.3g} TFLOP/s ({rates.efficiency:.0%} of peak; --efficiency) and "
        f"{rates.bus_bandwidth / 1e9:.3g} GB/s PCIe each way{disk}, not measured on your machine"
    )


def describe_range(time: PlannedTime) -> str:
    """Describe the uncertainty of planned seconds in one line.

    Args:
        time: Planned time of an update.
    """
    (low, high), (slow, fast) = EFFICIENCIES, time.tokens_per_second_range
    return f"note: training speed varies: {slow:,.0f} tokens/s at {low:.0%} of the peak, {fast:,.0f} at {high:.0%}"


def format_seconds(seconds: float) -> str:
    """Format a time with three digits, in s or ms.

    Args:
        seconds: Number of seconds.
    """
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
