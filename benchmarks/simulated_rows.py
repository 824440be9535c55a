"""The command line of what is simulated row by row, and its result file, which a further call continues.

For `schedule.py` and `host_weights.py`; `curve.py` has points and a command line of its own.
"""

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from environment import record_environment
from result_files import RESULTS, read_json, write_json

from slivertune.planning.cards import EFFICIENCY, known_cards

Row = dict[str, Any]


def make_parser(description: str | None, names: Iterable[str]) -> argparse.ArgumentParser:
    """A parser of what all of them take: `rows`, `card`, `efficiency`, `bus_bandwidth`, `quick` and `output`.

    Args:
        description: The script's own.
        names: Of the rows.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=list(names), help="a part; all by default")
    parser.add_argument("--card", choices=sorted(known_cards()), default="4090")
    parser.add_argument("--efficiency", type=float, default=EFFICIENCY, help="share of the peak that is reached")
    parser.add_argument("--bus_bandwidth", type=float, default=25e9, help="bytes a second each way")
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see whether it runs; needs --output")
    parser.add_argument("--output", type=Path)
    return parser


def add_host_bandwidth(parser: argparse.ArgumentParser) -> None:
    """Let the host's memory have a rate."""
    parser.add_argument("--host_bandwidth", type=float, help="bytes a second of the host's memory; no bound by default")


def open_result(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, file_name: str, about: dict[str, Any], others: str
) -> tuple[Path, dict[str, Any]]:
    """Where the result goes, and what is there; ends the program where a trial or other settings would go into it.

    Args:
        parser: Says why.
        arguments: What it read, with `quick` and `output`.
        file_name: Of the result, unless `--output` names another file.
        about: What has to be the same for all of a file.
        others: What the file has if it has not the same, before the values.
    """
    if arguments.quick and arguments.output is None:
        parser.error("--quick needs --output FILE: a trial is not written among the results")
    output = arguments.output or RESULTS / file_name
    kept = read_json(output)
    if kept and {name: kept[name] for name in about} != about:
        parser.error(f"{output} has {others} {[kept[name] for name in about]}; name another --output")
    return output, kept


def simulate_rows(
    parser: argparse.ArgumentParser,
    arguments: argparse.Namespace,
    file_name: str,
    names: Sequence[str],
    about: dict[str, Any],
    simulate: Callable[[str], Row],
    summary: Callable[[list[Row]], dict[str, Any]] = lambda rows: {},
) -> list[Row]:
    """Simulate the rows that were asked for, and write the result after each; the others stay in the file.

    Args:
        parser: Ends the program where the file was made otherwise.
        arguments: What it read.
        file_name: Of the result, unless `--output` names another file.
        names: Of all rows, in order.
        about: What has to be the same for all rows of a file.
        simulate: Makes a row, with its `name`.
        summary: Of all rows that are there; stands in the file as well.

    Returns:
        All rows that are there, in order.
    """
    output, kept = open_result(parser, arguments, file_name, about, "rows of other rates,")
    by_name: dict[str, Row] = {row["name"]: row for row in kept.get("rows", [])}
    for name in names:
        if arguments.rows is None or name in arguments.rows:
            by_name[name] = simulate(name)
            rows = [by_name[each] for each in names if each in by_name]
            write_json(output, {"environment": record_environment(), **about, **summary(rows), "rows": rows})
            print(name, "done", flush=True)
    return [by_name[each] for each in names if each in by_name]
