import logging
import re
from typing import Any

import datasets
import pytest

from slivertune.training.data.columns import (
    ROW_COLUMN,
    causal_columns,
    label_column,
    number_rows,
    sentence_columns,
    usable_rows,
)
from slivertune.training.options.arguments import DataArguments


def table(*columns: str, **values: list[Any]) -> Any:
    return number_rows(datasets.Dataset.from_dict({**{column: ["a", "b"] for column in columns}, **values}))


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (("id", "text"), ("text",)),
        (("story",), ("story",)),
        (("mr", "ref"), ("mr", "ref")),
        (("instruction", "output", "id"), ("instruction", "output")),
    ],
)
def test_plain_columns_are_guessed_and_said(
    columns: tuple[str, ...], expected: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "slivertune"):
        assert causal_columns(DataArguments(), table(*columns)) == expected
    assert all(repr(name) in caplog.text for name in expected)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (("text", "content"), "(text, content) could be text or content; name what to read with --text_column"),
        (("text", "prompt", "response"), "could be text or prompt+response"),
        (("instruction", "input", "output"), "(instruction, input, output) give no plain choice"),
        (("mr", "reference"), "(mr, reference) give no plain choice"),
    ],
)
def test_columns_that_could_mean_several_things_are_not_guessed(columns: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        causal_columns(DataArguments(), table(*columns))


def test_half_of_a_sentence_pair_is_not_guessed() -> None:
    classification = DataArguments(task="classification")
    assert sentence_columns(classification, table("sentence", "label")) == ("sentence",)
    with pytest.raises(ValueError, match="could be sentence or question"):
        sentence_columns(classification, table("sentence", "question", "label"))
    named = DataArguments(task="classification", text_column="question", text_pair_column="sentence")
    assert sentence_columns(named, table("sentence", "question", "label")) == ("question", "sentence")


@pytest.mark.parametrize(
    ("choose", "options", "message"),
    [
        (
            causal_columns,
            {"text_column": "three"},
            r"--text_column names the column 'three'.* its columns are one, two \(if",
        ),
        (
            causal_columns,
            {"prompt_column": "one", "response_column": "three"},
            "--response_column names the column 'three'",
        ),
        (
            label_column,
            {"task": "classification", "label_column": "three"},
            "--label_column names the column 'three'",
        ),
        (
            label_column,
            {"task": "classification"},
            "give no plain choice; name what to read with --label_column",
        ),
    ],
)
def test_an_absent_column_is_an_error_that_lists_those_there_are(
    choose: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        choose(DataArguments(**options), table("one", "two"))


def test_a_column_that_only_training_has_is_an_error() -> None:
    with pytest.raises(ValueError, match="the eval split has no column 'three', which the train split has"):
        usable_rows(table("one", "two"), ("one", "three"), DataArguments(), split="eval")


def test_a_column_of_numbers_is_no_text() -> None:
    with pytest.raises(ValueError, match=r"column 'text' holds .*int64.*, not text"):
        causal_columns(DataArguments(), table(text=[1, 2]))


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
    with pytest.raises(ValueError, match="no row is left"):
        usable_rows(rows, ["other"], skip, split="eval")
