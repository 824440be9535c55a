"""Check that a saved state belongs to this optimizer, in full, before anything is changed. Pure functions."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from slivertune.core.saved_state import StateMismatchError, is_count
from slivertune.core.saved_state import check_header as check_form
from slivertune.core.saved_values import (
    check_finite,
    check_hyperparameters,
    check_sign,
    is_rate,
    is_same,
    is_step,
)
from slivertune.core.typed_command import setting_name
from slivertune.hift.base import CUT_MULTIPLE, BaseOptimizer
from slivertune.hift.chunk import MASTER, Weight
from slivertune.hift.group_state import WeightState
from slivertune.hift.nested_state import flatten_state
from slivertune.hift.probe import StepMeter, TensorForm, describe_form, form_of
from slivertune.hift.rotation import Rotation

VERSION = 2
"""Version of the saved form. Version 2 added the steps that passed without an update."""
_READABLE = (1, VERSION)
_MEANINGS = {
    "groups": "grouping (layers_per_group, layers)",
    "order": "order of turns (order, seed)",
    "steps_per_group": "steps_per_group",
    "optimizer": "base optimizer",
    "waiting": "form of quantised layers (waiting)",
    "rounding": "seed of stochastic rounding (master, seed)",
}
"""Meanings of the entries of `HiFT.identity`, with the settings behind them."""
_SINCE_2 = frozenset({"skipped_turns", "skipped_in_cycle"})


def make_header(
    identity: Mapping[str, object],
    rotation: Rotation,
    param_groups: Sequence[Mapping[str, Any]],
    weights: Iterable[Weight],
) -> dict[str, Any]:
    """Build a saved state without its tensors.

    Args:
        identity: Value of `HiFT.identity`.
        rotation: Rotation that knows the current turn.
        param_groups: Param groups of the optimizer.
        weights: Trained weights, whose names replace the parameters.
    """
    names = {id(weight.trained): weight.name for weight in weights}
    return {
        "state": {},
        "param_groups": [
            {**group, "params": [names[id(p)] for p in group["params"] if id(p) in names]} for group in param_groups
        ],
        "hift": {"version": VERSION, **identity, **rotation.state()},
    }


def check_header(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Compare everything that identifies a state: form, model, grouping, base optimizer.

    Args:
        saved: State to load.
        own: Header of the optimizer that loads it.

    Raises:
        StateMismatchError: If something differs, with the first difference.
    """
    check_form(saved, "hift", "HiFT", _READABLE)
    theirs, ours = saved["hift"], own["hift"]
    for key in ours:
        if (
            key not in theirs
            and key not in ("waiting", "rounding")
            and not (theirs["version"] == 1 and key in _SINCE_2)
        ):
            raise StateMismatchError(f"the saved state is damaged: its header has no {key!r}. Use another checkpoint")
    if not isinstance(theirs["held_lr"], (list, tuple)) or not all(map(is_rate, theirs["held_lr"])):
        raise StateMismatchError(f"the saved state is damaged: held_lr={theirs['held_lr']!r}. Use another checkpoint")
    for key in _SINCE_2:
        _check_counts(key, theirs.get(key, {}), len(theirs["groups"]))
    _same_names(theirs["groups"], ours["groups"])
    check_identity("the saved state", theirs, {key: ours[key] for key in _MEANINGS})
    lost = [name for name in theirs.get("weights", []) if name not in saved["state"]]
    if lost:
        raise StateMismatchError(f"the saved state is damaged: {_short(lost)} is lost. Use another checkpoint")
    saved_params = [list(group.get("params", [])) for group in saved["param_groups"]]
    if saved_params != [list(group["params"]) for group in own["param_groups"]]:
        raise StateMismatchError(
            f"the param_groups of the saved state ({[len(names) for names in saved_params]} params) are not those "
            f"of this optimizer ({[len(group['params']) for group in own['param_groups']]}). "
            "Build the base optimizer with the param groups of the saved run"
        )
    if len(theirs["held_lr"]) not in (0, len(own["param_groups"])):
        raise StateMismatchError(
            f"the saved state is damaged: held_lr has {len(theirs['held_lr'])} values for "
            f"{len(own['param_groups'])} param groups. Use another checkpoint"
        )
    check_hyperparameters(saved["param_groups"], own["param_groups"])
    _check_own(saved.get("own", {}), own["param_groups"], len(theirs["groups"]))


