"""Every option of `slivertune train`: what it takes, its default, and the class that has it as a field."""

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
"""transformers 5.23 renamed these and warns of the old names, which every older command line uses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """An option, whether it is typed or stands in a config file."""

    name: str
    """With underscores, as a config file has it."""
    kinds: tuple[Any, ...]
    """The types of its values, None left out."""
    default: Any
    text: str
    """What it means."""
    owner: type
    """The class with a field of its name."""
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    """All that it may be; empty where that is open."""
    value_name: str | None = None
    """What its value is called in the help; by its type where it has no name."""
    may_stand_alone: bool = False
    """Whether it means true without a value."""

    @property
    def is_switch(self) -> bool:
        """Whether it is true or false; of two types HfArgumentParser takes the one that is no text."""
        return bool in self.kinds

    @property
    def item_kind(self) -> Any:
        """The type of the items, where it may be a list; None otherwise."""
        return next((get_args(kind)[0] for kind in self.kinds if get_origin(kind) is list), None)

    @property
    def takes_number_or_word(self) -> bool:
        """Whether it is a number or a word such as auto, and so read as a text."""
        return self.value_name is not None and self.value_name.startswith("N|")

    @property
    def takes_words(self) -> bool:
        """Whether several words may follow it on the command line."""
        # Of trackers, a text or a list, the parser takes several as well.
        return self.item_kind is not None and (str not in self.kinds or self.name == "report_to")

    @property
    def takes_mapping(self) -> bool:
        """Whether it may be a mapping, which on the command line is JSON."""
        return any(dict in (kind, get_origin(kind)) for kind in self.kinds)


def option_classes() -> list[type]:
    """The dataclasses whose fields are options; those of all registered methods among them."""
    methods = [method.options_class for method in TRAIN_METHODS.values()]
    return [RunArguments, *methods, TokenArguments, ModelArguments, DataArguments, TrainingArguments]


def train_options() -> dict[str, Option]:
    """Every option by name, `--method` first."""
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
        name: With underscores.
        options: From `train_options`.
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
