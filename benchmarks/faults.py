"""Runs that are ended by SIGKILL at random moments, and what resuming them gives.

A tiny Llama in bf16 is trained on CPUs by HiFT, SFT and TokenTune x HiFT, alone and on two ranks under DDP, FSDP2,
ZeRO-2 and ZeRO-3, all through `slivertune.prepare`, with a checkpoint (`accelerator.save_state`) every three updates,
which is renamed once all ranks have written it. In each cell an undisturbed run counts the calls that forward,
backward, step, save and rename make. A seed draws phase, update and call; there the run is ended, all ranks at once,
and resumed: it must come to the bits of the undisturbed run, from its newest checkpoint or from the start. A save that
was ended in its middle leaves a folder that must not be taken for a whole one: it is loaded, too, and must be named
as damaged or be whole. Then one rank alone is ended: the others must end by themselves.

    OMP_NUM_THREADS=1 python benchmarks/faults.py                                   # all cells, two cores, minutes
    OMP_NUM_THREADS=1 python benchmarks/faults.py --layouts ddp --methods hift --output trial.json

A cell that stands in the result file is not repeated. The exit status is 1 if any run came to something else.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")

# Imported here once, for the runs are forks of this process.
import deepspeed
import faults_run
from environment import record_environment
from faults_run import SAVE_EVERY, UPDATES, Kill
from result_files import RESULTS, read_json, write_json

LAYOUTS = ("single", "ddp", "fsdp2", "zero2", "zero3")
METHODS = ("hift", "sft", "tokentune_hift")
PHASES = ("forward", "backward", "step", "save", "rename")
NUM_RANKS = 2
NUM_KILLS = 2
Cell = tuple[str, str]
Reports = list[dict[str, Any]]
TIMEOUT_S = 120
"""Until ranks count as hung; a collective's own limit is far below."""


class Ended:
    """How the ranks of a run ended: exit statuses, negative for signals, None for one that hung; reports; errors."""

    def __init__(self, folder: Path, statuses: list[int | None], seconds: float) -> None:
        self.statuses, self.seconds = statuses, seconds
        paths = [folder / f"rank-{rank}.json" for rank in range(len(statuses))]
        self.reports = [json.loads(path.read_text(encoding="utf-8")) if path.exists() else None for path in paths]
        logs = [folder / f"rank-{rank}.log" for rank in range(len(statuses))]
        self.logs = [path.read_text(encoding="utf-8", errors="replace") for path in logs]

    def need_reports(self) -> Reports:
        if any(report is None for report in self.reports):
            raise RuntimeError(f"ended with {self.statuses} after {self.seconds:.0f} s:\n" + "\n".join(self.logs))
        return self.reports


