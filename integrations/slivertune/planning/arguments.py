"""Arguments of `slivertune plan`, read from the command line."""

import math
from collections.abc import Callable, Sequence
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_origin

from slivertune.core.byte_text import parse_memory_size
from slivertune.core.number_rule import RULES
from slivertune.core.output_place import check_file_place
from slivertune.core.suggestions import did_you_mean
from slivertune.planning.cards import DISK_BANDWIDTH, EFFICIENCY, card_named, known_cards
from slivertune.planning.largest import LargestField
from slivertune.planning.methods import check_options_are_read, planned_methods, planned_options
from slivertune.planning.parser import make_parser
from slivertune.planning.request import KINDS, PlanRequest, check_value, kinds_of, option
from slivertune.planning.shipped import SHIPPED_MODELS
from slivertune.planning.train_words import WORD_KINDS, TrainWords

SWEPT_FIELDS: dict[str, Callable[[str], Any]] = {
    item.name: item.metadata["read"] or (KINDS[item.name] if KINDS[item.name] in (int, float) else str)
    for item in fields(PlanRequest)
    if KINDS[item.name] in (int, float, str) or get_origin(KINDS[item.name]) is Literal
}
"""Fields of `PlanRequest` that are numbers or names, each with the function that reads a value."""
_REQUEST_FIELDS = {item.name: item for item in fields(PlanRequest)}
_QUESTION = "what to find out"
DECIDED_BY_COMPARISON = frozenset(
    {
        "method", "precision", "layers_per_group", "steps_per_group", "gradients", "selection", "load_in_4bit",
        "batch_size",
    }
)  # fmt: skip
"""Fields of `PlanRequest` that differ between the rows of `--compare`, or that follow from a row's method."""
_OF_CARD = -1
"""Value of `--fit` without a size, which means the memory of the card."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """Several values of one field."""

    field: str
    """Name of a field of `PlanRequest`."""
    values: tuple[Any, ...]
    """Values of the field, in the order given."""


def _sweep(text: str) -> Sweep:
    name, separator, listed = text.partition("=")
    read = SWEPT_FIELDS.get(name)
    if read is None or not separator:
        meant = did_you_mean(name, SWEPT_FIELDS)
        raise ValueError(f"{text!r} must be FIELD=V1,V2,... with one of {', '.join(SWEPT_FIELDS)}{meant}")
    try:
        values = tuple(read(value) for value in listed.split(","))
        for value in values:
            if value != "auto":
                check_value(_REQUEST_FIELDS[name], KINDS[name], value)
    except ValueError as error:
        raise ValueError(f"{text!r} has a value that {name} can't take: {error}") from error
    if len(set(values)) < len(values):
        raise ValueError(f"{text!r} has a value twice. Give each once")
    return Sweep(field=name, values=values)


def _count(text: str) -> int:
    """Read a count of at least 1, such as 3e6 or 3_000_000."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not RULES["tokens"].allows(value):
        raise ValueError(f"{text!r} must be a number, {RULES['tokens'].describe()}, such as 3000000 or 3e6")
    return round(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanArguments:
    """Arguments of `slivertune plan`."""

    given: dict[str, Any]
    """Fields of `PlanRequest` that the user set, by name."""
    model: str = field(
        metadata=option(
            "the run",
            f"folder with config.json, hub id, or one of {', '.join(SHIPPED_MODELS)}",
            names=("--model", "--model_name_or_path"),
            metavar="MODEL",
            required=True,
        ),
    )
    chooses_layers: bool = False
    """Whether `layers_per_group` was given as `auto`. `given` then lacks it."""
    gpu: str | None = field(
        default=None,
        metadata=option(
            _QUESTION,
            f"GPU, one of {', '.join(known_cards())}: report the time per update there, and whether the run fits its "
            "memory, also the limit of --fit without a size; by default this machine's GPU",
            metavar="NAME",
        ),
    )
    efficiency: float = field(
        default=EFFICIENCY,
        metadata=option(_QUESTION, "share of the card's peak that matrix products are assumed to reach, in (0, 1]"),
    )
    disk_bandwidth: float = field(
        default=DISK_BANDWIDTH,
        metadata=option(_QUESTION, "bytes/s that reads and writes share on the disk of --state disk"),
    )
    num_tokens: int | None = field(
        default=None,
        metadata=option(
            _QUESTION,
            "tokens of the data, on all GPUs together (3e6): report the hours of the run",
            names=("--tokens",),
            read=_count,
            metavar="N",
        ),
    )
    num_train_epochs: float = field(
        default=1.0, metadata=option(_QUESTION, "with --tokens: passes over them", metavar="N")
    )
    fits_card: bool = False
    """Whether `--fit` was given without a size."""
    fit_bytes: int | None = field(
        default=None,
        metadata=option(
            _QUESTION,
            "find settings that fit a GPU of this size (24GiB; by default that of --gpu), the least costly first, and "
            "print the command to run. Settings that are given here stay as they are, except the batch, which may be "
            "split. With --sweep: mark what fits",
            names=("--fit",),
            read=parse_memory_size,
            metavar="SIZE",
            nargs="?",
            const=_OF_CARD,
        ),
    )
    fit_host_bytes: int | None = field(
        default=None,
        metadata=option(
            _QUESTION,
            "with --fit: limit of host memory (64GiB) per process; by default the free memory here if a GPU is here, "
            "else no limit, with a warning",
            names=("--fit_host",),
            read=parse_memory_size,
            metavar="SIZE",
        ),
    )
    fit_disk_bytes: int | None = field(
        default=None,
        metadata=option(
            _QUESTION,
            "with --fit: limit of disk (500GiB) for --state disk; by default as --fit_host",
            names=("--fit_disk",),
            read=parse_memory_size,
            metavar="SIZE",
        ),
    )
    min_seq_length: int | None = field(
        default=None,
        metadata=option(
            _QUESTION,
            "with --fit: shortest sequence length to which --fit may go; by default it changes none",
        ),
    )
    sweep: Sweep | None = field(
        default=None,
        metadata=option(
            _QUESTION,
            f"plan for several values of one of {', '.join(SWEPT_FIELDS)}",
            read=_sweep,
            metavar="FIELD=V1,V2,...",
        ),
    )
    largest: LargestField | None = field(
        default=None,
        metadata=option(
            _QUESTION,
            "find the largest value of this with which the run fits --gpu or --fit SIZE, all else as given",
            names=("--max",),
        ),
    )
    compare: bool = field(
        default=False,
        metadata=option(
            _QUESTION,
            "plan every way of training the model on --gpu, each with the largest batch that fits, and recommend one; "
            "takes minutes for a large model",
        ),
    )
    plot: Path | None = field(
        default=None,
        metadata=option(
            _QUESTION,
            "draw the parts of the peak; with --sweep by value, with --compare beside the speeds",
            read=Path,
            metavar="FILE.png",
        ),
    )
    json: bool = field(
        default=False,
        metadata=option(_QUESTION, "print one JSON object on standard output, and everything else on standard error"),
    )

    def __post_init__(self) -> None:
        for item, kind in argument_fields():
            if item.name in self.given and item.name in KINDS:
                check_value(item, kind, self.given[item.name], is_typed=True)
            elif item.name in QUESTION_KINDS:
                check_value(item, kind, getattr(self, item.name), is_typed=True)
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


QUESTION_KINDS = kinds_of(PlanArguments)
"""Types of the arguments beside a request's fields, by name."""


def parse_plan_arguments(argv: Sequence[str]) -> PlanArguments:
    """Read the arguments of `slivertune plan`, or print them and exit for `--help`.

    Args:
        argv: Words of the command line after `slivertune plan`.

    Returns:
        Arguments; `PlanRequest` checks the values of its own fields.

    Raises:
        ValueError: If an argument is unknown or unreadable, or if two arguments contradict each other.
    """
    # Arguments that the user did not type are absent.
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in vars(make_parser(argument_fields()).parse_args(map(_with_underscores, argv))).items()
    }
    for item, _ in argument_fields():
        value = values.get(item.name)
        if value == "" or (isinstance(value, tuple) and "" in value):
            name = (item.metadata["names"] or (f"--{item.name}",))[0]
            raise ValueError(f"{name} '' is empty. It must be a name; give one, or leave it out")
    given = {name: values.pop(name) for name in tuple(values) if name in KINDS}
    words = TrainWords(**{name: values.pop(name) for name in tuple(values) if name in WORD_KINDS})
    sweep: Sweep | None = values.get("sweep")
    if words.bf16 is not None and (values.get("compare") or (sweep is not None and sweep.field == "method")):
        raise ValueError(
            f"--bf16 {str(words.bf16).lower()} means another precision for each method. Leave it out with --compare, "
            "which plans each method as slivertune train --bf16 does. Give --precision with --sweep method=..."
        )
    _check_method_reads(given, sweep, is_comparison="compare" in values)
    given = words.settle(given)
    chooses_layers = given.get("layers_per_group") == "auto"
    if chooses_layers:
        del given["layers_per_group"]
    fits_card = values.get("fit_bytes") == _OF_CARD
    if fits_card:
        del values["fit_bytes"]
    return PlanArguments(given=given, chooses_layers=chooses_layers, fits_card=fits_card, **values)


def _check_method_reads(given: dict[str, Any], sweep: Sweep | None, *, is_comparison: bool) -> None:
    """Refuse options that only other methods read, as `slivertune train` does (`--compare` plans every method)."""
    methods = {given.get("method", PlanRequest().method)}
    names = {*given}
    if sweep is not None and sweep.field == "method":
        methods = set(sweep.values)
    elif sweep is not None:
        names.add(sweep.field)
    check_options_are_read(set(planned_methods()) if is_comparison else methods, names, planned_options())


def _with_underscores(word: str) -> str:
    """Replace the hyphens in an option's name by underscores (`slivertune train` takes both)."""
    name, equals, value = word.partition("=")
    return name.replace("-", "_").replace("__", "--", 1) + equals + value if word.startswith("--") else word


def argument_fields() -> list[tuple[Field[Any], Any]]:
    """List the arguments of `slivertune plan` in the order of its help: each field, with the type of its values."""
    model, *questions = [item for item in fields(PlanArguments) if item.metadata]
    kinds = {**QUESTION_KINDS, **WORD_KINDS, **KINDS}
    return [(item, kinds[item.name]) for item in (model, *fields(PlanRequest), *fields(TrainWords), *questions)]
