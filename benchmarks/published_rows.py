"""Rows that others have published, from a YAML file of groups, and the plans of them."""

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from environment import record_environment
from result_files import RESULTS, read_json, write_json
from transformers import AutoConfig

from slivertune.planning.configs import find_model
from slivertune.planning.make import make_plan
from slivertune.planning.optimizers import without_trainer
from slivertune.planning.plan import Plan
from slivertune.planning.request import PlanRequest


@dataclass(frozen=True)
class PublishedRows:
    """A file of published rows."""

    models: dict[str, Any]
    """Figures of the models that do not come with the library."""
    groups: dict[str, dict[str, Any]]

    @classmethod
    def read(cls, name: str) -> "PublishedRows":
        """Read a file beside the scripts."""
        content = yaml.safe_load((Path(__file__).parent / name).read_text(encoding="utf-8"))
        return cls(content["models"], {group["name"]: group for group in content["groups"]})

    def plan(self, row: dict[str, Any]) -> Plan:
        """Plan a row by its settings."""
        figures = self.models.get(row["model"])
        config = find_model(row["model"]).config if figures is None else AutoConfig.for_model(**figures)
        settings = {name: tuple(each) if isinstance(each, list) else each for name, each in row["settings"].items()}
        with without_trainer() if row.get("has_no_trainer") else nullcontext():
            return make_plan(PlanRequest(**settings), config)

    def run(
        self,
        plan_group: Callable[[dict[str, Any]], dict[str, Any]],
        table: Callable[[list[dict[str, Any]]], str],
        about: str,
        result: str,
        **more: Any,
    ) -> None:
        """Plan the groups of the command line, write the result after each, and print the table of all.

        Args:
            plan_group: Returns the result of a group.
            table: Formats the results of groups.
            about: Description of the script.
            result: Name of the file under `results/`.
            **more: Further entries of the result.
        """
        parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--groups", nargs="+", choices=list(self.groups), help="a part; all by default")
        parser.add_argument("--output", type=Path, default=RESULTS / result)
        arguments = parser.parse_args()
        by_name = {group["name"]: group for group in read_json(arguments.output).get("groups", [])}
        for name in arguments.groups or self.groups:
            by_name[name] = plan_group(self.groups[name])
            found = [by_name[each] for each in self.groups if each in by_name]
            write_json(arguments.output, {"environment": record_environment(), **more, "groups": found})
        print(table([by_name[each] for each in self.groups if each in by_name]))
