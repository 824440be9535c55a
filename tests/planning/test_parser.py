import re

import pytest

from slivertune.planning.arguments import argument_fields, parse_plan_arguments
from slivertune.planning.parser import make_parser


def test_each_option_that_is_accepted_stands_exactly_once_in_the_help() -> None:
    parser = make_parser(argument_fields())
    heads = re.findall(r"^  (?:-h, )?(--.*?)(?:  .*)?$", parser.format_help(), re.MULTILINE)
    shown = [word for head in heads for word in re.findall(r"--\w+", head)]
    accepted = {each for action in parser._actions for each in action.option_strings if each.startswith("--")}
    assert len(shown) > 60 and len(shown) == len(set(shown))
    assert set(shown) == {each for each in accepted if not each.startswith("--no_")}


def test_the_help_fits_the_terminal_and_names_defaults(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stop:
        parse_plan_arguments(["--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0 and max(map(len, text.splitlines())) < 80
    titles = re.findall(r"^(\S.*):$", text, re.MULTILINE)
    expected = ["examples", "the run", "methods", "layout", "as slivertune train has it", "what to find out", "help"]
    assert titles == expected
    whole = " ".join(text.split())
    for part in (
        "--method {dense,hift,sft,lora} training method (default: hift)",
        "--seq_length N, --max_length unpadded tokens per sequence (default: 512)",
        "--fit [SIZE]",
        "--sft_target_modules NAME ...",
        "--layers_per_group N|SHARE|auto",
        "--optimizer NAME optimizer of the trained weights",
        "all logits; no effect on a classifier (default: true)",
    ):
        assert part in whole, part
    assert "object at 0x" not in whole and "default: None" not in whole and "default: false" not in whole


def test_what_is_not_typed_is_absent() -> None:
    parsed = make_parser(argument_fields()).parse_args(["--model", "x", "--no_chunked_cross_entropy"])
    assert vars(parsed) == {"model": "x", "chunked_cross_entropy": False}
