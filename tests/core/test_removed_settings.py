import dataclasses
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

from slivertune import HiFTConfig
from slivertune.core.removed_settings import is_only_value, refuse_removed, say_removed, say_removed_value
from slivertune.interop.axolotl import read_section
from slivertune.training.command_line.parse import parse_train_arguments
from slivertune.training.command_line.plan_words import parse_plan_arguments

UPDATE = "update was removed: step() always applies the update. Leave it out"
SPLIT = "'split' was removed: fp32 trains with the same bits and stores 2 bytes more per parameter. Use that, and an"


@refuse_removed
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    size: int = 3


def test_a_config_says_what_became_of_a_field_and_is_else_as_it_was() -> None:
    with pytest.raises(ValueError, match=re.escape(f"Config has no field 'update'; {UPDATE}")):
        Config(size=3, update="step")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'updates'"):
        Config(updates="step")  # type: ignore[call-arg]
    assert dataclasses.replace(Config(), size=4) == Config(size=4)
    assert list(inspect.signature(Config).parameters) == ["size"]


def test_a_name_is_known_as_it_is_typed() -> None:
    assert say_removed("--update") == f"; --{UPDATE}"
    assert say_removed("updates") == say_removed("order") == ""
    assert say_removed_value("--master", "split").startswith(f"; {SPLIT}")
    assert say_removed_value("master", "fp32") == say_removed_value("order", "split") == ""
    assert say_removed_value("master", ["split"]) == ""
    assert is_only_value("update", "step")
    assert not is_only_value("update", "forward") and not is_only_value("order", "step")


PLACES: dict[str, Callable[[str, str], Any]] = {
    "config": lambda name, value: HiFTConfig.paper(**{name: value}),  # type: ignore[arg-type]
    "axolotl": lambda name, value: read_section({"hift": {name: value}}),
    "train": lambda name, value: parse_train_arguments([f"--{name}", value]),
    "plan": lambda name, value: parse_plan_arguments(["--model", "llama-2-7b", f"--{name}", value]),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("update", "forward", UPDATE), ("update", "step", UPDATE), ("master", "split", SPLIT)],
)
def test_every_place_that_takes_settings_says_so(place: str, name: str, value: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        PLACES[place](name, value)
