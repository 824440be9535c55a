"""Several datasets in one: put together, or drawn from by weight."""

from collections.abc import Sequence
from typing import Any

import datasets

_COLUMNS = ["input_ids", "labels"]


def mix_rows(parts: Sequence[Any], weights: Sequence[float] | None, *, seed: int) -> Any:
    """Make one dataset of the tokenised rows of several.

    Args:
        parts: Each a `datasets.Dataset` of `input_ids` and maybe `labels`. Where some have labels, the tokens of the
            others become theirs, which is what no labels mean.
        weights: The share of the rows that comes from each, in any unit: rows are drawn until every part was seen
            whole, so that those of some come again. None puts the parts together as they are.
        seed: Decides which part the next row comes from.

    Returns:
        A `datasets.Dataset`; of one part, that part.
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
