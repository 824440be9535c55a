"""From the command line of `slivertune plan` to what is asked."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, NoReturn, get_args

from slivertune.core.layout import Layout
from slivertune.hift.config import MasterKind, StatePlace
from slivertune.planning.byte_text import parse_bytes
from slivertune.planning.methods import planned_methods
from slivertune.planning.optimizers import OptimizerName
from slivertune.planning.request import (
    PlanRequest,
    PrecisionName,
    TaskName,
)
from slivertune.planning.shipped import SHIPPED_MODELS
from slivertune.sft.config import SelectionCriterion

SWEPT_FIELDS: dict[str, Callable[[str], Any]] = {
    "batch_size": int,
    "gradient_accumulation_steps": int,
    "seq_length": int,
    "layers_per_group": int,
    "lora_rank": int,
    "num_gpus": int,
    "num_labels": int,
    "stream_bytes": parse_bytes,
    "token_ratio": float,
    "density": float,
    "reselection_interval": int,
    "estimation_steps": int,
    "replacement_rate": float,
}
"""The numeric fields of a request, and how each is read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """One field over several values."""

    field: str
    """A field of `PlanRequest`."""
    values: tuple[Any, ...]
    """Its values, in the order given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanArguments:
    """Everything `slivertune plan` was asked for."""

    model: str
    """Folder, hub id or shipped name."""
    given: dict[str, Any]
    """The fields of `PlanRequest` that the user set, by name."""
    fit_bytes: int | None = None
    """`--fit`: what the GPU has."""
    fit_host_bytes: int | None = None
    """`--fit_host`: what the host has."""
    min_seq_length: int | None = None
    """`--min_seq_length`: how short a search may make the sequences; None never shortens them."""
    sweep: Sweep | None = None
    """`--sweep`."""
    plot: Path | None = None
    """`--plot`: the PNG to write."""
    json: bool = False
    """`--json`."""


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
    values = vars(make_parser().parse_args(list(argv)))
    names = {item.name for item in fields(PlanRequest)}
    # Every field of a request is absent from the namespace unless it was typed.
    given = {name: values.pop(name) for name in tuple(values) if name in names}
    arguments = PlanArguments(**{name: value for name, value in values.items() if value is not None}, given=given)
    _check(arguments)
    return arguments


def make_parser() -> argparse.ArgumentParser:
    """The parser of `slivertune plan`."""
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
    _add_run(parser.add_argument_group("the run"))
    _add_methods(parser.add_argument_group("methods"))
    _add_layout(parser.add_argument_group("layout"))
    _add_question(parser.add_argument_group("what to find out"))
    return parser


def _add_run(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--model",
        "--model_name_or_path",
        required=True,
        metavar="MODEL",
        help=f"a folder with config.json, a hub id, or one of {', '.join(SHIPPED_MODELS)}",
    )
    _choice(group, "--task", TaskName, "what is learned; by default what the model was made for")
    group.add_argument("--method", choices=planned_methods(), help=f"how it is trained ({PlanRequest().method})")
    _choice(group, "--optimizer", OptimizerName, "the optimizer; sft is one itself")
    _choice(
        group,
        "--precision",
        PrecisionName,
        "fp32; mixed: fp32 weights under bf16 autocast; mixed_hi: bf16 weights with fp32 masters, hift's; bf16: bf16 "
        "weights alone. With --fit by default mixed_hi for hift, mixed for dense, else bf16",
    )
    _number(group, ("--batch_size", "--per_device_train_batch_size"), "sequences in a forward, on each GPU")
    _number(group, ("--gradient_accumulation_steps",), "forwards before an update")
    _number(group, ("--seq_length", "--max_length"), "tokens in a sequence")
    _number(group, ("--num_labels",), "classes of a classifier")
    _switch(group, "--gradient_checkpointing", "keep each block's input alone, and compute the block again in backward")
    _switch(
        group, "--chunked_cross_entropy", "compute a causal model's loss without ever holding all logits", negative=True
    )


def _add_methods(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--token_ratio",
        type=float,
        metavar="SHARE",
        help="any method: share of the tokens that carry gradient (TokenTune), in (0, 1]",
    )
    _number(group, ("--layers_per_group",), "hift: layers that an update trains")
    group.add_argument(
        "--stream_bytes",
        type=_size,
        metavar="SIZE",
        help="hift: what of a group's masters and state is on the GPU at a time while it is stepped (128MiB); 0: the "
        "whole group",
    )
    _choice(group, "--state", StatePlace, "hift: where masters and state wait")
    _choice(
        group, "--master", MasterKind, "hift with mixed_hi: whole fp32 masters, or the half that the weight lacks", None
    )
    _switch(
        group,
        "--step_in_backward",
        "hift: step a tensor as soon as its gradient is there; no accumulation, no clipping",
    )
    group.add_argument(
        "--density",
        type=float,
        metavar="SHARE",
        help="sft: share of the weights that is trained, in (0, 1]; by default as many as LoRA of rank 64 has",
    )
    _choice(group, "--selection", SelectionCriterion, "sft: how weights are chosen")
    _number(group, ("--reselection_interval",), "sft: updates between two reselections; 0: none")
    _number(group, ("--estimation_steps",), "sft: updates of an estimation phase; beyond half the interval two overlap")
    group.add_argument(
        "--replacement_rate",
        type=float,
        metavar="SHARE",
        help="sft: the most that a reselection after the first replaces, in [0, 1]",
    )
    _number(group, ("--lora_rank",), "lora: rank of the adapters")
    _switch(group, "--load_in_4bit", "lora, sft: the blocks' frozen linear layers in NF4")


def _add_layout(group: argparse._ArgumentGroup) -> None:
    _choice(group, "--layout", Layout, "how the run is spread over GPUs")
    _number(group, ("--num_gpus",), "GPUs of the layout")
    _switch(group, "--offload_parameters", "fsdp2, zero3: weights wait in host memory and are streamed layer by layer")


def _add_question(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--fit",
        dest="fit_bytes",
        type=_size,
        metavar="SIZE",
        help="find settings that fit a GPU of this size (24GiB), the least costly first, and print the command to run; "
        "what else is given here stays as it is, but for the batch, which may be split. With --sweep: mark what fits",
    )
    group.add_argument(
        "--fit_host",
        dest="fit_host_bytes",
        type=_size,
        metavar="SIZE",
        help="with --fit: what may wait in host memory (64GiB); no limit by default",
    )
    group.add_argument(
        "--min_seq_length",
        type=int,
        metavar="N",
        help="with --fit: sequences may become as short as this, if nothing else helps; never by default",
    )
    group.add_argument(
        "--sweep",
        type=_sweep,
        metavar="FIELD=V1,V2,...",
        help=f"plan for several values of one of {', '.join(SWEPT_FIELDS)}",
    )
    group.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="draw the parts of the peak; with --sweep by value"
    )
    group.add_argument(
        "--json", action="store_true", help="standard output is one JSON object; everything else goes to standard error"
    )


def _check(arguments: PlanArguments) -> None:
    if arguments.fit_bytes is None or arguments.sweep is not None:
        for name, value in (("fit_host", arguments.fit_host_bytes), ("min_seq_length", arguments.min_seq_length)):
            if value is not None:
                raise ValueError(f"--{name} is read by the search of --fit alone, without --sweep; leave it out")
    for name, value in (("fit", arguments.fit_bytes), ("fit_host", arguments.fit_host_bytes)):
        if value is not None and value < 1:
            raise ValueError(f"--{name} {value} must be more than 0, such as 24GiB")
    if arguments.min_seq_length is not None and arguments.min_seq_length < 1:
        raise ValueError(f"--min_seq_length {arguments.min_seq_length} must be at least 1")
    if arguments.sweep is not None and arguments.sweep.field in arguments.given:
        name = arguments.sweep.field
        raise ValueError(f"--{name} {arguments.given[name]} and --sweep {name}=... both set it; leave out one")
    if arguments.plot is not None:
        if arguments.plot.suffix.lower() != ".png":
            raise ValueError(f"--plot {arguments.plot} must end in .png")
        if not arguments.plot.parent.is_dir():
            raise ValueError(f"--plot {arguments.plot}: there is no folder {arguments.plot.parent}; make it first")


def _choice(group: argparse._ArgumentGroup, name: str, kind: Any, text: str, default: Any = MISSING) -> None:
    if default is MISSING:
        default = _default_of(name)
    shown = "" if default is None or "by default" in text else f" ({default})"
    group.add_argument(name, choices=get_args(kind), help=f"{text}{shown}")


def _number(group: argparse._ArgumentGroup, names: tuple[str, ...], text: str) -> None:
    group.add_argument(*names, type=int, metavar="N", help=f"{text} ({_default_of(names[0])})")


def _switch(group: argparse._ArgumentGroup, name: str, text: str, *, negative: bool = False) -> None:
    group.add_argument(
        name,
        nargs="?",
        const=True,
        type=_true_or_false,
        metavar="true|false",
        help=f"{text} ({str(_default_of(name)).lower()})",
    )
    if negative:
        bare = name.removeprefix("--")
        group.add_argument(f"--no_{bare}", dest=bare, action="store_false", help=f"the same as {name} false")


def _default_of(name: str) -> Any:
    return next(item.default for item in fields(PlanRequest) if item.name == name.removeprefix("--"))


def _true_or_false(text: str) -> bool:
    if text.lower() in ("true", "false", "yes", "no", "1", "0"):
        return text.lower() in ("true", "yes", "1")
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _sweep(text: str) -> Sweep:
    field, separator, listed = text.partition("=")
    read = SWEPT_FIELDS.get(field)
    if read is None or not separator:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no sweep; write FIELD=V1,V2,... with one of {', '.join(SWEPT_FIELDS)}"
        )
    try:
        values = tuple(read(value) for value in listed.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} has a value that {field} can't take: {error}") from error
    if len(set(values)) < len(values):
        raise argparse.ArgumentTypeError(f"{text!r} has a value twice")
    return Sweep(field=field, values=values)
