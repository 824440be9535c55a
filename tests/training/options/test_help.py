import re
import subprocess
import sys

import pytest

from slivertune.core.options import options_of
from slivertune.training.options.arguments import RunArguments
from slivertune.training.options.help import common_options, help_text
from slivertune.training.options.methods import METHOD_OPTIONS
from slivertune.training.options.parser import make_parser
from slivertune.training.options.table import train_options
from slivertune.training.options.trainer import CommonOptions

SET_BY_PEOPLE = (
    *("learning_rate", "num_train_epochs", "max_steps", "per_device_train_batch_size", "per_device_eval_batch_size"),
    *("gradient_accumulation_steps", "warmup_steps", "lr_scheduler_type", "bf16", "gradient_checkpointing", "optim"),
    *("seed", "logging_steps", "eval_steps", "save_steps", "logging_strategy", "eval_strategy", "save_strategy"),
    *("max_grad_norm", "weight_decay", "output_dir", "resume_from_checkpoint"),
)


def shown_options(text: str) -> list[str]:
    """Every spelling that begins an entry of the help, in its order."""
    heads = re.findall(r"^  (?:-h, )?(--.*?)(?:  .*)?$", text, re.MULTILINE)
    return [word.strip("-") for head in heads for word in re.findall(r"--\w+", head)]


def accepted_options() -> set[str]:
    """Every spelling that the parser takes; those with hyphens and with `no_` are told of in a sentence."""
    spellings = {each for action in make_parser()._actions for each in action.option_strings}
    names = {each.removeprefix("--") for each in spellings if each.startswith("--")}
    return {name for name in names if "-" not in name and not name.startswith("no_")}


def test_each_option_that_is_accepted_stands_exactly_once_in_the_help_of_all() -> None:
    shown = shown_options(help_text(has_all=True))
    assert len(shown) > 180 and len(shown) == len(set(shown))
    assert set(shown) == accepted_options()


def test_the_short_help_has_ours_and_the_trainers_that_people_set_each_once() -> None:
    shown = shown_options(help_text(has_all=False))
    ours = [name for name, option in train_options().items() if "TrainingArguments" not in option.owner.__name__]
    aliases = [alias for option in train_options().values() for alias in option.aliases]
    assert len(shown) == len(set(shown)) and {*ours, *aliases, *SET_BY_PEOPLE, "method", "unset", "help"} <= set(shown)
    assert len(shown) <= 111 and "fsdp_config" not in shown
    assert set(common_options()) == set(shown) - {*aliases, "unset", "help"}


@pytest.mark.parametrize("has_all", [False, True])
@pytest.mark.parametrize("width", [78, 100])
def test_no_line_is_too_long_and_no_word_is_broken(has_all: bool, width: int) -> None:
    text = help_text(has_all=has_all, width=width)
    # An address of the Trainer's texts is one word, and longer.
    assert [line for line in text.splitlines() if len(line) > width and len(line.split()) > 1] == []
    # Of the texts that stand there as they were written; the first word may have lost its capital, the last its stop.
    words = set(text.split())
    texts = [
        each.text.replace("%%", "%").split()[1:-1] for each in train_options().values() if each.owner is RunArguments
    ]
    assert texts and [word for split in texts for word in split if word not in words] == []


def test_groups_stand_in_the_order_in_which_a_run_is_put_together() -> None:
    titles = re.findall(r"^(\S.*?)[:,](?: .*)?$", help_text(has_all=True), re.MULTILINE)
    expected = ["examples", "model and data", "method", *(f"--method {name}" for name in ("hift", "sft", "lora"))]
    expected += ["with any method", "training", "memory", "output and resume"]
    expected += ["every other field of transformers.TrainingArguments", "run file", "help"]
    assert [title for title in titles if title in expected] == expected


def test_a_default_is_shown_unless_it_is_nothing() -> None:
    text = " ".join(help_text(has_all=True).split())
    for part in (
        "--num_train_epochs X passes over the training data (default: 3.0)",
        "0 writes none (default: 160)",
        "label smoothing factor to prevent overconfidence. Zero means no smoothing (default: 0.0)",
        "updates in a row with a loss or gradient that is not finite (default: 10)",
        "--order {bottom2up,top2down,random} order in which groups take turns",
        "~10% slower performance",
        "text between a prompt and its response (default: \\n)",
    ):
        assert part in text, part
    assert "default: None" not in text and "object at 0x" not in text and "%%" not in text


RENAMED_ONCE = {"gradient_checkpointing"}


def test_the_trainers_common_options_are_told_as_they_are() -> None:
    known = train_options()
    for option in options_of(CommonOptions):
        real = known[option.name]
        default = getattr(real.default, "value", real.default)
        # transformers 5.23 renamed this option, and left the old name without a default.
        allowed = {None, False} if option.name in RENAMED_ONCE else {default}
        assert option.default in allowed, (option.name, default)
        assert not option.choices or (option.name, option.choices) == (option.name, real.choices)
        assert option.is_switch == real.is_switch and option.text
        if not option.is_switch and option.name != "report_to":
            assert (int in option.kinds, float in option.kinds) == (int in real.kinds, float in real.kinds), option.name


def test_help_comes_at_once_without_torch() -> None:
    code = (
        "import atexit, sys\nfrom slivertune.cli import main\n"
        "atexit.register(lambda: print('imported', {'torch', 'transformers', 'datasets'} & sys.modules.keys()))\n"
        "main(['train', '--help'])"
    )
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert told.stdout.startswith("usage: slivertune train") and told.stdout.endswith("imported set()\n")


def test_the_command_prints_the_help_and_ends(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for words, has_all in (("--help", False), ("-h", False), ("--help all", True), ("--seed 1 --help", False)):
        with pytest.raises(SystemExit) as stop:
            make_parser().parse_args(words.split())
        assert stop.value.code == 0 and capsys.readouterr().out == help_text(has_all=has_all, width=78)
    with pytest.raises(ValueError, match="invalid choice: 'al'"):
        make_parser().parse_args(["--help", "al"])


def test_a_method_of_another_package_has_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.random_layers.train import RandomLayersMethod

    monkeypatch.setitem(METHOD_OPTIONS, "random_layers", RandomLayersMethod.about)
    text = help_text(has_all=False, width=100)
    assert "\n--method random_layers, blocks drawn for each update, beside embedding and head:\n" in text
    assert "\n  --num_random_blocks N\n" in text
