"""Wrong values of every option of `slivertune plan`, found from its parser."""

import re
from typing import Any

import pytest

from slivertune.cli import main
from slivertune.core.number_rule import RULES
from slivertune.core.options import Option
from slivertune.planning.request import REQUEST_OPTIONS, rule_of
from slivertune.training.command_line.plan_words import IN_PLACE_OF, NAMES_OF_FIELDS, plan_options
from slivertune.training.options.methods import METHOD_OPTIONS
from slivertune.training.options.number_rules import number_rule
from slivertune.training.options.table import train_options

pytestmark = pytest.mark.usefixtures("parsers_made_once")

OPTIONS = {**train_options(), **plan_options()}
FIELDS = {NAMES_OF_FIELDS.get(name, name): name for name in OPTIONS}
READ = {
    name: OPTIONS[name]
    for name in (
        *("model_name_or_path", *plan_options(), *(FIELDS[field] for field in REQUEST_OPTIONS)),
        *(name for others in IN_PLACE_OF.values() for name in others),
    )
}
"""Options on which a plan depends."""
NUMBERS = [each for each in READ.values() if number_rule(each) is not None]
SWITCHES = [each for each in READ.values() if each.is_switch]
CHOICES = [each for each in READ.values() if each.choices or each.name in ("gpu", "optim")]
TEXTS = {
    *("model_name_or_path", "layers", "sft_target_modules", "lora_target_modules", "optim_args", "sweep", "plot"),
    "attn_implementation",
}
"""Options that name a file, modules or fields, or that another library reads."""
SIZES = {each.name for each in READ.values() if "SIZE" in (each.value_name or "")}
WRONG = ("word", "", "nan", "inf", "-inf", "-3", str(10**30), "-1e-4", "-1,5", "9" * 5000)
NEEDED = {
    **dict.fromkeys(("fit_host", "fit_disk", "min_seq_length"), ("--fit", "1GiB")),
    "num_train_epochs": ("--tokens", "5"),
}
OWNERS = {
    option.name: ("--method", method)
    for method, about in METHOD_OPTIONS.items()
    for option in about.options()
    if option.name not in plan_options()
}


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_model(_: str) -> Any:
        raise AssertionError("the model was looked for")

    monkeypatch.setattr("slivertune.planning.command.find_model", find_model)


def refusal(option: Option, value: str, capsys: pytest.CaptureFixture[str]) -> str:
    model = () if option.name == "model_name_or_path" else ("--model", "m")
    rest = (*OWNERS.get(option.name, ()), *NEEDED.get(option.name, ()))
    assert main(["plan", *model, *rest, f"--{option.name}", value]) == 2, value[:40]
    said = capsys.readouterr().err
    assert said.startswith("slivertune plan: error: ") and said.count("\n") == 1, said
    assert option.name in said
    return said


@pytest.mark.parametrize("option", NUMBERS, ids=lambda each: each.name)
def test_a_wrong_number_is_refused_by_its_option_value_and_rule(
    option: Option, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("900000000TiB",) if option.name in SIZES else ()
    for value in (*WRONG, *more):
        said = refusal(option, value, capsys)
        shown = f"{value[:20]}... (5,000 digits)" if len(value) > 100 else value
        is_size = value.endswith("TiB")
        assert is_size or shown in said or ("," not in value and value and str(float(value)) in said), (
            value[:40],
            said,
        )
        assert " must " in said, said


@pytest.mark.parametrize("option", SWITCHES, ids=lambda each: each.name)
def test_a_switch_takes_no_other_word(option: Option, capsys: pytest.CaptureFixture[str]) -> None:
    for value in ("maybe", "", "2", "-1", "nan", "9" * 5000):
        assert " must be true or false" in refusal(option, value, capsys)


@pytest.mark.parametrize("option", CHOICES, ids=lambda each: each.name)
def test_an_unknown_choice_is_refused_with_all_that_there_are(
    option: Option, capsys: pytest.CaptureFixture[str]
) -> None:
    for value in ("magic", "", "nan"):
        said = refusal(option, value, capsys)
        assert repr(value) in said or f" {value}" in said
        assert re.search(r"choose from|must be one of|is empty", said), said


@pytest.mark.parametrize("name", sorted(TEXTS - {"optim_args"}))
def test_an_empty_text_is_refused_by_its_option(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (option,) = (each for each in READ.values() if each.name == name)
    assert re.search(r" must |is empty", refusal(option, "", capsys))


@pytest.mark.parametrize(
    "swept", ["seq_length=nan", "seq_length=0", "token_ratio=nan", "token_ratio=inf", "stream_bytes=900000000TiB"]
)
def test_a_wrong_value_of_a_sweep_is_refused_by_its_field(swept: str, capsys: pytest.CaptureFixture[str]) -> None:
    (option,) = (each for each in READ.values() if each.name == "sweep")
    method = swept.partition("=")[0]
    assert method in refusal(option, swept, capsys)


def test_every_option_is_swept_here_or_stands_in_the_list_of_texts() -> None:
    swept = {each.name for each in (*NUMBERS, *SWITCHES, *CHOICES)}
    assert READ.keys() - swept == TEXTS
    assert TEXTS.isdisjoint(swept)


def test_fields_of_a_request_have_the_rules_of_the_options() -> None:
    rules = {field: rule_of(option) for field, option in REQUEST_OPTIONS.items()}
    compared = {field: rule for field, rule in rules.items() if rule is not None}
    assert {field: number_rule(OPTIONS[FIELDS[field]]) for field in compared} == compared
    assert len(compared) > 15 and RULES["density"] == number_rule(OPTIONS["density"])
