"""How long an update is planned to take on a run's GPU: by the plan of its peak, and by what the card should reach."""

from dataclasses import dataclass

import torch

from slivertune.planning.byte_text import format_bytes
from slivertune.planning.cards import card_here
from slivertune.planning.plan import Plan, add_allowance
from slivertune.planning.planned_time import EFFICIENCIES, PlannedTime, plan_time, with_room_ahead
from slivertune.planning.time_report import format_seconds
from slivertune.training.assemble import Run

OPERATOR_SECONDS = 20e-6
"""What Python and torch take to issue an operator; an assumption, of which a plan by rates holds nothing."""


@dataclass(frozen=True, slots=True)
class PlannedUpdate:
    """What was planned, and what to say of it."""

    time: PlannedTime | None = None
    """None where there is no plan of it."""
    note: str | None = None
    """What the time leaves out, or why there is none."""


def plan_update(run: Run, plan: Plan | None) -> PlannedUpdate:
    """Plan the time of a run's updates, and say it. No failure of a plan breaks a run.

    Args:
        run: About to train.
        plan: Of its peak; None where there is none.
    """
    say = run.display.say
    try:
        time = None if plan is None else time_on(run.arguments.training.device, plan)
    # Whatever a plan stumbles over, the run may do.
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
        device: Trains.
        plan: Of the run's peak.

    Returns:
        The time; None on a CPU, of whose speed no plan holds anything.

    Raises:
        ValueError: If it is another device, or a card whose rates are not known.
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
    """What is planned, and what that assumes, in one line.

    Args:
        planned: The time.
    """
    (low, high), (slow, fast) = EFFICIENCIES, planned.tokens_per_second_range
    said = (
        f"{format_seconds(planned.seconds)} planned an update ({planned.tokens_per_second:,.0f} tokens a second if "
        f"{planned.rates.efficiency:.0%} of the card's peak is reached; {slow:,.0f} with {low:.0%}, {fast:,.0f} with "
        f"{high:.0%})"
    )
    disk = f"{format_bytes(planned.disk_bytes_per_hour)} an hour written to disk"
    parts = (said, disk if planned.disk_bytes_per_update else None, note_of(planned))
    return ", ".join(part for part in parts if part is not None)


def note_of(planned: PlannedTime) -> str | None:
    """What a planned time leaves out, where that counts: Python may issue operators slower than the GPU computes them.

    Args:
        planned: The time.
    """
    issuing = OPERATOR_SECONDS * planned.num_operators
    if issuing < planned.seconds:
        return None
    return (
        f"from operators alone: Python takes about {format_seconds(issuing)} to issue the "
        f"{planned.num_operators:,.0f} of an update"
    )
