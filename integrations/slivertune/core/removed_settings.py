"""Explain removed settings: errors say what to use instead, since old scripts and run files still name them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

_Config = TypeVar("_Config")


@dataclass(frozen=True, kw_only=True, slots=True)
class RemovedSetting:
    """A setting that was removed."""

    only_value: str
    """Value that every run has now."""
    instead: str
    """Way out, at the end of the error."""


REMOVED_SETTINGS: Mapping[str, RemovedSetting] = {
    "update": RemovedSetting(only_value="step", instead="step() always applies the update. Leave it out"),
}
"""Removed settings by name."""
REMOVED_VALUES: Mapping[tuple[str, str], str] = {
    ("master", "split"): "fp32 trains with the same bits and stores 2 bytes more per parameter. Use that, and an 8-bit "
    "optimizer or state='disk' to save host memory",
}
"""Way out by setting and value."""


def say_removed(name: str) -> str:
    """Say what to use in place of a removed setting, at the end of an error.

    Args:
        name: The name as typed, with hyphens or without.

    Returns:
        `; NAME was removed: WAY OUT`, or an empty text if there was no such setting.
    """
    removed = REMOVED_SETTINGS.get(_plain(name))
    return "" if removed is None else f"; {name} was removed: {removed.instead}"


def say_removed_value(name: str, value: object) -> str:
    """Say what to use in place of a removed value of a setting, at the end of an error.

    Args:
        name: The setting, with hyphens or without.
        value: The value as given. A config may hold anything.

    Returns:
        `; 'VALUE' was removed: WAY OUT`, or an empty text if there was no such value.
    """
    instead = REMOVED_VALUES.get((_plain(name), str(value)))
    return "" if instead is None else f"; {value!r} was removed: {instead}"


def is_only_value(name: str, value: object) -> bool:
    """Return whether a removed setting asks for the value that every run has now, as old run files do.

    Args:
        name: The setting.
        value: The value as written.
    """
    return name in REMOVED_SETTINGS and value == REMOVED_SETTINGS[name].only_value


def refuse_removed(config_class: type[_Config]) -> type[_Config]:
    """Let a dataclass's constructor say what replaced a removed field, which it would call unexpected.

    Args:
        config_class: The dataclass. Its constructor raises ValueError for such a field.
    """
    construct: Callable[..., None] = config_class.__init__

    @wraps(construct)
    def check_and_construct(self: Any, *args: Any, **values: Any) -> None:
        for name in values:
            if name in REMOVED_SETTINGS:
                raise ValueError(f"{config_class.__name__} has no field {name!r}{say_removed(name)}")
        construct(self, *args, **values)

    config_class.__init__ = check_and_construct  # type: ignore[method-assign]
    return config_class


def _plain(name: str) -> str:
    return name.strip("-").replace("-", "_")
