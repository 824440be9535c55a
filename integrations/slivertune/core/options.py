"""Options of a command, declared as the fields of a dataclass.

The type of a field says what the option takes, and the first paragraph of its docstring is the help text. Further
paragraphs are for those who read the class.
"""

import argparse
import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from enum import Enum
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from slivertune.core.byte_text import parse_bytes
from slivertune.core.option_parser import PartedWords


@dataclass(frozen=True, kw_only=True, slots=True)
class Spelling:
    """Spelling of an option, if the type of its field does not say it. It is used in `typing.Annotated`."""

    value_name: str | None = None
    """Name of the value in the help, such as `FOLDER`."""
    read: Callable[[str], Any] | None = None
    """Function that reads the value. It raises ValueError for a text that is none."""
    aliases: tuple[str, ...] = ()
    """Further names, with underscores."""
    choices: tuple[str, ...] = ()
    """All values, of a field that may be any text by its type."""
    alone: Any = None
    """Value of the option without a value. None: it needs one."""
    words: type[PartedWords] = PartedWords
    """Way in which a list is split into words."""


def bytes_or_auto(text: str) -> int | Literal["auto"]:
    """Read a size in bytes or "auto".

    Args:
        text: A size as in `parse_bytes`, or `auto`.

    Raises:
        ValueError: If it is neither.
    """
    return "auto" if text == "auto" else parse_bytes(text)


Bytes = Annotated[int, Spelling(value_name="SIZE", read=parse_bytes)]
"""A size in bytes. It is typed with a unit (64MiB) or as a number of bytes."""
BytesOrAuto = Annotated[int | Literal["auto"], Spelling(value_name="SIZE|auto", read=bytes_or_auto)]
"""A size in bytes, or "auto"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """An option of the command line or of a config file."""

    name: str
    """Name with underscores, as in a config file."""
    kinds: tuple[Any, ...]
    """Types of the values, without None."""
    default: Any
    text: str
    """Help text."""
    owner: type
    """Class that has the option as a field."""
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    """Allowed values. Empty if the values are not listed."""
    value_name: str | None = None
    """Name of the value in the help. None names it by its type."""
    may_stand_alone: bool = False
    """Whether the option without a value means true."""
    alone: Any = None
    """Value of the option without a value, if it is not true. None if there is none."""
    read: Callable[[str], Any] | None = None
    """Function that reads the value. None reads it by its type."""
    words: type[PartedWords] = PartedWords
    """Way in which a list is split into words."""

    @property
    def is_switch(self) -> bool:
        """Whether the option is true or false. If it has two types, HfArgumentParser takes the one that is no text."""
        return bool in self.kinds

    @property
    def item_kind(self) -> Any:
        """Type of the items if the option may be a list, else None."""
        return next((get_args(kind)[0] for kind in self.kinds if get_origin(kind) is list), None)

    @property
    def takes_words(self) -> bool:
        """Whether several words may follow the option on the command line."""
        # The parser also takes several trackers, though this option may be a text.
        return self.item_kind is not None and (str not in self.kinds or self.name == "report_to")

    @property
    def takes_mapping(self) -> bool:
        """Whether the option may be a mapping, typed as JSON on the command line."""
        return any(dict in (kind, get_origin(kind)) for kind in self.kinds)


def options_of(owner: type, names: Mapping[str, str | None] | None = None) -> Iterator[Option]:
    """Yield the options that a dataclass declares, in the order of its fields.

    Args:
        owner: The dataclass. A field's metadata may hold a help text and more, as `HfArgumentParser` reads them.
        names: Names of options by the names of their fields, where the two differ. None: the field is no option.
    """
    parts, texts, names = _parts_of(owner), attribute_docs(owner), names or {}
    named = {item.name: names.get(item.name, item.name) for item in dataclasses.fields(owner) if item.init}
    for item in dataclasses.fields(owner):
        name = named.get(item.name)
        if name is None:
            continue
        kinds, spelling = parts[item.name]
        kinds = tuple(kind for kind in kinds if kind is not Path or str not in kinds)
        aliases = item.metadata.get("aliases", ())
        aliases = [aliases] if isinstance(aliases, str) else aliases
        listed = item.metadata.get("choices", ()) or spelling.choices
        yield Option(
            name=name,
            kinds=kinds,
            default=item.default if item.default_factory is MISSING else item.default_factory(),
            text=item.metadata.get("help", "") or in_words(texts.get(item.name, ""), named),
            owner=owner,
            aliases=(*(alias.strip("-") for alias in aliases), *spelling.aliases),
            choices=tuple(listed) if listed or spelling.read else next(filter(None, map(_choices, kinds)), ()),
            value_name=item.metadata.get("metavar") or spelling.value_name,
            may_stand_alone=isinstance(item.default, bool) or kinds == (bool,) or item.metadata.get("nargs") == "?",
            alone=spelling.alone,
            read=spelling.read,
            words=spelling.words,
        )


def add_option(parser: Any, option: Option) -> None:
    """Add an option to a parser, under its names with underscores and with hyphens.

    Args:
        parser: An `OptionParser`.
        option: The option. One that is true by default is also added as `--no_NAME`.
    """
    words: dict[str, Any] = {"dest": option.name, "default": option.default}
    if option.is_switch:
        words |= {"type": read_switch, "nargs": "?", "const": True}
    elif option.takes_words:
        words |= {"nargs": "+", "action": option.words, "type": option.item_kind}
    elif option.choices:
        words |= {"choices": option.choices}
    elif option.read is not None:
        words |= {"type": _reader(option.read)}
    else:
        words |= {"type": next((kind for kind in option.kinds if kind in (int, float)), str)}
    if option.alone is not None:
        words |= {"nargs": "?", "const": option.alone}
    parser.add_argument(*(typed for name in (option.name, *option.aliases) for typed in _typed(name)), **words)
    if option.is_switch and option.default is True:
        parser.add_argument(*_typed(f"no_{option.name}"), dest=option.name, default=True, action="store_false")


@cache
def attribute_docs(owner: type) -> Mapping[str, str]:
    """Find the first paragraph of each field's docstring, in one line, by the field's name.

    Args:
        owner: A class whose source can be read; its bases are read, too.
    """
    found: dict[str, str] = {}
    for each in reversed([kind for kind in owner.__mro__ if dataclasses.is_dataclass(kind)]):
        try:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        except (OSError, TypeError):  # a class without a file, as in a notebook
            continue
        body = tree.body if isinstance(tree, ast.ClassDef) else []
        for field, below in pairwise(body):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
                and isinstance(below.value.value, str)
            ):
                paragraph = inspect.cleandoc(below.value.value).split("\n\n")[0]
                found[field.target.id] = " ".join(paragraph.split())
    return found


def in_words(text: str, names: Mapping[str, str | None]) -> str:
    """Write a docstring as a help text: fields become options, and code is not marked.

    Args:
        text: The docstring, such as 'needs `state="disk"`'.
        names: Names of options by the names of fields.

    Returns:
        The text, such as "needs --state disk".
    """

    def typed(match: re.Match[str]) -> str:
        name, equals, value = match[1].partition("=")
        option = names.get(name)
        return match[1] if option is None else f"--{option} {value.strip(_QUOTES)}" if equals else f"--{option}"

    return _CODE.sub(typed, text)


_CODE = re.compile(r"`([^`]+)`")
_QUOTES = "\"'"


@cache
def _parts_of(owner: type) -> Mapping[str, tuple[tuple[Any, ...], Spelling]]:
    """Return the types and the spelling of each field. Evaluating a class's annotations is slow, so it is done once."""
    return {name: _parts(hint) for name, hint in get_type_hints(owner, include_extras=True).items()}


