"""What waiting layers in fewer bits cost in quality: `HiFTConfig(waiting="int8" | "nf4")` against exact ones.

The two tasks of `dial.py`, with one layer a group and with four, each at the rate that won there, for as many updates,
three seeds. Only the form of the layers that wait differs. Evaluated twice: as evaluation in a run does it, over what
lies on the device, and over the exact weights, which are what is saved.

Every run that ends is added to the result file at once, and one that stands there is not repeated:

    python benchmarks/waiting.py language
    python benchmarks/waiting.py sst2 --data PATH
    python benchmarks/waiting.py language --forms nf4 --layers_per_group 1 --seeds 0    # one row
"""

import argparse
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from dial import Training
from dial_table import mean_and_range
from dial_tasks import DialTask, language_reference, sst2
from environment import record_environment
from markdown_table import markdown_table
from result_files import RESULTS, read_json, write_json

FORMS = ("exact", "int8", "nf4")
SETTINGS = {
    "language": {1: (2e-3, 480), 4: (1e-3, 356)},
    "sst2": {1: (4e-4, 150), 4: (2e-4, 83)},
}
"""By layers a group: the rate and the updates of `dial.py`."""
_TITLES = {"language": "language reference, loss", "sst2": "SST-2, accuracy"}


def train(task: DialTask, name: str, form: str, layers_per_group: int, seed: int) -> dict[str, Any]:
    """Fine-tune and evaluate; returns the run's settings and what was measured."""
    rate, num_updates = SETTINGS[name][layers_per_group]
    training = Training(task, layers_per_group, rate, seed, num_updates, waiting=None if form == "exact" else form)
    start = time.process_time()
    losses = [training.update() for _ in range(num_updates)]
    cpu_seconds = time.process_time() - start
    waiting = task.evaluate(training.model)
    training.optimizer.detach()
    exact = task.evaluate(training.model)
    return {
        "form": form,
        "layers_per_group": layers_per_group,
        "seed": seed,
        "learning_rate": rate,
        "num_updates": num_updates,
        "cpu_seconds": round(cpu_seconds, 1),
        "is_finite": all(map(math.isfinite, losses)),
        "on_device": waiting,
        "exact": exact,
    }


def table(content: dict[str, Any]) -> str:
    """Means and ranges over the seeds of what lies on the device; of int8 and NF4 the mean difference, seed by seed."""
    return markdown_table(
        ["Task", "Layers a group", "exact", "`int8`", "`nf4`"],
        (
            [_TITLES[name], str(m), *(_cell(part, form, m) for form in FORMS)]
            for name, part in content.items()
            for m in SETTINGS[name]
        ),
    )


def _cell(part: dict[str, Any], form: str, layers_per_group: int) -> str:
    figure = part["figure"]
    runs, exact = _runs(part, form, layers_per_group), _runs(part, "exact", layers_per_group)
    values = {seed: run["on_device"][figure] for seed, run in runs.items()}
    if not values:
        return "not measured"
    text = mean_and_range(figure, list(values.values()), digits=4)
    differences = [values[seed] - exact[seed]["on_device"][figure] for seed in values.keys() & exact.keys()]
    if form == "exact" or not differences:
        return text
    mean = statistics.mean(differences)
    return f"{text}; {f'{mean:+.4f}' if figure == 'loss' else f'{100 * mean:+.1f}'}"


def _runs(part: dict[str, Any], form: str, layers_per_group: int) -> dict[int, dict[str, Any]]:
    return {
        run["seed"]: run for run in part["runs"] if (run["form"], run["layers_per_group"]) == (form, layers_per_group)
    }


def parse_arguments() -> argparse.Namespace:
    """Read the command line; its defaults are the whole table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("task", choices=SETTINGS, help="what to train")
    parser.add_argument("--data", type=Path, help="sst2: folder with train.tsv and dev.tsv")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--layers_per_group", type=int, nargs="+", choices=(1, 4), default=[1, 4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--results", type=Path, default=RESULTS / "waiting.json", help="result file to continue")
    arguments = parser.parse_args()
    if arguments.task == "sst2" and arguments.data is None:
        parser.error("sst2 needs --data, the folder with train.tsv and dev.tsv")
    return arguments


def main() -> None:
    """Run what the result file lacks, then print the table."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    content = read_json(arguments.results)
    task = language_reference() if arguments.task == "language" else sst2(arguments.data, None)
    part = content.setdefault(arguments.task, {"figure": task.figure, "environment": record_environment(), "runs": []})
    for seed in arguments.seeds:
        for m in arguments.layers_per_group:
            for form in arguments.forms:
                if seed not in _runs(part, form, m):
                    part["runs"].append(train(task, arguments.task, form, m, seed))
                    write_json(arguments.results, content)
                    print(part["runs"][-1], flush=True)
    print(table(content))


if __name__ == "__main__":
    main()
