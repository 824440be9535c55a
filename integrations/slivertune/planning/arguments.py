"""From the command line of `slivertune plan` to what is asked."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, get_args

from slivertune.core.setting_checks import integer_or_auto
from slivertune.planning.byte_text import parse_bytes
from slivertune.planning.cards import known_cards
from slivertune.planning.methods import planned_methods
from slivertune.planning.request import KINDS, PlanRequest, kinds_of, option
from slivertune.planning.shipped import SHIPPED_MODELS

SWEPT_FIELDS: dict[str, Callable[[str], Any]] = {
    item.name: item.metadata["read"] or KINDS[item.name]
    for item in fields(PlanRequest)
    if KINDS[item.name] in (int, float)
}
"""The numeric fields of a request, and how each is read."""
_QUESTION = "what to find out"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """One field over several values."""

    field: str
    """A field of `PlanRequest`."""
    values: tuple[Any, ...]
    """Its values, in the order given."""


def _sweep(text: str) -> Sweep:
    name, separator, listed = text.partition("=")
    read = SWEPT_FIELDS.get(name)
    if read is None or not separator:
        raise ValueError(f"{text!r} is no sweep; write FIELD=V1,V2,... with one of {', '.join(SWEPT_FIELDS)}")
    try:
        values = tuple(read(value) for value in listed.split(","))
    except ValueError as error:
        raise ValueError(f"{text!r} has a value that {name} can't take: {error}") from error
    if len(set(values)) < len(values):
        raise ValueError(f"{text!r} has a value twice")
    return Sweep(field=name, values=values)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanArguments:
    """Everything `slivertune plan` was asked for."""

    given: dict[str, Any]
    """The fields of `PlanRequest` that the user set, by name."""
    model: str = field(
        metadata=option(
            "the run",
            f"a folder with config.json, a hub id, or one of {', '.join(SHIPPED_MODELS)}",
            names=("--model", "--model_name_or_path"),
            metavar="MODEL",
            required=True,
        ),
    )
    chooses_layers: bool = False
    """Whether `layers_per_group` was given as `auto`; `given` does not have it then."""
    gpu: str | None = field(
        default=None,
        metadata=option(
            _QUESTION,
            f"with --layers_per_group auto: the card, one of {', '.join(known_cards())}; by default the one that is "
            "here",
            metavar="NAME",
        ),
    )
    fit_bytes: int | None = field(
        default=None,
        metadata=option(
            _QUESTION,
            "find settings that fit a GPU of this size (24GiB), the least costly first, and print the command to run; "
            "what else is given here stays as it is, but for the batch, which may be split. With --sweep: "
            "mark what fits",
            names=("--fit",),
            read=parse_bytes,
            metavar="SIZE",
        ),
    )
    fit_host_bytes: int | None = field(
        default=None,
        metadata=option(
            _QUESTION,
            "with --fit: what may wait in host memory (64GiB); no limit by default",
            names=("--fit_host",),
            read=parse_bytes,
            metavar="SIZE",
        ),
    )
    min_seq_length: int | None = field(
        default=None,
        metadata=option(
            _QUESTION, "with --fit: sequences may become as short as this, if nothing else helps; never by default"
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
    plot: Path | None = field(
        default=None,
        metadata=option(_QUESTION, "draw the parts of the peak; with --sweep by value", read=Path, metavar="FILE.png"),
    )
    json: bool = field(
        default=False,
        metadata=option(_QUESTION, "standard output is one JSON object; everything else goes to standard error"),
    )

    def __post_init__(self) -> None:
        for name, value, rule in (
            ("fit", self.fit_bytes, "more than 0, such as 24GiB"),
            ("fit_host", self.fit_host_bytes, "more than 0, such as 24GiB"),
            ("min_seq_length", self.min_seq_length, "at least 1"),
        ):
            if value is not None and name != "fit" and (self.fit_bytes is None or self.sweep is not None):
                raise ValueError(f"--{name} is read by the search of --fit alone, without --sweep; leave it out")
            if value is not None and value < 1:
                raise ValueError(f"--{name} {value} must be {rule}")
        if self.gpu is not None and not self.chooses_layers:
            raise ValueError(f"--gpu {self.gpu} is read with --layers_per_group auto alone; leave it out")
        if self.chooses_layers and self.sweep is not None:
            raise ValueError("--layers_per_group auto chooses for one run, without --sweep; give a number")
        if self.sweep is not None and self.sweep.field in self.given:
            name = self.sweep.field
            raise ValueError(f"--{name} {self.given[name]} and --sweep {name}=... both set it; leave out one")
        if self.plot is not None:
            if self.plot.suffix.lower() != ".png":
                raise ValueError(f"--plot {self.plot} must end in .png")
            if not self.plot.parent.is_dir():
                raise ValueError(f"--plot {self.plot}: there is no folder {self.plot.parent}; make it first")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Turn argparse's complaint into an exception.

        Args:
            message: What is wrong.

        Raises:
            ValueError: Always.
        """
        raise ValueError(f"{message}; see slivertune plan --help")


