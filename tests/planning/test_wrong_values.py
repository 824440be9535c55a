"""Wrong values of every option of `slivertune plan`, found from its parser."""

import re
from argparse import Action
from typing import Any

import pytest

from slivertune.cli import main
from slivertune.core.number_rule import RULES
from slivertune.planning.arguments import argument_fields
from slivertune.planning.methods import planned_options
from slivertune.planning.parser import make_parser
from slivertune.planning.request import rule_of
from slivertune.training.options.number_rules import number_rule
from slivertune.training.options.table import train_options

FIELDS = {item.name: (item, kind) for item, kind in argument_fields()}
ACTIONS = [each for each in make_parser(argument_fields())._actions if each.nargs != 0]
NUMBERS = [each for each in ACTIONS if rule_of(*FIELDS[each.dest]) is not None]
SWITCHES = [each for each in ACTIONS if FIELDS[each.dest][1] is bool]
CHOICES = [each for each in ACTIONS if each.choices or each.dest in ("gpu", "optim")]
TEXTS = {"model", "layers", "sft_target_modules", "lora_target_modules", "optim_args", "sweep", "plot"}
"""Arguments that name a file, modules or fields, or that another library reads."""
SIZES = {each.dest for each in ACTIONS if each.metavar == "SIZE"}
WRONG = ("word", "", "nan", "inf", "-inf", "-3", str(10**30), "-1e-4", "-1,5", "9" * 5000)
NEEDED = {
    **dict.fromkeys(("fit_host_bytes", "fit_disk_bytes", "min_seq_length"), ("--fit", "1GiB")),
    "num_train_epochs": ("--tokens", "5"),
}
OWNERS = {name: ("--method", method) for method, own in planned_options().items() for name in own}


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_model(_: str) -> Any:
        raise AssertionError("the model was looked for")

    monkeypatch.setattr("slivertune.planning.command.find_model", find_model)


def refusal(action: Action, value: str, capsys: pytest.CaptureFixture[str]) -> str:
    model = () if action.dest == "model" else ("--model", "m")
    rest = (*OWNERS.get(action.dest, ()), *NEEDED.get(action.dest, ()))
    assert main(["plan", *model, *rest, action.option_strings[0], value]) == 2, value[:40]
    said = capsys.readouterr().err
    assert said.startswith("slivertune plan: error: ") and said.count("\n") == 1, said
    assert action.option_strings[0].strip("-") in said
    return said


@pytest.mark.parametrize("action", NUMBERS, ids=lambda each: each.dest)
def test_a_wrong_number_is_refused_by_its_option_value_and_rule(
    action: Action, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("900000000TiB",) if action.dest in SIZES else ()
    for value in (*WRONG, *more):
        said = refusal(action, value, capsys)
        shown = f"{value[:20]}... (5,000 digits)" if len(value) > 100 else value
        is_size = value.endswith("TiB")
        assert is_size or shown in said or ("," not in value and value and str(float(value)) in said), (
            value[:40],
            said,
        )
        assert " must " in said, said


@pytest.mark.parametrize("action", SWITCHES, ids=lambda each: each.dest)
def test_a_switch_takes_no_other_word(action: Action, capsys: pytest.CaptureFixture[str]) -> None:
    for value in ("maybe", "", "2", "-1", "nan", "9" * 5000):
        assert " must be true or false" in refusal(action, value, capsys)


@pytest.mark.parametrize("action", CHOICES, ids=lambda each: each.dest)
def test_an_unknown_choice_is_refused_with_all_that_there_are(
    action: Action, capsys: pytest.CaptureFixture[str]
) -> None:
    for value in ("magic", "", "nan"):
        said = refusal(action, value, capsys)
        assert repr(value) in said or f" {value}" in said
        assert re.search(r"choose from|must be one of|must be a name", said), said


@pytest.mark.parametrize("name", sorted(TEXTS - {"optim_args"}))
def test_an_empty_text_is_refused_by_its_option(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (action,) = (each for each in ACTIONS if each.dest == name)
    assert re.search(r" must |is empty", refusal(action, "", capsys))


@pytest.mark.parametrize(
    "swept", ["seq_length=nan", "seq_length=0", "token_ratio=nan", "token_ratio=inf", "stream_bytes=900000000TiB"]
)
def test_a_wrong_value_of_a_sweep_is_refused_by_its_field(swept: str, capsys: pytest.CaptureFixture[str]) -> None:
    (action,) = (each for each in ACTIONS if each.dest == "sweep")
    method = swept.partition("=")[0]
    assert method in refusal(action, swept, capsys)


def test_every_option_is_swept_here_or_stands_in_the_list_of_texts() -> None:
    swept = {each.dest for each in (*NUMBERS, *SWITCHES, *CHOICES)}
    assert {each.dest for each in ACTIONS} - swept == TEXTS
    assert TEXTS.isdisjoint(swept)


def test_options_that_train_has_too_have_the_same_rule() -> None:
    options, compared = train_options(), 0
    for action in NUMBERS:
        for name in (each.strip("-") for each in action.option_strings):
            if name in options:
                assert rule_of(*FIELDS[action.dest]) == number_rule(options[name]), name
                compared += 1
    assert compared > 15 and RULES["density"] == number_rule(options["density"])
