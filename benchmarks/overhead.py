"""What HiFT costs and saves in time, measured on a CPU.

`wrapper`: HiFT with a single group (k = 1) does what the bare optimizer does, so what its steps take beyond the bare
optimizer's is the wrapper's own cost. Whole training steps (forward, backward, step) of a Llama of 50 million
parameters, AdamW, fp32. `wrapped` keeps its state on the device (target: at most 1.02 of `bare`); `streamed` has the
default, state that waits on the host and passes through the device in pieces, and no target.

`cycle`: HiFT with one layer per group (the paper's schedule) against dense training of an equal model on the same
batches, streaming included; 12 blocks, the mean over a full cycle in which every group has its turn once (target: at
most 0.55 of the dense step).

    OMP_NUM_THREADS=1 python benchmarks/overhead.py                    # both parts; 20 minutes on one core
    OMP_NUM_THREADS=1 python benchmarks/overhead.py --parts wrapper
    OMP_NUM_THREADS=1 python benchmarks/overhead.py --quick --output trial.json

Everything that is compared alternates in one process on one thread. Each time is taken twice: by the clock on the
wall, and as CPU time of the process. The ratios that count are those of CPU time, since a machine that does other
work as well stretches the wall clock at random; those of the wall clock stand beside them in the result.
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from environment import record_environment
from llama import LlamaSizes, build_llama, num_parameters, random_batch
from result_files import RESULTS, read_json, write_json

import slivertune as st

WRAPPER = LlamaSizes(hidden=512, intermediate=1376, blocks=6, heads=8, vocabulary=32_000, batch_size=4, length=128)
CYCLE = LlamaSizes(hidden=768, intermediate=2048, blocks=12, heads=12, vocabulary=32_000, batch_size=8, length=128)
QUICK = LlamaSizes(hidden=32, intermediate=48, blocks=2, heads=4, vocabulary=97, batch_size=2, length=16)
WRAPPER_LIMIT = 1.02
CYCLE_LIMIT = 0.55
DENSE_EVERY = 2
"""HiFT's steps from one dense step to the next."""
CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of one training step and, within it, of `optimizer.step`."""

    cpu: float
    wall: float
    optimizer_cpu: float
    optimizer_wall: float


class Trainee:
    """A model with its optimizer.

    Args:
        sizes: Sizes of the model; equal seeds give equal weights.
        make_optimizer: Makes the optimizer over it.
    """

    def __init__(self, sizes: LlamaSizes, make_optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer]) -> None:
        self.model = build_llama(sizes, dtype=torch.float32, device=CPU, seed=0)
        self.optimizer = make_optimizer(self.model)

    def step(self, batch: dict[str, torch.Tensor]) -> StepTime:
        """Train on one batch; the gradients are dropped within the time."""
        start, cpu_start = time.perf_counter(), time.process_time()
        self.model(**batch).loss.backward()
        before, cpu_before = time.perf_counter(), time.process_time()
        self.optimizer.step()
        self.optimizer.zero_grad()
        end, cpu_end = time.perf_counter(), time.process_time()
        return StepTime(
            cpu=cpu_end - cpu_start,
            wall=end - start,
            optimizer_cpu=cpu_end - cpu_before,
            optimizer_wall=end - before,
        )


def dense_adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def hift_adamw(config: st.HiFTConfig) -> Callable[[torch.nn.Module], torch.optim.Optimizer]:
    return lambda model: st.HiFT(model, torch.optim.AdamW, config=config, lr=1e-4)


def measure_wrapper(sizes: LlamaSizes, num_rounds: int) -> dict[str, Any]:
    """Compare k = 1 with the bare optimizer, in rounds of one step each.

    Args:
        sizes: The model and its batch.
        num_rounds: Rounds that count; a first one, in which the states are allocated, does not.

    Returns:
        All times, the medians over rounds of the ratio to the bare step of the same round, and whether the weights of
        all variants ended with the same bits.
    """
    all_layers = sizes.blocks + 2
    trainees = {
        "bare": Trainee(sizes, dense_adamw),
        "wrapped": Trainee(sizes, hift_adamw(st.HiFTConfig.paper(layers_per_group=all_layers, state="device"))),
        "streamed": Trainee(sizes, hift_adamw(st.HiFTConfig.paper(layers_per_group=all_layers))),
    }
    times: dict[str, list[StepTime]] = {name: [] for name in trainees}
    for index in range(num_rounds + 1):
        batch = random_batch(sizes, device=CPU, seed=index)
        # Turned round every time, so that none always follows the same other one.
        names = list(trainees) if index % 2 else list(reversed(trainees))
        for name in names:
            times[name].append(trainees[name].step(batch))
        seconds = (f"{name} {times[name][-1].cpu:.3f} s" for name in trainees)
        print(f"wrapper, round {index} of {num_rounds}:", *seconds, flush=True)
    counted = {name: series[1:] for name, series in times.items()}
    ratios = {name: paired_ratios(counted[name], counted["bare"]) for name in ("wrapped", "streamed")}
    bare = list(trainees["bare"].model.parameters())
    same = {
        name: all(torch.equal(a, b) for a, b in zip(trainees[name].model.parameters(), bare, strict=True))
        for name in ratios
    }
    return {
        "sizes": dataclasses.asdict(sizes),
        "num_parameters": num_parameters(trainees["bare"].model),
        "median_ratio_to_bare": ratios,
        "same_weights_as_bare": same,
        "limit_of_wrapped_cpu": WRAPPER_LIMIT,
        "within_limit": ratios["wrapped"]["cpu"] <= WRAPPER_LIMIT,
        "seconds": {name: [dataclasses.asdict(one) for one in series] for name, series in counted.items()},
    }


def measure_cycle(sizes: LlamaSizes, num_cycles: int) -> dict[str, Any]:
    """Compare HiFT's step, averaged over a cycle, with the dense step between its steps.

    Args:
        sizes: The model and its batch.
        num_cycles: Cycles that count; a first one, in which every group's state is allocated, does not.

    Returns:
        All times, each cycle's ratio of means, and the median of these ratios.
    """
    dense, hift = Trainee(sizes, dense_adamw), Trainee(sizes, hift_adamw(st.HiFTConfig.paper()))
    num_groups: int = hift.optimizer.num_groups  # type: ignore[attr-defined]
    cycles: list[dict[str, list[StepTime]]] = []
    for cycle in range(num_cycles + 1):
        times: dict[str, list[StepTime]] = {"hift": [], "dense": []}
        for group in range(num_groups):
            batch = random_batch(sizes, device=CPU, seed=cycle * num_groups + group)
            times["hift"].append(hift.step(batch))
            # Before the cycles that count, one to allocate the dense optimizer's state is enough.
            if group % DENSE_EVERY == 0 and (cycle or group == 0):
                times["dense"].append(dense.step(batch))
        cycles.append(times)
        mean = mean_ratio(times, "cpu")
        print(
            f"cycle {cycle} of {num_cycles}: {mean:.3f} of the dense step{'' if cycle else ', not counted'}", flush=True
        )
    counted = cycles[1:]
    ratios = {
        field.name: [mean_ratio(times, field.name) for times in counted] for field in dataclasses.fields(StepTime)
    }
    return {
        "sizes": dataclasses.asdict(sizes),
        "num_parameters": num_parameters(dense.model),
        "num_groups": num_groups,
        "median_ratio": {name: statistics.median(values) for name, values in ratios.items()},
        "limit_of_cpu": CYCLE_LIMIT,
        "within_limit": statistics.median(ratios["cpu"]) <= CYCLE_LIMIT,
        "seconds": [
            {name: [dataclasses.asdict(one) for one in series] for name, series in times.items()} for times in counted
        ],
    }


def paired_ratios(series: Sequence[StepTime], base: Sequence[StepTime]) -> dict[str, float]:
    """Return the median over rounds of the ratio within a round, for each kind of time."""
    return {
        field.name: statistics.median(
            getattr(one, field.name) / getattr(other, field.name) for one, other in zip(series, base, strict=True)
        )
        for field in dataclasses.fields(StepTime)
    }


def mean_ratio(times: dict[str, list[StepTime]], kind: str) -> float:
    """Divide the mean HiFT step of a cycle by the mean dense step of the same cycle."""
    means = {name: statistics.fmean(getattr(one, kind) for one in series) for name, series in times.items()}
    return means["hift"] / means["dense"]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=("wrapper", "cycle"), default=["wrapper", "cycle"])
    parser.add_argument("--rounds", type=int, default=21, help="rounds of `wrapper` that count")
    parser.add_argument("--cycles", type=int, default=3, help="cycles of `cycle` that count")
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model, few steps: a trial, whose times mean nothing"
    )
    parser.add_argument("--output", type=Path, help="result file; parts that are not run stay in it")
    arguments = parser.parse_args()
    if arguments.quick and arguments.output is None:
        parser.error("--quick needs --output: its times must not stand among the results")
    if min(arguments.rounds, arguments.cycles) < 1:
        parser.error(f"--rounds {arguments.rounds} and --cycles {arguments.cycles} must be at least 1")
    return arguments


def main() -> None:
    """Run the parts asked for, and put them into the result file."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    output = arguments.output or RESULTS / "overhead.json"
    content = read_json(output)
    for part in arguments.parts:
        environment = record_environment()
        if part == "wrapper":
            result = measure_wrapper(*((QUICK, 2) if arguments.quick else (WRAPPER, arguments.rounds)))
            print(f"k=1 against the bare optimizer: {result['median_ratio_to_bare']['wrapped']['cpu']:.4f}")
        else:
            result = measure_cycle(*((QUICK, 1) if arguments.quick else (CYCLE, arguments.cycles)))
            print(f"HiFT's step against the dense step: {result['median_ratio']['cpu']:.3f}")
        content[part] = {"environment": environment, **result}
        write_json(output, content)


if __name__ == "__main__":
    main()
