"""From a dataset's name, on the disk or on the Hugging Face hub, to a training and an evaluation split."""

import logging
import re
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

from slivertune.training.data.columns import number_rows
from slivertune.training.data.local_files import FORMATS, load_local
from slivertune.training.options.arguments import DataArguments

logger = logging.getLogger(__name__)

_PROBE_SECONDS = 10.0
"""How long one request may take that asks the hub whether it is there."""
_HUB_ID = re.compile(r"[\w][\w.\-]*(/[\w][\w.\-]*)?")


def load_splits(arguments: DataArguments, *, seed: int) -> Any:
    """Load the rows to train on and the rows to evaluate on.

    What lies on the disk comes before the hub. Without `eval_split` and `eval_file`, `eval_fraction` of the training
    rows, at least one, is drawn with the seed and held out.

    Args:
        arguments: Names a local csv, tsv, json, jsonl, txt or parquet file, a folder of such, or a hub id, and the
            splits; slices such as `train[:1000]` work.
        seed: Decides which rows are held out.

    Returns:
        A `datasets.DatasetDict` with `train` and `eval`, whose rows know their number in the split they come from.

    Raises:
        ValueError: If no dataset is named, the dataset, a split or a file is not there or can't be read, or there are
            too few rows.
        ConnectionError: If the hub can't be reached.
    """
    dataset, config, eval_file = arguments.dataset, arguments.dataset_config, arguments.eval_file
    if dataset is None:
        raise ValueError("dataset=None names no rows; give --dataset a hub id or a local file")
    splits = [arguments.train_split] if arguments.eval_split is None else [arguments.train_split, arguments.eval_split]
    path, names = Path(dataset).expanduser(), arguments.column_names
    options: dict[str, Any] = {"sample_by": arguments.sample_by, "cache_dir": arguments.dataset_cache_dir}
    if path.exists():
        if config is not None:
            raise ValueError(f"dataset_config={config!r} is for hub datasets; {path} is local, leave it out")
        loaded = load_local(path, splits, column_names=names, **options)
    else:
        _check_hub_id(dataset)
        if names is not None and eval_file is None:
            raise ValueError(f"column_names={names} is for local csv and tsv files; {dataset!r} is a hub dataset")
        loaded = _load_hub(dataset, config, splits, arguments.dataset_cache_dir)
    loaded = [_with_rows(rows, dataset, split) for rows, split in zip(loaded, splits, strict=True)]
    if eval_file is not None:
        file = Path(eval_file).expanduser()
        if not file.is_file():
            raise ValueError(f"eval_file {eval_file!r} is no file; give an existing {', '.join(FORMATS)} file")
        names = names if file.suffix.lower() in (".csv", ".tsv") else None
        loaded += [
            _with_rows(rows, eval_file, "train") for rows in load_local(file, ["train"], column_names=names, **options)
        ]
    if len(loaded) == 1:
        return _hold_out(loaded[0], arguments.eval_fraction, seed)
    return datasets.DatasetDict(train=loaded[0], eval=loaded[1])


def _check_hub_id(dataset: str) -> None:
    looks_local = Path(dataset).suffix.lower() in FORMATS or dataset.startswith((".", "/", "~"))
    if looks_local or not _HUB_ID.fullmatch(dataset):
        raise ValueError(
            f"dataset {dataset!r} is not there (looked for from {Path.cwd()}); give an existing "
            f"{', '.join(FORMATS)} file, a folder of such, or a hub id (name or owner/name)"
        )


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


def _load_hub(dataset: str, config: str | None, splits: list[str], cache_dir: str | None) -> list[Any]:
    """Load splits of a hub dataset.

    One request first asks whether the hub is there, since the datasets library retries an unreachable one for half a
    minute. A dataset that was loaded before is then taken from its cache.
    """
    _check_reachable(dataset, cache_dir)
    try:
        return list(datasets.load_dataset(dataset, config, split=splits, cache_dir=cache_dir))
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(
            f"dataset {dataset!r} (configuration {config!r}, splits {', '.join(splits)}) can't be loaded from "
            f"the hub: {' '.join(str(error).split())}; see --dataset_config, --train_split and --eval_split"
        ) from error


def _check_reachable(dataset: str, cache_dir: str | None) -> None:
    try:
        huggingface_hub.HfApi().dataset_info(dataset, timeout=_PROBE_SECONDS)
    except GatedRepoError:
        # The datasets library says itself how to ask for access.
        return
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"dataset {dataset!r} is neither a local file or folder nor a dataset that the hub shows you; check the "
            "spelling, or log in with `hf auth login` if it is private"
        ) from error
    except HfHubHTTPError:
        # The hub is there; what it refuses, the datasets library will say.
        return
    # Every transport has its own errors, and all say the same.
    except Exception as error:
        if _is_cached(dataset, cache_dir):
            logger.warning("the hub can't be reached (%s); taking %s from the cache", error, dataset)
            return
        raise ConnectionError(
            f"dataset {dataset!r} is no local file or folder, and the hub can't be reached to look for it "
            f"({type(error).__name__}: {error}); name a local file, or connect once so that it is cached"
        ) from error


def _is_cached(dataset: str, cache_dir: str | None) -> bool:
    owner, _, name = dataset.rpartition("/")
    folder = datasets.naming.camelcase_to_snakecase(name)
    root = Path(cache_dir or datasets.config.HF_DATASETS_CACHE).expanduser()
    return (root / (f"{owner}___{folder}" if owner else folder)).is_dir()
