"""Requests for plans with the paper's schedule, which plans of every model are tested with."""

from typing import Any

from slivertune.planning.request import PlanRequest


def paper_request(**settings: Any) -> PlanRequest:
    """One layer per group and one update per turn, unless the settings have others."""
    return PlanRequest(**{"layers_per_group": 1, "steps_per_group": 1, **settings})
