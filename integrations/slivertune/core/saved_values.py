"""Check each value in a saved state before use, since a file may have been changed and signed anew."""

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch

from slivertune.core.saved_state import COUNT_LIMIT, StateMismatchError
from slivertune.core.torch_internals import is_without_data


def is_step(value: Any) -> bool:
    """Return whether a value counts steps as optimizers do: a number, or a tensor with one number, from 0 on."""
    if isinstance(value, torch.Tensor):
        is_number = value.numel() == 1 and value.dtype != torch.bool
        return is_number and (is_without_data() or is_step(value.item()))
    return _is_number(value) and 0 <= value < COUNT_LIMIT


def is_rate(value: Any) -> bool:
    """Return whether a value may be a learning rate: finite, not negative, or None if the optimizer finds it itself."""
    if value is None:
        return True
    if isinstance(value, torch.Tensor):
        is_number = value.numel() == 1 and value.is_floating_point()
        return is_number and (is_without_data() or is_rate(float(value)))
    return _is_number(value) and math.isfinite(value) and value >= 0


def _is_number(value: Any) -> bool:
    """Return whether a value is a number of Python or numpy, as schedules compute them."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_same(one: Any, other: Any) -> bool:
    """Return whether two plain values are equal, and both or neither of them are True or False."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(is_same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(is_same, one, other))
    are_plain = not isinstance(one, torch.Tensor) and not isinstance(other, torch.Tensor)
    return are_plain and isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def is_finite(value: Any) -> bool:
    """Return whether a value holds neither NaN nor infinity, at any depth of its containers. Reads each tensor once."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, Mapping):
        return all(map(is_finite, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(is_finite, value))
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.numel():
        return True
    if is_without_data():
        return True  # as in a memory plan
    plain = value.detach()
    return all(math.isfinite(each) for each in (plain.float() if plain.itemsize == 1 else plain).aminmax())


def check_finite(where: str, value: Any) -> None:
    """Refuse NaN and infinity.

    Args:
        where: Name of the value in the error.
        value: A number, a tensor, or a container of these.

    Raises:
        StateMismatchError: If the value holds one. The message names the value.
    """
    if not is_finite(value):
        raise StateMismatchError(f"the saved state is damaged: {where} holds NaN or infinity. Use another checkpoint")


_NEVER_NEGATIVE = frozenset(
    (
        *("acc_delta", "col_var", "columns", "exp_avg_sq", "exp_avg_sq_col", "exp_avg_sq_row", "exp_inf"),
        *("max_exp_avg_sq", "row_var", "rows", "square_avg", "step_size", "sum_of_squares", "variance"),
    )
)
"""Names of state that optimizers make of squares and magnitudes, and take roots of."""


def fits_sign(key: str, value: Any) -> bool:
    """Return whether a value is not negative if an optimizer keeps squares or magnitudes in it. Reads a tensor once.

    Args:
        key: Its name in the state.
        value: A value of any type.
    """
    is_read = isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() and value.itemsize > 1
    return key not in _NEVER_NEGATIVE or not is_read or is_without_data() or bool(value.min() >= 0)


def check_sign(where: str, key: str, value: Any) -> None:
    """Refuse negative values in state in which an optimizer keeps squares or magnitudes.

    Args:
        where: Name of the value in the error.
        key: Its name in the state.
        value: A value of any type.

    Raises:
        StateMismatchError: If it has negative values. The message names the value.
    """
    if not fits_sign(key, value):
        raise StateMismatchError(f"the saved state is damaged: {where} has negative values. Use another checkpoint")


def check_hyperparameters(saved: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]]) -> None:
    """Refuse hyperparameters that can't be those of an optimizer.

    Args:
        saved: Param groups of the saved state.
        own: As many param groups of the optimizer that loads them.

    Raises:
        StateMismatchError: If one can't. The message names the param group, the hyperparameter and its value.
    """
    for index, (theirs, ours) in enumerate(zip(saved, own, strict=True)):
        for key, value in theirs.items():
            if key == "params":
                continue
            fits = is_rate(value) if key in ("lr", "initial_lr") else _is_like(value, ours.get(key))
            if not fits:
                raise StateMismatchError(
                    f"the saved state is damaged: {key} of param group {index} is {str(value)[:60]!r}, and this "
                    f"optimizer has {str(ours.get(key))[:60]!r}. Use another checkpoint"
                )


def _is_like(value: Any, own: Any) -> bool:
    """Return whether a hyperparameter can replace the optimizer's own. None stands for an unset one."""
    if value is None or own is None:
        return is_finite(value)
    if isinstance(value, (list, tuple)) and isinstance(own, (list, tuple)):
        return len(value) == len(own) and all(map(_is_like, value, own))
    if not is_finite(value) and is_finite(own):
        return False
    kind, own_kind = _kind(value), _kind(own)
    return kind == own_kind or "other" in (kind, own_kind)


def _kind(value: Any) -> str:
    if isinstance(value, bool) or (isinstance(value, torch.Tensor) and value.dtype == torch.bool):
        return "flag"
    if _is_number(value) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        return "number"
    return "text" if isinstance(value, str) else "container" if isinstance(value, (list, tuple, dict)) else "other"
