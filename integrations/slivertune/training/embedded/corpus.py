"""Text that every Python carries: docstrings of its standard library, and the language reference of `help()`."""

import ast
import hashlib
import re
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets

_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3", "__pycache__"}
)
_SHORTEST_DOCSTRING = 32
_EVALUATED_TOPICS = 8
"""Number of topics of which one is held out for evaluation."""


def collect_docstrings(root: Path | None = None) -> list[str]:
    """Read the docstrings of all modules, classes and functions, without importing anything.

    Args:
        root: Folder to read. The default is this Python's standard library. Installed packages and tests are skipped.

    Returns:
        Distinct docstrings of at least 32 characters, in an order that depends only on their text.

    Raises:
        RuntimeError: If there is no docstring under the folder.
    """
    folder = stdlib_folder() if root is None else root
    docstrings = {text for _, tree in parse_modules(folder) for text in _docstrings_of(tree)}
    if not docstrings:
        raise RuntimeError(
            f"no docstrings under {folder}: this Python comes without its library's sources, so the embedded base "
            "model can't be trained. Name a model with --model_name_or_path"
        )
    return sorted(docstrings, key=_shuffled)


def stdlib_folder() -> Path:
    """Return the folder of this Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def parse_modules(folder: Path) -> Iterator[tuple[Path, ast.Module]]:
    """Parse all modules under a folder in the order of their paths, except installed packages and tests.

    Args:
        folder: Folder such as the standard library's.

    Yields:
        Path of a module under the folder, and its syntax tree.
    """
    for path in sorted(folder.rglob("*.py")):
        place = path.relative_to(folder)
        if not _SKIPPED_FOLDERS.intersection(place.parts) and (tree := _parse(path)) is not None:
            yield place, tree


def reference_splits() -> Any:
    """Load the Python language reference, as shipped for `help()`.

    Returns:
        A `datasets.DatasetDict` with `train` and `eval` (one topic in eight, chosen by name), one topic per row in the
        column `text`.

    Raises:
        RuntimeError: If this Python comes without it.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise RuntimeError(
            "this Python comes without pydoc_data.topics, the language reference. Name data with --dataset"
        ) from error
    texts = [topics[name].strip() for name in sorted(topics, key=_shuffled)]
    num_held_out = len(texts) // _EVALUATED_TOPICS
    return datasets.DatasetDict(
        train=datasets.Dataset.from_dict({"text": texts[num_held_out:]}),
        eval=datasets.Dataset.from_dict({"text": texts[:num_held_out]}),
    )


def _parse(path: Path) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            # A stray backslash in a library's source does not concern the user.
            warnings.simplefilter("ignore")
            return ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError):
        # The library has a few files that are broken or oddly encoded on purpose.
        return None


def _docstrings_of(tree: ast.Module) -> list[str]:
    found = (
        ast.get_docstring(node)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
    )
    texts = [text for text in found if text is not None and len(text) >= _SHORTEST_DOCSTRING]
    # Some docstrings quote half of a surrogate pair, which can't be encoded.
    return [text for text in texts if not re.search(r"[\ud800-\udfff]", text)]


def _shuffled(text: str) -> str:
    # A hash mixes long with short and module with module, in the same way on every machine.
    return hashlib.sha256(text.encode()).hexdigest()