def _check_own(
    adapted: Mapping[int, Mapping[int, Mapping[str, Any]]], param_groups: Sequence[Mapping[str, Any]], num_groups: int
) -> None:
    """Check the hyperparameters that instances of the base optimizer adapted by themselves."""
    for group, by_index in adapted.items():
        for index, values in by_index.items():
            if not (is_count(group) and group < num_groups and is_count(index) and index < len(param_groups)):
                raise StateMismatchError(
                    f"the saved state is damaged: it has hyperparameters of group {group!r}, param group {index!r}. "
                    "Use another checkpoint"
                )
            check_hyperparameters([values], [param_groups[index]])


def check_identity(
    state: str | Path, theirs: Mapping[str, Any], ours: Mapping[str, Any], built: str = "the optimizer"
) -> None:
    """Refuse the state of another run.

    Args:
        state: Name of the state in the error.
        theirs: `HiFT.identity` of the run that saved it, and anything else that identifies that run.
        ours: The same entries of the current optimizer.
        built: Name, in the error, of the object to build with other settings.

    Raises:
        StateMismatchError: If something differs, with all differences.
    """
    differing = [
        f"another {_MEANINGS.get(key, key)}: {_short(theirs.get(key))} there, {_short(own)} here"
        for key, own in ours.items()
        if not is_same(theirs.get(key), own)
    ]
    if differing:
        raise StateMismatchError(
            f"{state} has {', '.join(differing)}. Build {built} with the settings of the saved run{_hint(theirs, ours)}"
        )


def _hint(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """Name the preset of a saved schedule that was the default once, if this schedule is another."""
    # The name of the order, then the groups in it.
    order: Any = theirs.get("order")
    is_bottom_up = isinstance(order, (list, tuple)) and list(order[:1]) == ["bottom2up"]
    if not is_bottom_up or theirs.get("steps_per_group") != 1 or ours.get("steps_per_group") == 1:
        return ""
    return f" (its turns are those of {setting_name('--preset paper', 'HiFTConfig.paper()')})"


def check_accepted(saved: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]], base: BaseOptimizer) -> None:
    """Refuse hyperparameters that the base optimizer's constructor refuses, such as a negative beta.

    Args:
        saved: Param groups of the saved state.
        own: As many, of the optimizer that loads them. If one of these is refused, its counterpart is not checked.
        base: The base optimizer.

    Raises:
        StateMismatchError: If it refuses a saved group, with the constructor's text.
    """
    for index, (theirs, ours) in enumerate(zip(saved, own, strict=True)):
        problem = base.refusal_of(theirs)
        if problem is not None and base.refusal_of(ours) is None:
            raise StateMismatchError(
                f"the saved state is damaged: {base.name} does not take the hyperparameters of param group {index} "
                f"({problem}). Use another checkpoint"
            )


def check_weights(state: Mapping[str, WeightState], weights: Iterable[Weight], meter: StepMeter) -> None:
    """Check the saved state of each weight.

    Args:
        state: Saved state by name of the weight, then by key.
        weights: Trained weights.
        meter: Meter that knows the base optimizer's state of a weight, and whether it has an fp32 master.

    Raises:
        StateMismatchError: If one does not fit, with the weight's name and the reason.
    """
    known = {weight.name: weight for weight in weights}
    for name, values in state.items():
        if name not in known:
            raise StateMismatchError(
                f"the saved state has {name}, which this model does not train. Train the parameters of the saved run"
            )
        _check_weight(known[name], values, meter)


