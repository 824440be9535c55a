"""The tables of the pages, made from the files under `results/`, each between its markers as it stands in the pages.

python benchmarks/tables.py            # prints them
python benchmarks/tables.py --write    # puts them into the pages, in place of what stands between their markers
"""

import argparse
import re
from collections.abc import Callable
from pathlib import Path

import cost_tables
import curve
import dial_table
import evidence
import host_weights
import measured
import plan_speeds
import plan_time
import schedule
import waiting
import ways_table
from result_files import RESULTS, read_json

CHECKOUT = Path(__file__).resolve().parents[1]


def _dial(task: str) -> str:
    return dial_table.details(task, read_json(RESULTS / "dial.json")[task])


TABLES: dict[str, tuple[tuple[str, ...], Callable[[], str]]] = {
    "measured": (("README.md",), measured.table),
    "dial": (("README.md", "docs/hift.md"), lambda: dial_table.summary(read_json(RESULTS / "dial.json"))),
    "dial-language": (("benchmarks/README.md",), lambda: _dial("language")),
    "dial-sst2": (("benchmarks/README.md",), lambda: _dial("sst2")),
    "waiting": (("docs/hift.md",), lambda: waiting.table(read_json(RESULTS / "waiting.json"))),
    "sft": (("docs/sft.md",), cost_tables.sft),
    "sft-in-chunks": (("docs/sft.md",), cost_tables.sft_in_chunks),
    "tokentune": (("docs/tokentune.md",), cost_tables.tokentune),
    "token-gradients": (("docs/tokentune.md", "docs/evidence.md"), cost_tables.token_gradients),
    "ranks": (("docs/ranks.md",), cost_tables.sent_by_ranks),
    "plan-time": (("docs/plan.md",), lambda: plan_time.table(read_json(RESULTS / "plan_time.json")["rows"])),
    "plan-speeds": (("docs/plan.md",), lambda: plan_speeds.table(read_json(RESULTS / "plan_speeds.json")["groups"])),
    "ways": (("docs/which-method.md",), lambda: ways_table.table(read_json(RESULTS / "ways_8b_4090.json"))),
    "curve": (("benchmarks/README.md",), lambda: curve.table(read_json(RESULTS / "curve.json"))),
    "evidence-rows": (("docs/evidence.md",), evidence.rows_table),
    "evidence": (("docs/evidence.md",), evidence.quality_table),
    "evidence-claims": (("docs/evidence.md",), evidence.claims_table),
    "evidence-ideas": (("docs/evidence.md",), evidence.ideas_table),
    "evidence-map": (("docs/evidence.md",), evidence.map_table),
    "evidence-time": (("docs/evidence.md",), evidence.time_table),
    "schedule": (("benchmarks/README.md",), lambda: schedule.table(read_json(RESULTS / "schedule.json")["rows"])),
    "host-weights": (
        ("benchmarks/README.md",),
        lambda: host_weights.table(read_json(RESULTS / "host_weights.json")["rows"]),
    ),
}
"""By the name in its markers: the pages that have it, and what makes it."""


def between_markers(name: str, text: str) -> str:
    """A text as a page has it: `name` in the comments around it."""
    return f"<!-- {name} -->\n{text}\n<!-- /{name} -->\n"


def replace_between_markers(path: Path, name: str, text: str) -> None:
    """Put `text` in place of what a page has between the markers of `name`.

    Raises:
        ValueError: If the page does not have the markers exactly once.
    """
    page = path.read_text(encoding="utf-8")
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if len(pattern.findall(page)) != 1:
        raise ValueError(f"{path} must have {begin.strip()} and {end.strip()} once; put both where the table belongs")
    path.write_text(pattern.sub(lambda match: between_markers(name, text), page), encoding="utf-8")


def main() -> None:
    """Print the tables, or write them into the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace the tables in the pages")
    arguments = parser.parse_args()
    for name, (pages, make) in TABLES.items():
        text = make()
        if not arguments.write:
            print(between_markers(name, text))
            continue
        for each in pages:
            replace_between_markers(CHECKOUT / each, name, text)


if __name__ == "__main__":
    main()
