import re
from typing import Any

import datasets
import pytest

from slivertune.training.data.columns import number_rows
from slivertune.training.data.json_rows import JsonValue
from slivertune.training.data.labels import encode_labels, read_labels


def rows(labels: list[Any], feature: Any = None) -> Any:
    features = None if feature is None else datasets.Features({"label": feature})
    return number_rows(datasets.Dataset.from_dict({"label": labels}, features=features))


def test_integers_beside_words_are_labels_and_other_values_of_json_are_none() -> None:
    mixed = rows([0, "yes", None], JsonValue())
    assert read_labels(mixed, "label") == ("0", "yes")
    for other in ([1], 1.5, True):
        with pytest.raises(ValueError, match="label column 'label' holds JSON values, and regression"):
            read_labels(rows([0, "yes", other], JsonValue()), "label")


@pytest.mark.parametrize(
    ("values", "names", "classes"),
    [
        ([10, 2, 10, -1], ("-1", "2", "10"), [2, 1, 2, 0]),
        (["10", "2", " 2 "], ("2", "10"), [1, 0, 0]),
        (["neutral", "entailment", "neutral"], ("entailment", "neutral"), [1, 0, 1]),
        ([True, False], ("False", "True"), [1, 0]),
        (["1.1", "scope"], ("1.1", "scope"), [0, 1]),
    ],
)
def test_labels_are_sorted_as_numbers_or_words(values: list[Any], names: tuple[str, ...], classes: list[int]) -> None:
    assert read_labels(rows(values), "label") == read_labels(rows(values[::-1]), "label") == names
    assert encode_labels(rows(values), "label", names, split="train") == classes


def test_named_classes_keep_their_own_order_even_where_one_is_unused() -> None:
    named = rows([1, 0, 1], datasets.ClassLabel(names=["pos", "neg", "never"]))
    assert read_labels(named, "label") == ("pos", "neg", "never")
    assert encode_labels(named, "label", ("pos", "neg", "never"), split="train") == [1, 0, 1]


def test_labels_written_differently_in_another_file_are_the_same_labels() -> None:
    assert encode_labels(rows([1, 0]), "label", read_labels(rows(["0", "1"]), "label"), split="eval") == [1, 0]
    named = rows([0, 1], datasets.ClassLabel(names=["pos", "neg"]))
    assert encode_labels(named, "label", read_labels(rows(["neg", "pos"]), "label"), split="eval") == [1, 0]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([0.0, 1.0], "label column 'label' holds Value('float64'), and regression is not supported"),
        (["0.5", "1"], "label column 'label' holds decimals such as 0.5, and regression is not supported"),
        (["1e-3", "2"], "label column 'label' holds decimals such as 1e-3, and regression is not supported"),
        ([".5", "3."], "label column 'label' holds decimals such as .5, and regression is not supported"),
        ([1, 1], "has the labels ['1'], and a classifier needs at least two"),
    ],
)
def test_decimals_are_refused_as_regression_and_one_label_as_no_classification(values: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        read_labels(rows(values), "label")


def test_a_label_that_training_never_saw_is_named_with_its_rows() -> None:
    with pytest.raises(
        ValueError,
        match=r"of the eval split holds labels .*: c, d \(3 rows: rows 1, 2, 3, .*\); the train split has a, b",
    ):
        encode_labels(rows(["a", "c", "d", "c"]), "label", ("a", "b"), split="eval")
    hidden = rows([-1], datasets.ClassLabel(names=["a", "b"]))
    with pytest.raises(ValueError, match=r"does not have: -1 \(1 rows: row 0"):
        encode_labels(hidden, "label", ("a", "b"), split="eval")
