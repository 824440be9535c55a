"""Wrong values of every option that `slivertune compare` itself has, found from its parser."""

from argparse import Action

import pytest

from slivertune.cli import main
from slivertune.training.comparison.arguments import make_parser
from slivertune.training.comparison.budget import LENGTHS

ACTIONS = [each for each in make_parser()._actions if each.nargs != 0]
NUMBERS = [each for each in ACTIONS if each.type in (int, float) or each.dest == "seeds"]
TEXTS = {"rows", "budget", "output_dir"}
WRONG = ("word", "", "nan", "inf", "-inf", "-3", "1e30", "-1e-4", "9" * 5000)


@pytest.fixture(autouse=True)
def nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object) -> None:
        raise AssertionError("a comparison was begun")

    monkeypatch.setattr("slivertune.training.comparison.comparison.Comparison.run", run)


def refusal(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["compare", *words]) == 2, words
    said = capsys.readouterr().err
    assert said.startswith("slivertune compare: error: ") and said.count("\n") == 1 and words[0] in said, said
    return said


@pytest.mark.parametrize("action", NUMBERS, ids=lambda each: each.dest)
def test_a_wrong_number_is_refused_by_its_option_value_and_rule(
    action: Action, capsys: pytest.CaptureFixture[str]
) -> None:
    for value in WRONG:
        said = refusal([action.option_strings[0], *(["1"] if value else []), value], capsys)
        shown = f"{value[:20]}... (5,000 digits)" if len(value) > 100 else value
        assert shown in said or str(float(value)) in said, said
        assert " must be " in said, said


@pytest.mark.parametrize("length", [*LENGTHS, "bytes"])
def test_a_wrong_amount_of_the_budget_is_refused(length: str, capsys: pytest.CaptureFixture[str]) -> None:
    for value in (*WRONG, "900000000TiB"):
        said = refusal(["--budget", f"{length}={value}"], capsys)
        assert "must be" in said or "needs a limit" in said, said


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_an_empty_text_is_refused_by_its_option(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "''" in refusal([f"--{name}", ""], capsys)


def test_every_option_is_swept_here_or_stands_in_the_list_of_texts() -> None:
    assert {each.dest for each in ACTIONS} - {each.dest for each in NUMBERS} == TEXTS
