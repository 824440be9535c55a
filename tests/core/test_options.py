from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from torch import nn

from slivertune.core.byte_text import parse_bytes
from slivertune.core.option_parser import OptionParser, PartedTexts
from slivertune.core.options import (
    Bytes,
    BytesOrAuto,
    Spelling,
    add_option,
    attribute_docs,
    bytes_or_auto,
    in_words,
    options_of,
)
from slivertune.training.command_line.plan_words import parse_plan_arguments
from slivertune.training.options.arguments import DataArguments, ModelArguments, RunArguments, TokenArguments
from slivertune.training.options.methods import METHOD_OPTIONS
from slivertune.training.options.parser import given_values


@dataclass(kw_only=True)
class Base:
    place: Literal["host", "disk"] = "host"
    """Place of the state, in
    two lines.

    A paragraph for readers of the class."""
    own: int = 0
    """Not an option."""


@dataclass(kw_only=True)
class Settings(Base):
    folder: Annotated[str | Path | None, Spelling(value_name="FOLDER", aliases=("dir",))] = None
    """Folder of `place=disk`; see `elsewhere`."""
    size: Bytes = 2**20
    """Size of a chunk."""
    room: BytesOrAuto = "auto"
    """Room for chunks."""
    names: Sequence[str | type[nn.Module]] | None = None
    """Names of modules."""
    columns: Annotated[list[str] | None, Spelling(words=PartedTexts)] = None
    """Names of columns."""
    task: Annotated[str, Spelling(choices=("one", "two"))] = "one"
    """Task."""
    is_on: bool = True
    """Switch."""
    share: float | None = None
    untold: int = 3

    @property
    def place_again(self) -> str:
        """Not a field."""
        return self.place


OPTIONS = {option.name: option for option in options_of(Settings, {"own": None, "names": "module_names"})}


def parsed(*words: str) -> dict[str, Any]:
    parser = OptionParser(prog="it")
    for option in OPTIONS.values():
        add_option(parser, option)
    return vars(parser.parse_args(list(words)))


def test_a_fields_docstring_is_its_help_up_to_the_first_blank_line() -> None:
    assert attribute_docs(Settings)["place"] == "Place of the state, in two lines."
    assert OPTIONS["folder"].text == "Folder of --place disk; see elsewhere."
    assert OPTIONS["module_names"].text == "Names of modules."
    assert OPTIONS["share"].text == "" and "place_again" not in attribute_docs(Settings)


def test_fields_that_are_no_options_are_left_out_and_others_keep_their_order() -> None:
    assert list(OPTIONS) == [
        *("place", "folder", "size", "room", "module_names", "columns", "task", "is_on", "share", "untold"),
    ]


@pytest.mark.parametrize(
    ("name", "kinds", "choices", "value_name"),
    [
        ("place", (Literal["host", "disk"],), ("host", "disk"), None),
        ("folder", (str,), (), "FOLDER"),
        ("size", (int,), (), "SIZE"),
        ("room", (int, Literal["auto"]), (), "SIZE|auto"),
        ("module_names", (list[str],), (), None),
        ("task", (str,), ("one", "two"), None),
        ("share", (float,), (), None),
    ],
)
def test_types_say_what_an_option_takes(
    name: str, kinds: tuple[Any, ...], choices: tuple[str, ...], value_name: str | None
) -> None:
    option = OPTIONS[name]
    assert (option.kinds, option.choices, option.value_name) == (kinds, choices, value_name)


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ((), "room", "auto"),
        (("--place", "disk"), "place", "disk"),
        (("--dir=x",), "folder", "x"),
        (("--size", "64MiB"), "size", 64 * 2**20),
        (("--size", "64"), "size", 64),
        (("--room", "1.5GB"), "room", 1_500_000_000),
        (("--room", "auto"), "room", "auto"),
        (("--module-names", "a,b", "c"), "module_names", ["a", "b", "c"]),
        (("--columns", "a b,c"), "columns", ["a b", "c"]),
        (("--is_on",), "is_on", True),
        (("--is-on", "no"), "is_on", False),
        (("--no_is_on",), "is_on", False),
        (("--no-is-on",), "is_on", False),
        (("--share", "1e-1"), "share", 0.1),
        (("--untold", "5"), "untold", 5),
    ],
)
def test_words_become_values(words: tuple[str, ...], name: str, value: object) -> None:
    assert parsed(*words)[name] == value


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--size", "64 boxes"), "--size '64 boxes' must be a size, such as 24GiB"),
        (("--room", "much"), "--room 'much' must be a size, such as 24GiB"),
        (("--is_on", "maybe"), "--is_on 'maybe' must be true or false"),
        (("--untold", "x"), "--untold 'x' must be a whole number"),
        (("--task", "on"), "argument --task: invalid choice: 'on'"),
        (("--own", "3"), "unrecognized arguments: --own"),
    ],
)
def test_other_words_are_refused_by_the_options_name(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parsed(*words)


def test_a_docstrings_code_is_written_as_it_is_typed() -> None:
    names = {"state": "state", "targets": "sft_target_modules", "seed": None}
    text = 'with `state="disk"`, `targets` and `seed`, not `other=1`'
    assert in_words(text, names) == "with --state disk, --sft_target_modules and seed, not other=1"


def test_a_reader_may_be_used_without_a_parser() -> None:
    assert bytes_or_auto("auto") == "auto" and bytes_or_auto("2KiB") == 2048 == parse_bytes("2048")


@pytest.mark.parametrize("owner", [RunArguments, TokenArguments, ModelArguments, DataArguments])
def test_every_option_of_a_run_has_a_help_text(owner: type) -> None:
    assert [option.name for option in options_of(owner) if not option.text] == []


@pytest.mark.parametrize("method", METHOD_OPTIONS)
def test_every_option_of_a_method_has_a_help_text_without_marks(method: str) -> None:
    options = METHOD_OPTIONS[method].options()
    assert [each.name for each in options if not each.text.endswith((".", '."')) or "`" in each.text] == []


@pytest.mark.parametrize(
    "name", ["device_bytes", "stream_bytes", "prefetch_bytes", "resident_bytes", "state_ram_bytes"]
)
@pytest.mark.parametrize("text", ["64MiB", "64 mib", "67108864", "67.108864MB"])
def test_train_and_plan_read_a_size_alike(name: str, text: str) -> None:
    about = {"resident_bytes": ["--weights", "host"], "state_ram_bytes": ["--state", "disk"]}.get(name, [])
    words = [*about, f"--{name}", text]
    planned = parse_plan_arguments(["--model", "llama-2-7b", *words])
    assert given_values(words)[name] == 2**26 == planned.given[name]
