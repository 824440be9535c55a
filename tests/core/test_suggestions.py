import pytest

from slivertune.core.suggestions import close_names, did_you_mean

NAMES = ["--learning_rate", "--num_train_epochs", "--per_device_train_batch_size", "--per_device_eval_batch_size"]


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("--learnin_rate", ["--learning_rate"]),
        ("learning-rate", ["--learning_rate"]),
        ("LEARNING_RATE", ["--learning_rate"]),
        ("--epochs", ["--num_train_epochs"]),
        ("batch_size", ["--per_device_train_batch_size", "--per_device_eval_batch_size"]),
        ("--colour", []),
        ("size", ["--per_device_train_batch_size", "--per_device_eval_batch_size"]),
        # A part of a word is no word of the name, and too short a one says little.
        ("poch", []),
        ("num", []),
        ("", []),
    ],
)
def test_names_that_are_spelled_alike_or_have_the_word_as_a_part_are_close(word: str, expected: list[str]) -> None:
    assert close_names(word, NAMES) == expected


def test_the_question_names_one_or_several_or_is_not_asked() -> None:
    assert did_you_mean("--learnin_rate", NAMES) == "; did you mean --learning_rate?"
    both = "; did you mean --per_device_train_batch_size or --per_device_eval_batch_size?"
    assert did_you_mean("--batch_size", NAMES) == both
    assert did_you_mean("colour", NAMES) == "" == did_you_mean("word", [])
    several = [f"the_{letter * 9}_word" for letter in "abcd"]
    shown = "the_aaaaaaaaa_word, the_bbbbbbbbb_word or the_ccccccccc_word"
    assert did_you_mean("word", several) == f"; did you mean {shown}?"
