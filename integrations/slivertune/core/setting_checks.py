"""Check settings, for `__post_init__` of a configuration."""

from numbers import Real
from typing import Literal

from slivertune.core.removed_settings import say_removed_value
from slivertune.core.suggestions import did_you_mean


def check_integer(name: str, value: object, minimum: int | None = None) -> None:
    """Refuse a setting that is not an integer, or is less than the minimum.

    Args:
        name: Name of the setting in the error.
        value: Value of the setting. True and False are no integers.
        minimum: Smallest allowed value, if there is one.

    Raises:
        ValueError: If it is refused. The message names the setting, its value and the rule.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}={value!r} must be an integer")
    if minimum is not None and value < minimum:
        raise ValueError(f"{name}={value} must be at least {minimum}")


def check_number(name: str, value: object) -> None:
    """Refuse a setting that is not a number.

    Args:
        name: Name of the setting in the error.
        value: Value of the setting. True and False are no numbers.

    Raises:
        ValueError: If it is refused. The message names the setting, its value and the rule.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name}={value!r} must be a number")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuse a setting that is none of its choices.

    Args:
        name: Name of the setting in the error.
        value: Value of the setting.
        choices: All allowed values.

    Raises:
        ValueError: If it is refused. The message names the setting, its value and the choices.
    """
    if value not in choices:
        ending = say_removed_value(name, value) or did_you_mean(str(value), choices)
        raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, choices))}{ending}")


def check_bytes_or_auto(name: str, value: object) -> None:
    """Refuse a setting that is neither a number of bytes nor "auto".

    Args:
        name: Name of the setting in the error.
        value: Value of the setting.

    Raises:
        ValueError: If it is refused. The message names the setting, its value and the rule.
    """
    if value == "auto":
        return
    if isinstance(value, str):
        raise ValueError(f'{name}={value!r} must be a number of bytes, 0 or more, or "auto"')
    check_integer(name, value, 0)


def check_layers_per_group(value: object) -> None:
    """Refuse a `layers_per_group` that is neither a number of layers nor a share of them.

    Args:
        value: An integer from 1, or a share of the layers, a float between 0 and 1.

    Raises:
        ValueError: If it is refused. The message names the setting, its value and the rule.
    """
    is_number = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if not is_number and not (isinstance(value, float) and 0 < value < 1):
        raise ValueError(
            f"layers_per_group={value!r} must be a number of layers (an integer from 1), or a share of the layers "
            "(above 0, below 1)"
        )


def layers_or_auto(text: str) -> float | Literal["auto"]:
    """Read `layers_per_group`: an integer, a share or "auto".

    Args:
        text: The text as typed.

    Raises:
        ValueError: If it is none of them. The message names the setting and its value.
    """
    if text == "auto":
        return "auto"
    try:
        number = float(text) if set(".eE").intersection(text) else int(text)
    except ValueError:
        raise ValueError(
            f"layers_per_group={text!r} must be an integer, a share of the layers as 0.25, or 'auto'"
        ) from None
    check_layers_per_group(number)
    return number


def integer_or_auto(name: str, text: str) -> int | Literal["auto"]:
    """Read an integer or "auto".

    Args:
        name: Name of the setting in the error.
        text: The text as typed.

    Raises:
        ValueError: If it is neither. The message names the setting and its value.
    """
    try:
        return "auto" if text == "auto" else int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} must be an integer or 'auto'") from None
