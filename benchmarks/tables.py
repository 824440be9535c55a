"""The tables and pictures of the pages, made from the files under `results/`.

    python benchmarks/tables.py              # prints the tables
    python benchmarks/tables.py --write      # puts them into the pages, in place of what stands between their markers
    python benchmarks/tables.py --draw       # draws the pictures
    python benchmarks/tables.py --figures    # prints what the pictures show, as JSON

Nothing is trained or planned.
"""

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import evidence
import measured
import method_tables
import pictures
import plan_speeds
from result_files import kept, write_picture

CHECKOUT = Path(__file__).resolve().parents[1]
TABLES: dict[str, tuple[tuple[str, ...], Callable[[], str]]] = {
    "measured": (("README.md",), measured.table),
    "dial": (("README.md", "docs/hift.md"), method_tables.dial),
    "waiting": (("docs/hift.md",), method_tables.waiting),
    "sft": (("docs/sft.md",), method_tables.sft),
    "sft-in-chunks": (("docs/sft.md",), method_tables.sft_in_chunks),
    "tokentune": (("docs/tokentune.md",), method_tables.tokentune),
    "token-gradients": (("docs/tokentune.md", "docs/evidence.md"), method_tables.token_gradients),
    "ranks": (("docs/ranks.md",), method_tables.sent_by_ranks),
    "plan-time": (("docs/plan.md",), method_tables.plan_time),
    "plan-speeds": (("docs/plan.md",), lambda: plan_speeds.table(kept("plan_speeds")["groups"])),
    "ways": (("docs/which-method.md",), method_tables.ways),
    "evidence-rows": (("docs/evidence.md",), evidence.rows_table),
    "evidence": (("docs/evidence.md",), evidence.quality_table),
    "evidence-claims": (("docs/evidence.md",), evidence.claims_table),
    "evidence-ideas": (("docs/evidence.md",), evidence.ideas_table),
    "evidence-map": (("docs/evidence.md",), evidence.map_table),
    "evidence-time": (("docs/evidence.md",), evidence.time_table),
}
"""By the name in its markers: the pages that have it, and what makes it."""
PICTURES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "measured.png": (measured.picture, pictures.draw_measured),
    "evidence.png": (evidence.figures, lambda shown: pictures.draw_evidence(shown, evidence.TASKS)),
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
    """Print or write the tables, or draw the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_mutually_exclusive_group()
    actions.add_argument("--write", action="store_true", help="replace the tables in the pages")
    actions.add_argument("--draw", action="store_true", help="replace the pictures in docs/images")
    actions.add_argument("--figures", action="store_true", help="print what the pictures show")
    arguments = parser.parse_args()
    if arguments.figures:
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
