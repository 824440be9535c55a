"""What `slivertune plan` found out, and the same as plain JSON."""

import shlex
from dataclasses import dataclass
from typing import Any

from slivertune import __version__
from slivertune.planning.configs import ModelFigures
from slivertune.planning.memory_requirement import Limits, MemoryRequirement
from slivertune.planning.search import Found, Step
from slivertune.planning.train_command import TrainCommand, train_command


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One run, planned."""

    model: ModelFigures
    """What is trained."""
    requirement: MemoryRequirement
    """What it takes."""
    limits: Limits | None = None
    """What there is; None where nothing was said of it."""
    found: Found | None = None
    """How the settings came about; None where they were given."""

    @property
    def command(self) -> TrainCommand:
        """The command that makes the run."""
        return train_command(self.requirement.plan.request, self.model.name_or_path)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON: the plan's own fields, and beside them the model, the allowance, the command and the search."""
        command = self.command
        values: dict[str, Any] = {
            **_requirement_json(self.requirement),
            "model": self.model.name,
            "model_source": self.model.source,
            "command": None if command.arguments is None else shlex.join(command.arguments),
            "command_notes": list(command.notes),
            "slivertune": __version__,
        }
        if self.limits is not None:
            values["fit"] = _fit_json(self.limits, self.requirement, self.found)
        return values


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepAnswer:
    """One field over several values, each planned."""

    model: ModelFigures
    """What is trained."""
    field: str
    """The field of the request."""
    requirements: tuple[tuple[Any, MemoryRequirement], ...]
    """Its values, each with what the run takes then."""
    limits: Limits | None = None
    """What there is; None where nothing was said of it."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON: an array of plans, each with the field's value."""
        points = []
        for value, requirement in self.requirements:
            point = {self.field: value, **_requirement_json(requirement)}
            if self.limits is not None:
                point["fits"] = requirement.fits(self.limits)
            points.append(point)
        values: dict[str, Any] = {
            "field": self.field,
            "sweep": points,
            "model": self.model.name,
            "model_source": self.model.source,
            "slivertune": __version__,
        }
        if self.limits is not None:
            values["fit"] = {"limit_bytes": self.limits.device_bytes}
        return values


def _requirement_json(requirement: MemoryRequirement) -> dict[str, Any]:
    return {
        **requirement.plan.to_json(),
        "allowance": requirement.allowance.to_json(),
        "need_bytes": requirement.device_bytes,
    }


def _fit_json(limits: Limits, requirement: MemoryRequirement, found: Found | None) -> dict[str, Any]:
    values: dict[str, Any] = {
        "limit_bytes": limits.device_bytes,
        "host_limit_bytes": limits.host_bytes,
        "fits": requirement.fits(limits),
    }
    if found is not None:
        values |= {
            "need_bytes_as_asked": found.start.device_bytes,
            "host_bytes_as_asked": found.start.host_bytes,
            "steps": [_step_json(step) for step in found.steps],
            "skipped": [{"title": title, "reason": reason} for title, reason in found.skipped],
            "num_plans": found.num_plans,
        }
    return values


def _step_json(step: Step) -> dict[str, Any]:
    return {
        "title": step.title,
        "cost": step.cost,
        "changes": {name: {"from": old, "to": new} for name, (old, new) in step.changes.items()},
    }
