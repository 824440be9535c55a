"""Table of every option of `slivertune train`: its values, its default, and the class that has it as a field."""

import dataclasses
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from transformers import TrainingArguments

from slivertune.training.methods.registry import DEFAULT_METHOD, TRAIN_METHODS
from slivertune.training.options.arguments import DataArguments, ModelArguments, RunArguments, TokenArguments

_FIELDS = {item.name for item in dataclasses.fields(TrainingArguments)}
RENAMED = {
    old: new
    for old, new in (
        ("gradient_checkpointing", "activation_checkpointing"),
        ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"),
    )
    if new in _FIELDS
}
"""New names by old ones. transformers 5.23 renamed these options and warns of the names in older command lines."""


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
    """Allowed values; empty if the values are not listed."""
    value_name: str | None = None
    """Name of the value in the help; None names it by its type."""
    may_stand_alone: bool = False
    """Whether the option without a value means true."""

    @property
    def is_switch(self) -> bool:
        """Whether the option is true or false; of two types, HfArgumentParser takes the one that is no text."""
        return bool in self.kinds

    @property
    def item_kind(self) -> Any:
        """Type of the items if the option may be a list; None otherwise."""
        return next((get_args(kind)[0] for kind in self.kinds if get_origin(kind) is list), None)

    @property
    def takes_number_or_word(self) -> bool:
        """Whether the option takes a number or a word such as auto, so that it is read as a text."""
        return self.value_name is not None and self.value_name.startswith("N|")

    @property
    def takes_words(self) -> bool:
        """Whether several words may follow the option on the command line."""
        # The parser also takes several trackers, though this option may be a text.
        return self.item_kind is not None and (str not in self.kinds or self.name == "report_to")

    @property
    def takes_mapping(self) -> bool:
        """Whether the option may be a mapping, typed as JSON on the command line."""
        return any(dict in (kind, get_origin(kind)) for kind in self.kinds)


def option_classes() -> list[type]:
    """Return the dataclasses whose fields are options, including those of all registered methods."""
    methods = [method.options_class for method in TRAIN_METHODS.values()]
    return [RunArguments, *methods, TokenArguments, ModelArguments, DataArguments, TrainingArguments]


def train_options() -> dict[str, Option]:
    """Return every option by name, `--method` first."""
    method = Option(
        name="method",
        kinds=(str,),
        default=DEFAULT_METHOD.name,
        text="; ".join(f"{name}: {each.help}" for name, each in TRAIN_METHODS.items()),
        owner=TrainingArguments,
        choices=tuple(TRAIN_METHODS),
    )
    return {option.name: option for option in (method, *_fields())}


def option_named(name: str, options: dict[str, Option]) -> Option | None:
    """Find an option by its name or an alias.

    Args:
        name: Name with underscores.
        options: Options from `train_options`.
    """
    return options.get(name) or next((each for each in options.values() if name in each.aliases), None)


def _fields() -> Iterator[Option]:
    for owner in option_classes():
        hints = get_type_hints(owner)
        for item in dataclasses.fields(owner):
            if item.init:
                yield _option(item, hints[item.name], owner)


def _option(item: Any, hint: Any, owner: type) -> Option:
    aliases = item.metadata.get("aliases", ())
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kinds = tuple(kind for kind in kinds if kind is not NoneType)
    return Option(
        name=item.name,
        kinds=kinds,
        default=item.default if item.default_factory is MISSING else item.default_factory(),
        text=item.metadata.get("help", ""),
        owner=owner,
        aliases=tuple(alias.strip("-") for alias in ([aliases] if isinstance(aliases, str) else aliases)),
        choices=tuple(item.metadata.get("choices", ())) or next(filter(None, map(_choices, kinds)), ()),
        value_name=item.metadata.get("metavar"),
        may_stand_alone=isinstance(item.default, bool) or kinds == (bool,) or item.metadata.get("nargs") == "?",
    )


def _choices(kind: Any) -> tuple[str, ...]:
    if get_origin(kind) is Literal:
        return tuple(str(each) for each in get_args(kind) if isinstance(each, str))
    return tuple(str(each.value) for each in kind) if isinstance(kind, type) and issubclass(kind, Enum) else ()
