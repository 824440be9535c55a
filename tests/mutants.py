"""Change one thing in the package at a time, and print whether the tests of `make test` notice.

    python -m tests.mutants                          # 40 mutants of HEAD
    python -m tests.mutants --base 3e617b7           # survivors are tried in that commit, by its tests
    python -m tests.mutants --seed 7 --num 6 --folders hift sft
    python -m tests.mutants --skip 18                # a run that was stopped after 18 goes on

Lines are drawn by the seed among those that both commits have, and one comparison, operator, constant or call of each
is changed. A mutant is killed when a test of its folder or one of `tests/test_*.py` fails, hangs or can't be imported.
Both commits are cloned: the checkout stays as it is, and what is not committed has no part. Without mutants all tests
have to pass; a test that fails by itself kills every mutant, and is printed beside each.
"""

import argparse
import ast
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

CHECKOUT = Path(__file__).resolve().parents[1]
PACKAGE = Path("integrations/slivertune")
_PAIRS = [("Lt", "LtE"), ("Gt", "GtE"), ("Eq", "NotEq"), ("Is", "IsNot"), ("In", "NotIn"), ("And", "Or")]
_PAIRS += [("Add", "Sub"), ("Mult", "FloorDiv")]
SWAPPED = {**dict(_PAIRS), **{other: one for one, other in _PAIRS}, "Div": "Mult", "Mod": "Mult", "Pow": "Mult"}
"""Operators by the names of their classes in `ast`, and their substitutes."""


class Line(NamedTuple):
    """A line by the functions around it and the number of its likes before it, so that two commits can share it."""

    path: str
    within: str
    text: str
    index: int


class Mutant(NamedTuple):
    """An expression of a file, by the offsets of its bytes, and its substitute."""

    row: int
    start: int
    end: int
    old: str
    new: str

    def applied(self, source: bytes) -> bytes:
        """Return the file with the substitute."""
        return source[: self.start] + self.new.encode() + source[self.end :]


def mutants_of(path: Path, checkout: Path) -> dict[Line, list[Mutant]]:
    """Find the mutants of each line of a file, whose path is relative to the checkout."""
    source = (checkout / path).read_bytes()
    rows = source.splitlines(keepends=True)
    starts, tree = [sum(map(len, rows[:row])) for row in range(len(rows))], ast.parse(source)
    lines = _lines(str(path), tree, rows)
    found: dict[Line, list[Mutant]] = {}
    for node in _expressions(tree):
        row, start, end = node.lineno - 1, node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        old = ast.unparse(node)
        if (new := _changed(node)) is not None:
            found.setdefault(lines[row], []).append(Mutant(row + 1, starts[row] + start, end, old, f"({new})"))
    return found


def _lines(path: str, tree: ast.Module, rows: list[bytes]) -> list[Line]:
    within = [""] * len(rows)
    for node in ast.walk(tree):  # the outer ones come first
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for row in range(node.lineno - 1, node.end_lineno or node.lineno):
                within[row] += f".{node.name}"
    places = list(zip(within, (row.decode().strip() for row in rows), strict=True))
    return [Line(path, *place, places[:row].count(place)) for row, place in enumerate(places)]


def _expressions(node: ast.AST) -> Iterator[Any]:
    """Yield all expressions but annotations, docstrings and the parts of f-strings, whose offsets Python 3.11 lacks."""
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            is_docstring = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            if name in ("annotation", "returns") or is_docstring or isinstance(child, ast.JoinedStr):
                continue
            if isinstance(child, ast.expr):
                yield child
            if isinstance(child, ast.AST):
                yield from _expressions(child)


def _changed(node: Any) -> str | None:
    """Return the source of the substitute; None if there is nothing to change. Sentences are left alone."""
    kind = type(node.ops[0] if isinstance(node, ast.Compare) else getattr(node, "op", None)).__name__
    if kind in SWAPPED:
        swapped = getattr(ast, SWAPPED[kind])()
        _ = node.ops.__setitem__(0, swapped) if isinstance(node, ast.Compare) else setattr(node, "op", swapped)
        return ast.unparse(node)
    if isinstance(node, ast.UnaryOp):
        return ast.unparse(node.operand)
    if isinstance(node, ast.Call):
        return ast.unparse(node.args[0]) if node.args else "None"
    value = getattr(node, "value", None) if isinstance(node, ast.Constant) else None
    if isinstance(value, bool):
        return str(not value)
    if isinstance(value, int | float):
        return repr(value + 1)
    return repr(value + "x") if isinstance(value, str) and " " not in value else None


