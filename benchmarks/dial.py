"""Which `layers_per_group`? HiFT at m = 1, 2, 4 and all n layers, at equal CPU time, each at its best rate.

Two tasks: the embedded base model on the Python language reference (evaluation loss), and MiniLM on SST-2 (development
accuracy). A larger m makes an update dearer, so it gets fewer of them: the seconds of an update are measured first, the
settings in turn in one process, and every setting gets as many updates as fit the CPU time of `--updates` updates at
m = 1. All else is equal: AdamW, fp32, HiFT's default settings, the norm of a step's gradients clipped at 1.0, cosine
with 5 % warm-up, one thread, the data's order by the seed. m = n is dense fine-tuning.

Every rate is tried at the first seed and, unless it diverged there, at the other seeds too (of each setting the
`--finalists` best alone, if that is given); the best rate has the best mean over all seeds.

Every run that ends is added to the result file at once, and one that stands there is not repeated, so that a search can
be stopped, continued and widened, on the same machine:

    python benchmarks/dial.py language
    python benchmarks/dial.py sst2 --data PATH
    python benchmarks/dial.py language --layers_per_group 4 --rates 2.5e-4    # a wider search

`dial_table.py` prints the tables.
"""

import argparse
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from dial_table import tables
from dial_tasks import DialTask, is_diverging, language_reference, sst2
from environment import record_environment
from result_files import RESULTS, read_json, write_json
from transformers import get_scheduler

import slivertune as st

SETTINGS = (1, 2, 4, 8)
"""m; both models have eight layers: the embedding, six blocks, the head."""
RATES = {
    "language": {1: (1e-3, 2e-3, 4e-3), 2: (1e-3, 2e-3, 4e-3), 4: (5e-4, 1e-3, 2e-3), 8: (1e-3, 2e-3, 4e-3)},
    "sst2": {1: (2e-4, 4e-4, 8e-4), 2: (2e-4, 4e-4, 8e-4), 4: (1e-4, 2e-4, 4e-4), 8: (1e-4, 2e-4, 4e-4)},
}
UPDATES = {"language": 480, "sst2": 150}
"""At m = 1; those of `language` were the embedded default of `slivertune train`."""
WARMUP_RATIO = 0.05
CLIP_NORM = 1.0
DIVERGED = 1.5
"""A run ends early when the mean of 16 training losses is above this many times the evaluation loss before. It has
diverged then, and also if its evaluation loss is higher after it than before."""