def fork(num_ranks: int, work: Callable[..., None], *args: Any, timeout_s: float = TIMEOUT_S) -> Ended:
    """Call `work(rank, num_ranks, folder, *args)` in forks that are one process group, and wait for their ends."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        leader, ranks = 0, []
        sys.stdout.flush()
        for rank in range(num_ranks):
            process = os.fork()
            if process == 0:
                _be_rank(rank, num_ranks, folder, leader, work, args)
            _set_group(process, leader or process)
            leader = leader or process
            ranks.append(process)
        start = time.monotonic()
        statuses = _wait(ranks, start + timeout_s)
        killed = folder / "killed.json"
        if killed.exists():
            shutil.copy(killed, LAST_KILL)
        return Ended(folder, statuses, time.monotonic() - start)


LAST_KILL = Path(tempfile.gettempdir()) / f"slivertune-faults-{os.getpid()}.json"


def _set_group(process: int, group: int) -> None:
    # The process may have done so itself, or have ended.
    with contextlib.suppress(PermissionError, ProcessLookupError):
        os.setpgid(process, group)


def _be_rank(rank: int, num_ranks: int, folder: Path, leader: int, work: Callable[..., None], args: Any) -> None:
    _set_group(0, leader)
    log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    status = 1
    try:
        work(rank, num_ranks, folder, *args)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Engines leave threads behind whose teardown has aborted processes after their work was done.
        os._exit(status)


def _wait(ranks: list[int], deadline: float) -> list[int | None]:
    statuses: dict[int, int | None] = {}
    while len(statuses) < len(ranks) and time.monotonic() < deadline:
        for process in ranks:
            if process not in statuses:
                done, status = os.waitpid(process, os.WNOHANG)
                if done:
                    statuses[process] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    for process in ranks:
        if process not in statuses:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            statuses[process] = None
    return [statuses[process] for process in ranks]


def draw(seed: str, calls: dict[str, dict[str, int]], num_ranks: int, *, everyone: bool) -> Kill:
    """Draw a moment of a run whose calls were counted."""
    source = random.Random(seed)
    phase = source.choice(PHASES)
    saved = phase in ("save", "rename")
    update = source.choice(range(SAVE_EVERY, UPDATES, SAVE_EVERY)) if saved else source.randint(1, UPDATES)
    call = source.randint(1, max(1, calls[phase][str(update)]))
    # Rank 0 renames.
    rank = 0 if phase == "rename" else source.randrange(num_ranks)
    return Kill(phase=phase, update=update, call=call, rank=rank, everyone=everyone)


def kill_and_resume(cell: Cell, num_ranks: int, kill: Kill, straight: Reports) -> dict[str, Any]:
    """End a run, load what its save left half, resume it, and compare."""
    LAST_KILL.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as name:
        checkpoints = Path(name)
        ended = fork(num_ranks, faults_run.train, checkpoints, cell, kill)
        outcome: dict[str, Any] = {**asdict(kill), "statuses": ended.statuses}
        if not LAST_KILL.exists():
            raise RuntimeError(f"{cell} was not ended at {kill}: {ended.statuses}\n" + "\n".join(ended.logs))
        outcome.update(json.loads(LAST_KILL.read_text(encoding="utf-8")))
        if not kill.everyone:
            outcome["others_ended"] = None not in ended.statuses
            outcome["seconds"] = round(ended.seconds, 1)
        partial = next(checkpoints.glob("partial-*"), None)
        if partial is not None and not any(partial.rglob("*")):
            partial = None  # nothing was written yet
        outcome["half_saved"] = None if partial is None else load_half(cell, num_ranks, partial, straight)
        resumed = fork(num_ranks, faults_run.train, checkpoints, cell, None).need_reports()
        outcome["resumed_from"] = resumed[0]["start"]
        outcome["same_bits"] = are_same(resumed, straight)
        outcome["passed"] = (
            outcome["same_bits"] and outcome.get("others_ended", True) and is_named_or_whole(outcome["half_saved"])
        )
        return outcome


def load_half(cell: Cell, num_ranks: int, partial: Path, straight: Reports) -> str:
    """Load a folder whose save was ended; return the error of each rank, "whole", or "another run"."""
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name) / partial.name.replace("partial-", "checkpoint-")
        shutil.copytree(partial, copy)
        found = fork(num_ranks, faults_run.load, copy, cell)
        refused = [report["refused"] if report else "ended by itself" for report in found.reports]
        if any(refused):
            return " | ".join(str(each).splitlines()[0].replace(name, "FOLDER")[:300] for each in refused)
        resumed = fork(num_ranks, faults_run.train, Path(name), cell, None).need_reports()
        return "whole" if are_same(resumed, straight) else "another run"


def is_named_or_whole(half_saved: str | None) -> bool:
    """Whether the folder of an ended save was whole after all, or every rank named it as damaged."""
    if half_saved in (None, "whole"):
        return True
    return all("DamagedCheckpointError" in each and "FOLDER" in each for each in half_saved.split(" | "))


def are_same(resumed: Reports, straight: Reports) -> bool:
    """Whether every rank has the weights of the undisturbed run, and had its losses on the way."""
    return all(
        one["weights"] == other["weights"] and one["losses"].items() <= other["losses"].items()
        for one, other in zip(resumed, straight, strict=True)
    )


def run_cell(layout: str, method: str, *, seed: int, num_kills: int) -> dict[str, Any]:
    """All kills of one layout and method."""
    cell, num_ranks = (layout, method), 1 if layout == "single" else NUM_RANKS
    with tempfile.TemporaryDirectory() as name:
        straight = fork(num_ranks, faults_run.train, Path(name), cell, None).need_reports()
    kills = []
    for index in range(num_kills + (num_ranks > 1)):
        everyone = index < num_kills
        kill = draw(f"{seed}/{layout}/{method}/{index}", straight[0]["calls"], num_ranks, everyone=everyone)
        kills.append(kill_and_resume(cell, num_ranks, kill, straight))
        last = kills[-1]
        outcome = "passed" if last["passed"] else "FAILED"
        print(f"{layout:7}{method:15}{kill.phase:9}update {kill.update:2}  from {last['resumed_from']:2}  {outcome}")
    return {"kills": kills, "passed": all(kill["passed"] for kill in kills)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="layouts to run")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="methods to run")
    parser.add_argument("--kills", type=int, default=NUM_KILLS, help="runs to end in each cell, all ranks at once")
    parser.add_argument("--seed", type=int, default=0, help="draws the moments")
    parser.add_argument("--output", type=Path, default=RESULTS / "faults.json", help="where to write")
    options = parser.parse_args()
    # Its shared-memory collectives would be compiled first, for a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    content = read_json(options.output)
    content.update(num_ranks=NUM_RANKS, updates=UPDATES, save_every=SAVE_EVERY)
    cells = content.setdefault("cells", {})
    for layout in options.layouts:
        for method in options.methods:
            name = f"{layout}/{method}"
            if name in cells and cells[name]["seed"] == options.seed and cells[name]["passed"]:
                continue
            found = run_cell(layout, method, seed=options.seed, num_kills=options.kills)
            cells[name] = {"seed": options.seed, "environment": record_environment(), **found}
            write_json(options.output, content)
    failed = [name for name, cell in cells.items() if not cell["passed"]]
    num_kills = sum(len(cell["kills"]) for cell in cells.values())
    print(f"{num_kills} kills in {len(cells)} cells; failed: {', '.join(failed) or 'none'}")
    halves = [kill["half_saved"] for cell in cells.values() for kill in cell["kills"] if kill["half_saved"]]
    refused = [each for each in halves if each not in ("whole", "another run")]
    named = [each for each in refused if "FOLDER" in each]
    print(f"{len(halves)} folders of ended saves: {len(refused)} refused, {len(named)} of them with the folder's name")
    LAST_KILL.unlink(missing_ok=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
