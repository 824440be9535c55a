"""Rows of a dataset of the Hugging Face hub."""

import logging
import re
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

from slivertune.core.suggestions import closest
from slivertune.core.user_path import user_path
from slivertune.training.data.local_files import FORMATS

logger = logging.getLogger(__name__)

_PROBE_SECONDS = 10.0
"""Timeout, in seconds, of the request that checks whether the hub is reachable."""
_HUB_ID = re.compile(r"[\w][\w.\-]*(/[\w][\w.\-]*)?")


def check_hub_id(dataset: str) -> None:
    """Check that a name, which is no local path, can be one of the hub.

    Args:
        dataset: Name of a dataset.

    Raises:
        ValueError: If it looks like a file, or is no name that the hub would take.
    """
    looks_local = Path(dataset).suffix.lower() in FORMATS or dataset.startswith((".", "/", "~"))
    if looks_local or not _HUB_ID.fullmatch(dataset):
        raise ValueError(
            f"dataset {dataset!r} is not there (looked for from {Path.cwd()}). Give an existing "
            f"{', '.join(FORMATS)} file, a folder of such, or a hub id (name or owner/name){_named_beside(dataset)}"
        )


def load_hub(dataset: str, config: str | None, splits: list[str], cache_dir: str | None) -> list[Any]:
    """Load splits of a hub dataset.

    One request first checks that the hub is reachable, since the datasets library retries an unreachable hub for half
    a minute. If it is not, a dataset that was loaded before is taken from the cache.

    Args:
        dataset: Id of the dataset, `name` or `owner/name`.
        config: Name of a configuration, or None if there is one only.
        splits: Names, or slices such as `train[:100]`, one per returned dataset.
        cache_dir: Folder for prepared data. The default is the datasets library's own cache.

    Returns:
        One `datasets.Dataset` per split.

    Raises:
        ValueError: If the hub shows no such dataset, or it can't be loaded.
        ConnectionError: If the hub can't be reached, and the dataset is not in the cache.
    """
    _check_reachable(dataset, cache_dir)
    try:
        return list(datasets.load_dataset(dataset, config, split=splits, cache_dir=cache_dir))
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(
            f"dataset {dataset!r} (configuration {config!r}, splits {', '.join(splits)}) can't be loaded from "
            f"the hub: {' '.join(str(error).split())}. See --dataset_config, --train_split and --eval_split"
        ) from error


def _check_reachable(dataset: str, cache_dir: str | None) -> None:
    try:
        huggingface_hub.HfApi().dataset_info(dataset, timeout=_PROBE_SECONDS)
    except GatedRepoError:
        # The datasets library explains how to ask for access.
        return
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"dataset {dataset!r} is neither a local file or folder nor a dataset that the hub shows you. Check the "
            f"spelling, or log in with `hf auth login` if it is private{_named_beside(dataset)}"
        ) from error
    except HfHubHTTPError:
        # The hub is reachable, and the datasets library reports the refusal.
        return
    # Each transport raises its own errors, and all mean the same.
    except Exception as error:
        if _is_cached(dataset, cache_dir):
            logger.warning("the hub can't be reached (%s), so %s is read from the cache", error, dataset)
            return
        raise ConnectionError(
            f"dataset {dataset!r} is no local file or folder, and the hub can't be reached to look for it "
            f"({type(error).__name__}: {error}). Name a local file, or connect once so that it is cached"
            f"{_named_beside(dataset)}"
        ) from error


def _is_cached(dataset: str, cache_dir: str | None) -> bool:
    owner, _, name = dataset.rpartition("/")
    folder = datasets.naming.camelcase_to_snakecase(name)
    root = user_path(cache_dir or datasets.config.HF_DATASETS_CACHE)
    return (root / (f"{owner}___{folder}" if owner else folder)).is_dir()


def _named_beside(dataset: str) -> str:
    """Suggest a file with a similar name, if there is one."""
    path = user_path(dataset)
    there = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
    near = closest(path.name, there)
    return "" if near is None else f"; did you mean {path.parent / near}?"
