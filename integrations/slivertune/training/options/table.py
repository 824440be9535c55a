"""Table of every option of `slivertune train`: its values, its default, and the class that has it as a field."""

import dataclasses
from itertools import chain

from transformers import TrainingArguments

from slivertune.core.options import Option, options_of
from slivertune.training.options.arguments import (
    DataArguments,
    ModelArguments,
    ParkedArguments,
    RunArguments,
    TokenArguments,
)
from slivertune.training.options.methods import METHOD_OPTIONS, method_option

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
OLD_NAMES = {new: old for old, new in RENAMED.items()}


def train_options() -> dict[str, Option]:
    """Return every option by name, `--method` first."""
    options = chain(
        [method_option()],
        options_of(RunArguments),
        *(method.options() for method in METHOD_OPTIONS.values()),
        *map(options_of, (TokenArguments, ParkedArguments, ModelArguments, DataArguments, TrainingArguments)),
    )
    return {option.name: option for option in options}


def option_named(name: str, options: dict[str, Option]) -> Option | None:
    """Find an option by its name or an alias.

    Args:
        name: Name with underscores.
        options: Options from `train_options`.
    """
    return options.get(name) or next((each for each in options.values() if name in each.aliases), None)
