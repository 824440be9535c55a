"""Load a dataset from the Hugging Face hub, or say at once why that can't be."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

logger = logging.getLogger(__name__)

_PROBE_SECONDS = 10.0
"""How long one request may take that asks the hub whether it is there."""


def load_hub(
    dataset: str, splits: list[str], *, dataset_config: str | None = None, cache_dir: str | None = None
) -> list[Any]:
    """Load splits of a hub dataset.

    One request first asks whether the hub is there, since the datasets library retries an unreachable one for half a
    minute. A dataset that was loaded before is then taken from its cache.

    Args:
        dataset: A hub id, `name` or `owner/name`.
        splits: Names, or slices such as `train[:100]`, one per returned dataset.
        dataset_config: The dataset's configuration.
        cache_dir: Where prepared data is kept; the datasets library's own cache by default.

    Returns:
        One `datasets.Dataset` per split.

    Raises:
        ValueError: If the hub has no such dataset, configuration or split.
        ConnectionError: If the hub can't be reached and the dataset is not in the cache.
    """
    _check_reachable(dataset, cache_dir)
    try:
        loaded: list[Any] = datasets.load_dataset(dataset, dataset_config, split=splits, cache_dir=cache_dir)
    except (ValueError, FileNotFoundError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"dataset {dataset!r} (configuration {dataset_config!r}, splits {', '.join(splits)}) can't be loaded from "
            f"the hub: {reason}; see --dataset_config, --train_split and --eval_split"
        ) from error
    return loaded


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
