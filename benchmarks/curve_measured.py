"""Tokens/s against tokens per update on a GPU: HiFT over the dial, and beside it what a user would take instead.

Llama-3.1-8B in bf16 with random weights, AdamW, activation checkpointing, the loss in chunks, nothing clipped, random
tokens in sequences of at most 2,048; the ways are those of `curve_ways.py`. A point is a way and a number of tokens per
update. It is measured with micro-batches of one sequence, two, four and so on, each in a process of its own, until one
does not fit; the fastest counts. Seconds are the wall clock's between two waits for the device: of a cycle of all
groups (of SFT's interval with its reselection) after a first one, which makes all state, or of `--updates` after two.

Each point is written when it is done, and is not measured again without `--again`. `--memory_gib 24` lets torch take no
more than a smaller card has; the bus and the speed stay those of the card.

    python benchmarks/curve_measured.py --memory_gib 24
    python benchmarks/curve_measured.py --ways m8 lora torchao --tokens 4096 --output trial.json
    python benchmarks/curve_measured.py --device cpu --quick --ways m1 lora --tokens 512 --output dry.json

`results/gpu_24gib.json` holds single trials of an H100 and an H200; the whole table has not been made yet.
"""

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from curve_ways import WAYS, make_update
from environment import record_environment
from gpu import SHAPES, refuse_dry_result, refuse_without_cuda, synchronize
from llama import LlamaSizes, random_batch
from markdown_table import markdown_table
from result_files import RESULTS, read_json, write_json

MODEL = "llama-3.1-8b"
TOKENS = (512, 1024, 2048, 4096, 8192, 32768, 131072)
"""Of an update."""
LONGEST = 2048
"""Tokens of a sequence."""
TINY = {"hidden": 32, "intermediate": 64, "blocks": 3, "heads": 4, "vocabulary": 97}
_ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
"""What DeepSpeed reads of a process that no launcher started."""
_MARK = "measured: "


