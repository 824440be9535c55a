"""Whether two commits train with the same bits: losses and final weights of every method on every layout.

Each commit is checked out into a worktree of its own, and trains a tiny Llama in bf16 on CPUs, alone and on two ranks
under DDP, FSDP2 and ZeRO-1, 2 and 3, with clipping, and most cells with accumulation; `same_bits_run.py` has the table
of methods and settings. What the new commit refuses the old one must refuse, too.

    python benchmarks/same_bits.py main~3 main                    # all cells, two cores, twelve minutes
    python benchmarks/same_bits.py main~3 main --layouts single --output trial.json

The exit status is 1 if any cell differs.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from environment import record_environment
from result_files import RESULTS, write_json

CHECKOUT = Path(__file__).parents[1]
Cells = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", help="a commit")
    parser.add_argument("new", help="another")
    parser.add_argument("--layouts", nargs="+", default=[], help="all of them by default")
    parser.add_argument("--methods", nargs="+", default=[], help="all of them by default")
    parser.add_argument("--output", type=Path, default=RESULTS / "same_bits.json")
    options = parser.parse_args()
    chosen = ["--layouts", *options.layouts] if options.layouts else []
    chosen += ["--methods", *options.methods] if options.methods else []
    commits = {name: resolve(name) for name in (options.old, options.new)}
    found = [run(commits[name], chosen) for name in (options.old, options.new)]
    old, new = found
    refused = [{cell for cell, ranks in each.items() if any("refused" in one for one in ranks)} for each in found]
    accepted = sorted(refused[0] - refused[1])
    different = [cell for cell in differing(old, new) if cell not in accepted]
    write_json(
        options.output,
        {
            "old": commits[options.old],
            "new": commits[options.new],
            "environment": record_environment(),
            "num_cells": len(new),
            "refused": sorted(refused[1]),
            "accepted": accepted,
            "different": different,
        },
    )
    same = len(new) - len(different) - len(accepted)
    print(f"{same} of {len(new)} cells have the same bits, {len(accepted)} were refused before; {options.output}")
    for cell in different:
        print(f"different: {cell}")
    return 1 if different else 0


def differing(old: Cells, new: Cells) -> list[str]:
    """Cells whose losses, weights or refusals are not the same, and those that only one has."""
    return sorted(cell for cell in old.keys() | new.keys() if old.get(cell) != new.get(cell))


def run(commit: str, chosen: list[str]) -> Cells:
    """Return the bits that a commit computes."""
    with worktree(commit) as folder:
        output = folder / "same_bits.json"
        source = folder / "integrations"
        command = [sys.executable, str(Path(__file__).with_name("same_bits_run.py")), str(output), *chosen]
        print(f"{commit[:12]} ...", flush=True)
        subprocess.run(
            [*command, "--source", str(source)], check=True, env={**os.environ, "PYTHONPATH": str(source)}, cwd=folder
        )
        return dict(json.loads(output.read_text(encoding="utf-8")))


@contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """Make a folder with a commit's files."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "checkout"
        git("worktree", "add", "--detach", str(folder), commit)
        try:
            yield folder
        finally:
            git("worktree", "remove", "--force", str(folder))


def resolve(name: str) -> str:
    return git("rev-parse", "--verify", f"{name}^{{commit}}").strip()


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, cwd=CHECKOUT, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
