"""Half an hour on a real GPU: three parts of at most eight minutes, each of which goes on where it was cut off.

    python benchmarks/gpu.py campaign --part 1   # what no CPU can tell, then tests/gpu, the likeliest failures first
    python benchmarks/gpu.py campaign --part 2   # waits of the host by optimizer, Llama-2-7B whole
    python benchmarks/gpu.py campaign --part 3   # each memory feature once, ways in 24 GiB, the command line
    python benchmarks/gpu.py campaign --part 1 --pretend --output FOLDER   # tiny, on a pretended card: whether it runs

A step is a process with a limit of its own, and its figures go to a file of its own. After each, `part1.json` has what
ended how, with the card and versions, and `part1.log` all that was printed. A step that has ended well is not run
again; one that failed or was cut off is, if the part is called again.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environment import record_environment
from result_files import RESULTS, read_json, write_json

CHECKOUT = Path(__file__).parents[1]
SECONDS = 480
"""Seconds that a part may take."""
_LEAST_SECONDS = 10
"""Seconds that must be left of a part for another step to begin."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A process of Python.

    Attributes:
        command: Arguments of `python`; `{output}` is the step's result, without a suffix.
        seconds: Time after which it is ended.
        tiny: More arguments on a pretended card.
    """

    command: Sequence[str]
    seconds: float
    tiny: Sequence[str] = ()


def _tests(selected: str, seconds: float, tiny: str) -> Step:
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", "--maxfail=8", "tests/gpu", "-k", selected]
    return Step(command=command, seconds=seconds, tiny=["-k", tiny])


def _benchmark(name: str, seconds: float, tiny: str, *arguments: str) -> Step:
    command = [f"benchmarks/{name}.py", *arguments, "--output", "{output}.json"]
    return Step(command=command, seconds=seconds, tiny=tiny.split())


_FIRST = "waits or pinned or stream or pieces"
_OPTIMIZERS = (
    "full",
    "full, not compiled",
    "fused AdamW",
    "host",
    "SGD",
    "Adafactor",
    "bitsandbytes' AdamW8bit",
    "torchao's AdamW8bit",
)
TINY_LLAMA = "--blocks 2 --hidden 64 --heads 4 --kv_heads 4 --vocabulary 128 --length 16 --probe_bytes 65536"
PARTS: dict[int, dict[str, Step]] = {
    1: {
        "probe": _benchmark("gpu_probe", 90, "--bytes 1048576"),
        "first tests": _tests(_FIRST, 150, "never_waits"),
        "other tests": _tests(f"not ({_FIRST})", 230, "test_tokentune"),
    },
    2: {
        "four blocks": _benchmark("gpu", 60, TINY_LLAMA, "--blocks", "4"),
        "optimizers": _benchmark(
            "gpu_features",
            100,
            "--quick --ways host --trace host",
            *("--length", "512", "--seconds", "80", "--ways", *_OPTIMIZERS, "--trace", "full", "fused AdamW"),
        ),
        "llama-2-7b": _benchmark("gpu", 300, TINY_LLAMA, "--cycles", "3"),
    },
    3: {
        "features": _benchmark("gpu_features", 220, "--quick --ways device host", "--seconds", "180"),
        "24 GiB": _benchmark(
            "curve_measured",
            200,
            "--quick --ways m1 lora --tokens 512",
            *("--memory_gib", "24", "--ways", "m1", "m8", "lora", "torchao", "--tokens", "512", "4096"),
        ),
        "command line": Step(
            command=["-m", "slivertune", "train", "--max_steps", "40", "--output_dir", "{output}"],
            seconds=120,  # with the embedded model, which the first run trains
            tiny=["--max_steps", "2"],
        ),
    },
}


def environment_of(pretend: bool) -> dict[str, str]:
    """Make the variables of each step: the package from the checkout, and nothing from the network."""
    paths = [CHECKOUT / "integrations", CHECKOUT]
    if pretend:
        paths.insert(0, CHECKOUT / "tests/pretended_cuda/everywhere")
    known = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, paths), *([known] if known else [])]),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        **({"TORCH_COMPILE_DISABLE": "1"} if pretend else {}),
    }


def run_step(step: Step, output: Path, log: Path, seconds: float, *, pretend: bool) -> dict[str, Any]:
    """Run a step, with what it prints in the log.

    Returns:
        Exit status, None if its time was over; seconds; the last lines.
    """
    command = [each.format(output=output) for each in [*step.command, *(step.tiny if pretend else ())]]
    start, before = time.monotonic(), log.stat().st_size if log.exists() else 0
    with log.open("a", encoding="utf-8") as file:
        print(f"\n== {' '.join(command)}", file=file, flush=True)
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=CHECKOUT,
            env=environment_of(pretend),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 9)
                process.wait()
    with log.open("rb") as printed:
        printed.seek(before)
        last = printed.read().decode(errors="replace").splitlines()[-14:]
    return {"status": status, "seconds": round(time.monotonic() - start, 1), "last lines": last}


def run_part(part: int, folder: Path, *, pretend: bool) -> dict[str, Any]:
    """Run the steps of a part that have not ended well yet, as long as there is time.

    Args:
        part: A key of `PARTS`.
        folder: For the results.
        pretend: Whether the card is pretended.

    Returns:
        What `part{part}.json` holds.
    """
    file, log, began = folder / f"part{part}.json", folder / f"part{part}.log", time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    result = {"part": part, "pretended": pretend, "steps": {}, **read_json(file)}
    for name, step in PARTS[part].items():
        left = SECONDS - (time.monotonic() - began)
        if result["steps"].get(name, {}).get("status") == 0:
            print(f"{name}: done before", flush=True)
        elif left < _LEAST_SECONDS:
            print(f"{name}: no time left; call part {part} again", flush=True)
        else:
            output = folder / name.replace(" ", "_")
            done = run_step(step, output, log, min(step.seconds, left), pretend=pretend)
            result["steps"][name] = done
            write_json(file, {**result, "environment": record_environment()})
            ended = "time was over" if done["status"] is None else f"status {done['status']}"
            print(f"{name}: {ended} after {done['seconds']} s\n  " + "\n  ".join(done["last lines"]), flush=True)
    return result


def main(arguments: Sequence[str]) -> int:
    """Run a part.

    Args:
        arguments: Of the command line, after `campaign`.

    Returns:
        1 if a step has not ended well.
    """
    parser = argparse.ArgumentParser(
        prog="gpu.py campaign", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", type=int, choices=[*PARTS], required=True)
    parser.add_argument("--pretend", action="store_true", help="tiny sizes on a pretended card; needs --output")
    parser.add_argument("--output", type=Path, help="folder of the results, benchmarks/results/campaign by default")
    given = parser.parse_args(arguments)
    if given.pretend and given.output is None:
        parser.error("--pretend needs --output: what it writes must not stand among the results")
    folder = (given.output or RESULTS / "campaign").absolute()
    result = run_part(given.part, folder, pretend=given.pretend)
    return int(any(result["steps"].get(name, {}).get("status") != 0 for name in PARTS[given.part]))