def measure_trial(way_name: str, sizes: LlamaSizes, num_micro_batches: int, arguments: argparse.Namespace) -> Any:
    """Train with one way and one size of micro-batch in this process.

    Args:
        way_name: Of `WAYS`.
        sizes: Of the model and of a micro-batch.
        num_micro_batches: Of an update.
        arguments: Of the command line.

    Returns:
        Seconds per update and bytes; or that it did not fit.

    Raises:
        RuntimeError: If a loss is not finite: times of such a run mean nothing.
    """
    device = torch.device(arguments.device)
    is_cuda = device.type == "cuda"
    if is_cuda and arguments.memory_gib:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, arguments.memory_gib * 2**30 / total))
    try:
        update, period = make_update(WAYS[way_name], sizes, num_micro_batches, device)
        batches = [random_batch(sizes, device=device, seed=seed) for seed in range(num_micro_batches)]
        num_first, num_timed = (period, period) if period > 1 else (2, arguments.updates)
        for _ in range(num_first):
            loss = update(batches)
        synchronize(device)
        if is_cuda:  # how the model was made is not what training needs
            torch.cuda.reset_peak_memory_stats(device)
        start = time.perf_counter()
        for _ in range(num_timed):
            loss = update(batches)
        synchronize(device)
        seconds = (time.perf_counter() - start) / num_timed
    except torch.OutOfMemoryError:
        return {"fits": False}
    if not math.isfinite(float(loss)):
        raise RuntimeError(f"the loss of {way_name} is {float(loss)}; nothing is written of it")
    return {
        "fits": True,
        "batch_size": sizes.batch_size,
        "micro_batches": num_micro_batches,
        "updates": num_timed,
        "seconds_per_update": seconds,
        "tokens_per_second": num_micro_batches * sizes.batch_size * sizes.length / seconds,
        "peak_bytes": torch.cuda.max_memory_allocated(device) if is_cuda else None,
        "reserved_bytes": torch.cuda.max_memory_reserved(device) if is_cuda else None,
        "process_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def measure_point(way_name: str, num_tokens: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Try micro-batches until one does not fit or fails, each in a process of its own; the fastest counts.

    Returns:
        The fastest trial's figures; of one that stopped the search how many sequences it had, and its `failure` if it
        was another than memory.
    """
    point: dict[str, Any] = {"way": way_name, "tokens": num_tokens, "fits": False}
    if WAYS[way_name].needs_cuda and arguments.device == "cpu":
        return point | {"failure": "needs a CUDA device"}
    num_sequences = num_tokens // min(num_tokens, LONGEST)
    tried = []
    for power in range(num_sequences.bit_length()):
        said = _run_trial(way_name, num_tokens, 2**power, arguments)
        if not said["fits"]:
            point |= {"stopped_at": 2**power, **said}
            break
        tried.append(said)
    return point | min(tried, key=lambda each: float(each["seconds_per_update"]), default={})


def _run_trial(way_name: str, num_tokens: int, batch_size: int, arguments: argparse.Namespace) -> dict[str, Any]:
    words = [sys.executable, __file__, "--trial", way_name, str(num_tokens), str(batch_size)]
    words += ["--device", arguments.device, "--updates", str(arguments.updates)]
    words += ["--quick"] if arguments.quick else []
    words += ["--memory_gib", str(arguments.memory_gib)] if arguments.memory_gib else []
    done = subprocess.run(words, check=False, env={**os.environ, **_ALONE}, capture_output=True, text=True)
    marked = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if done.returncode == 0 and marked:
        return dict(json.loads(marked[-1].removeprefix(_MARK)))
    return {"fits": False, "failure": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}


def trial_sizes(num_tokens: int, batch_size: int, *, is_quick: bool) -> tuple[LlamaSizes, int]:
    """Return the model, a micro-batch of so many sequences, and the number of micro-batches per update."""
    length = min(num_tokens, LONGEST)
    sizes = LlamaSizes(**(TINY if is_quick else SHAPES["llama-3-8b"]), batch_size=batch_size, length=length)
    return sizes, num_tokens // length // batch_size


def table(result: dict[str, Any]) -> str:
    """All points in Markdown: seconds per update, tokens/s, GiB that were allocated at the most."""
    points = {(each["way"], each["tokens"]): each for each in result["points"]}
    counts = sorted({num_tokens for _, num_tokens in points})
    rows = (
        [way.title, *(_cell(points.get((name, each))) for each in counts)]
        for name, way in WAYS.items()
        if any((name, each) in points for each in counts)
    )
    return markdown_table(["Tokens per update", *(f"{each:,}" for each in counts)], rows)


def _cell(point: dict[str, Any] | None) -> str:
    if point is None:
        return ""
    if not point["fits"]:
        return str(point.get("failure", "does not fit"))
    memory = "" if point["peak_bytes"] is None else f", {point['peak_bytes'] / 2**30:.1f} GiB"
    return f"{point['seconds_per_update']:.3g} s, {point['tokens_per_second']:,.0f}/s{memory}"


def parse_arguments() -> argparse.Namespace:
    """Read the command line; its defaults are all ways at three numbers of tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--tokens", nargs="+", type=int, choices=TOKENS, default=[512, 4096, 32768])
    parser.add_argument("--updates", type=int, default=5, help="timed, of ways whose updates are alike")
    parser.add_argument("--memory_gib", type=float, help="what torch may take of the card; all by default")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="`cpu` is a dry run")
    parser.add_argument("--again", action="store_true", help="measure points anew that are there")
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see whether it runs; needs --output")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--trial", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.trial:
        refuse_dry_result(parser, arguments)
    refuse_without_cuda(parser, arguments)
    arguments.output = arguments.output or RESULTS / "curve_measured.json"
    return arguments


def main() -> None:
    """Measure what is missing, write the result after every point, and print the table."""
    arguments = parse_arguments()
    if arguments.trial:
        way_name, num_tokens, batch_size = arguments.trial
        sizes, num_micro_batches = trial_sizes(int(num_tokens), int(batch_size), is_quick=arguments.quick)
        print(_MARK + json.dumps(measure_trial(way_name, sizes, num_micro_batches, arguments)))
        return
    about = {
        "model": "tiny" if arguments.quick else MODEL,
        "device": torch.cuda.get_device_name(0) if arguments.device == "cuda" else "cpu",
        "memory_gib": arguments.memory_gib,
        "dry_run": arguments.device == "cpu",
    }
    kept = read_json(arguments.output)
    if kept and {name: kept[name] for name in about} != about:
        raise SystemExit(f"{arguments.output} has points of {[kept[name] for name in about]}; name another --output")
    by_key = {(each["way"], each["tokens"]): each for each in kept.get("points", [])}
    for tokens in arguments.tokens:
        for way in arguments.ways:
            if (way, tokens) in by_key and not arguments.again:
                continue
            by_key[way, tokens] = measure_point(way, tokens, arguments)
            points = [by_key[key] for key in ((way, tokens) for way in WAYS for tokens in TOKENS) if key in by_key]
            write_json(arguments.output, {"environment": record_environment(), **about, "points": points})
            print(f"{WAYS[way].title}, {tokens:,} tokens: {_cell(by_key[way, tokens])}", flush=True)
    print(table(read_json(arguments.output)))


if __name__ == "__main__":
    main()
