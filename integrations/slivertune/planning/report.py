"""Text output of a plan for people."""

import shlex
from dataclasses import fields
from typing import Any

from rich.console import Console
from rich.table import Table

from slivertune.core.byte_text import common_unit, format_bytes
from slivertune.core.masking import masked
from slivertune.core.typed_command import typed_command
from slivertune.planning.answer import Answer, SweepAnswer
from slivertune.planning.configs import ModelFigures
from slivertune.planning.limits import unlimited_needs
from slivertune.planning.methods import planned, planned_methods
from slivertune.planning.plan import GroupPlan, LimitName, Limits, MemoryRequirement, Plan
from slivertune.planning.request import PlanRequest
from slivertune.planning.search import Found, Tell
from slivertune.planning.time_report import print_time

PART_TITLES = {
    "parameters": "weights",
    "gradients": "gradients",
    "state": "masters and optimizer state",
    "residual": "activations and other",
}
"""Titles of the kinds of bytes."""
_WAITING_TITLES: dict[LimitName, str] = {"host_bytes": "offloaded to host memory", "disk_bytes": "offloaded to disk"}
_MUCH = 0.1
"""Share of a limit from which memory that stays free is worth a line."""
_ALWAYS_SHOWN = ("optimizer", "precision", "batch_size", "seq_length")


def line_printer(console: Console) -> Tell:
    """Return a function that prints a line of any length without its secrets."""
    return lambda line: console.print(masked(line), markup=False, highlight=False, soft_wrap=True)


def print_answer(answer: Answer, console: Console) -> None:
    """Print the parts of the peak, the groups, the chosen settings and the next commands.

    Args:
        answer: Answer to print.
        console: Console to print to.
    """
    plan, command = answer.requirement.plan, answer.command
    say = line_printer(console)
    _print_head(answer.model, plan, say)
    if answer.found is not None:
        _print_search(answer.found, say)
    if answer.choice is not None:
        for line in answer.choice.lines():
            say(line)
    if answer.largest is not None:
        say(answer.largest.describe())
    if answer.limits is not None:
        for need in unlimited_needs(answer.requirement, answer.limits):
            say(f"warning: {need}")
    console.print(_parts_table(answer.requirement, answer.limits))
    if len(plan.groups) > 1:
        console.print(_groups_table(plan))
    if answer.time is not None and answer.card is not None:
        at_least = plan.request.inactive == "above"
        print_time(answer.time, answer.card, answer.num_tokens, console, at_least=at_least)
        if answer.card.note:
            say(f"note: {answer.card.note}")
    elif answer.card is not None:
        say(f"the time per update on a {answer.card.name} is planned only if the run fits. --fit finds such settings")
    for note in plan.notes:
        say(f"note: {note}")
    if command.arguments is not None:
        say(f"to run it: {shlex.join(typed_command(*command.arguments[1:]))}")
    for note in command.notes:
        say(f"note: {note}")
    if (filling := _how_to_fill(answer)) is not None:
        say(filling)
    if answer.limits is None:
        say("--fit 24GiB finds settings for a GPU of that size, the least costly first")
    if answer.card is None:
        say("--gpu 4090 shows the time per update there, and whether the run fits")


def _how_to_fill(answer: Answer) -> str | None:
    """Name the options that find what fills the memory that stays free, or return None if little does."""
    limits, requirement = answer.limits, answer.requirement
    is_changed = answer.choice is not None or (answer.found is not None and bool(answer.found.steps))
    if limits is None or answer.largest is not None or is_changed or not requirement.fits(limits):
        return None  # of a run with other settings than the command's, --max would not be told
    spare = limits.device_bytes - requirement.device_bytes
    if spare < _MUCH * limits.device_bytes:
        return None
    request = requirement.plan.request
    has_copies = planned(request.method).trains_in_groups and request.layout == "single" and request.state == "host"
    layers = " --layers_per_group auto finds the layers." if has_copies and answer.card is not None else ""
    return f"{format_bytes(spare)} stay free. --max batch_size finds the batch that fills them.{layers}"


