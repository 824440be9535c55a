"""Options of `slivertune train` that a plan's request names differently: `--bf16`, `--weights_dtype`, `--optim`."""

from dataclasses import dataclass, field
from typing import Any, Literal

from slivertune.core.suggestions import did_you_mean
from slivertune.planning.methods import planned
from slivertune.planning.optimizers import OPTIM_NAMES, OptimizerName
from slivertune.planning.request import PlanRequest, PrecisionName, kinds_of, option

WeightsDtype = Literal["auto", "fp32", "bf16"]
_GROUP = "as slivertune train has it"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainWords:
    """Options of `slivertune train` that set a field of `PlanRequest` with another name."""

    bf16: bool | None = field(
        default=None,
        metadata=option(_GROUP, "in place of precision: mixed_hi with hift, mixed with dense, else bf16; false: fp32"),
    )
    weights_dtype: WeightsDtype | None = field(
        default=None,
        metadata=option(_GROUP, "in place of precision: dtype of stored weights; fp32 under bf16 is mixed"),
    )
    optim: str | None = field(
        default=None,
        metadata=option(_GROUP, f"in place of optimizer: one of {', '.join(OPTIM_NAMES)}", read=str, metavar="NAME"),
    )
    optim_args: str | None = field(
        default=None,
        metadata=option(
            _GROUP, "arguments of optim; momentum=0.9 with sgd is sgd_momentum", read=str, metavar="NAME=VALUE"
        ),
    )

    def settle(self, given: dict[str, Any]) -> dict[str, Any]:
        """Translate these options into fields of a request.

        Args:
            given: Fields of `PlanRequest` that were typed.

        Returns:
            The given fields, with the fields that these options set.

        Raises:
            ValueError: If an option contradicts a field that was typed, or a plan does not know its value.
        """
        given = dict(given)
        if self.bf16 is not None or self.weights_dtype in ("fp32", "bf16"):
            words = [f"--bf16 {str(self.bf16).lower()}"] if self.bf16 is not None else []
            words += [f"--weights_dtype {self.weights_dtype}"] if self.weights_dtype is not None else []
            _set(given, "precision", precision_of(given, self.bf16 or False, self.weights_dtype or "auto"), words)
        if self.optim is not None:
            _set(given, "optimizer", optimizer_named(self.optim, self.optim_args or ""), [f"--optim {self.optim}"])
        elif self.optim_args is not None:
            raise ValueError(f"--optim_args {self.optim_args} takes effect only with --optim. Name the optimizer")
        return given


WORD_KINDS = kinds_of(TrainWords)
"""Types of these options, by name."""


def _set(given: dict[str, Any], name: str, value: str, words: list[str]) -> None:
    if given.get(name, value) != value:
        raise ValueError(
            f"{' '.join(words)} means --{name} {value} here, and --{name} {given[name]} says otherwise. Leave out one "
            "of the two"
        )
    given[name] = value


def precision_of(given: dict[str, Any], bf16: bool, weights_dtype: WeightsDtype) -> PrecisionName:
    """Return the precision of a plan that `--bf16` and `--weights_dtype` of `slivertune train` stand for.

    `--bf16` means bf16 weights for methods that keep in fp32 the precision that bf16 lacks, and for all methods under
    DeepSpeed, whose engine keeps masters. It means autocast for dense fine-tuning, and both for adapters.

    Args:
        given: Fields of `PlanRequest` that were typed: method, masters, 4 bits and layout.
        bf16: Whether `--bf16` was given.
        weights_dtype: Dtype of the weights. fp32 is assumed if `auto` would follow the checkpoint.
    """
    defaults = PlanRequest()
    method, four_bit, layout, master = (
        given.get(name, getattr(defaults, name)) for name in ("method", "load_in_4bit", "layout", "master")
    )
    meaning = planned(method).bf16_precision
    is_bf16 = bf16 or weights_dtype == "bf16"
    if not is_bf16:
        return "fp32"
    if weights_dtype == "fp32":
        return "mixed"
    is_autocast = meaning == "mixed" and not four_bit and not layout.startswith("zero")
    if is_autocast:
        return "bf16" if weights_dtype == "bf16" else "mixed"
    return "mixed_hi" if meaning == "mixed_hi" and master != "none" else "bf16"


def optimizer_named(optim: str, optim_args: str) -> OptimizerName:
    """Return the plan's optimizer for a `TrainingArguments.optim`.

    Args:
        optim: Value of `TrainingArguments.optim`.
        optim_args: Value of `TrainingArguments.optim_args`.

    Raises:
        ValueError: If a plan does not know it.
    """
    if optim not in OPTIM_NAMES:
        meant = did_you_mean(optim, OPTIM_NAMES)
        raise ValueError(f"a plan does not know --optim {optim}: it must be one of {', '.join(OPTIM_NAMES)}{meant}")
    return "sgd_momentum" if optim == "sgd" and "momentum=" in optim_args else OPTIM_NAMES[optim]
