"""A dataset, from disk or the Hugging Face hub, as a training and an evaluation split."""

import dataclasses
import logging
from typing import Any

import datasets

from slivertune.core.user_path import user_path
from slivertune.training.data.columns import number_rows
from slivertune.training.data.hub import check_hub_id, load_hub
from slivertune.training.data.local_files import FORMATS, choose_splits, load_local, reader_of
from slivertune.training.embedded.built_in import BUILT_IN, check_built_in
from slivertune.training.options.arguments import DataArguments

logger = logging.getLogger(__name__)


def load_splits(arguments: DataArguments, *, seed: int) -> Any:
    """Load the training and evaluation rows of one dataset.

    A local path takes precedence over the hub. Without `eval_split` and `eval_file`, `eval_fraction` of the training
    rows, at least one, is drawn with the seed and held out.

    Args:
        arguments: Settings that name the splits, and one local csv, tsv, json, jsonl, txt or parquet file, a folder of
            such files, a hub id, or a built-in dataset, which has a split `eval`. Slices such as `train[:1000]` work.
        seed: Seed for the choice of held-out rows.

    Returns:
        A `datasets.DatasetDict` with `train` and `eval`. Rows keep their number in the split from which they come.

    Raises:
        ValueError: If not exactly one dataset is named, if the dataset, a split or a file is missing or can't be read,
            or if there are too few rows.
        ConnectionError: If the hub can't be reached.
    """
    if arguments.dataset is None or len(arguments.dataset) != 1:
        raise ValueError(f"dataset={arguments.dataset} names no rows. Give --dataset a hub id or a local file")
    (dataset,) = arguments.dataset
    eval_split = arguments.eval_split
    if eval_split is None and arguments.eval_file is None and dataset in BUILT_IN:
        eval_split = "eval"
    splits = [arguments.train_split] if eval_split is None else [arguments.train_split, eval_split]
    loaded = _load_rows(dataset, splits, _for_dataset(dataset, arguments))
    if arguments.eval_file is not None:
        loaded.append(_load_eval_file(arguments.eval_file, arguments))
    if len(loaded) == 1:
        return _hold_out(loaded[0], arguments.eval_fraction, seed)
    return datasets.DatasetDict(train=loaded[0], eval=loaded[1])


def load_datasets(arguments: DataArguments, *, seed: int) -> dict[str, Any]:
    """Load the rows of every named dataset.

    Args:
        arguments: Settings that name one or more datasets. The split settings apply to each. An `eval_file` replaces
            the evaluation rows of all.
        seed: Seed for the choice of held-out rows in each dataset.

    Returns:
        Results of `load_splits` by dataset name. With several datasets and an `eval_file`, each has only `train`, and
        the file comes last and has only `eval`, unless it is one of the datasets.

    Raises:
        ValueError: As `load_splits`.
        ConnectionError: As `load_splits`.
    """
    names, eval_file = arguments.dataset or [], arguments.eval_file
    if len(names) < 2:
        return {name: load_splits(arguments, seed=seed) for name in names}
    if eval_file is None:
        return {
            name: load_splits(
                dataclasses.replace(_for_dataset(name, arguments), dataset=[name], dataset_weights=None), seed=seed
            )
            for name in names
        }
    sources = {
        name: datasets.DatasetDict(train=_load_rows(name, [arguments.train_split], _for_dataset(name, arguments))[0])
        for name in names
    }
    sources.setdefault(eval_file, datasets.DatasetDict())["eval"] = _load_eval_file(eval_file, arguments)
    return sources


def check_datasets(arguments: DataArguments) -> None:
    """Check the names of the datasets, without loading anything.

    Args:
        arguments: Settings that name local files, folders or hub ids.

    Raises:
        ValueError: If a name is neither built in, nor an existing path, nor a hub id, or if a file is empty or of an
            unknown format.
    """
    for name in arguments.dataset or []:
        path = user_path(name)
        check_built_in(name)
        if name in BUILT_IN:
            continue
        if path.is_file():
            reader_of([path])
        elif not path.exists():
            check_hub_id(name)


