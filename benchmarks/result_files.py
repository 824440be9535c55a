"""Result files under `results/`, and pictures of them: written aside and renamed, so that a stop loses nothing."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slivertune.core.atomic import atomic_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESULTS = Path(__file__).parent / "results"
MIB, GIB = 2**20, 2**30


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replace `path` by `content` in one move; its folder is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """Read what the file holds; nothing if there is none yet."""
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def kept(name: str) -> dict[str, Any]:
    """Read a result that is kept under `results/`, by its name without `.json`."""
    return read_json(RESULTS / f"{name}.json")


def write_picture(path: Path, figure: "Figure", shown: Any) -> None:
    """Replace a PNG in one move; it carries what it shows.

    Args:
        path: The PNG.
        figure: What was drawn.
        shown: Its figures, plain JSON.
    """
    with atomic_file(path) as temporary:
        figure.savefig(temporary, dpi=192, metadata={"Description": json.dumps(shown)})
