import argparse
import re
from typing import ClassVar

import pytest

from slivertune.core.option_parser import OptionParser


class Parser(OptionParser):
    other_words: ClassVar = {"lr": "learning_rate"}


def make_parser() -> OptionParser:
    parser = Parser(prog="tool verb")
    parser.add_argument("--learning_rate", "--learning-rate", type=float)
    parser.add_argument("--method", choices=("dense", "hift"))
    parser.add_argument("--number", type=int, choices=(1, 2))
    # Long enough for a usage of several lines.
    for name in ("weight_decay", "max_grad_norm", "gradient_accumulation_steps", "warmup_steps"):
        parser.add_argument(f"--{name}", metavar="N|auto", nargs="?")
    return parser


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--learnin_rate 1", "unrecognized arguments: --learnin_rate 1; did you mean --learning_rate?; see tool verb"),
        ("--learnin-rate=1", "unrecognized arguments: --learnin-rate=1; did you mean --learning_rate?; see"),
        # The first that is close to something.
        ("--what 1 --warmup 1", "unrecognized arguments: --what 1 --warmup 1; did you mean --warmup_steps?"),
        ("--lr 1", "unrecognized arguments: --lr 1; did you mean --learning_rate?; see tool verb --help"),
        ("--gradient_acumulation_step 1", "did you mean --gradient_accumulation_steps?"),
        ("--nothing", "unrecognized arguments: --nothing; see tool verb --help"),
        ("stray", "unrecognized arguments: stray; see tool verb --help"),
        (
            "--method hifft",
            "argument --method: invalid choice: 'hifft' (choose from 'dense', 'hift'); did you mean hift?",
        ),
        ("--method lora", "argument --method: invalid choice: 'lora' (choose from 'dense', 'hift'); see tool verb"),
        ("--number 3", "invalid choice: 3 (choose from 1, 2); see tool verb --help"),
        (
            "--learning_rate much",
            "--learning_rate 'much' must be a number; see tool verb",
        ),
        ("--learning_rate -1,5", "--learning_rate '-1,5' must be a number; see"),
        ("--learning_rate -0x1", "--learning_rate '-0x1' must be a number; see"),
        (
            "--learning-rate --1",
            "expected one argument; if '--1' is its value, write --learning_rate=--1; see tool verb",
        ),
        ("--learning-rate --method hift", "expected one argument; see tool verb"),
        ("--learning-rate", "expected one argument; see tool verb"),
        # Whole names alone: a new option must not change what an older command means.
        ("--learn 1", "unrecognized arguments: --learn 1"),
    ],
)
def test_a_complaint_is_an_exception_and_says_what_was_meant(words: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make_parser().parse_args(words.split())


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ("--modle x", "required: --model; there is no --modle; did you mean --model?; see tool verb --help"),
        ("--lr=1 --what 2", "required: --model; there is no --lr; did you mean --model?; there is no --what; see"),
        ("--learning_rate 1", "required: --model; see tool verb --help"),
    ],
)
def test_what_is_missing_may_be_what_was_mistyped(words: str, asked: str) -> None:
    parser = Parser(prog="tool verb")
    parser.other_words = {"lr": "model"}  # type: ignore[misc]
    parser.add_argument("--model", required=True)
    parser.add_argument("--learning_rate")
    with pytest.raises(ValueError, match=re.escape(asked)):
        parser.parse_args(words.split())


def test_what_is_right_is_read_as_argparse_reads_it() -> None:
    parsed = make_parser().parse_args(["--learning-rate", "0.5", "--method", "hift"])
    assert isinstance(parsed, argparse.Namespace) and (parsed.learning_rate, parsed.method) == (0.5, "hift")
