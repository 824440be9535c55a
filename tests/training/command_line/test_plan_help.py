import re

import pytest

from slivertune.planning.request import REQUEST_OPTIONS
from slivertune.training.command_line.plan_help import plan_help
from slivertune.training.command_line.plan_words import IN_PLACE_OF, NAMES_OF_FIELDS, parse_plan_arguments, plan_options


def test_each_option_on_which_a_plan_depends_stands_exactly_once_in_the_help() -> None:
    heads = re.findall(r"^  (?:-h, )?(--.*?)(?:  .*)?$", plan_help(plan_options()), re.MULTILINE)
    shown = [word for head in heads for word in re.findall(r"--\w+", head)]
    assert len(shown) > 60 and len(shown) == len(set(shown))
    options_of_train = {"--help", "--model", "--model_name_or_path", *NAMES_OF_FIELDS}
    names = {*REQUEST_OPTIONS, *plan_options(), *(name for others in IN_PLACE_OF.values() for name in others)}
    assert set(shown) == {*(f"--{name.strip('-')}" for name in {*names, *options_of_train})} - {"--use_cpu"}


def test_the_help_fits_the_terminal_and_names_defaults(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stop:
        parse_plan_arguments(["--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0 and max(map(len, text.splitlines())) < 80
    titles = re.findall(r"^(\S.*):$", text, re.MULTILINE)
    methods = [f"--method {name}" for name in ("hift", "sft", "lora")]
    expected = ["examples", "the run", *methods, "layout", "what to find out", "help"]
    assert [title.partition(",")[0] for title in titles] == expected
    whole = " ".join(text.split())
    for part in (
        "--method {dense,hift,sft,lora,full} training method (default: hift)",
        "--max_length N, --seq_length unpadded tokens per sequence. By default 1,024, or as many as the model takes",
        "--fit [SIZE]",
        "--sft_target_modules NAME ...",
        "--layers_per_group N|SHARE|all|auto",
        "--optimizer NAME in place of optim: the optimizer of the trained weights",
        "compute whole logits, as transformers does (default: true)",
    ):
        assert part in whole, part
    assert "object at 0x" not in whole and "default: None" not in whole and "default: false" not in whole
