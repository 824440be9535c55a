"""Planned time of an update on a run's GPU, from the plan of its peak memory and the expected speed of the card."""

from dataclasses import dataclass

import torch

from slivertune.core.byte_text import format_bytes
from slivertune.planning.cards import card_here
from slivertune.planning.plan import Plan, add_allowance
from slivertune.planning.planned_time import EFFICIENCIES, PlannedTime, plan_time, with_room_ahead
from slivertune.planning.time_report import format_seconds
from slivertune.training.assemble import Run

OPERATOR_SECONDS = 20e-6
"""Seconds that Python and torch take to issue an operator. This is an assumption, and no part of a plan by rates."""


@dataclass(frozen=True, slots=True)
class PlannedUpdate:
    """Planned time of an update, and a note about it."""

    time: PlannedTime | None = None
    """Planned time. None if it is not planned."""
    note: str | None = None
    """Parts that the time leaves out, or the reason why there is no time."""


def plan_update(run: Run, plan: Plan | None) -> PlannedUpdate:
    """Plan the time of a run's updates, and print it. A plan that fails never breaks a run.

    Args:
        run: Run that is about to train.
        plan: Plan of its peak memory; None if there is none.
    """
    say = run.display.say
    try:
        time = None if plan is None else time_on(run.arguments.training.device, plan)
    # An error in a plan must not stop the run.
    except Exception as error:
        note = f"not planned: {' '.join(str(error).split()) or type(error).__name__}"
        say(f"  time    {note}")
        return PlannedUpdate(note=note)
    if time is None:
        return PlannedUpdate()
    say(f"  time    {describe_update(time)}")
    return PlannedUpdate(time, note_of(time))


def time_on(device: torch.device, plan: Plan) -> PlannedTime | None:
    """Plan the time of updates on a device.

    Args:
        device: Device that trains.
        plan: Plan of the run's peak memory.

    Returns:
        The time, or None on a CPU, since plans know nothing about its speed.

    Raises:
        ValueError: If it is another device, or a card whose rates are unknown.
    """
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        raise ValueError(f"the rates of a device {device.type!r} are not known, only those of CUDA devices")
    card = card_here()
    if card is None:
        raise ValueError(f"the rates of {torch.cuda.get_device_name()} are not known")
    plan = with_room_ahead(add_allowance(plan), card.memory_bytes)
    return plan_time(plan, card.rates(in_fp32=plan.request.precision == "fp32"))


def describe_update(planned: PlannedTime) -> str:
    """Describe the planned time and its assumptions in one line.

    Args:
        planned: Planned time.
    """
    (low, high), (slow, fast) = EFFICIENCIES, planned.tokens_per_second_range
    said = (
        f"{format_seconds(planned.seconds)} planned per update ({planned.tokens_per_second:,.0f} tokens/s at "
        f"{planned.rates.efficiency:.0%} of the card's peak, {slow:,.0f} at {low:.0%}, {fast:,.0f} at {high:.0%})"
    )
    disk = f"{format_bytes(planned.disk_bytes_per_hour)} per hour written to disk"
    parts = (said, disk if planned.disk_bytes_per_update else None, note_of(planned))
    return ", ".join(part for part in parts if part is not None)


def note_of(planned: PlannedTime) -> str | None:
    """Describe the part that a planned time leaves out, if Python may issue operators slower than the GPU runs them.

    Args:
        planned: Planned time.
    """
    issuing = OPERATOR_SECONDS * planned.num_operators
    if issuing < planned.seconds:
        return None
    return (
        f"from operators alone: Python takes about {format_seconds(issuing)} to issue the "
        f"{planned.num_operators:,.0f} operators per update"
    )
