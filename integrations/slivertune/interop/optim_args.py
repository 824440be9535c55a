"""Settings of the base optimizer that the Trainer passes over: it reads `optim_args` for some optimizers alone."""

from typing import Any

from torch.optim import Optimizer

_OF_SCALARS = ("torch.optim.", "transformers.optimization")
"""Modules whose optimizers take each of these settings under its own name."""


def set_passed_over(optimizer: Optimizer, optim_args: str | None) -> None:
    """Set the hyperparameters that `optim_args` names and the Trainer has not set, for optimizers of known modules.

    Args:
        optimizer: Optimizer that the Trainer made, before its first step.
        optim_args: The Trainer's argument, such as `decay_rate=-0.5,clip_threshold=2`.

    Raises:
        ValueError: If the optimizer has no such hyperparameter, or none that is a number, or it is the learning rate.
    """
    kind = type(optimizer)
    if not optim_args or not kind.__module__.startswith(_OF_SCALARS):
        return
    known = sorted(
        key
        for key, value in optimizer.defaults.items()
        if key != "lr" and isinstance(value, bool | int | float | None)  # the Trainer has set the learning rate
    )
    for setting in optim_args.replace(" ", "").split(","):
        name, _, text = setting.partition("=")
        if name not in known:
            raise ValueError(
                f"optim_args has {setting!r}, and {kind.__name__} takes {', '.join(known)} there. Name one of "
                "these, or build the optimizer yourself: HiFT.wrap(optimizer, model)"
            )
        value = _number(setting, text)
        if optimizer.defaults[name] != value:
            optimizer.defaults[name] = value
            for group in optimizer.param_groups:
                group[name] = value


def _number(setting: str, text: str) -> Any:
    lower = text.lower()
    if lower in ("true", "false", "yes", "no"):
        return lower in ("true", "yes")
    try:
        return int(text) if text.lstrip("-").isdigit() else float(text)
    except ValueError:
        raise ValueError(f"optim_args has {setting!r}, which is not a number. Write name=number") from None
