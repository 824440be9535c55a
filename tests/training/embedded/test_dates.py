from datetime import date, datetime

import pytest

from slivertune.training.embedded.built_in import BUILT_IN, built_in_of
from slivertune.training.embedded.dates import date_splits, written_out


@pytest.mark.parametrize(
    ("day", "written"),
    [("2031-03-07", "7 March 2031"), ("1999-12-31", "31 December 1999"), ("2000-02-29", "29 February 2000")],
)
def test_dates_are_written_out(day: str, written: str) -> None:
    assert written_out(date.fromisoformat(day)) == written


def test_each_response_is_the_date_of_its_prompt() -> None:
    for row in date_splits()["eval"]:
        assert datetime.strptime(row["response"], "%d %B %Y").date().isoformat() == row["prompt"]


def test_no_date_to_evaluate_on_is_trained_on_and_a_second_draw_is_the_same() -> None:
    splits, again = date_splits(), date_splits()
    train, evaluation = set(splits["train"]["prompt"]), set(splits["eval"]["prompt"])
    assert (len(train), len(evaluation), len(train | evaluation)) == (4096, 128, 4224)
    assert {date.fromisoformat(day).day for day in train} == set(range(1, 32))
    assert [list(again[name]["response"]) for name in again] == [list(splits[name]["response"]) for name in splits]


def test_a_built_in_dataset_is_known_if_it_is_the_only_one() -> None:
    dates, reference = BUILT_IN
    assert built_in_of(None) is BUILT_IN[dates]
    assert built_in_of([reference]) is BUILT_IN[reference]
    assert built_in_of([dates, reference]) is None
    assert built_in_of(["rows.csv"]) is None
