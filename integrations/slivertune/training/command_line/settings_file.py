"""Writes a run's settings as a config file, from which `slivertune train` repeats the run."""

import math
import re
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from slivertune.core.atomic import atomic_file
from slivertune.core.masking import masked
from slivertune.core.options import enum_value
from slivertune.core.user_path import user_path
from slivertune.training.command_line.parse import DERIVED, TrainArguments
from slivertune.training.embedded.built_in import REFERENCE
from slivertune.training.options.help import common_options
from slivertune.training.options.table import RENAMED
from slivertune.training.options.trainer import CommonOptions

_HEAD = """\
# The settings of this run. The same run in a new folder: slivertune train THIS_FILE
# To continue the run itself, add --output_dir ITS_FOLDER --resume_from_checkpoint auto
# Paths are relative to where the command was given.
"""
_LEFT_OUT = """
# Not set, and so by default:
"""


_LONGEST_NUMBER = 20
"""Length in digits from which a text is not written as a number. Python can't parse thousands of digits."""


def write_settings(arguments: TrainArguments, path: Path) -> None:
    """Write the settings of a run to a file, which appears whole or not at all.

    Args:
        arguments: Settings, in which automatic values such as `layers_per_group` have been chosen.
        path: Path of the file; its folder must exist. An older file is replaced.

    Raises:
        OSError: If the file can't be written.
    """
    text = settings_text(arguments)
    with atomic_file(path, needs_bytes=len(text)) as temporary:
        temporary.write_text(text, encoding="utf-8")


def settings_text(arguments: TrainArguments) -> str:
    """Return the settings as YAML: values of the user, the method and the embedded model, and the rest as comments.

    Args:
        arguments: Settings as for `write_settings`.
    """
    values = _settled(arguments)
    owners = (arguments.run, arguments.model, arguments.data, arguments.tokens)
    by_class: dict[type, Any] = {type(each): each for each in owners} | {CommonOptions: arguments.training}
    of_method = arguments.method.values()
    lines = []
    for option in common_options().values():
        name = RENAMED.get(option.name, option.name)
        default = of_method.get(name, getattr(by_class.get(option.owner), name, None))
        # Skip the folder, which is the run's own, and None, which is the default of most options.
        if name not in values and name not in ("output_dir", "resume_from_checkpoint") and default is not None:
            text = _dump({name: enum_value(default) if isinstance(default, Enum) else default})
            lines += [f"# {line}\n" for line in text.splitlines()]  # a list has several
    return f"{_HEAD}{_dump(values)}{_LEFT_OUT}{''.join(lines)}"


def older_defaults_note(arguments: TrainArguments) -> str | None:
    """Describe defaults of an older version behind a run's own settings file, which has them as comments.

    Args:
        arguments: Settings, which may have been read from such a file.

    Returns:
        One line with the settings to add to the file. None if this version has the same defaults, or if the settings
        come from elsewhere.
    """
    words = arguments.command[2:]
    if not words or words[0].startswith("-"):
        return None
    try:
        text = user_path(words[0]).read_text(encoding="utf-8-sig")
        changed = _changed_defaults(text, arguments)
    except (OSError, ValueError, yaml.YAMLError):
        # The file is gone, or its comments were edited.
        return None
    lines = "; ".join(_dump({name: value}).strip() for name, value in changed.items())
    return f"{words[0]} was written when other defaults held. To repeat its run, add to it: {lines}" if lines else None


def _changed_defaults(text: str, arguments: TrainArguments) -> dict[str, Any]:
    """Return the recorded defaults that differ from the values of this run, and were not set now."""
    written, is_own, left_out = text.partition(_LEFT_OUT)
    if not is_own:
        return {}
    recorded, settings = yaml.safe_load(re.sub(r"^# ?", "", left_out, flags=re.MULTILINE)), yaml.safe_load(written)
    owners = (arguments.run, arguments.model, arguments.data, arguments.tokens)
    values = {item.name: getattr(owner, item.name) for owner in owners for item in fields(owner)}
    values |= arguments.method.values()
    changed = {
        name: value
        for name, value in (recorded if isinstance(recorded, dict) else {}).items()
        if name in values.keys() - arguments.given - DERIVED and not _is_alike(value, values[name])
    }
    # Its default was left out of files until it became another.
    has_dataset = "dataset" in {*(settings or {}), *arguments.given}
    return changed if has_dataset else {"dataset": REFERENCE, **changed}


def _is_alike(one: Any, other: Any) -> bool:
    """Return whether two values are written alike."""
    texts = (_dump({"": _plain(enum_value(each) if isinstance(each, Enum) else each)}) for each in (one, other))
    return len({*texts}) == 1


def _settled(arguments: TrainArguments) -> dict[str, Any]:
    """Return the values, with the chosen ones in place of `auto`."""
    chosen = arguments.method.values()
    values = {name: chosen.get(name, value) for name, value in arguments.values.items()}
    return masked({name: _plain(value) for name, value in values.items() if value is not None})


def _plain(value: Any) -> Any:
    """Return a whole number as people write it: 8 for a text 8 or for 8.0. Return other values unchanged."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    is_short = isinstance(value, str) and len(value) < _LONGEST_NUMBER
    is_number = is_short and value.isascii() and value.isdecimal() and str(int(value)) == value
    return int(value) if is_number else value


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # yaml ships no types
    """A YAML dumper that writes line breaks in texts as escapes, so that every text is one line."""


def _represent_text(dumper: Any, text: str) -> Any:
    is_one_line = "".join(text.splitlines()) == text
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if is_one_line else '"')


_Dumper.add_representer(str, _represent_text)


def _dump(values: dict[str, Any]) -> str:
    text: str = yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=math.inf)
    return text
