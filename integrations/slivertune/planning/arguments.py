"""Questions of `slivertune plan`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin

from slivertune.core.byte_text import parse_memory_size
from slivertune.core.number_rule import RULES
from slivertune.core.options import Spelling
from slivertune.core.output_place import check_file_place
from slivertune.core.suggestions import did_you_mean
from slivertune.planning.cards import DISK_BANDWIDTH, EFFICIENCY, card_named
from slivertune.planning.largest import LargestField
from slivertune.planning.request import REQUEST_OPTIONS, check_value

SWEPT_FIELDS = {
    option.name: option.read or (option.kinds[0] if option.kinds[0] in (int, float) else str)
    for option in REQUEST_OPTIONS.values()
    if option.kinds[0] in (int, float, str) or get_origin(option.kinds[0]) is Literal
}
"""Fields of `PlanRequest` that are numbers or names, each with the function that reads a value."""
DECIDED_BY_COMPARISON = frozenset(
    {
        "method", "precision", "layers_per_group", "steps_per_group", "gradients", "selection", "load_in_4bit",
        "batch_size",
    }
)  # fmt: skip
"""Fields of `PlanRequest` that differ between the rows of `--compare`, or that follow from a row's method."""
OF_CARD = "card"
"""Value of `--fit` without a size, which means the memory of the card."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """Several values of one field."""

    field: str
    """Name of a field of `PlanRequest`."""
    values: tuple[Any, ...]
    """Values of the field, in the order given."""


def read_sweep(text: str) -> Sweep:
    """Read `--sweep`, such as `seq_length=512,2048`.

    Args:
        text: The text as typed.

    Raises:
        ValueError: If it names no field, or if the field can't take a value. The message begins with the text.
    """
    name, separator, listed = text.partition("=")
    read = SWEPT_FIELDS.get(name)
    if read is None or not separator:
        meant = did_you_mean(name, SWEPT_FIELDS)
        raise ValueError(f"{text!r} must be FIELD=V1,V2,... with one of {', '.join(SWEPT_FIELDS)}{meant}")
    try:
        values = tuple(read(value) for value in listed.split(","))
        for value in values:
            if value != "auto":
                check_value(REQUEST_OPTIONS[name], value)
    except ValueError as error:
        raise ValueError(f"{text!r} has a value that {name} can't take: {error}") from error
    if len(set(values)) < len(values):
        raise ValueError(f"{text!r} has a value twice. Give each once")
    return Sweep(field=name, values=values)


def read_count(text: str) -> int:
    """Read a count of at least 1, such as 3e6 or 3_000_000.

    Args:
        text: The text as typed.

    Raises:
        ValueError: If it is no such number. The message begins with the text.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not RULES["tokens"].allows(value):
        raise ValueError(f"{text!r} must be a number, {RULES['tokens'].describe()}, such as 3000000 or 3e6")
    return round(value)


def read_limit(text: str) -> int | str:
    """Read `--fit`: a size, or `card`.

    Args:
        text: The text as typed.

    Raises:
        ValueError: If it is neither.
    """
    return text if text == OF_CARD else parse_memory_size(text)


