"""Names of the methods of `slivertune train`, and the options that each alone reads. It imports no torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal

from slivertune.core.adapter_targets import target_modules
from slivertune.core.options import Option, Spelling, options_of
from slivertune.hift.config import HiFTConfig
from slivertune.sft.config import NAMES_OF_OPTIONS, SFTConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class NoOptions:
    """The options of a method that has none of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodOptions:
    """The name of a method, and the options that it alone reads."""

    name: str
    """Name after `--method`. It is also the default folder of its runs."""
    help: str
    """Description in one clause, for `--help`."""
    options_class: type = NoOptions
    """Dataclass whose fields are the options. A field's docstring is its help text."""
    names: Mapping[str, str | None] = field(default_factory=dict)
    """Names of options by the fields of `options_class`, where the two differ. None: the field is no option."""
    shared: tuple[str, ...] = ()
    """Fields of `options_class` that are options of every method."""

    def options(self) -> Iterator[Option]:
        """Yield the options."""
        return options_of(self.options_class, {**self.names, **dict.fromkeys(self.shared)})

    def make(self, values: Mapping[str, Any]) -> Any:
        """Make an instance of `options_class`.

        Args:
            values: Values by the names of options; those of other owners are left out.

        Raises:
            ValueError: If a value is out of range or contradicts another.
        """
        return self.options_class(**{item: values[name] for item, name in self._named() if name in values})

    def values(self, options: Any) -> dict[str, Any]:
        """Return the values of options by name, as plain JSON.

        Args:
            options: Instance of `options_class`.
        """
        return {name: getattr(options, item) for item, name in self._named()}

    def replaced(self, options: Any, values: Mapping[str, Any]) -> Any:
        """Return options with other values.

        Args:
            options: Instance of `options_class`, which is left as it is.
            values: New values by the names of options; those of other owners are left out.

        Raises:
            ValueError: If a value is out of range or contradicts another.
        """
        return replace(options, **{item: values[name] for item, name in self._named() if name in values})

    def _named(self) -> Iterator[tuple[str, str]]:
        """Yield the fields that are options, and the options' names."""
        for item in fields(self.options_class):
            name = self.names.get(item.name, item.name)
            if name is not None:
                yield item.name, name


@dataclass(frozen=True, kw_only=True, slots=True)
class HiFTOptions(HiFTConfig):
    """Options of `--method hift`: those of `HiFTConfig`, and two about their choice."""

    preset: Literal["paper"] | None = None
    """paper sets the paper's schedule (--layers_per_group 1 --steps_per_group 1 --order bottom2up), except for options
    that are given as well."""
    gpu: Annotated[str | None, Spelling(value_name="NAME")] = None
    """GPU for which --layers_per_group auto chooses, by default this machine's. The name is one that slivertune plan
    takes."""

    def config(self, seed: int) -> HiFTConfig:
        """Return the settings as a `HiFTConfig`.

        Args:
            seed: Seed of the run.
        """
        values = {each.name: getattr(self, each.name) for each in fields(HiFTConfig)}
        return HiFTConfig(**{**values, "seed": seed})


@dataclass(frozen=True, kw_only=True, slots=True)
class SFTOptions(SFTConfig):
    """Options of `--method sft`: those of `SFTConfig`, and the momentum of SM3."""

    momentum: float = 0.0
    """Momentum of SM3, in [0, 1), only with `selection=momentum`."""

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ValueError(f"sft_momentum={self.momentum} must lie in [0, 1). Use 0 for none")
        SFTConfig.__post_init__(self)

    def config(self, seed: int) -> SFTConfig:
        """Return the settings as an `SFTConfig`.

        Args:
            seed: Seed of the run.
        """
        values = {each.name: getattr(self, each.name) for each in fields(SFTConfig)}
        return SFTConfig(**{**values, "seed": seed})


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraOptions:
    """Settings of LoRA for PEFT.

    Raises:
        ValueError: If a number is out of its range.
    """

    lora_rank: int = 16
    """Rank r of an adapter's two matrices."""
    lora_alpha: int | None = None
    """Numerator of the adapters' scale alpha / rank. By default twice the rank."""
    lora_dropout: float = 0.0
    """Dropout on an adapter's input, in [0, 1)."""
    lora_target_modules: list[str] | None = None
    """Names of the modules that get an adapter, e.g. q_proj v_proj. By default PEFT's all-linear, every linear layer
    but the head, and but those whose weights Mamba reads past an adapter."""

    def __post_init__(self) -> None:
        if self.lora_rank < 1:
            raise ValueError(f"lora_rank={self.lora_rank} must be at least 1. Leave it out for 16")
        if self.lora_alpha is not None and self.lora_alpha < 1:
            raise ValueError(f"lora_alpha={self.lora_alpha} must be at least 1. Leave it out for twice the rank")
        if not 0 <= self.lora_dropout < 1:
            raise ValueError(f"lora_dropout={self.lora_dropout} must lie in [0, 1). Use 0 for no dropout")

    @property
    def alpha(self) -> int:
        """`lora_alpha`, or twice the rank."""
        return 2 * self.lora_rank if self.lora_alpha is None else self.lora_alpha

    @property
    def target_modules(self) -> list[str] | str:
        """Module names as PEFT takes them: a list, or its shorthand `all-linear`, which must be a string."""
        return target_modules(self.lora_target_modules)


DENSE = MethodOptions(name="dense", help="all weights in every update")
HIFT = MethodOptions(
    name="hift",
    help="one group of layers per update, the rest frozen",
    options_class=HiFTOptions,
    names={"seed": None, "elementwise": None, "max_grad_norm": None},
    shared=("waiting", "weights", "device_bytes", "resident_bytes"),
)
SFT = MethodOptions(
    name="sft",
    help="a sparse choice of weights, reselected during training, with deltas in --output_dir/delta",
    options_class=SFTOptions,
    names={
        **NAMES_OF_OPTIONS,
        "momentum": "sft_momentum",
        **dict.fromkeys(("form", "phi_gradient", "max_grad_norm", "seed")),
    },
)
LORA = MethodOptions(
    name="lora",
    help="small adapters beside frozen weights (PEFT), saved alone in --output_dir/model",
    options_class=LoraOptions,
)
METHOD_OPTIONS: dict[str, MethodOptions] = {each.name: each for each in (DENSE, HIFT, SFT, LORA)}
"""Methods by the name that is typed, including those of other packages."""
DEFAULT_METHOD = HIFT
FULL = "full"
"""Value of `--method` that stands for hift with other settings (`without_full`)."""
_FULL_HELP = (
    "hift with all layers in each update and a small state (Adafactor); bf16 weights are stepped in the backward and "
    "rounded stochastically, so that nothing is in host memory"
)


def method_option() -> Option:
    """Make the option `--method`."""
    return Option(
        name="method",
        kinds=(str,),
        default=DEFAULT_METHOD.name,
        text="; ".join([*(f"{name}: {each.help}" for name, each in METHOD_OPTIONS.items()), f"{FULL}: {_FULL_HELP}"]),
        owner=MethodOptions,
        choices=(*METHOD_OPTIONS, FULL),
    )
