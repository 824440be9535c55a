"""Checks that a saved state belongs to this optimizer, all made before anything is changed. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from slivertune.core.saved_state import StateMismatchError, is_count
from slivertune.core.saved_state import check_header as check_form
from slivertune.core.saved_values import check_finite, check_hyperparameters, check_sign, is_same
from slivertune.deltas.delta import check_positions
from slivertune.sft.selection import contains
from slivertune.sft.weight import SparseWeight

VERSION = 1
"""Version of the saved format."""


def check_header(
    saved: Mapping[str, Any], identity: Mapping[str, Any], param_groups: Sequence[Mapping[str, Any]]
) -> None:
    """Compare the identity of a saved state with that of this optimizer.

    Args:
        saved: The state to load.
        identity: `SFT.identity` of this optimizer.
        param_groups: Param groups of this optimizer.

    Raises:
        StateMismatchError: If something differs; it names the first difference.
    """
    check_form(saved, "sft", "SFT", (VERSION,))
    its_selection, selection, names = saved["sft"].get("selection"), identity["selection"], identity["tensors"]
    if not is_same(its_selection, selection):
        raise StateMismatchError(
            f"the saved state was selected by {its_selection!r}, this optimizer by {selection!r}. "
            "Build it with the settings of the saved run"
        )
    if len(saved["param_groups"]) != len(param_groups):
        raise StateMismatchError(
            f"the saved state has {len(saved['param_groups'])} param groups, and this optimizer {len(param_groups)}: "
            "it is of another optimizer, or damaged. Use another checkpoint"
        )
    check_hyperparameters(saved["param_groups"], param_groups)
    missing, unknown = sorted(set(names) - set(saved["state"])), sorted(set(saved["state"]) - set(names))
    if missing or unknown:
        raise StateMismatchError(
            f"the saved state is of another model or other targets: it lacks {_short(missing)}, and this optimizer "
            f"does not train {_short(unknown)}. Build it with the targets of the saved run"
        )


def check_weight(weight: SparseWeight, state: Mapping[str, Any], oldest: int, *, is_whole: bool = True) -> None:
    """Check one tensor's saved state, its pretrained values included.

    Args:
        weight: The tensor as this optimizer has it.
        state: Saved state of the tensor.
        oldest: Largest age of a trained weight.
        is_whole: Whether the optimizer's own positions and pretrained values are right. They are not after a failed
            step: then the model has to hold the values.

    Raises:
        StateMismatchError: If something is wrong; it names the tensor and the fault.
    """
    name, target = weight.name, weight.target
    num_active = len(state["indices"]) if "indices" in state else 0
    shapes = weight.moments.expected_shapes(num_active, target.shape)
    expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "indices": ((num_active,), torch.int32),
        "delta": ((num_active,), weight.phi.dtype),
        **{key: (shapes[key], tensor.dtype) for key, tensor in weight.moments.tensors().items()},
        **({} if target.is_4bit else {"base": ((num_active,), target.parameter.dtype)}),
    }
    _check_tensors(name, state, expected)
    ages = state.get("age", state.get("cohort_ages"))
    if ages is not None and bool(((ages < 0) | (ages > oldest)).any()):
        raise StateMismatchError(
            f"the saved state of {name} is damaged: it has ages outside of [0, {oldest}]. Use another checkpoint"
        )
    if "cohort" in expected and num_active and int(state["cohort"].max()) >= len(state["cohort_ages"]):
        raise StateMismatchError(f"the saved state of {name} is damaged: a cohort has no age. Use another checkpoint")
    estimates = state.get("estimates", {}).values()
    for estimate in estimates:
        candidates = estimate.get("indices")
        extent = (len(candidates) if isinstance(candidates, torch.Tensor) else 0,)
        floats = dict.fromkeys(("sum", "sum_of_squares"), (extent, weight.phi.dtype))
        _check_tensors(f"{name}'s estimate", estimate, {"indices": (extent, torch.int32), **floats})
        if not is_count(estimate.get("num_steps")):
            raise StateMismatchError(
                f"the saved state of {name} is damaged: its estimate has no number of updates. Use another checkpoint"
            )
    try:
        for each in (state, *estimates):
            check_positions(each["indices"], target.num_elements)
    except ValueError as error:
        raise StateMismatchError(f"the saved state of {name}: {error}") from error
    if not target.is_4bit:
        _check_base(weight, state, is_whole=is_whole)
    elif state.get("codes", weight.codes_hash) != weight.codes_hash:
        raise StateMismatchError(
            f"the saved state of {name} belongs to other 4-bit weights than the model has. Load the base that the "
            "saved run began with, in the same 4-bit form"
        )


def _check_tensors(
    name: str, state: Mapping[str, Any], expected: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> None:
    for key, (shape, dtype) in expected.items():
        tensor = state.get(key)
        if not isinstance(tensor, torch.Tensor):
            raise StateMismatchError(
                f"the saved state of {name} lacks {key!r}. Build the optimizer as the saved run did"
            )
        fits = tensor.ndim == len(shape) and all(b in (a, -1) for a, b in zip(tensor.shape, shape, strict=True))
        if not fits or tensor.dtype != dtype:
            raise StateMismatchError(
                f"the saved state of {name} has {key!r} of shape {tuple(tensor.shape)} and {tensor.dtype}, expected "
                f"{shape} and {dtype}. Use a checkpoint of this model with these settings (packed), not a damaged one"
            )
        check_finite(f"{key!r} of {name}", tensor)
        check_sign(f"{key!r} of {name}", key, tensor)


def _check_base(weight: SparseWeight, state: Mapping[str, Any], *, is_whole: bool) -> None:
    """Check that the model holds the pretrained values of the deltas, or already their sum with the deltas."""
    indices, base, delta = (state[key].to(weight.pretrained.device) for key in ("indices", "base", "delta"))
    present = weight.pretrained.read(indices)
    own_base = weight.base_values() if is_whole else None
    if weight.merged and own_base is not None:
        present[contains(weight.indices, indices)] = own_base[contains(indices, weight.indices)]
    merged = (base.float() + delta).to(base.dtype)
    if num_foreign := int(((present != base) & (present != merged)).sum()):
        raise StateMismatchError(
            f"{num_foreign} of {indices.numel()} saved entries of {weight.name} belong to other pretrained values "
            "than the model has. Load the weights that the saved run began with, or those of its checkpoint"
        )


def _short(names: Sequence[str]) -> str:
    if not names:
        return "nothing"
    return repr(list(names)) if len(names) <= 3 else f"{list(names[:3])} and {len(names) - 3} more"
