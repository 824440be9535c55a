"""Rows of a comparison: names, and settings of one's own."""

import pytest

from slivertune.training.comparison.rows import DEFAULT_ROWS, NAMED_ROWS, Row, parse_rows
from slivertune.training.options.parser import given_values


def test_each_named_row_has_options_that_train_knows() -> None:
    methods = {name: given_values(options)["method"] for name, options in NAMED_ROWS.items()}
    assert methods["hift+tokentune"] == "hift" and methods["sft-ma"] == "sft" and methods["qlora"] == "lora"
    assert set(DEFAULT_ROWS) <= set(NAMED_ROWS) and DEFAULT_ROWS[0] == "dense"


def test_settings_of_ones_own_have_a_name_and_add_to_those_of_a_known_one() -> None:
    rows = parse_rows(["dense", "m4:--method hift --layers_per_group 4", "lora:--lora_rank 64"])
    assert rows == (
        Row(name="dense", options=("--method", "dense")),
        Row(name="m4", options=("--method", "hift", "--layers_per_group", "4")),
        Row(name="lora", options=("--method", "lora", "--lora_rank", "64")),
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["hfit"], r"'hfit' is unknown\. Use dense, .* did you mean hift"),
        (["dense", "dense"], "names 'dense' twice"),
        (["a/b:--method hift"], "a name may have only letters"),
        ([":--method hift"], "a name may have only letters"),
    ],
)
def test_what_is_no_row_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_rows(words)
