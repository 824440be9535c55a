"""What others don't document and the library relies on: there, and reached through one file for each library."""

import ast
import importlib
import inspect
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

FILES = {
    "torch": "core/torch_internals.py",
    "transformers": "core/transformers_internals.py",
    "accelerate": "parallel/accelerate_internals.py",
    "deepspeed": "parallel/zero/deepspeed_internals.py",
}
OWN_PREFIX = "_slivertune"
PUBLIC = {"_replace", "_SubParsersAction", "_ArgumentGroup"}
"""Of named tuples, and types of argparse, which documents no other name for them."""


def relied_on(library: str) -> Mapping[str, str]:
    module = importlib.import_module("slivertune." + FILES[library].removesuffix(".py").replace("/", "."))
    names: Mapping[str, str] = module.RELIED_ON
    return names


CASES = [(library, name, why) for library in FILES for name, why in relied_on(library).items()]


@pytest.mark.parametrize(("library", "name", "why"), CASES, ids=[name for _, name, _ in CASES])
def test_it_is_where_the_library_looks_for_it(library: str, name: str, why: str) -> None:
    pytest.importorskip(library)
    assert is_there(name), (
        f"{library} {importlib.import_module(library).__version__} has no {name}, by which slivertune {why}; see "
        f"slivertune/{FILES[library]}"
    )


@pytest.mark.parametrize(
    "name",
    [
        "torch._C._no_such_thing",
        "torch.nn.Module()._no_such_thing",
        "deepspeed.runtime.engine.DeepSpeedEngine#_no_such_thing",
        "torch.no_such_file.thing",
    ],
)
def test_what_has_moved_is_noticed(name: str) -> None:
    assert not is_there(name)


def is_there(name: str) -> bool:
    """Look a dotted name up; `Class()` is an instance, `Class#attribute` is set somewhere in the class."""
    owner, _, attribute = name.partition("#")
    try:
        found = reduce(_member, owner.split("."), None)
    except (AttributeError, ImportError):
        return False
    return (
        not attribute
        or f"self.{attribute} = " in inspect.getsource(found)
        or f"self.{attribute}:" in inspect.getsource(found)
    )


def _member(parent: Any, name: str) -> Any:
    if parent is None:
        return importlib.import_module(name)
    bare = name.removesuffix("()")
    if inspect.ismodule(parent) and not hasattr(parent, bare):
        return importlib.import_module(f"{parent.__name__}.{bare}")
    found = getattr(parent, bare)
    return found() if name.endswith("()") else found


def test_private_names_of_others_stand_in_these_files_alone(checkout: Path) -> None:
    root = checkout / "integrations" / "slivertune"
    texts = {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in root.rglob("*.py")}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    own = {name for tree in trees.values() for name in defined(tree)}
    found = [
        f"{path}:{line} {name}"
        for path, tree in trees.items()
        if path not in FILES.values()
        for line, name in private_names(tree)
        if name not in own | PUBLIC and not name.startswith(OWN_PREFIX)
    ]
    assert found == []


def defined(tree: ast.Module) -> set[str]:
    """Names that a file itself gives: functions, classes, variables, and attributes of `self` and `cls`."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names |= {node.attr} if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls") else set()
    return names


def private_names(tree: ast.Module) -> list[tuple[int, str]]:
    """Attributes and imports with a leading underscore, and where they stand; magic names are not private."""
    names = [(node.lineno, node.attr) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("slivertune"):
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            names += [(node.lineno, part) for part in parts]
    return [(line, name) for line, name in names if name.startswith("_") and not name.startswith("__")]
