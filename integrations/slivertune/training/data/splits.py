"""From a dataset's name to a training and an evaluation split."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import datasets

from slivertune.training.data.columns import number_rows
from slivertune.training.data.hub import load_hub
from slivertune.training.data.local_files import FORMATS, load_local
from slivertune.training.options.data import DataArguments

logger = logging.getLogger(__name__)

_HUB_ID = re.compile(r"[\w][\w.\-]*(/[\w][\w.\-]*)?")


def load_splits(
    dataset: str,
    *,
    dataset_config: str | None = None,
    train_split: str = "train",
    eval_split: str | None = None,
    eval_file: str | None = None,
    eval_fraction: float = 0.1,
    seed: int = 0,
    column_names: list[str] | None = None,
    sample_by: str = "line",
    cache_dir: str | None = None,
) -> Any:
    """Load the rows to train on and the rows to evaluate on.

    What lies on the disk comes before the hub. Without `eval_split` and `eval_file`, `eval_fraction` of the training
    rows, at least one, is drawn with the seed and held out.

    Args:
        dataset: A local csv, tsv, json, jsonl, txt or parquet file, a folder of such, or a hub id.
        dataset_config: Configuration of a hub dataset.
        train_split: Split to train on; slices such as `train[:1000]` work.
        eval_split: Split of the same dataset to evaluate on.
        eval_file: Local file to evaluate on, in place of `eval_split`.
        eval_fraction: Fraction of the training rows to hold out, in (0, 1).
        seed: Decides which rows are held out.
        column_names: Column names of csv and tsv files without a header line.
        sample_by: One row of a txt file is a "line", a "paragraph" or the whole "document".
        cache_dir: Where prepared data is kept; the datasets library's own cache by default.

    Returns:
        A `datasets.DatasetDict` with `train` and `eval`, whose rows know their number in the split they come from.

    Raises:
        ValueError: If the dataset, a split or a file is not there or can't be read, or there are too few rows.
        ConnectionError: If the hub can't be reached.
    """
    if eval_split is not None and eval_file is not None:
        raise ValueError(
            f"eval_split={eval_split!r} and eval_file={eval_file!r} both name the evaluation rows; keep one"
        )
    if not 0 < eval_fraction < 1:
        raise ValueError(f"eval_fraction={eval_fraction} must lie between 0 and 1")
    splits = [train_split] if eval_split is None else [train_split, eval_split]
    path = Path(dataset).expanduser()
    local_options: dict[str, Any] = {"column_names": column_names, "sample_by": sample_by, "cache_dir": cache_dir}
    if path.exists():
        if dataset_config is not None:
            raise ValueError(f"dataset_config={dataset_config!r} is for hub datasets; {path} is local, leave it out")
        loaded = load_local(path, splits, **local_options)
    else:
        _check_hub_id(dataset)
        if column_names is not None and eval_file is None:
            raise ValueError(
                f"column_names={column_names} is for local csv and tsv files; {dataset!r} is a hub dataset"
            )
        loaded = load_hub(dataset, splits, dataset_config=dataset_config, cache_dir=cache_dir)
    loaded = [_with_rows(rows, dataset, split) for rows, split in zip(loaded, splits, strict=True)]
    if eval_file is not None:
        loaded.append(_load_eval_file(eval_file, local_options))
    if len(loaded) == 1:
        return _hold_out(loaded[0], eval_fraction, seed)
    return datasets.DatasetDict(train=loaded[0], eval=loaded[1])


def load_from_arguments(arguments: DataArguments, *, seed: int) -> Any:
    """Load the splits that `arguments` names.

    Args:
        arguments: The data arguments of a run.
        seed: Decides which rows are held out where no evaluation rows are named.

    Returns:
        What `load_splits` returns.

    Raises:
        ValueError: If `arguments.dataset` is None, or as in `load_splits`.
        ConnectionError: If the hub can't be reached.
    """
    if arguments.dataset is None:
        raise ValueError("dataset=None names no rows; give --dataset a hub id or a local file")
    return load_splits(
        arguments.dataset,
        dataset_config=arguments.dataset_config,
        train_split=arguments.train_split,
        eval_split=arguments.eval_split,
        eval_file=arguments.eval_file,
        eval_fraction=arguments.eval_fraction,
        seed=seed,
        column_names=arguments.column_names,
        sample_by=arguments.sample_by,
        cache_dir=arguments.dataset_cache_dir,
    )


def _check_hub_id(dataset: str) -> None:
    looks_local = Path(dataset).suffix.lower() in FORMATS or dataset.startswith((".", "/", "~"))
    if looks_local or not _HUB_ID.fullmatch(dataset):
        raise ValueError(
            f"dataset {dataset!r} is not there (looked for from {Path.cwd()}); give an existing "
            f"{', '.join(FORMATS)} file, a folder of such, or a hub id (name or owner/name)"
        )


def _load_eval_file(eval_file: str, options: dict[str, Any]) -> Any:
    path = Path(eval_file).expanduser()
    if not path.is_file():
        raise ValueError(f"eval_file {eval_file!r} is no file; give an existing {', '.join(FORMATS)} file")
    if path.suffix.lower() not in (".csv", ".tsv"):
        options = {**options, "column_names": None}
    return _with_rows(load_local(path, ["train"], **options)[0], eval_file, "train")


def _with_rows(rows: Any, dataset: str, split: str) -> Any:
    if len(rows) == 0:
        raise ValueError(f"split {split!r} of {dataset!r} has no rows; name another split or file")
    return number_rows(rows)


def _hold_out(rows: Any, fraction: float, seed: int) -> Any:
    num_held_out = max(1, round(fraction * len(rows)))
    if num_held_out >= len(rows):
        raise ValueError(
            f"{len(rows)} rows are too few to hold out {fraction:g} of them for evaluation; name evaluation rows with "
            "--eval_split or --eval_file, lower --eval_fraction, or cut a txt file finer with --sample_by"
        )
    logger.info("held out %d of %d rows for evaluation (seed %d)", num_held_out, len(rows), seed)
    parts = rows.train_test_split(test_size=num_held_out, seed=seed)
    return datasets.DatasetDict(train=parts["train"], eval=parts["test"])
