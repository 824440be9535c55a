"""What the methods send between ranks in a training step, and what HiFT's change of groups costs, on CPUs.

Two processes train a random Llama (fp32, 4 blocks of width 256) under DDP, FSDP2 and DeepSpeed's ZeRO-1, 2 and 3, by
each method in turn: dense AdamW under the layout's own wrapper, HiFT (one layer a group), SFT-AG and SFT-MA (density
0.01), all through `slivertune.prepare`. Every collective of a step is counted where torch.distributed issues it
(`traffic.py`), and turned into the bytes that a rank sends as a ring sends them. Bytes depend on the layout, the model
and the number of ranks, not on the machine; a larger model changes the ratios only by its share of embeddings.

    OMP_NUM_THREADS=1 python benchmarks/ranks.py                        # minutes, on two cores
    OMP_NUM_THREADS=1 python benchmarks/ranks.py --quick --output trial.json

`bytes_per_step` is the mean over whole cycles of HiFT and over intervals between reselections of SFT; `plain` steps of
SFT are those without estimation or reselection. A switch is everything HiFT does when the turn passes to another group;
`beyond_copies` is its time less the copies of masters and state, whose duration is the bus's affair.
A meeting is what ranks tell each other before a step or a gradient sync (`Heartbeat.meet`).
"""

import argparse
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import faults  # also keeps the runs, which are forks of this process, on CPUs
import method_tables
import torch
from accelerators import make_accelerator
from environment import record_environment
from faults_run import CPU, join, report
from llama import LlamaSizes, build_llama, num_parameters, random_batch
from result_files import RESULTS, read_json, write_json
from traffic import Traffic

import slivertune as st
from slivertune.parallel.consistency.headers import Header, Stage
from slivertune.parallel.consistency.heartbeat import Heartbeat

FULL = LlamaSizes(hidden=256, intermediate=688, blocks=4, heads=4, vocabulary=2048, batch_size=2, length=32)
QUICK = LlamaSizes(hidden=32, intermediate=64, blocks=2, heads=2, vocabulary=97, batch_size=2, length=8)
LAYOUTS = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
METHODS = ("dense", "hift", "sft_ag", "sft_ma")
NUM_RANKS = 2
TIMEOUT_S = 1800
NUM_CYCLES = 3
NUM_MEETINGS = 300
INTERVAL = 8
ESTIMATION = 3
SWITCH_LIMIT_SECONDS = 0.005


def make_optimizer(method: str, model: torch.nn.Module, num_steps: int) -> Any:
    """Build the optimizer of a method over a model."""
    if method == "dense":
        return torch.optim.AdamW(model.parameters(), lr=1e-4)
    if method == "hift":
        return st.HiFT(model, torch.optim.AdamW, config=st.HiFTConfig.paper(), lr=1e-4)
    config = st.SFTConfig(
        density=0.01,
        selection="momentum" if method == "sft_ma" else "accumulated_gradient",
        reselection_interval=INTERVAL,
        estimation_steps=ESTIMATION,
    )
    return st.SFT(model, config=config, lr=1e-4, total_steps=num_steps)


def measure(layout: str, method: str, sizes: LlamaSizes) -> dict[str, Any]:
    """Train by a method under a layout, and count.

    Returns:
        Bytes by collective and in all, a step; for HiFT the seconds of a switch; or the reason why the pair is refused.
    """
    accelerator = make_accelerator(layout)
    model = build_llama(sizes, dtype=torch.float32, device=CPU, seed=0)
    num_weights = num_parameters(model)
    cycle = len(st.find_layers(model)) if method == "hift" else INTERVAL
    num_steps = NUM_CYCLES * cycle
    optimizer = make_optimizer(method, model, num_steps)
    sliver = optimizer
    try:
        model, optimizer = st.prepare(accelerator, model, optimizer)
    except ValueError as error:
        return {"refused": str(error)}
    steps = []
    for index in range(num_steps):
        batch = random_batch(sizes, device=CPU, seed=NUM_RANKS * index + accelerator.process_index)
        with Traffic() as traffic:
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        steps.append(dict(traffic.sent_bytes))
    # The first cycle makes buffers and compares settings.
    counted = steps[cycle:]
    totals = [sum(step.values()) for step in counted]
    result: dict[str, Any] = {
        "num_parameters": num_weights,
        "bytes_per_step": statistics.mean(totals),
        "median_bytes_per_step": statistics.median(totals),
        "bytes_by_collective": {
            name: sum(step.get(name, 0) for step in counted) / len(counted)
            for name in sorted({name for step in counted for name in step})
        },
    }
    if method.startswith("sft"):
        result["num_trained"] = sliver.num_weights
    if method == "hift":
        result["switch"] = switch_seconds(layout, model, sliver)
        result["meeting_seconds"] = meeting_seconds()
    return result


def meeting_seconds() -> float:
    """Median seconds in which the ranks tell each other where they are, which they do before they share anything."""
    heartbeat = Heartbeat("benchmark")
    series = []
    for index in range(NUM_MEETINGS):
        start = time.perf_counter()
        heartbeat.meet(Header(Stage.STEPPING, index), {"lr": 1e-4})
        series.append(time.perf_counter() - start)
    return statistics.median(series)


def switch_seconds(layout: str, model: Any, optimizer: Any) -> dict[str, float]:
    """Median seconds of a change of groups, less the copies of state; nothing is trained in it."""
    if layout.startswith("zero"):
        schedule = model.hift_schedule
        beyond = (schedule.switch_seconds - schedule.copy_seconds) / schedule.num_switches
        return {"beyond_copies": beyond, "num_switches": schedule.num_switches}
    series = []
    for _ in range(optimizer.num_groups * NUM_CYCLES):
        optimizer.rotation.updates += optimizer.rotation.steps_per_group
        start = time.perf_counter()
        optimizer.turns.activate()
        series.append(time.perf_counter() - start)
    return {"beyond_copies": statistics.median(series), "num_switches": len(series)}


def work(rank: int, num_ranks: int, folder: Path, layout: str, methods: list[str], sizes: LlamaSizes) -> None:
    """Train by each method in one process of a layout, and report what was counted."""
    warnings.filterwarnings("ignore")
    join(rank, num_ranks, folder)
    results = {}
    for method in methods:
        results[method] = measure(layout, method, sizes)
        torch.distributed.barrier()
    report(rank, num_ranks, folder, results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="layouts to run")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="methods to run")
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    parser.add_argument("--output", type=Path, default=RESULTS / "ranks.json", help="where to write")
    options = parser.parse_args()
    sizes = QUICK if options.quick else FULL
    content = read_json(options.output)
    content["num_ranks"] = NUM_RANKS
    content["environment"] = record_environment()
    content.setdefault("layouts", {})
    for layout in options.layouts:
        ended = faults.fork(NUM_RANKS, work, layout, options.methods, sizes, timeout_s=TIMEOUT_S)
        found = ended.need_reports()[0]
        content["layouts"].setdefault(layout, {}).update(found)
        write_json(options.output, content)
    content["switch_limit_seconds"] = SWITCH_LIMIT_SECONDS
    content["switches_within_limit"] = all(
        methods["hift"]["switch"]["beyond_copies"] <= SWITCH_LIMIT_SECONDS
        for methods in content["layouts"].values()
        if "switch" in methods.get("hift", {})
    )
    write_json(options.output, content)
    print(method_tables.sent_by_ranks(content))


if __name__ == "__main__":
    main()