MemorySize = Annotated[int, Spelling(value_name="SIZE", read=parse_memory_size)]
NAMES_OF_QUESTIONS: Mapping[str, str | None] = {
    "model": None,
    "given": None,
    "follow_checkpoint": None,
    "chooses_layers": None,
    "fits_card": None,
    "unread": None,
    "num_tokens": "tokens",
    "fit_bytes": "fit",
    "fit_host_bytes": "fit_host",
    "fit_disk_bytes": "fit_disk",
    "largest": "max",
}
"""Options by the fields of `PlanArguments`, where the two differ. None: the field is no option."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanArguments:
    """Arguments of `slivertune plan`. A field's docstring is the help text of its option.

    Raises:
        ValueError: If two arguments contradict each other, a card is not known, or `plot` can't be written.
    """

    model: str
    """Folder with config.json, hub id, or a name in `planning.shipped.SHIPPED_MODELS`."""
    given: dict[str, Any]
    """Fields of `PlanRequest` that the user set, by name."""
    follow_checkpoint: frozenset[str] = frozenset()
    """Methods whose precision is that of the model's weights, since none was given, as with `slivertune train`."""
    chooses_layers: bool = False
    """Whether `layers_per_group` was given as `auto`. `given` then lacks it."""
    fits_card: bool = False
    """Whether `--fit` was given without a size."""
    unread: tuple[str, ...] = ()
    """Options that were given and on which a plan does not depend."""
    gpu: Annotated[str | None, Spelling(value_name="NAME")] = None
    """GPU: report the time per update there, and whether the run fits its memory, also the limit of --fit without a
    size. By default this machine's GPU."""
    efficiency: Annotated[float, Spelling(value_name="SHARE")] = EFFICIENCY
    """Share of the card's peak that matrix products are assumed to reach, in (0, 1]."""
    disk_bandwidth: float = DISK_BANDWIDTH
    """Bytes/s that reads and writes share on the disk of --state disk."""
    num_tokens: Annotated[int | None, Spelling(value_name="N", read=read_count)] = None
    """Tokens of the data, on all GPUs together (3e6): report the hours of the run."""
    num_train_epochs: Annotated[float, Spelling(value_name="N")] = 1.0
    """Passes over the tokens of --tokens."""
    fit_bytes: Annotated[int | None, Spelling(value_name="[SIZE]", read=read_limit, alone=OF_CARD)] = None
    """Find settings that fit a GPU of this size (24GiB, by default that of --gpu), the least costly first, and print
    the command to run. Settings that are given here stay as they are, except the batch, which may be split. With
    --sweep: mark what fits."""
    fit_host_bytes: MemorySize | None = None
    """Limit of host memory (64GiB) per process, with --fit. By default the free memory here if a GPU is here, else no
    limit, with a warning."""
    fit_disk_bytes: MemorySize | None = None
    """Limit of disk (500GiB) for --state disk, with --fit. By default as --fit_host."""
    min_seq_length: int | None = None
    """Shortest sequence length to which --fit may go. By default it changes none."""
    sweep: Annotated[Sweep | None, Spelling(value_name="FIELD=V1,V2,...", read=read_sweep)] = None
    """Plan for several values of one field."""
    largest: LargestField | None = None
    """Find the largest value of this with which the run fits --gpu or --fit SIZE, all else as given."""
    compare: bool = False
    """Plan every way of training the model on --gpu, each with the largest batch that fits, and recommend one. This
    takes minutes for a large model."""
    plot: Annotated[Path | None, Spelling(value_name="FILE.png", read=Path)] = None
    """Draw the parts of the peak, with --sweep by value, with --compare beside the speeds."""
    json: bool = False
    """Print one JSON object on standard output, and everything else on standard error."""

    def __post_init__(self) -> None:
        for name, value in (
            ("fit_host", self.fit_host_bytes),
            ("fit_disk", self.fit_disk_bytes),
            ("min_seq_length", self.min_seq_length),
        ):
            if value is not None and not self.has_limit:
                raise ValueError(f"--{name} needs --fit. Give --fit the size of the GPU, or leave it out")
        if self.min_seq_length is not None and self.sweep is not None:
            raise ValueError(
                f"--min_seq_length {self.min_seq_length} is for the search of --fit, without --sweep. Leave it out"
            )
        if self.num_train_epochs != 1 and self.num_tokens is None:
            raise ValueError(
                f"--num_train_epochs {self.num_train_epochs} takes effect only with --tokens, the tokens per epoch. "
                "Give these, or leave it out"
            )
        if "recipe" in self.given and (self.compare or self.searches):
            raise ValueError(
                f"--recipe {self.given['recipe']} plans a script of another library, and --fit and --compare search "
                "among settings of slivertune train. Ask one at a time"
            )
        if self.chooses_layers and self.sweep is not None:
            raise ValueError("--layers_per_group auto chooses for one run, without --sweep. Give a number")
        if self.sweep is not None and self.sweep.field in self.given:
            name = self.sweep.field
            raise ValueError(f"--{name} {self.given[name]} and --sweep {name}=... both set it. Leave out one")
        if self.largest is not None:
            self._check_largest(self.largest)
        if self.compare:
            self._check_compare()
        if self.gpu is not None:
            card_named(self.gpu)
        if self.plot is not None:
            if self.plot.suffix.lower() != ".png":
                raise ValueError(f"--plot {self.plot} must end in .png")
            check_file_place(self.plot, "--plot")
            if not self.plot.parent.is_dir():
                raise ValueError(f"--plot {self.plot}: there is no folder {self.plot.parent}. Make it first")

    def _check_largest(self, name: str) -> None:
        if name in self.given:
            raise ValueError(f"--{name} {self.given[name]} and --max {name} both set it. Leave out one")
        if self.sweep is not None or self.chooses_layers:
            other = "--layers_per_group auto" if self.chooses_layers else "--sweep"
            raise ValueError(f"--max {name} is one question, and {other} another. Ask one at a time")
        if self.min_seq_length is not None:
            raise ValueError(
                f"--min_seq_length {self.min_seq_length} is for the search of --fit, not for --max. Leave it out"
            )

    def _check_compare(self) -> None:
        for name in sorted(DECIDED_BY_COMPARISON.intersection(self.given)):
            raise ValueError(f"--{name} {self.given[name]} is set by each row of --compare. Leave out one of the two")
        others = (
            ("--sweep", self.sweep is not None),
            ("--max", self.largest is not None),
            ("--layers_per_group auto", self.chooses_layers),
            ("--min_seq_length", self.min_seq_length is not None),
        )
        for name, is_asked in others:
            if is_asked:
                raise ValueError(f"--compare is one question, and {name} another. Ask one at a time")

    @property
    def all_tokens(self) -> float | None:
        """Tokens to train on, over all epochs (None without `--tokens`)."""
        return None if self.num_tokens is None else self.num_tokens * self.num_train_epochs

    @property
    def has_limit(self) -> bool:
        """Whether `--fit` was given."""
        return self.fit_bytes is not None or self.fits_card

    @property
    def searches(self) -> bool:
        """Whether settings are searched that fit."""
        return self.has_limit and self.sweep is None and self.largest is None and not self.compare