def _for_dataset(name: str, arguments: DataArguments) -> DataArguments:
    """Adapt the settings to one of several datasets. Options for one kind of file apply only to it, if there is any."""
    named = [*(arguments.dataset or []), *filter(None, [arguments.eval_file])]

    def is_for(suffixes: tuple[str, ...]) -> bool:
        return _may_hold(name, suffixes) or not any(_may_hold(each, suffixes) for each in named)

    column_names = arguments.column_names if is_for((".csv", ".tsv")) else None
    return dataclasses.replace(
        arguments, column_names=column_names, sample_by=arguments.sample_by if is_for((".txt",)) else "line"
    )


def _may_hold(name: str, suffixes: tuple[str, ...]) -> bool:
    """Check whether a dataset is a file with one of the suffixes, or a folder, which may contain such files."""
    path = user_path(name)
    return path.is_dir() or path.suffix.lower() in suffixes


def _load_rows(dataset: str, splits: list[str], arguments: DataArguments) -> list[Any]:
    path, config, names = user_path(dataset), arguments.dataset_config, arguments.column_names
    check_built_in(dataset)
    if dataset in BUILT_IN:
        loaded = _load_built_in(dataset, splits, arguments)
    elif path.exists():
        if config is not None:
            raise ValueError(f"dataset_config={config!r} is for hub datasets, and {path} is local. Leave it out")
        loaded = load_local(path, splits, column_names=names, **_reader_options(arguments))
    else:
        check_hub_id(dataset)
        if names is not None:
            raise ValueError(
                f"column_names={names} is for local csv and tsv files, and {dataset!r} is on the hub. Leave it out"
            )
        if arguments.sample_by != "line":
            raise ValueError(
                f"sample_by={arguments.sample_by} is for local txt files, and {dataset!r} is on the hub. Leave it out"
            )
        loaded = load_hub(dataset, config, splits, arguments.dataset_cache_dir)
    return [_with_rows(rows, dataset, split) for rows, split in zip(loaded, splits, strict=True)]


def _load_built_in(dataset: str, splits: list[str], arguments: DataArguments) -> list[Any]:
    for name, default in (("dataset_config", None), ("column_names", None), ("sample_by", "line")):
        value = getattr(arguments, name)
        if value != default:
            raise ValueError(f"{name}={value} is for other data than {dataset}, which is built in. Leave it out")
    return choose_splits(dataset, BUILT_IN[dataset].load(), splits)


def _load_eval_file(eval_file: str, arguments: DataArguments) -> Any:
    file = user_path(eval_file)
    if not file.is_file():
        raise ValueError(f"eval_file {eval_file!r} is no file. Give an existing {', '.join(FORMATS)} file")
    arguments = _for_dataset(eval_file, arguments)
    (rows,) = load_local(file, ["train"], column_names=arguments.column_names, **_reader_options(arguments))
    return _with_rows(rows, eval_file, "train")


def _reader_options(arguments: DataArguments) -> dict[str, Any]:
    return {"sample_by": arguments.sample_by, "cache_dir": arguments.dataset_cache_dir}


def _with_rows(rows: Any, dataset: str, split: str) -> Any:
    if len(rows) == 0:
        raise ValueError(f"split {split!r} of {dataset!r} has no rows. Name another split or file")
    return number_rows(rows)


def _hold_out(rows: Any, fraction: float, seed: int) -> Any:
    num_held_out = max(1, round(fraction * len(rows)))
    if num_held_out >= len(rows):
        raise ValueError(
            f"{len(rows)} rows are too few to hold out {fraction:g} of them for evaluation. Name evaluation rows with "
            "--eval_split or --eval_file, lower --eval_fraction, or cut a txt file finer with --sample_by"
        )
    logger.info("held out %d of %d rows for evaluation (seed %d)", num_held_out, len(rows), seed)
    parts = rows.train_test_split(test_size=num_held_out, seed=seed)
    return datasets.DatasetDict(train=parts["train"], eval=parts["test"])