def parse_plan_arguments(argv: Sequence[str]) -> PlanArguments:
    """Read the arguments of `slivertune plan`; `--help` prints them all and exits.

    Args:
        argv: What follows `slivertune plan`.

    Returns:
        What was asked; values are checked by `PlanRequest`.

    Raises:
        ValueError: If an argument is unknown or unreadable, or two of these contradict each other.
    """
    # What was not typed is absent.
    values = vars(make_parser().parse_args(list(argv)))
    given = {name: values.pop(name) for name in tuple(values) if name in KINDS}
    chooses_layers = given.get("layers_per_group") == "auto"
    if chooses_layers:
        del given["layers_per_group"]
    return PlanArguments(given=given, chooses_layers=chooses_layers, **values)


def make_parser() -> argparse.ArgumentParser:
    """The parser of `slivertune plan`: an argument for each field of `PlanRequest` and of `PlanArguments`."""
    parser = _Parser(
        prog="slivertune plan",
        description=(
            "Say what a run will need before it runs: its real step is made on tensors without data, every living byte "
            "counted. Needs neither weights nor a GPU."
        ),
        epilog=(
            "slivertune plan --model llama-2-7b --precision mixed_hi | slivertune plan --model llama-2-7b --batch_size "
            "8 --fit 24GiB | slivertune plan --model llama-3-8b --precision mixed_hi --gradient_checkpointing --sweep "
            "seq_length=512,2048,8192 --fit 24GiB --plot lengths.png"
        ),
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    groups: dict[str, argparse._ArgumentGroup] = {}
    own_kinds = kinds_of(PlanArguments)
    model, *questions = [item for item in fields(PlanArguments) if item.metadata]
    for item in (model, *fields(PlanRequest), *questions):
        title = item.metadata["group"]
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        _add(groups[title], item, {**own_kinds, **KINDS}[item.name])
    return parser


def _add(group: argparse._ArgumentGroup, item: Any, kind: Any) -> None:
    """Add the argument of a field, with its default in parentheses unless the text says it."""
    text, read, more = (item.metadata[key] for key in ("text", "read", "more"))
    names = item.metadata["names"] or (f"--{item.name}",)
    if item.default not in (None, MISSING) and "by default" not in text:
        text += f" ({str(item.default).lower()})"
    if kind is bool:
        more = {"nargs": "?", "const": True, "type": _reader(_true_or_false), "metavar": "true|false"}
    elif item.name == "method" or get_args(kind):
        more = {"choices": get_args(kind) or planned_methods()}
    elif read is not None:
        more = {**more, "type": _reader(read)}
    elif item.metadata["or_auto"]:
        more = {"type": _reader(partial(integer_or_auto, item.name)), "metavar": "N|auto"}
    elif kind in (int, float):
        more = {"type": kind, "metavar": "N" if kind is int else "SHARE"}
    group.add_argument(*names, dest=item.name, help=text, **more)
    if item.default is True:
        group.add_argument(
            f"--no_{item.name}", dest=item.name, action="store_false", help=f"the same as {names[0]} false"
        )


def _reader(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Let argparse show what a reader complains of."""

    def read_or_complain(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return read_or_complain


def _true_or_false(text: str) -> bool:
    if text.lower() in ("true", "false", "yes", "no", "1", "0"):
        return text.lower() in ("true", "yes", "1")
    raise ValueError(f"{text!r} is neither true nor false")
