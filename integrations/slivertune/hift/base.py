"""The base optimizer: build further instances of it, and tell how far its groups may be cut."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any, Literal

import torch

from slivertune.core.torch_internals import is_compiled_function
from slivertune.hift.config import HiFTConfig
from slivertune.hift.unsupported_optimizers import refuse_class, refuse_instance

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
_TORCHAO_TENSORWISE = frozenset({"Adam8bit", "Adam4bit", "AdamFp8", "AdamW8bit", "AdamW4bit", "AdamWFp8"})

# Vector loops and bitsandbytes' quantisation blocks start again at multiples of this, so that a cut changes no bit.
CUT_MULTIPLE = 256


_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
"""torch's own tables of an optimizer's hooks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slicing:
    """Cuts of a group into chunks that do not change the base optimizer's results."""

    unit: Unit
    """`elements`: cuts at any multiple of `CUT_MULTIPLE`. `tensors`: cuts between tensors. `group`: no cut."""
    minimum: int = CUT_MULTIPLE
    """Fewest elements that a cut may leave in a slice (bitsandbytes keeps 32-bit state for small tensors)."""
    is_listed: bool = False
    """Whether this file lists the class, and so knows the form of its state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseOptimizer:
    """An optimizer class with the arguments that build an instance."""

    optimizer_class: type[torch.optim.Optimizer]
    arguments: Mapping[str, Any]
    """Keyword arguments of the constructor, without the parameters."""
    defaults: Mapping[str, Any]
    """Default hyperparameters under these arguments, as the class's instances report them."""
    slicing: Slicing

    @classmethod
    def of_class(
        cls, optimizer_class: type[torch.optim.Optimizer], arguments: Mapping[str, Any], elementwise: bool | None
    ) -> BaseOptimizer:
        """Check a class and its arguments by building an instance over one dummy weight.

        Raises:
            ValueError: If HiFT can't rotate this class, with the reason.
            TypeError: If it is not an optimizer class, or from its constructor.
        """
        if not _is_optimizer_class(optimizer_class):
            raise TypeError(
                f"optimizer_class={optimizer_class!r} must be a class of torch.optim.Optimizer. "
                "Pass an instance to HiFT.wrap(optimizer, model)"
            )
        refuse_class(optimizer_class)
        sample = optimizer_class([torch.nn.Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))], **arguments)
        refuse_instance(sample)
        return cls._of(sample, arguments, elementwise)

    @classmethod
    def of_instance(cls, optimizer: torch.optim.Optimizer, elementwise: bool | None) -> BaseOptimizer:
        """Read the constructor's arguments back from an instance that has not stepped yet.

        Raises:
            ValueError: If it has stepped, HiFT can't rotate its class, or an equal instance can't be built.
            TypeError: If it is not an optimizer.
        """
        refuse_class(type(optimizer))
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"{optimizer!r} must be an instance of torch.optim.Optimizer, built over the parameters. Pass a class "
                "to HiFT(model, optimizer_class)"
            )
        refuse_instance(optimizer)
        if found := [name for name in _HOOKS if getattr(optimizer, name, None)]:
            raise ValueError(
                f"the {type(optimizer).__name__} to wrap has hooks ({found[0]}), and HiFT would run none of them. "
                "Register hooks on steps with the HiFT, and change states after state_dict()"
            )
        arguments = _arguments_of(optimizer)
        rebuilt = _rebuilt(optimizer, arguments)
        made_at_once: dict[str, Any] = next(iter(rebuilt.state.values()), {})
        if any(_has_stepped(state, made_at_once) for state in optimizer.state.values()):
            raise ValueError(
                f"the {type(optimizer).__name__} to wrap has already taken steps. Wrap it before its first step, "
                "or load a saved HiFT state with HiFT.load_state_dict"
            )
        _check_settings(optimizer, rebuilt)
        _warn_of_compiled_step(optimizer)
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

    def refusal_of(self, hyperparameters: Mapping[str, Any]) -> str | None:
        """Return the constructor's error for these hyperparameters over a dummy weight, or None if it accepts them.

        Args:
            hyperparameters: Hyperparameters of a param group. A rate is checked only if it is None: classes that find
                their own rate write it into the group, but refuse it in the constructor.
        """
        names = inspect.signature(self.optimizer_class).parameters
        given = {name: value for name, value in hyperparameters.items() if name in names and name != "params"}
        if given.get("lr") is not None:
            del given["lr"]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                dummy = torch.nn.Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))
                self.optimizer_class([dummy], **{**self.arguments, **given})
        except Exception as error:
            return f"{type(error).__name__}: {str(error)[:200]}"
        return None

    @property
    def name(self) -> str:
        """Full name of the class, which a checkpoint must match."""
        return f"{self.optimizer_class.__module__}.{self.optimizer_class.__qualname__}"

    def build(
        self, param_groups: list[dict[str, Any]], stands_for: Iterable[tuple[torch.Tensor, torch.Tensor]] = ()
    ) -> torch.optim.Optimizer:
        """Build an instance over param groups that carry all their hyperparameters.

        Args:
            param_groups: Param groups, as a constructor takes them.
            stands_for: Pairs of a parameter of these groups and the model's parameter that it replaces in the step.
        """
        optimizer = self.optimizer_class(param_groups, **self.arguments)
        give_own_overrides(optimizer, {id(own): dict(self.overrides_of(of_model)) for own, of_model in stands_for})
        return optimizer

    def overrides_of(self, parameter: torch.Tensor) -> tuple[tuple[str, Any], ...]:
        """Return the overrides of bitsandbytes' global manager for one of the model's parameters, if there are any."""
        if not any(kind.__module__.startswith("bitsandbytes.") for kind in self.optimizer_class.__mro__):
            return ()
        from bitsandbytes.optim.optimizer import GlobalOptimManager

        manager = GlobalOptimManager.get_instance()  # type: ignore[no-untyped-call]
        config = dict(manager.pid2config.get(id(parameter), {}))
        for module, attribute, override in manager.module_weight_config_triple:
            if getattr(module, attribute) is parameter:
                config.update(override)
        return tuple(config.items())


