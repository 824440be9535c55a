"""Result files under `results/`: written to a temporary file and renamed, so that a stop in mid-write loses nothing."""

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replace `path` by `content` in one move; its folder is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".partial")
    temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """What the file holds; nothing if there is none yet."""
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}
