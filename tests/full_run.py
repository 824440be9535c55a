"""`make test-all`: every test, in parts, and the record of it in `tests/last_full_run.json`.

    python -m tests.full_run                # all parts, and a new record
    python -m tests.full_run ranks training # these parts, beside what the record has of the same tree

Only a clean tree is run, and the record names its hash, without the record itself. It is committed alone, on top of the
commit that was run. Parts may be run one after another, also on several machines, with a commit of the record after
each.
"""

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from slivertune.core.atomic import write_json

CHECKOUT = Path(__file__).resolve().parents[1]
RECORD = Path("tests/last_full_run.json")
PARTS: dict[str, tuple[str, ...]] = {
    "methods": (
        "chunked_loss",
        "core",
        "deltas",
        "gpu",
        "helpers",
        "hift",
        "parked",
        "pretended_cuda",
        "second_device",
        "sft",
        "tokentune",
    ),
    "ranks": ("parallel",),
    "planning": ("planning",),
    "training": ("interop", "training"),
    "whole": ("test_*.py",),
    "oldest": (),
}
"""Folders and files of tests by part, each of which takes less than 60 minutes on two cores; "oldest" is all tests that
are not slow, with the oldest versions."""
OLDEST_PYTHON = Path(".venv-oldest/bin/python")


class FullRunError(RuntimeError):
    """The tests can't be run, or the record does not fit the tree."""


def paths_of(part: str, checkout: Path = CHECKOUT) -> list[Path]:
    """What pytest is given for a part, relative to the checkout.

    Args:
        part: A key of `PARTS`.
        checkout: Root of the repository.
    """
    tests = checkout / "tests"
    return sorted(path.relative_to(checkout) for pattern in PARTS[part] for path in tests.glob(pattern))


def command_of(part: str, num_workers: int, checkout: Path = CHECKOUT) -> list[str]:
    """How a part's tests are run.

    Args:
        part: A key of `PARTS`.
        num_workers: Test processes.
        checkout: Root of the repository.

    Raises:
        FullRunError: If the environment of the oldest versions is needed, and is not there.
    """
    options = ["-m", "pytest", "-n", str(num_workers), "--dist", "loadscope", "--no-loadscope-reorder"]
    if part != "oldest":
        return [sys.executable, *options, *map(str, paths_of(part, checkout))]
    python = checkout / OLDEST_PYTHON
    if not python.exists():
        raise FullRunError(f"there is no {OLDEST_PYTHON}; run it by make test-all, which makes it")
    return [str(python), *options, "-m", "not slow"]


def clean_tree(checkout: Path) -> str:
    """The hash of the files of HEAD, but for the record.

    Args:
        checkout: Root of a git repository.

    Returns:
        SHA-256 of git's list of them.

    Raises:
        FullRunError: If a file other than the record differs from HEAD, or is not in it.
    """
    lines = _git(checkout, "status", "--porcelain", "--untracked-files=all").splitlines()
    changed = [line[3:] for line in lines if line[3:] != str(RECORD)]
    if changed:
        raise FullRunError(f"the tree is not clean: {', '.join(changed[:5])}; commit or remove it, then run again")
    return _tree(checkout)


def _tree(checkout: Path) -> str:
    files = _git(checkout, "ls-tree", "-r", "HEAD").splitlines()
    others = [line for line in files if not line.endswith(f"\t{RECORD}")]
    return hashlib.sha256("\n".join(others).encode()).hexdigest()


