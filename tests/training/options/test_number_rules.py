import re
from pathlib import Path

import pytest

from slivertune.cli import main
from slivertune.training.methods.registry import TRAIN_METHODS
from slivertune.training.options.number_rules import number_rule
from slivertune.training.options.parse import parse_train_arguments
from slivertune.training.options.table import Option, train_options

OPTIONS = train_options()
NUMBERS = [each for each in OPTIONS.values() if number_rule(each) is not None]
CHOICES = [each for each in OPTIONS.values() if each.choices]
WRONG = ("word", "", "nan", "inf", "-inf", "below", "above", "-1e-4", "9" * 5000)
ANY_SIGN = {"below": "-3", "above": str(10**30)}


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def owner_of(option: Option) -> list[str]:
    """The method that reads the option, as typed."""
    return next((["--method", name] for name, each in TRAIN_METHODS.items() if each.options_class is option.owner), [])


@pytest.mark.parametrize("option", NUMBERS, ids=lambda each: each.name)
def test_a_wrong_number_is_refused_by_the_name_of_its_option_and_its_value(option: Option) -> None:
    for wrong in WRONG:
        value = ANY_SIGN.get(wrong, wrong)
        with pytest.raises(ValueError, match=rf"\b{option.name}\b") as refused:
            parse_train_arguments([*owner_of(option), f"--{option.name}", value])
        said = str(refused.value)
        number = value if wrong in ("word", "") else str(float(value))
        assert value in said or number in said, (wrong, said)
        assert re.search(r"must|invalid (int|float) value|lie", said), (wrong, said)
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("option", CHOICES, ids=lambda each: each.name)
def test_an_unknown_choice_is_refused_with_all_that_there_are(option: Option) -> None:
    for value in ("magic", ""):
        with pytest.raises(ValueError, match=rf"--{option.name}\b.*invalid choice: {value!r}.*{option.choices[0]}"):
            parse_train_arguments([*owner_of(option), f"--{option.name}", value])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--num_train_epochs", "-3"), "--num_train_epochs -3.0 must be more than 0"),
        (("--max_steps", "0"), "--max_steps 0 must be at least 1 and at most 2147483647, or -1 to leave it off"),
        (("--learning_rate", "1e6"), "--learning_rate 1000000.0 must be at least 0 and at most 100"),
        (("--learning-rate", "-1e-4"), "--learning_rate -0.0001 must be at least 0 and at most 100"),
        (("--max_grad_norm", "-1"), "--max_grad_norm -1.0 must be at least 0"),
        (("--per_device_train_batch_size", "0"), "--per_device_train_batch_size 0 must be at least 1"),
        (("--adam_beta2", "1"), "--adam_beta2 1.0 must be at least 0 and less than 1"),
        (("--seed", "9" * 5000), f"argument --seed: invalid int value: '{'9' * 20}... (5,000 digits)'"),
        (("run.yaml",), "run.yaml, line 2: --warmup_steps -1.0 must be at least 0"),
    ],
    ids=lambda words: words[0],
)
def test_what_is_wrong_is_one_line_before_anything_is_loaded(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run.yaml").write_text("seed: 3\nwarmup_steps: -1\n", encoding="utf-8")
    assert main(["train", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"slivertune train: error: {said}") and error.count("\n") == 1
    assert [path.name for path in Path().iterdir()] == ["run.yaml"]