class Training:
    """A model under HiFT and the batches of one seed.

    Args:
        task: Model and data.
        layers_per_group: m.
        rate: AdamW's learning rate at the end of the warm-up.
        seed: Of the data's order and of a new head.
        num_updates: Length of the schedule.
        waiting: As in `HiFTConfig`.
    """

    def __init__(
        self, task: DialTask, layers_per_group: int, rate: float, seed: int, num_updates: int, waiting: Any = None
    ) -> None:
        self.model = task.make_model(seed).train()
        config = st.HiFTConfig(layers_per_group=layers_per_group, waiting=waiting)
        self.optimizer = st.HiFT(self.model, torch.optim.AdamW, config=config, lr=rate, weight_decay=task.weight_decay)
        self._scheduler = get_scheduler("cosine", self.optimizer, int(WARMUP_RATIO * num_updates), num_updates)
        self._batches = task.batches(seed)

    def update(self) -> float:
        """One training step; returns its loss in nats."""
        loss = self.model(**next(self._batches)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.optimizer.step()
        self._scheduler.step()
        self.optimizer.zero_grad()
        return float(loss.item())


def calibrate(task: DialTask, num_updates: int, rounds: int) -> dict[str, Any]:
    """Measure the CPU seconds of an update, the settings in turn on the same batches, and share out the time.

    A round has eight updates of each setting: whole cycles of all of them. The first one allocates and does not count.
    """
    trainings = {m: Training(task, m, 1e-5, 0, 10**6) for m in SETTINGS}
    seconds: dict[int, list[float]] = {m: [] for m in SETTINGS}
    for _ in range(rounds + 1):
        for m, training in trainings.items():
            start = time.process_time()
            for _ in range(8):
                training.update()
            seconds[m].append((time.process_time() - start) / 8)
    medians = {m: statistics.median(series[1:]) for m, series in seconds.items()}
    budget = num_updates * medians[1]
    return {
        "seconds_per_update": {str(m): series[1:] for m, series in seconds.items()},
        "budget_cpu_seconds": budget,
        "num_updates": {str(m): round(budget / medians[m]) for m in SETTINGS},
        "num_groups": {str(m): training.optimizer.num_groups for m, training in trainings.items()},
    }


def count_bytes(task: DialTask) -> dict[str, dict[str, int]]:
    """By m: each kind's largest number of bytes over a cycle in which every state exists; activations are left out.

    The largest group has its gradients and its state on the device at one moment, when it is stepped, so the sum of
    weights, gradients and state is what is there at the peak.
    """
    counted = {}
    for m in SETTINGS:
        training = Training(task, m, 1e-5, 0, 10**6)
        with st.Ledger(training.model) as ledger:
            for step in range(2 * training.optimizer.cycle_length):
                if step == training.optimizer.cycle_length:
                    ledger.reset_peak()
                training.update()
        highest = ledger.highest
        parts = {"weights": highest.parameters, "gradients": highest.gradients, "state": highest.state}
        counted[str(m)] = {**parts, "device": sum(parts.values()), "host": highest.host}
    return counted


def train(task: DialTask, run: dict[str, Any], num_updates: int, loss_before: float) -> dict[str, Any]:
    """Fine-tune and evaluate; returns the run's settings and what was measured.

    Args:
        task: Model and data.
        run: layers_per_group, learning_rate and seed.
        num_updates: Length of the schedule.
        loss_before: Evaluation loss of the untrained model.
    """
    training = Training(task, run["layers_per_group"], run["learning_rate"], run["seed"], num_updates)
    losses: list[float] = []
    limit = DIVERGED * loss_before
    start = time.process_time()
    while len(losses) < num_updates and not is_diverging(losses, limit):
        losses.append(training.update())
    cpu_seconds = round(time.process_time() - start, 1)
    measured = {} if is_diverging(losses, limit) else task.evaluate(training.model)
    measured = {name: value for name, value in measured.items() if math.isfinite(value)}  # JSON has no others
    return {
        **run,
        "diverged": measured.get("loss", math.inf) > loss_before,
        "num_updates": len(losses),
        "cpu_seconds": cpu_seconds,
        **measured,
    }


def finalists(part: dict[str, Any], m: int, first_seed: int, num_finalists: int | None) -> list[float]:
    """The best rates of a setting at the first seed, which are worth further seeds, in ascending order."""
    of_setting = [run for run in part["runs"] if (run["layers_per_group"], run["seed"]) == (m, first_seed)]
    figure, sign = part["fixed"]["figure"], 1 if part["fixed"]["figure"] == "loss" else -1
    stable = sorted((run for run in of_setting if not run["diverged"]), key=lambda run: sign * run[figure])
    return sorted(run["learning_rate"] for run in stable[:num_finalists])


def prepare(arguments: argparse.Namespace, task: DialTask, part: dict[str, Any]) -> None:
    """Calibrate and count once; refuse to continue a file that was made otherwise.

    Raises:
        ValueError: If the file's part was made with other settings or on another machine.
    """
    fixed = {
        "figure": task.figure,
        "batch_size": task.batch_size,
        "weight_decay": task.weight_decay,
        "warmup_ratio": WARMUP_RATIO,
        "clip_norm": CLIP_NORM,
        "updates_at_m_1": arguments.updates,
        "num_rows": task.num_rows,
    }
    environment = record_environment()
    machine = {name: value for name, value in environment.items() if name != "date"}
    before = {name: value for name, value in part.get("environment", environment).items() if name != "date"}
    for old, new in ((part.get("fixed", fixed), fixed), (before, machine)):
        if old != new:
            raise ValueError(
                f"{arguments.results.name} was made with {old}, this would be {new}; equal CPU time has a meaning on "
                "one machine and with one budget alone: give the same settings, or another --results"
            )
    if "calibration" not in part:
        part |= {
            "environment": environment,
            "fixed": fixed,
            "loss_before": task.evaluate(task.make_model(0))["loss"],
            "calibration": calibrate(task, arguments.updates, arguments.rounds),
            "bytes": count_bytes(task),
            "runs": [],
        }


def parse_arguments() -> argparse.Namespace:
    """Read the command line; its defaults are the whole search."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("task", choices=UPDATES, help="what to train")
    parser.add_argument("--data", type=Path, help="sst2: folder with train.tsv and dev.tsv")
    parser.add_argument("--updates", type=int, help="at m = 1: the budget; 480 (language), 150 (sst2)")
    parser.add_argument("--layers_per_group", type=int, nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--rates", type=float, nargs="+", help="in place of each setting's own three")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--finalists", type=int, help="rates that go on to further seeds; all by default")
    parser.add_argument("--rounds", type=int, default=5, help="of the calibration")
    parser.add_argument("--results", type=Path, default=RESULTS / "dial.json", help="result file to continue")
    parser.add_argument("--quick", action="store_true", help="32 sentences; a trial, which needs --results")
    arguments = parser.parse_args()
    if arguments.task == "sst2" and arguments.data is None:
        parser.error("sst2 needs --data, the folder with train.tsv and dev.tsv")
    if arguments.quick and arguments.results == RESULTS / "dial.json":
        parser.error("a trial's figures mean nothing: --quick needs --results")
    if arguments.updates is None:
        arguments.updates = UPDATES[arguments.task]
    return arguments


def main() -> None:
    """Run what the result file lacks, then print the table."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    content = read_json(arguments.results)
    name = arguments.task
    task = language_reference() if name == "language" else sst2(arguments.data, 32 if arguments.quick else None)
    part = content.setdefault(name, {})
    prepare(arguments, task, part)
    write_json(arguments.results, content)
    for seed in arguments.seeds:
        for m in arguments.layers_per_group:
            is_first = seed == arguments.seeds[0]
            rates = arguments.rates or RATES[name][m]
            for rate in rates if is_first else finalists(part, m, arguments.seeds[0], arguments.finalists):
                run = {"layers_per_group": m, "learning_rate": rate, "seed": seed}
                if not any(run.items() <= done.items() for done in part["runs"]):
                    num_updates = part["calibration"]["num_updates"][str(m)]
                    part["runs"].append(train(task, run, num_updates, part["loss_before"]))
                    write_json(arguments.results, content)
                    print(part["runs"][-1], flush=True)
    print(tables(content))


if __name__ == "__main__":
    main()