def give_own_overrides(optimizer: torch.optim.Optimizer, overrides: dict[int, dict[str, Any]]) -> None:
    """Give an optimizer of bitsandbytes its own overrides, such as 32-bit state for embeddings.

    bitsandbytes stores them by parameter, and by position for all instances of the process together.

    Args:
        optimizer: Any optimizer; others than those of bitsandbytes are left as they are.
        overrides: Overrides by the id of the parameter.
    """
    if hasattr(optimizer, "mng"):
        optimizer.mng = SimpleNamespace(pid2config=overrides, index2config={}, module_weight_config_triple=[])


def _is_optimizer_class(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, torch.optim.Optimizer)


def _arguments_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the constructor's arguments that the defaults or attributes of an instance reveal."""
    accepted = inspect.signature(type(optimizer).__init__).parameters
    known = {**vars(optimizer), **optimizer.defaults}
    if "args" not in accepted and hasattr(optimizer, "args"):  # bitsandbytes: bits, block sizes
        known = {**vars(optimizer.args), **known}
    return {name: known[name] for name in accepted if name in known and name not in ("self", "params")}


def _rebuilt(optimizer: torch.optim.Optimizer, arguments: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Build an instance from these arguments over a dummy weight.

    Raises:
        ValueError: If none can be built.
    """
    name = type(optimizer).__name__
    # If everything is frozen, as in an adapter loaded for inference, HiFT's search for layers raises the error.
    without = torch.zeros(1, dtype=torch.float32, device="cpu")
    first = next((each for group in optimizer.param_groups for each in group["params"]), without)
    dummy = torch.nn.Parameter(torch.zeros((1,) * max(1, first.dim()), dtype=first.dtype, device="cpu"))
    try:
        return type(optimizer)([{**optimizer.param_groups[0], "params": [dummy]}], **arguments)
    except Exception as error:
        raise ValueError(
            f"HiFT builds one {name} per group, and can't read its arguments back from this instance "
            f"({type(error).__name__}: {error}). Pass the class and its arguments: HiFT(model, {name}, ...)"
        ) from error


def _check_settings(optimizer: torch.optim.Optimizer, rebuilt: torch.optim.Optimizer) -> None:
    """Compare the settings of an instance with those of an instance rebuilt from its arguments.

    Raises:
        ValueError: If one differs, since HiFT's instances would not have the user's value.
    """
    name = type(optimizer).__name__
    ours, theirs = _settings(rebuilt), _settings(optimizer)
    for key, value in ours.items():
        if key in theirs and theirs[key] != value:
            raise ValueError(
                f"HiFT builds one {name} per group, and can't read {key}={theirs[key]!r} back as an argument from this "
                f"instance (another one has {value!r}). Pass the class and its arguments: HiFT(model, {name}, ...)"
            )


def _warn_of_compiled_step(optimizer: torch.optim.Optimizer) -> None:
    """Warn that HiFT's instances do not run a step that was compiled on this instance alone."""
    if is_compiled_function(vars(optimizer).get("step")):
        name = type(optimizer).__name__
        warnings.warn(
            f"the step of this {name} was compiled on the instance. HiFT builds one {name} per group, and runs their "
            "steps uncompiled. Wrap a class that compiles its own step to have them compiled",
            UserWarning,
            stacklevel=4,
        )


def _settings(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the plain attributes that the constructor has set, including bitsandbytes' `args`."""
    attributes = {**vars(getattr(optimizer, "args", None) or SimpleNamespace()), **vars(optimizer)}
    return {
        key: value
        for key, value in attributes.items()
        if not key.startswith("_") and (value is None or isinstance(value, (bool, int, float, str)))
    }


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
        return Slicing(unit="elements", minimum=max(minimum, CUT_MULTIPLE), is_listed=known)
    from_torchao = optimizer_class.__module__.startswith("torchao.") and optimizer_class.__name__ in _TORCHAO_TENSORWISE
    if (
        known
        or optimizer_class in _TENSORWISE
        or f"{optimizer_class.__module__}.{optimizer_class.__qualname__}" in _TENSORWISE_NAMES
        or from_torchao
    ):
        return Slicing(unit="tensors", is_listed=True)
    return Slicing(unit="group")


def _has_stepped(state: Any, made: Any) -> bool:
    # Adagrad and others fill their state when built. Their step count is still zero, or missing (APOLLO).
    if not state:
        return False
    step = state.get("step")
    return state.keys() != made.keys() if step is None else float(step) > 0


def refuse_settings(optimizer_class: type, arguments: Mapping[str, Any]) -> None:
    """Refuse HiFT's settings among the arguments of its base optimizer.

    Args:
        optimizer_class: Class of the base optimizer.
        arguments: Keyword arguments of its constructor.

    Raises:
        TypeError: If the constructor takes no such argument and `HiFTConfig` has such a field.
    """
    try:
        known = inspect.signature(optimizer_class).parameters
    except (TypeError, ValueError):  # no class, or one without a signature
        return
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in known.values()):
        return
    settings = {item.name for item in fields(HiFTConfig)}
    for name in arguments:
        if name in settings and name not in known:
            raise TypeError(
                f"{name}= is a setting of HiFT, and no argument of {optimizer_class.__name__}. Pass "
                f"config=HiFTConfig({name}=...)"
            )
