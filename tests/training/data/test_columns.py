import tracemalloc
from datetime import datetime
from typing import Any

import datasets
import pytest

from slivertune.training.data.columns import (
    ROW_COLUMN,
    iterate_values,
    label_column,
    number_rows,
    sentence_columns,
    usable_rows,
)
from slivertune.training.options.arguments import DataArguments


def table(*columns: str, **values: list[Any]) -> Any:
    return number_rows(datasets.Dataset.from_dict({**{column: ["a", "b"] for column in columns}, **values}))


PAIRS = {"text_column": "question", "text_pair_column": "sentence"}


@pytest.mark.parametrize(
    ("options", "columns", "expected"),
    [({}, ("sentence", "label"), ("sentence",)), (PAIRS, ("sentence", "question", "label"), ("question", "sentence"))],
)
def test_sentences_are_guessed_and_pairs_named(
    options: dict[str, str], columns: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    assert sentence_columns(DataArguments(task="classification", **options), table(*columns)) == expected


ONE_TWO = table("one", "two")


@pytest.mark.parametrize(
    ("choose", "options", "rows", "message"),
    [
        # Half of a sentence pair is not guessed.
        (
            sentence_columns,
            {"task": "classification"},
            table("sentence", "question", "label"),
            "could be sentence or question",
        ),
        (
            label_column,
            {"task": "classification", "label_column": "three"},
            ONE_TWO,
            "--label_column names the column 'three'",
        ),
        (
            label_column,
            {"task": "classification"},
            ONE_TWO,
            r"give no plain choice\. Name what to read with --label_column",
        ),
        (sentence_columns, {"task": "classification"}, table(text=[1, 2]), r"column 'text' holds .*int64.*, not text"),
        (
            sentence_columns,
            {"task": "classification"},
            table(text=[datetime(2031, 3, 7), datetime(2031, 3, 8)]),
            r"column 'text' holds .*timestamp.*, not text, as texts such as 2031-03-07 become .* local json or csv",
        ),
    ],
)
def test_a_column_that_is_not_plain_absent_or_no_text_is_an_error(
    choose: Any, options: dict[str, Any], rows: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        choose(DataArguments(**options), rows)


def test_a_column_that_only_training_has_is_an_error() -> None:
    with pytest.raises(ValueError, match="the eval split has no column 'three', which the train split has"):
        usable_rows(ONE_TWO, ("one", "three"), DataArguments(), split="eval")


def test_empty_rows_are_an_error_that_names_their_numbers() -> None:
    rows = table(text=["one", "", None, " \t\n", "five", *[""] * 5], label=[0, 1, 2, 3, None, *range(5)])
    with pytest.raises(ValueError, match="rows of the train split have nothing") as raised:
        usable_rows(rows.shuffle(seed=0), ["text", "label"], DataArguments(), split="train")
    message = str(raised.value)
    assert "9 of 10 rows of the train split have nothing in column 'text', 'label' (rows 1, 2, 3, 4, 5, ...," in message
    assert "--skip_empty_rows" in message


def test_empty_rows_are_left_out_on_request_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    rows = table(text=["one", "", "three"], other=[None, None, None])
    skip = DataArguments(skip_empty_rows=True)
    kept = usable_rows(rows, ["text"], skip, split="eval")
    assert (list(kept["text"]), list(kept[ROW_COLUMN])) == (["one", "three"], [0, 2])
    assert "1 of 3 rows of the eval split have nothing in column 'text' (row 1, counted from 0); they are left out" in (
        caplog.text
    )
    with pytest.raises(ValueError, match=r"\. No row is left"):
        usable_rows(rows, ["other"], skip, split="eval")


def test_texts_are_read_a_part_at_a_time() -> None:
    rows = datasets.Dataset.from_dict({"text": ["x" * 4000] * 5000, "other": [0] * 5000})
    tracemalloc.start()
    try:
        assert sum(map(len, iterate_values(rows, "text"))) == 20_000_000
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Two parts of 1,000 texts at most, one of which is left when the other is read.
    assert peak < 12_000_000