def print_sweep(answer: SweepAnswer, console: Console) -> None:
    """Print a row for each value.

    Args:
        answer: Answer to print.
        console: Console to print to.
    """
    say, limits = line_printer(console), answer.limits
    all_needs = [requirement for _, requirement in answer.requirements]
    _print_head(answer.model, all_needs[0].plan, say, without=answer.field)
    unit, size = common_unit(max(each.device_bytes for each in all_needs))
    # "needed" is the peak with the allowance.
    columns = [
        "weights",
        "gradients",
        "state",
        "activations",
        *(["peak"] if answer.card is None else []),
        "needed",
        "host",
    ]
    timed = ("tokens/s",) if answer.card is not None else ()
    table = _table(f"on one GPU, in {unit}", [], [answer.field, *columns, *timed], ["fits"] if limits else [])
    for (value, requirement), time in zip(answer.requirements, answer.times, strict=True):
        peak = requirement.plan.peak
        sizes = [getattr(peak, kind) for kind in PART_TITLES]
        sizes += [peak.total] if answer.card is None else []
        sizes += [requirement.device_bytes, requirement.host_bytes]
        fits = [] if limits is None else ["yes" if requirement.fits(limits) else "no"]
        speeds = ["" if time is None else f"{time.tokens_per_second:,.0f}" for _ in timed]
        table.add_row(str(value), *(f"{num_bytes / size:,.2f}" for num_bytes in sizes), *speeds, *fits)
    console.print(table)
    if answer.num_missing:
        say(f"interrupted: {answer.num_missing} more values were not planned")
    if limits is not None:
        for need in unlimited_needs(max(all_needs, key=lambda each: each.host_bytes + each.disk_bytes), limits):
            say(f"warning: {need}")
    for note in dict.fromkeys(note for each in all_needs for note in each.plan.notes):
        say(f"note: {note}")


def describe_request(request: PlanRequest, *, without: str | None = None) -> str:
    """Describe a run's settings in one line: the main ones, and others that are not at their defaults.

    Args:
        request: The run.
        without: Name of a field to leave out.
    """
    of_all = frozenset().union(*(planned(name).settings for name in planned_methods()))
    left_out = {"method", without, *(of_all - planned(request.method).settings)}
    settings = [(item.name, getattr(request, item.name), item.default) for item in fields(PlanRequest)]
    return ", ".join(
        _setting(name, value)
        for name, value, default in settings
        if name not in left_out and (name in _ALWAYS_SHOWN or value != default)
    )