def _check_weight(weight: Weight, state: WeightState, meter: StepMeter) -> None:
    name, shape, on_master = weight.name, weight.parameter.shape, meter.steps_master(weight)
    if on_master != (MASTER in state):
        there, way_out = ("no", "none") if on_master else ("an", "fp32")
        raise StateMismatchError(f"the saved state has {there} fp32 master for {name}. Resume with master={way_out!r}")
    if set(state) != {MASTER} and (missing := sorted(meter.needs(weight).keys - set(state))):
        raise StateMismatchError(f"the saved state of {name} lacks {missing}: it is damaged. Use another checkpoint")
    forms = dict(meter.needs(weight).forms) if set(state) != {MASTER} else {}
    forms[MASTER] = TensorForm(dtype=torch.float32, has_extent=weight.parameter.dim() > 0, is_finite=True)
    for key, value in flatten_state(dict(state), copy_objects=True).items():
        _check_form(f"{key!r} of {name}", value, forms.get(key))
        check_sign(f"{key!r} of {name}", key, value)
        if key == "step" and not is_step(value):
            raise StateMismatchError(f"the saved state {key!r} of {name} is {value}. Use another checkpoint")
    for key, value in state.items():
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            continue
        blocks = (-(-shape.numel() // CUT_MULTIPLE),)
        fits = value.shape == shape or (key.startswith("absmax") and value.shape == blocks) or key.startswith("qmap")
        if (key == MASTER or meter.is_elementwise) and not fits:
            raise StateMismatchError(
                f"the saved state {key!r} of {name} has shape {tuple(value.shape)}, and the weight {tuple(shape)}: it "
                "is of another model, or damaged. Use another checkpoint"
            )


def _check_form(where: str, value: Any, form: TensorForm | type | None) -> None:
    """Compare a value of a weight's state with the form that a step on a dummy has left under the same key.

    Args:
        where: Name of the value in the error.
        value: Saved value.
        form: Form of the dummy's value; None if the dummy has none.
    """
    theirs = form_of(value)
    if isinstance(theirs, TensorForm) and isinstance(form, TensorForm):
        # torch chooses the dtype of a scalar. A value that begins as infinite may become infinite again.
        is_other = theirs.has_extent != form.has_extent or (form.has_extent and theirs.dtype != form.dtype)
        is_other = is_other or (form.is_finite and not theirs.is_finite)
    else:
        check_finite(where, value)
        kinds = _kind(theirs), _kind(form)
        is_lost = value is None and isinstance(form, TensorForm)
        is_other = is_lost or (kinds[0] != kinds[1] and None not in kinds)
    if is_other and form is not None:
        raise StateMismatchError(
            f"the saved state is damaged: {where} is {describe_form(theirs)}, where this optimizer has "
            f"{describe_form(form)}. Use another checkpoint"
        )


def _kind(form: TensorForm | type | None) -> object:
    """Return the kind of a value: tensor, number, flag or text. None for any other value, which tells nothing."""
    if isinstance(form, TensorForm):
        return TensorForm
    return float if form is int else form if form in (float, bool, str) else None


def _check_counts(key: str, counts: Any, num_groups: int) -> None:
    if not isinstance(counts, Mapping) or not all(
        is_count(group) and group < num_groups and is_count(count) for group, count in counts.items()
    ):
        raise StateMismatchError(f"the saved state is damaged: {key}={counts!r}. Use another checkpoint")


def _same_names(their_groups: Iterable[Iterable[str]], our_groups: Iterable[Iterable[str]]) -> None:
    theirs, ours = (set[str]().union(*groups) for groups in (their_groups, our_groups))
    missing, unknown = sorted(ours - theirs), sorted(theirs - ours)
    if missing or unknown:
        raise StateMismatchError(
            f"the saved state is of another model: it has no {_short(missing)}, and this model has no "
            f"{_short(unknown)}. Load it into the model that it was saved with"
        )


def _short(value: Any) -> str:
    if isinstance(value, (list, tuple)) and value and all(isinstance(each, (list, tuple)) for each in value):
        return f"{len(value)} groups of {[len(group) for group in value][:6]} parameters"
    if isinstance(value, (list, tuple)) and len(value) > 3:
        return f"{list(value[:3])} and {len(value) - 3} more"
    return repr(value)
