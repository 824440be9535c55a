"""A plan as people read it."""

import shlex
from dataclasses import fields
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from slivertune.planning.answer import Answer, SweepAnswer
from slivertune.planning.byte_text import common_unit, format_bytes
from slivertune.planning.configs import ModelFigures
from slivertune.planning.methods import planned, planned_methods
from slivertune.planning.plan import GroupPlan, Limits, MemoryRequirement, Moment, Plan
from slivertune.planning.request import PlanRequest
from slivertune.planning.search import Found

PART_TITLES = {
    "parameters": "weights",
    "gradients": "gradients",
    "state": "masters and optimizer state",
    "residual": "activations and other",
}
"""What the kinds of bytes are called."""
_ALWAYS_SHOWN = ("optimizer", "precision", "batch_size", "seq_length")


def print_answer(answer: Answer, console: Console) -> None:
    """Print the parts of the peak, the groups, what was chosen, and what to do next.

    Args:
        answer: What was found out.
        console: Where to.
    """
    plan = answer.requirement.plan
    say = _sayer(console)
    say(_headline(answer.model, plan))
    say(f"  {describe_request(plan.request)}")
    if answer.found is not None:
        _print_search(answer.found, say)
    console.print(_parts_table(answer.requirement, answer.limits))
    if len(plan.groups) > 1:
        console.print(_groups_table(plan))
    for note in plan.notes:
        say(f"note: {note}")
    for line in _next_lines(answer):
        say(line)


def print_sweep(answer: SweepAnswer, console: Console) -> None:
    """Print a row for each value.

    Args:
        answer: What was found out.
        console: Where to.
    """
    first = answer.requirements[0][1].plan
    say = _sayer(console)
    say(_headline(answer.model, first))
    say(f"  {describe_request(first.request, without=answer.field)}")
    unit, size = common_unit(max(requirement.device_bytes for _, requirement in answer.requirements))
    table = Table(title=f"on one GPU, in {unit}", title_justify="left")
    table.add_column(answer.field, justify="right")
    for title in ("weights", "gradients", "state", "activations", "peak", "allowance", "needed", "on the host"):
        table.add_column(title, justify="right")
    if answer.limits is not None:
        table.add_column("fits")
    for value, requirement in answer.requirements:
        peak = requirement.plan.peak
        sizes = [getattr(peak, kind) for kind in PART_TITLES]
        sizes += [peak.total, requirement.allowance.total, requirement.device_bytes, requirement.host_bytes]
        cells = [str(value), *(f"{num_bytes / size:,.2f}" for num_bytes in sizes)]
        if answer.limits is not None:
            cells.append("yes" if requirement.fits(answer.limits) else "no")
        table.add_row(*cells)
    console.print(table)
    for note in dict.fromkeys(note for _, requirement in answer.requirements for note in requirement.plan.notes):
        say(f"note: {note}")


def describe_request(request: PlanRequest, *, without: str | None = None) -> str:
    """The settings of a run in one line: those that always matter, and others where they are not the default.

    Args:
        request: The run.
        without: A field to leave out.
    """
    own = planned(request.method).settings
    of_others = frozenset().union(*(planned(name).settings for name in planned_methods())) - own
    parts = []
    for item in fields(PlanRequest):
        value = getattr(request, item.name)
        if item.name in ("method", without, *of_others):
            continue
        if item.name in _ALWAYS_SHOWN or value != item.default:
            parts.append(_setting(item.name, value))
    return ", ".join(parts)


def _headline(model: ModelFigures, plan: Plan) -> str:
    return f"{plan.request.method} on {model.name}: {plan.num_parameters:,} parameters, from {model.source}"


