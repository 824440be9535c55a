"""The tables and pictures of the pages, made from the files under `results/`.

python benchmarks/tables.py              # prints the tables
python benchmarks/tables.py --write      # puts them into the pages, in place of what stands between their markers
python benchmarks/tables.py --draw       # draws the pictures
python benchmarks/tables.py --figures    # prints what the pictures show, as JSON
python benchmarks/tables.py --plan       # plans the times of docs/evidence.md's map anew; half an hour
"""

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import evidence_tables
import measured
import method_tables
import pictures
import plan_memory
import plan_speeds
import planned_map
from result_files import kept, write_picture

CHECKOUT = Path(__file__).resolve().parents[1]


def _of(name: str, make: Callable[[dict[str, Any]], str]) -> Callable[[], str]:
    """Make a table of a kept result."""
    return lambda: make(kept(name))


TABLES: dict[str, tuple[tuple[str, ...], Callable[[], str]]] = {
    "measured": (("README.md",), measured.table),
    "measured-hift": (("docs/hift.md",), measured.hift_table),
    "speeds": (("docs/hift.md",), measured.speeds_table),
    "features": (("docs/hift.md",), measured.features_table),
    "decision": (
        ("README.md", "docs/which-method.md", "docs/evidence.md"),
        lambda: (CHECKOUT / "benchmarks" / "decision.md").read_text(encoding="utf-8").rstrip("\n"),
    ),
    "dial": (("docs/hift.md",), _of("dial", method_tables.dial)),
    "waiting": (("docs/hift.md",), _of("waiting", method_tables.waiting)),
    "sft": (("docs/sft.md",), _of("sft", method_tables.sft)),
    "sft-in-chunks": (("docs/sft.md",), _of("sft", method_tables.sft_in_chunks)),
    "tokentune": (("docs/tokentune.md",), _of("tokentune", method_tables.tokentune)),
    "token-gradients": (
        ("docs/tokentune.md", "docs/evidence.md"),
        _of("token_gradients", method_tables.token_gradients),
    ),
    "ranks": (("docs/ranks.md",), _of("ranks", method_tables.sent_by_ranks)),
    "plan-time": (("docs/plan.md",), _of("plan_time", method_tables.plan_time)),
    "plan-speeds": (("docs/plan.md",), _of("plan_speeds", lambda content: plan_speeds.table(content["groups"]))),
    "plan-memory": (("docs/plan.md",), _of("plan_memory", lambda content: plan_memory.table(content["groups"]))),
    "ways": (("docs/which-method.md",), _of("ways_8b_4090", method_tables.ways)),
    "evidence-rows": (("docs/evidence.md",), evidence_tables.rows_table),
    "evidence": (("docs/evidence.md",), evidence_tables.quality_table),
    "evidence-claims": (("docs/evidence.md",), evidence_tables.claims_table),
    "evidence-ideas": (("docs/evidence.md",), evidence_tables.ideas_table),
    "evidence-map": (("docs/evidence.md",), planned_map.map_table),
    "evidence-time": (("docs/evidence.md",), planned_map.time_table),
}
"""By the name in its markers: the pages that have it, and what makes it."""
PICTURES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "fixed_batch.png": (planned_map.fixed_batch, pictures.draw_fixed_batch),
    "evidence.png": (evidence_tables.figures, pictures.draw_evidence),
    "ways_8b_4090.png": (lambda: method_tables.ways_drawn(kept("ways_8b_4090")), pictures.draw_ways),
}
"""By the file in docs/images: what it shows, and what draws that."""


def between_markers(name: str, text: str) -> str:
    """Put `name` in the comments around a text, as a page has it."""
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
    """Print or write the tables, draw the pictures, or plan what the map shows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_mutually_exclusive_group()
    actions.add_argument("--write", action="store_true", help="replace the tables in the pages")
    actions.add_argument("--draw", action="store_true", help="replace the pictures in docs/images")
    actions.add_argument("--figures", action="store_true", help="print what the pictures show")
    actions.add_argument("--plan", action="store_true", help="plan the map's times by `slivertune plan --json`")
    arguments = parser.parse_args()
    if arguments.plan:
        planned_map.plan_points()
    elif arguments.figures:
        print(json.dumps({name: figures() for name, (figures, _) in PICTURES.items()}, indent=1))
    elif arguments.draw:
        for name, (figures, draw) in PICTURES.items():
            shown = figures()
            write_picture(CHECKOUT / "docs" / "images" / name, draw(shown), shown)
    else:
        for name, (pages, make) in TABLES.items():
            text = make()
            if not arguments.write:
                print(between_markers(name, text))
                continue
            for each in pages:
                replace_between_markers(CHECKOUT / each, name, text)


if __name__ == "__main__":
    main()
