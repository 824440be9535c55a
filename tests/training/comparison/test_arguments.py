"""The command line of `slivertune compare`."""

import shlex
from pathlib import Path

import pytest

from slivertune.training.comparison.arguments import parse_compare_arguments


def test_what_is_not_its_own_belongs_to_train() -> None:
    words = "run.yaml --rows dense hift --max_steps 9 --search_rates 1e-4 1e-3 --seeds 1 2 --output_dir here --bf16"
    arguments = parse_compare_arguments(words.split())
    assert [row.name for row in arguments.rows] == ["dense", "hift"]
    assert (arguments.rates, arguments.seeds, arguments.folder) == ((1e-4, 1e-3), (1, 2), Path("here"))
    assert arguments.common == ("run.yaml", "--max_steps", "9", "--bf16")


def test_rates_may_be_left_to_the_rows() -> None:
    assert parse_compare_arguments([]).rates is None
    assert parse_compare_arguments(["--search_rates"]).rates == ()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--method hift", r"--method differs between the runs of a comparison\. Use --rows"),
        ("--seed=3", "Use --seeds"),
        ("--resume-from-checkpoint auto", "the same command again"),
        ("--search_rates 1e-3", "one rate is no search"),
        ("--search_rates 1e-3 -1", "-1.0 must be more than 0 and at most 100"),
        ("--seeds -1", "--seeds -1 must be at least 0 and at most 4294967295"),
        ("--seeds 1.5", "--seeds '1.5' must be a whole number"),
        ("--search_rates 1e6 1e7", "--search_rates 1000000.0 must be more than 0 and at most 100"),
        ("--output_dir /dev/null", r"output_dir /dev/null is a file\. Name a folder"),
        ("--seeds 1 1", "one of them is there twice"),
        (
            "--rows dense 's7:--method dense --seed 7'",
            "--rows s7: --seed differs between its runs. Use --seeds",
        ),
        ("--rows 'a:--method dense --resume_from_checkpoint=auto'", "Use the same command again"),
        ("--rows 'a:--method dense --max-steps 7'", "--rows a: --max_steps is the same for all rows"),
        ("--rows 'dense:--num_train_epochs 2'", "Give it outside --rows"),
        ("--rows 'dense:--output_dir here'", "--output_dir is the same for all rows"),
        ("--rows 'dense:--chat_template_date 2026-01-31'", "--chat_template_date is the same for all rows"),
        ("--rows 'dense:--learning_rate 1' --search_rates 1 2", "--rows dense: --search_rates sets the rates"),
        ("--rows", "expected at least one argument"),
    ],
)
def test_what_does_not_hold_together_is_refused(words: str, message: str) -> None:
    with pytest.raises((ValueError, FileExistsError), match=message):
        parse_compare_arguments(shlex.split(words))


def test_the_help_has_each_option_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_compare_arguments(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(option in text for option in ("--rows", "--budget", "--search_rates", "--seeds", "--output_dir"))
    assert "slivertune compare\n" in text
