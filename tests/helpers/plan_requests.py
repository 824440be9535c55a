"""Requests for plans with the paper's schedule, which plans of every model are tested with."""

from collections.abc import Sequence
from typing import Any

from slivertune.planning import command
from slivertune.planning.request import PlanRequest
from slivertune.training.command_line.plan_words import parse_plan_arguments


def paper_request(**settings: Any) -> PlanRequest:
    """One layer per group, one update per turn, and one sequence of 512 tokens, unless the settings have others."""
    sizes = {"batch_size": 1, "seq_length": 512}
    return PlanRequest(**{"layers_per_group": 1, "steps_per_group": 1, **sizes, **settings})


def run_plan(words: Sequence[str]) -> None:
    """Run `slivertune plan` with these words, without the handling of errors."""
    command.run_plan(parse_plan_arguments(words))
