"""Checks of settings, for `__post_init__` of a configuration."""

from numbers import Real
from typing import Literal

from slivertune.core.removed_settings import say_removed_value
from slivertune.core.suggestions import did_you_mean


def check_integer(name: str, value: object, minimum: int | None = None) -> None:
    """Refuse a setting that is no integer, or less than the minimum.

    Args:
        name: The setting, in the error.
        value: What was given; True and False are no integers.
        minimum: The smallest that is allowed, if there is one.

    Raises:
        ValueError: Naming the setting, its value and the rule.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}={value!r} must be an integer")
    if minimum is not None and value < minimum:
        raise ValueError(f"{name}={value} must be at least {minimum}")


def check_number(name: str, value: object) -> None:
    """Refuse a setting that is no number.

    Args:
        name: The setting, in the error.
        value: What was given; True and False are no numbers.

    Raises:
        ValueError: Naming the setting, its value and the rule.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name}={value!r} must be a number")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuse a setting that is none of its choices.

    Args:
        name: The setting, in the error.
        value: What was given.
        choices: All that are allowed.

    Raises:
        ValueError: Naming the setting, its value and the choices.
    """
    if value not in choices:
        ending = say_removed_value(name, value) or did_you_mean(str(value), choices)
        raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, choices))}{ending}")


def check_bytes_or_auto(name: str, value: object) -> None:
    """Refuse a setting that is neither a number of bytes nor left to be chosen.

    Args:
        name: The setting, in the error.
        value: What was given.

    Raises:
        ValueError: Naming the setting, its value and the rule.
    """
    if value == "auto":
        return
    if isinstance(value, str):
        raise ValueError(f'{name}={value!r} must be a number of bytes, 0 or more, or "auto"')
    check_integer(name, value, 0)


def integer_or_auto(name: str, text: str) -> int | Literal["auto"]:
    """Read a number that may be left to be chosen.

    Args:
        name: The setting, in the error.
        text: As it was typed.

    Raises:
        ValueError: Naming the setting and its value, if it is neither.
    """
    try:
        return "auto" if text == "auto" else int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} must be an integer or 'auto'") from None
