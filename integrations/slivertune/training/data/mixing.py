"""Mixing of several datasets: concatenated, or sampled by weight."""

from collections.abc import Sequence
from typing import Any

import datasets

_COLUMNS = ["input_ids", "labels"]


def mix_rows(parts: Sequence[Any], weights: Sequence[float] | None, *, seed: int) -> Any:
    """Combine the tokenised rows of several datasets into one dataset.

    Args:
        parts: Datasets (`datasets.Dataset`) of `input_ids` and optionally `labels`. If some have labels, the tokens of
            the others become their labels, which is the meaning of absent labels.
        weights: Relative share of the rows from each part. Rows are drawn until every part has been read in full, so
            rows of some parts repeat. None concatenates the parts.
        seed: Seed for the choice of the part from which the next row comes.

    Returns:
        A `datasets.Dataset`. A single part is returned as it is.
    """
    if len(parts) == 1:
        return parts[0]
    if any("labels" in part.column_names for part in parts):
        parts = [_labelled(part).select_columns(_COLUMNS) for part in parts]
    if weights is None:
        return datasets.concatenate_datasets(list(parts))
    return datasets.interleave_datasets(
        list(parts),
        probabilities=[weight / sum(weights) for weight in weights],
        seed=seed,
        stopping_strategy="all_exhausted",
    )


def _labelled(rows: Any) -> Any:
    if "labels" in rows.column_names:
        return rows
    return rows.map(_own_labels, batched=True, desc="Labelling texts")


def _own_labels(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {"labels": batch["input_ids"]}
