"""The base optimizer: how to make another instance of it, and how far a group may be cut for it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

Unit = Literal["elements", "tensors", "group"]

# By exact class: a subclass may look at a whole tensor.
_ELEMENTWISE = frozenset(
    {
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)
_BITSANDBYTES_ELEMENTWISE = frozenset(
    f"{family}{width}"
    for family in ("Adagrad", "Adam", "AdamW", "Lion", "RMSprop", "SGD")
    for width in ("", "8bit", "32bit")
)
# Each tensor alone, but whole and in its own shape (factored moments, norms, orthogonalisation).
_TENSORWISE = frozenset({torch.optim.Adafactor, torch.optim.Muon})
_TENSORWISE_NAMES = frozenset({"transformers.optimization.Adafactor"})

# Vector loops and bitsandbytes' quantisation blocks both begin anew at multiples of this, so that a cut changes no bit.
CUT_MULTIPLE = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Slicing:
    """How a group may be cut into pieces without changing what the base optimizer computes."""

    unit: Unit
    """`elements`: anywhere at multiples of `CUT_MULTIPLE`; `tensors`: between tensors; `group`: nowhere."""
    minimum: int = CUT_MULTIPLE
    """Elements below which no cut may leave a slice (bitsandbytes keeps 32-bit state for small tensors)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseOptimizer:
    """A class of optimizers with the arguments that make an instance."""

    optimizer_class: type[torch.optim.Optimizer]
    arguments: Mapping[str, Any]
    """Keyword arguments of the constructor beside the parameters."""
    defaults: Mapping[str, Any]
    """The class's default hyperparameters under these arguments, as its instances report them."""
    slicing: Slicing

    @classmethod
    def of_class(
        cls, optimizer_class: type[torch.optim.Optimizer], arguments: Mapping[str, Any], elementwise: bool | None
    ) -> BaseOptimizer:
        """Take a class and its arguments, checked by building an instance over one dummy weight.

        Raises:
            ValueError: If HiFT can't rotate this class, with the reason.
            TypeError: If it is no optimizer class, or from its constructor.
        """
        if not _is_optimizer_class(optimizer_class):
            raise TypeError(
                f"optimizer_class={optimizer_class!r} must be a class of torch.optim.Optimizer; "
                "HiFT.wrap(optimizer, model) takes an instance"
            )
        _refuse(optimizer_class)
        sample = optimizer_class([torch.nn.Parameter(torch.zeros(1))], **arguments)
        return cls._of(sample, arguments, elementwise)

    @classmethod
    def of_instance(cls, optimizer: torch.optim.Optimizer, elementwise: bool | None) -> BaseOptimizer:
        """Take an instance that has not stepped yet; its constructor's arguments are read back from it.

        Raises:
            ValueError: If it has already stepped, or HiFT can't rotate its class.
        """
        _refuse(type(optimizer))
        if any(_has_stepped(state) for state in optimizer.state.values()):
            raise ValueError(
                f"the {type(optimizer).__name__} to wrap has already taken steps; wrap it before its first step, "
                "or load its successor's state with HiFT.load_state_dict"
            )
        accepted = inspect.signature(type(optimizer).__init__).parameters
        arguments = {name: value for name, value in optimizer.defaults.items() if name in accepted}
        if "args" in accepted and hasattr(optimizer, "args"):  # bitsandbytes: bits, block sizes
            arguments["args"] = optimizer.args
        return cls._of(optimizer, arguments, elementwise)

    @classmethod
    def _of(
        cls, sample: torch.optim.Optimizer, arguments: Mapping[str, Any], elementwise: bool | None
    ) -> BaseOptimizer:
        return cls(
            optimizer_class=type(sample),
            arguments=dict(arguments),
            defaults=dict(sample.defaults),
            slicing=_slicing(sample, elementwise),
        )

    @property
    def name(self) -> str:
        """The class's full name, which a checkpoint must match."""
        return f"{self.optimizer_class.__module__}.{self.optimizer_class.__qualname__}"

    def build(self, param_groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Make a new instance over these groups, which carry all their hyperparameters."""
        return self.optimizer_class(param_groups, **self.arguments)


def _is_optimizer_class(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, torch.optim.Optimizer)


def _slicing(sample: torch.optim.Optimizer, elementwise: bool | None) -> Slicing:
    optimizer_class = type(sample)
    from_bitsandbytes = optimizer_class.__module__.startswith("bitsandbytes.")
    minimum = int(getattr(getattr(sample, "args", None), "min_8bit_size", CUT_MULTIPLE)) if from_bitsandbytes else 0
    known = optimizer_class in _ELEMENTWISE or (
        from_bitsandbytes
        and optimizer_class.__name__ in _BITSANDBYTES_ELEMENTWISE
        and not getattr(sample.args, "max_unorm", 0.0)  # type: ignore[attr-defined]
    )
    if elementwise or (elementwise is None and known):
        return Slicing(unit="elements", minimum=max(minimum, CUT_MULTIPLE))
    full_name = f"{optimizer_class.__module__}.{optimizer_class.__qualname__}"
    if known or optimizer_class in _TENSORWISE or full_name in _TENSORWISE_NAMES:
        return Slicing(unit="tensors")
    return Slicing(unit="group")


def _refuse(optimizer_class: type[torch.optim.Optimizer]) -> None:
    name = optimizer_class.__name__
    closure = inspect.signature(optimizer_class.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{name} evaluates the model again inside its step, on weights that HiFT writes back only afterwards; "
            "use an optimizer whose step needs no closure"
        )
    if optimizer_class.__module__.startswith("bitsandbytes.") and name.startswith("Paged"):
        raise ValueError(
            f"{name} pages its state by itself; HiFT already keeps it off the device: use {name.removeprefix('Paged')}"
        )


def _has_stepped(state: Any) -> bool:
    # Adagrad and the like fill their state when built; their step count is still zero.
    if not state:
        return False
    step = state.get("step")
    return step is None or float(step) > 0