def _setting(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return name if value else f"no {name}"
    if isinstance(value, tuple):
        return f"{name} {' '.join(value)}"
    return f"{name} {format_bytes(value) if name.endswith('_bytes') else value}"


def _print_head(model: ModelFigures, plan: Plan, say: Tell, *, without: str | None = None) -> None:
    say(f"{plan.request.method} on {model.name}: {plan.num_parameters:,} parameters, from {model.source}")
    say(f"  {describe_request(plan.request, without=without)}")


def _table(title: str, left: list[str], right: list[str], last: list[str], *, show_header: bool = True) -> Table:
    """Make a table without rows. Columns of numbers are in the middle, right-aligned, and keep to one line."""
    table = Table(title=title, title_justify="left", show_header=show_header)
    for name in (*left, *right, *last):
        table.add_column(name, justify="right" if name in right else "left", no_wrap=name in right, overflow="fold")
    return table


def _parts_table(requirement: MemoryRequirement, limits: Limits | None) -> Table:
    plan, allowance = requirement.plan, requirement.allowance
    table = _table("on one GPU", ["part"], ["bytes"], ["remark"], show_header=False)
    sections = (
        [(title, getattr(plan.peak, kind), "") for kind, title in PART_TITLES.items()],
        [("peak", plan.peak_bytes, _when(plan))],
        [
            ("CUDA context and kernels", allowance.context, "allowance, not planned"),
            ("cuBLAS workspaces", allowance.workspace, "allowance"),
            *([("NCCL buffers", allowance.collectives, "allowance")] if allowance.collectives else []),
            ("fragmentation", allowance.fragmentation, "allowance, 5 % of transient memory"),
        ],
        [("GPU memory needed", requirement.device_bytes, _verdict(requirement, limits))],
        [
            (title, getattr(requirement, name), _verdict_on(name, requirement, limits))
            for name, title in _WAITING_TITLES.items()
            if getattr(requirement, name)
        ],
    )
    for rows in sections:
        for title, num_bytes, remark in rows:
            size = format_bytes(num_bytes)
            is_sum = title in ("peak", "GPU memory needed")
            table.add_row(title, f"[bold]{size}[/]" if is_sum else size, remark)
        table.add_section()
    return table


def _when(plan: Plan) -> str:
    group = next(group for group in plan.groups if plan.peak.group in group.indices)
    where = f", {group.name}"
    if len(plan.groups) == 1:
        where = ""
    elif planned(plan.request.method).trains_in_groups:
        where = f", while {_name_of(group)} trains"
    return f"in the {_phase_of(group)}{where}"


def _name_of(group: GroupPlan) -> str:
    others = len(group.indices) - 1
    return group.name if not others else f"{group.name} or {'another' if others == 1 else f'one of {others}'} alike"


def _phase_of(group: GroupPlan) -> str:
    return "update" if group.peak.phase == "step" else group.peak.phase


def _verdict(requirement: MemoryRequirement, limits: Limits | None) -> str:
    if limits is None:
        return ""
    size, missing = format_bytes(limits.device_bytes), requirement.missing_device_bytes(limits)
    if missing:
        return f"{format_bytes(missing)} more than {size}"
    return f"fits {size}, {format_bytes(limits.device_bytes - requirement.device_bytes)} to spare"


def _verdict_on(name: LimitName, requirement: MemoryRequirement, limits: Limits | None) -> str:
    """Return whether offloaded bytes fit their limit, as a remark."""
    limit = None if limits is None else getattr(limits, name)
    if limits is None or limit is None:
        return ""
    size, spare = format_bytes(limit), limit - getattr(requirement, name)
    source = " that this machine has free" if name in limits.assumed else ""
    if spare < 0:
        return f"{format_bytes(-spare)} more than {size}{source}"
    return f"fits {size}{source}, {format_bytes(spare)} to spare"


def _groups_table(plan: Plan) -> Table:
    num_groups = sum(len(group.indices) for group in plan.groups)
    first, heading = "update", f"{num_groups} kinds of updates"
    if planned(plan.request.method).trains_in_groups:
        per_turn = plan.request.steps_per_group
        first = "group"
        heading = f"{num_groups} groups, {'one per update' if per_turn == 1 else f'{per_turn} updates per turn'}"
    table = _table(heading, [first], ["trains", "gradients", "masters", "state", "peak"], ["phase"])
    for group in plan.groups:
        sizes = (group.gradient_bytes, group.master_bytes, group.state_bytes, group.peak.total)
        table.add_row(_name_of(group), f"{group.num_parameters:,}", *map(format_bytes, sizes), _phase_of(group))
    return table


def _print_search(found: Found, say: Tell) -> None:
    as_asked = f"{format_bytes(found.start.device_bytes)} needed as asked"
    if not found.steps:
        say(f"{as_asked}, which fits without any change")
        return
    say(f"{as_asked}, {format_bytes(found.requirement.device_bytes)} as chosen:")
    for step in found.steps:
        changes = ", ".join(f"{name} {_plain(old)} -> {_plain(new)}" for name, (old, new) in step.changes.items())
        say(f"  chose  {step.title} ({changes}). Cost: {step.cost}")
    for title, reason in found.skipped:
        say(f"  skipped {title}: {reason}")


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)
