"""Folders as runs leave them, written by hand."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS: dict[str, Any] = {
    "method": "hift",
    "model": "some/model",
    "dataset": "rows.csv",
    "num_steps": 30,
    "command": ["slivertune", "train"],
    "before": {"eval_loss": 3.0},
    "after": {"eval_loss": 0.5},
    "best_checkpoint": None,
    "settings": {"num_groups": 4},
    "planned_update": {"tokens_per_second": 900.0},
    "planned_peak_bytes": 9_000_000,
    "measured_peak_bytes": 8_000_000,
    "planned_host_bytes": 5_000_000,
    "planned_disk_bytes": 0,
    "highest_bytes": {"host": 4_000_000, "disk": 0},
}


def line(step: int, **more: Any) -> dict[str, Any]:
    """One of the log, with values that no other step has."""
    return {
        "loss": 2 + 1 / step,
        "grad_norm": 0.1 * step,
        "learning_rate": 1e-3 / step,
        "hift/scheduled_lr": 2e-3 / step,
        "hift/group": step // 10 % 4,
        "memory/state_device_bytes": 0,
        "memory/state_host_bytes": 100_000 * step,
        "memory/state_disk_bytes": 0,
        "tokens_per_second": 800 + step,
        "epoch": step / 10,
        "step": step,
        **more,
    }


def evaluation(step: int, loss: float) -> dict[str, Any]:
    return {"eval_loss": loss, "eval_runtime": 1.0, "epoch": step / 10, "step": step}


LOG = [line(10), evaluation(10, 2.5), line(20), evaluation(20, 1.5), line(30)]


def write_state(folder: Path, log: Sequence[Any], step: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "trainer_state.json"
    path.write_text(json.dumps({"global_step": step, "log_history": list(log)}), encoding="utf-8")
    return path


def write_run(folder: Path, log: Sequence[Any] = LOG, step: int = 30, **changes: Any) -> Path:
    """A run that has ended."""
    write_state(folder, log, step)
    (folder / "results.json").write_text(json.dumps({**RESULTS, **changes}), encoding="utf-8")
    return folder