def drawn(checkouts: list[Path], seed: int, num_mutants: int, folders: list[str]) -> list[tuple[Line, list[Mutant]]]:
    """Draw lines that all checkouts have, of these folders or of all; return each with its mutant by checkout."""
    draw, known = random.Random(seed), []
    for checkout in checkouts:
        paths = sorted(path.relative_to(checkout) for path in (checkout / PACKAGE).rglob("*.py"))
        chosen = [path for path in paths if not folders or _folder(path) in folders]
        known.append({line: mutants for path in chosen for line, mutants in mutants_of(path, checkout).items()})
    common = [line for line in sorted(known[0]) if all(line in each for each in known)]
    found: list[tuple[Line, list[Mutant]]] = []
    for line in draw.sample(common, len(common)):
        index = draw.randrange(len(known[0][line]))
        same = [each[line][index] for each in known if len(each[line]) == len(known[0][line])]
        if len(same) < len(checkouts) or len({(mutant.old, mutant.new) for mutant in same}) > 1:
            continue
        with suppress(SyntaxError):
            compile(same[0].applied((checkouts[0] / line.path).read_bytes()), line.path, "exec")
            found.append((line, same))
        if len(found) == num_mutants:
            break
    return found


def _folder(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0]


def killer_of(checkout: Path, path: Path, mutant: Mutant, num_workers: int) -> str | None:
    """Run the tests over a mutant of a clone's file; return the first that failed, None if all passed."""
    before = (checkout / path).read_bytes()
    (checkout / path).write_bytes(mutant.applied(before))
    files = sorted((checkout / "tests").glob("test_*.py"))
    whole = [f"tests/{each.name}" for each in files if each.name != "test_types.py"]  # no behaviour
    folder = f"tests/{_folder(path)}"
    try:
        killer = _run(checkout, [folder], num_workers) if (checkout / folder).is_dir() else None
        return killer or _run(checkout, whole, num_workers)
    finally:
        (checkout / path).write_bytes(before)


def _run(checkout: Path, paths: list[str], num_workers: int) -> str | None:
    environment = {
        "OMP_NUM_THREADS": "1",
        "SLIVERTUNE_TEST_DATA": str(CHECKOUT.parent / "shared" / "data"),
        **os.environ,
        "PYTHONPATH": f"{checkout / 'integrations'}{os.pathsep}{checkout}",
        "PYTHONDONTWRITEBYTECODE": "1",  # a changed file of the same second and size would be taken from its cache
    }
    options = f"-q -x -p no:cacheprovider --dist loadscope -n {num_workers}".split()
    command = ["timeout", "3600", sys.executable, "-m", "pytest", *options, "-m", "not slow", *paths]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    reason = failed[1] if failed else f"exit code {done.returncode}: {(done.stderr or done.stdout)[-200:]}"
    return reason if done.returncode else None


def main() -> int:
    """Run the mutants that the command line asks for; return 1 if one survives that the base kills."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base", help="hash of a commit in which those that survive are tried, too")
    parser.add_argument("--seed", type=int, default=31, help="decides which lines are drawn")
    parser.add_argument("--num", type=int, default=40, help="mutants")
    parser.add_argument("--skip", type=int, default=0, help="mutants of these that an earlier run has tried, the first")
    parser.add_argument("--folders", nargs="*", default=[], help="folders of the package to draw from; all without")
    parser.add_argument("--workers", type=int, default=2, help="test processes")
    arguments = parser.parse_args()
    commits, worse = ["HEAD", *([arguments.base] if arguments.base else [])], 0
    with tempfile.TemporaryDirectory(prefix="slivertune-mutants-") as folder:
        checkouts = [_cloned(commit, Path(folder) / str(index)) for index, commit in enumerate(commits)]
        for line, mutants in drawn(checkouts, arguments.seed, arguments.num, arguments.folders)[arguments.skip :]:
            print(f"{line.path}:{mutants[0].row} {mutants[0].old} -> {mutants[0].new}", flush=True)
            killer = None
            for commit, checkout, mutant in zip(commits, checkouts, mutants, strict=True):
                killer = killer_of(checkout, Path(line.path), mutant, arguments.workers)
                print(f"    {commit}: {f'killed by {killer}' if killer else 'SURVIVED'}", flush=True)
                if killer is not None:
                    worse += commit != "HEAD"
                    break
    print(f"{worse} of them are killed in the base alone")
    return int(worse > 0)


def _cloned(commit: str, folder: Path) -> Path:
    subprocess.run(["git", "clone", "--quiet", "--shared", "--no-checkout", str(CHECKOUT), str(folder)], check=True)
    subprocess.run(["git", "-C", str(folder), "checkout", "--quiet", "--detach", commit], check=True)
    return folder


if __name__ == "__main__":
    sys.exit(main())