def run_part(part: str, num_workers: int, checkout: Path = CHECKOUT) -> dict[str, Any]:
    """Run a part's tests.

    Args:
        part: A key of `PARTS`.
        num_workers: Test processes.
        checkout: Root of the repository.

    Returns:
        How many tests passed, failed and were skipped, the seconds that they took, and the processor.

    Raises:
        FullRunError: If pytest ran no test at all, or can't be run.
    """
    command = command_of(part, num_workers, checkout)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        start = time.monotonic()
        subprocess.run([*command, f"--junitxml={report}"], cwd=checkout, check=False)
        seconds = time.monotonic() - start
        if not report.exists():
            raise FullRunError(f"pytest wrote no report of part {part}; see above")
        counts = count_outcomes(report)
    if not sum(counts.values()):
        raise FullRunError(f"pytest ran no test of part {part}; see above")
    return {**counts, "seconds": round(seconds), **_machine()}


def _machine() -> dict[str, Any]:
    import torch

    processor = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores"
    return {"processor": processor, "threads": int(os.environ.get("OMP_NUM_THREADS", "1"))}


def count_outcomes(report: Path) -> dict[str, int]:
    """Tests by outcome.

    Args:
        report: A file of JUnit's XML.

    Returns:
        Numbers under "passed", "failed" (errors too) and "skipped".
    """
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for case in ElementTree.parse(report).iter("testcase"):
        tags = {child.tag for child in case}
        counts["failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"] += 1
    return counts


def check_record(checkout: Path) -> None:
    """Check that a record that was committed last is of the commit before, and without failures.

    Args:
        checkout: Root of a git repository; nothing is checked where its last commit leaves the record alone.

    Raises:
        FullRunError: Naming what does not fit.
    """
    changed = _git(checkout, "diff", "--name-only", "HEAD~1", "HEAD").splitlines()
    if str(RECORD) not in changed:
        return
    if changed != [str(RECORD)]:
        others = ", ".join(name for name in changed if name != str(RECORD))
        raise FullRunError(f"{RECORD} was committed together with {others}; commit it alone, after the run")
    record = json.loads((checkout / RECORD).read_text(encoding="utf-8"))
    tree = _tree(checkout)
    if record["tree"] != tree:
        raise FullRunError(f"{RECORD} is of tree {record['tree']}, and the commit before has {tree}; run make test-all")
    failed = [part for part, counts in record["parts"].items() if counts["failed"]]
    if failed:
        raise FullRunError(f"{RECORD}: parts with failures: {failed}; run make test-all")


def main() -> int:
    """Run what the command line asks for; the exit code is 1 where a test failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all without")
    parser.add_argument("--workers", type=int, default=2, help="test processes")
    arguments = parser.parse_args()
    unknown = [part for part in arguments.parts if part not in PARTS]
    if unknown:
        parser.error(f"unknown part {unknown[0]!r}; the parts are {', '.join(PARTS)}")
    try:
        tree = clean_tree(CHECKOUT)
        record = _record_of(tree)
        for part in arguments.parts or PARTS:
            record["parts"][part] = run_part(part, arguments.workers)
            if clean_tree(CHECKOUT) != tree:
                raise FullRunError("HEAD moved while its tests ran; run them again")
            _write(record)
    except FullRunError as error:
        print(f"tests.full_run: {error}", file=sys.stderr)
        return 2
    for part, counts in record["parts"].items():
        print(f"{part:10}", "  ".join(f"{counts[name]} {name}" for name in ("passed", "failed", "skipped", "seconds")))
    if missing := [part for part in PARTS if part not in record["parts"]]:
        print("not run yet:", ", ".join(missing))
    return int(any(counts["failed"] for counts in record["parts"].values()))


def _record_of(tree: str) -> dict[str, Any]:
    """The record so far, where it is of the same tree; otherwise a new one."""
    path = CHECKOUT / RECORD
    old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return old if old.get("tree") == tree else {"tree": tree, "parts": {}}


def _write(record: dict[str, Any]) -> None:
    record["parts"] = {part: record["parts"][part] for part in PARTS if part in record["parts"]}
    write_json(CHECKOUT / RECORD, record)


def _git(checkout: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(checkout), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise FullRunError(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.rstrip("\n")


if __name__ == "__main__":
    sys.exit(main())
