"""One language: `HiFTConfig`, `train`, `plan` and `compare` accept and refuse a run alike, by the same sentence."""

import random
import shlex
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from slivertune.core.options import Option
from slivertune.hift import HiFTConfig
from slivertune.training.command_line.parse import parse_train_arguments
from slivertune.training.command_line.plan_words import parse_plan_arguments, plan_options
from slivertune.training.comparison.arguments import parse_compare_arguments
from slivertune.training.comparison.comparison import Comparison
from slivertune.training.comparison.record import Record
from slivertune.training.options.methods import METHOD_OPTIONS
from slivertune.training.options.table import RENAMED, train_options
from tests.training.command_line.values import value_of

pytestmark = pytest.mark.usefixtures("parsers_made_once")

AXES: dict[str, tuple[Any, ...]] = {
    "state": ("host", "device", "disk", "discard"),
    "master": ("fp32", "none"),
    "gradients": ("device", "host", "stepped"),
    "waiting": (None, "int8", "nf4"),
    "weights": ("device", "host"),
    "prefetch_bytes": ("auto", 0, 2**20),
    "resident_bytes": ("auto", 0, 2**20),
    "steps_per_group": (1, 20),
}
DRAWN: dict[str, tuple[Any, ...]] = {
    **AXES,
    "layers_per_group": (1, 0.25, 0, 1.5),
    "device_bytes": ("auto", 0, 2**21),
    "stream_bytes": (0, "64MiB"),
    "state_ram_bytes": (0, 2**20),
    "order": ("random", "bottom2up"),
}
"""Some of these values are wrong by themselves."""


def refusal(made: Callable[[], Any]) -> str | None:
    """Return the message of a refusal, or None."""
    try:
        made()
    except ValueError as error:
        return str(error).partition("; see slivertune")[0]
    return None


def with_folder(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {**settings, **({"state_dir": "state"} if settings["state"] == "disk" else {})}


def words_of(settings: Mapping[str, Any]) -> list[str]:
    return [f"--{name}={value}" for name, value in settings.items() if value is not None]


def test_all_combinations_of_hifts_axes_are_refused_by_train_as_by_the_config() -> None:
    refused = 0
    for values in product(*AXES.values()):
        settings = with_folder(dict(zip(AXES, values, strict=True)))
        said = refusal(lambda settings=settings: HiFTConfig(**settings))  # type: ignore[misc]
        assert refusal(lambda settings=settings: METHOD_OPTIONS["hift"].make(settings)) == said  # type: ignore[misc]
        refused += said is not None
    assert 500 < refused < 2500


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("own_folder")
@pytest.mark.parametrize(
    "num_runs", [pytest.param(40, id="40 runs"), pytest.param(400, id="400 runs", marks=pytest.mark.slow)]
)
def test_drawn_runs_are_refused_alike_everywhere(num_runs: int) -> None:
    draw, said = random.Random(num_runs), list[str | None]()
    for _ in range(num_runs):
        settings = with_folder({name: draw.choice(values) for name, values in DRAWN.items()})
        found = refusals(settings)
        assert len({each if each is None else bare(each) for each in found.values()}) == 1, (settings, found)
        said.append(found["config"])
    assert len({each for each in said if each is not None}) > 5 and None in said


def refusals(settings: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the refusals of a run by the place that was asked."""
    words = words_of(settings)
    return {
        "config": refusal(lambda: HiFTConfig(**settings)),
        # Stepped gradients can't be clipped, as the Trainer does by default.
        "train": refusal(lambda: parse_train_arguments([*words, "--max_grad_norm", "0", "--output_dir", "out"])),
        "plan": refusal(lambda: parse_plan_arguments(["--model", "m", *words])),
    }


def bare(message: str) -> str:
    """Leave out how a setting is written: as a field or as an option, its value with quotes or without."""
    return message.replace("--", "").replace("=", " ").replace("'", "").replace('"', "")


@pytest.mark.usefixtures("own_folder")
def test_a_row_of_a_comparison_is_refused_by_the_sentence_of_train() -> None:
    for words in ("--state device --gradients host", "--resident_bytes 5", "--state_ram_bytes 5"):
        said = refusal(lambda words=words: parse_train_arguments([*shlex.split(words), "--output_dir", "out"]))  # type: ignore[misc]
        row = parse_compare_arguments(["--rows", "dense", f"mine:--method hift {words}"])
        compared = refusal(lambda row=row: Comparison(row, Record(row.folder), None, print))  # type: ignore[misc, arg-type]
        assert said is not None and compared is not None and said in compared


def spellings(option: Option, value: str) -> Iterator[list[str]]:
    """Spell an option in three ways, the last of them in a run file."""
    yield [f"--{option.name}", *shlex.split(value)]
    yield [f"--{option.name.replace('_', '-')}={value}"]
    text = f'"{value}"' if value.startswith("{") else value
    Path("run.yaml").write_text(f"{option.name}: {text}\n", encoding="utf-8")
    yield ["run.yaml"]


@pytest.mark.usefixtures("own_folder")
@pytest.mark.parametrize("name", [name for name in train_options() if name not in plan_options()])
def test_every_option_of_train_is_planned_or_named_in_three_spellings(name: str) -> None:
    option = train_options()[name]
    owner = next((method for method, about in METHOD_OPTIONS.items() if option in about.options()), "hift")
    rest = ["--method", owner] if name != "model_name_or_path" else []
    model = ["--model", "m"] if name != "model_name_or_path" else []
    found = []
    for words in spellings(option, value_of(option)):
        try:
            arguments = parse_plan_arguments([*words, *model, *rest])
        except ValueError as error:
            said = str(error).partition("; see slivertune")[0]
            found.append(said)
            assert option.name in said or "distributes" in said, said
        else:
            found.append(str((arguments.model, sorted(arguments.given.items()), arguments.unread)))
            nothing = arguments.given.keys() <= {"method"} and arguments.model == "m" and not arguments.chooses_layers
            assert bool({name, RENAMED.get(name)}.intersection(arguments.unread)) == nothing, (words, arguments)
    assert len({each.removeprefix("run.yaml, line 1: ") for each in found}) == 1, found