def _setting(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return name if value else f"no {name}"
    return f"{name} {format_bytes(value) if name.endswith('_bytes') else value}"


def _parts_table(requirement: MemoryRequirement, limits: Limits | None) -> Table:
    plan, allowance = requirement.plan, requirement.allowance
    table = Table(title="on one GPU", title_justify="left", show_header=False)
    table.add_column("")
    table.add_column("", justify="right")
    table.add_column("")
    for kind, title in PART_TITLES.items():
        table.add_row(title, format_bytes(getattr(plan.peak, kind)), "")
    table.add_section()
    table.add_row("peak", Text(format_bytes(plan.peak_bytes), style="bold"), _when(plan))
    table.add_section()
    table.add_row("CUDA context and kernels", format_bytes(allowance.context), "allowance, not planned")
    table.add_row("cuBLAS workspaces", format_bytes(allowance.workspace), "allowance")
    if allowance.collectives:
        table.add_row("NCCL buffers", format_bytes(allowance.collectives), "allowance")
    table.add_row("fragmentation", format_bytes(allowance.fragmentation), "allowance, 5 % of what comes and goes")
    table.add_section()
    table.add_row(
        "a GPU must have", Text(format_bytes(requirement.device_bytes), style="bold"), _verdict(requirement, limits)
    )
    if plan.host_bytes or plan.disk_bytes:
        table.add_section()
    if plan.host_bytes:
        table.add_row("waits in host memory", format_bytes(plan.host_bytes), "")
    if plan.disk_bytes:
        table.add_row("waits on disk", format_bytes(plan.disk_bytes), "")
    return table


def _when(plan: Plan) -> str:
    group = _group_of(plan, plan.peak)
    if len(plan.groups) == 1:
        where = ""
    elif planned(plan.request.method).trains_in_groups:
        where = f", while {_name_of(group)} trains"
    else:
        where = f", {group.name}"
    return f"in the {'update' if plan.peak.phase == 'step' else plan.peak.phase}{where}"


def _group_of(plan: Plan, moment: Moment) -> GroupPlan:
    return next(group for group in plan.groups if moment.group in group.indices)


def _name_of(group: GroupPlan) -> str:
    others = len(group.indices) - 1
    return group.name if not others else f"{group.name} or one of {others} alike"


def _verdict(requirement: MemoryRequirement, limits: Limits | None) -> str:
    if limits is None:
        return ""
    missing = requirement.missing_device_bytes(limits)
    if missing:
        return f"{format_bytes(missing)} more than {format_bytes(limits.device_bytes)}"
    spare = limits.device_bytes - requirement.device_bytes
    return f"fits {format_bytes(limits.device_bytes)}, {format_bytes(spare)} to spare"


def _groups_table(plan: Plan) -> Table:
    num_groups = sum(len(group.indices) for group in plan.groups)
    in_groups = planned(plan.request.method).trains_in_groups
    heading = f"{num_groups} groups, one an update" if in_groups else f"{num_groups} kinds of updates"
    table = Table(title=heading, title_justify="left")
    table.add_column("group" if in_groups else "update")
    for title in ("trains", "gradients", "masters", "optimizer state", "peak"):
        table.add_column(title, justify="right")
    table.add_column("in the")
    for group in plan.groups:
        table.add_row(
            _name_of(group),
            f"{group.num_parameters:,}",
            format_bytes(group.gradient_bytes),
            format_bytes(group.master_bytes),
            format_bytes(group.state_bytes),
            format_bytes(group.peak.total),
            "update" if group.peak.phase == "step" else group.peak.phase,
        )
    return table


def _print_search(found: Found, say: Any) -> None:
    as_asked = f"{format_bytes(found.start.device_bytes)} needed as asked"
    if not found.steps:
        say(f"{as_asked}, which fits without any change")
        return
    say(f"{as_asked}, {format_bytes(found.requirement.device_bytes)} as chosen:")
    for step in found.steps:
        changes = ", ".join(f"{name} {_plain(old)} -> {_plain(new)}" for name, (old, new) in step.changes.items())
        say(f"  chose  {step.title} ({changes}). Cost: {step.cost}")
    for title, reason in found.skipped:
        say(f"  left   {title}: {reason}")


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def _next_lines(answer: Answer) -> list[str]:
    command = answer.command
    lines = []
    if command.arguments is not None:
        lines.append(f"to run it: {shlex.join(command.arguments)}")
    lines += [f"note: {note}" for note in command.notes]
    if answer.limits is None:
        lines.append("--fit 24GiB finds settings for a GPU of that size, the least costly first")
    return lines


def _sayer(console: Console) -> Any:
    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    return say