def _parts(hint: Any) -> tuple[tuple[Any, ...], Spelling]:
    """Return the types of a field's values, without None, and their spelling."""
    if get_origin(hint) is Annotated:
        inner, *about = get_args(hint)
        return _parts(inner)[0], next((each for each in about if isinstance(each, Spelling)), Spelling())
    if get_origin(hint) not in (Union, UnionType):
        return (list[str] if get_origin(hint) is Sequence else hint,), Spelling()
    kinds, spellings = zip(*(_parts(kind) for kind in get_args(hint) if kind is not NoneType), strict=True)
    spelling = next((each for each in spellings if each != Spelling()), Spelling())
    return tuple(kind for each in kinds for kind in each), spelling


def _choices(kind: Any) -> tuple[str, ...]:
    if get_origin(kind) is Literal:
        return tuple(str(each) for each in get_args(kind) if isinstance(each, str))
    return tuple(str(each.value) for each in kind) if isinstance(kind, type) and issubclass(kind, Enum) else ()


def _typed(name: str) -> list[str]:
    return list(dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")))


def _reader(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Wrap a reader, so that argparse shows its errors."""

    def read_or_complain(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return read_or_complain


def read_switch(text: str) -> bool:
    """Read a value that is true or false.

    Args:
        text: The text as typed.

    Raises:
        argparse.ArgumentTypeError: If it is neither.
    """
    if text.lower() in _TRUE or text.lower() in _FALSE:
        return text.lower() in _TRUE
    raise argparse.ArgumentTypeError(f"{text!r} must be true or false")


_TRUE = ("true", "t", "yes", "y", "1")
_FALSE = ("false", "f", "no", "n", "0")


def enum_value(value: Any) -> str:
    """Return a setting that is an enumeration or one of its values, as it is typed on the command line."""
    return str(getattr(value, "value", value))
