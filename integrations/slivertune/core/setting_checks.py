"""Check settings, for `__post_init__` of a configuration."""

from numbers import Real
from typing import Any, Literal, TypeAlias

from slivertune.core.byte_text import parse_bytes
from slivertune.core.removed_settings import say_removed_value
from slivertune.core.suggestions import did_you_mean

NumKept: TypeAlias = int | Literal["auto"]
"""Number of blocks that keep their activations. "auto" is as many as the device has room for."""


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


def check_flag(name: str, value: object) -> None:
    """Refuse a setting that is neither True nor False.

    Args:
        name: Name of the setting in the error.
        value: Value of the setting. Texts such as "no" would count as True.

    Raises:
        ValueError: If it is refused. The message names the setting, its value and the rule.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be True or False")


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


def read_bytes(name: str, value: object, *, may_be_auto: bool = False) -> int | Literal["auto"]:
    """Read a setting that is a size.

    Args:
        name: Name of the setting in the error.
        value: Number of bytes, or a text such as "64MiB".
        may_be_auto: Whether "auto" is allowed.

    Returns:
        Bytes, or "auto".

    Raises:
        ValueError: If it is refused. The message names the setting, its value and the rule.
    """
    if may_be_auto and value == "auto":
        return "auto"
    if isinstance(value, str):
        try:
            return parse_bytes(value)
        except ValueError as error:
            raise ValueError(f"{name}={error}{', or auto' if may_be_auto else ''}") from None
    check_integer(name, value, 0)
    assert isinstance(value, int)
    return value


def check_layers_per_group(value: object) -> None:
    """Refuse a `layers_per_group` that is no number of layers, no share of them, and not "all" or "auto".

    Args:
        value: An integer from 1, a share of the layers (a float between 0 and 1), "all", or "auto".

    Raises:
        ValueError: If it is refused. The message names the setting, its value and the rule.
    """
    if value in ("all", "auto"):
        return
    is_number = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if not is_number and not (isinstance(value, float) and 0 < value < 1):
        raise ValueError(
            f"layers_per_group={value!r} must be a number of layers (an integer from 1), a share of the layers "
            "(above 0, below 1), or 'all'"
        )


def layers_or_auto(text: str) -> float | Literal["all", "auto"]:
    """Read `layers_per_group`: an integer, a share, "all" or "auto".

    Args:
        text: The text as typed.

    Raises:
        ValueError: If it is none of them. The message begins with the text.
    """
    if text == "all":
        return "all"
    if text == "auto":
        return "auto"
    try:
        return float(text) if set(".eE").intersection(text) else int(text)
    except ValueError:
        raise ValueError(f"{text!r} must be an integer, a share of the layers as 0.25, 'all' or 'auto'") from None


def integer_or_auto(text: str) -> int | Literal["auto"]:
    """Read an integer or "auto".

    Args:
        text: The text as typed.

    Raises:
        ValueError: If it is neither. The message begins with the text.
    """
    try:
        return "auto" if text == "auto" else int(text)
    except ValueError:
        raise ValueError(f"{text!r} must be an integer or 'auto'") from None


def check_num_kept(num_blocks: Any, num_present: int | None = None, model_name: str = "the model") -> None:
    """Refuse an impossible number of blocks.

    Args:
        num_blocks: The number.
        num_present: Number of blocks in the model. None if it is not known yet.
        model_name: Name of the model in the error.

    Raises:
        ValueError: If it is not an integer from 0 to `num_present`. The message names the number and the rule.
    """
    if isinstance(num_blocks, str):
        raise ValueError(f"keep_activations={num_blocks!r} must be an integer or 'auto'")
    check_integer("keep_activations", num_blocks, 0)
    if num_present is not None and num_blocks > num_present:
        raise ValueError(
            f"keep_activations={num_blocks} must be at most {num_present}, the number of blocks of {model_name}. To "
            "keep the activations of all, leave checkpointing out"
        )
