"""Arguments of `slivertune compare`: its own options, and options of `slivertune train` for all rows."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from slivertune.core.number_rule import NumberRule
from slivertune.core.option_help import HelpEntry, HelpGroup, render_help
from slivertune.core.option_parser import OptionParser, PartedWords
from slivertune.core.output_place import check_place
from slivertune.core.user_path import user_path
from slivertune.training.comparison.budget import Budget, parse_budget
from slivertune.training.comparison.rows import DEFAULT_ROWS, NAMED_ROWS, Row, parse_rows
from slivertune.training.options.number_rules import number_rule
from slivertune.training.options.table import train_options

DEFAULT_FOLDER = "runs/compare"
_DESCRIPTION = (
    "Fine-tune on one task by several methods or settings, at an equal budget, and compare them with the first: "
    "evaluation, seconds, tokens/s, peak memory. Each row is a run of slivertune train, and takes all options of that "
    "command, given for all rows. Without any options: six methods on the embedded model and data, in under ten "
    "minutes. Repeat the command to continue a stopped comparison, or to add rows, rates and seeds."
)
_RUN = "slivertune compare --model_name_or_path PATH --dataset data.jsonl --max_steps 400"
_EXAMPLES = (
    "slivertune compare",
    f"{_RUN} --rows dense hift lora --budget seconds --search_rates 1e-5 5e-5 2e-4 --seeds 0 1 2",
    "slivertune compare --rows dense 'm4:--method hift --layers_per_group 4'",
)
_OWN = HelpGroup(
    "the comparison",
    [
        HelpEntry(
            "--rows ROW ...",
            f"runs to compare, the first being the baseline: {', '.join(NAMED_ROWS)}, or any settings as "
            f"'NAME:--option value'. By default {', '.join(DEFAULT_ROWS)}",
        ),
        HelpEntry(
            "--budget steps|tokens|seconds[=N] [bytes=SIZE]",
            "equal amount of updates, tokens read, or seconds of updates; without a number, as many as the first row "
            "takes by --max_steps or --num_train_epochs. bytes: limit on the device's peak; rows then use smaller "
            "forwards and accumulate, and a row that still does not fit fails. By default steps",
        ),
        HelpEntry(
            "--search_rates [RATE ...]",
            "learning rates to try for each row, with the first seed; the other seeds train at its best rate, and at "
            "the next best if their mean is worse than that. Without a rate: half, once and twice the row's own, and "
            "further until the best lies between others. Without the option, each row trains at its own rate, and the "
            "table says so",
        ),
        HelpEntry("--seeds N ...", "seeds to train with; the table has means and ranges. By default 42, the Trainer's"),
        HelpEntry("--output_dir FOLDER", f"folder of the comparison, by default {DEFAULT_FOLDER}"),
        HelpEntry("-h, --help", "show this text"),
    ],
)


_BETWEEN_RUNS = {
    "seed": "--seeds",
    "resume_from_checkpoint": "the same command again, which continues",
}
"""Options that the comparison sets for each run, and their replacements."""
_ALIKE_IN_ROWS = ("output_dir", "max_steps", "num_train_epochs", "chat_template_date")
"""Options that all rows share. A row's own value would have no effect."""


class _Parser(OptionParser):
    other_words: ClassVar[dict[str, str]] = {"methods": "rows", "rates": "search_rates", "output": "output_dir"}

    def format_help(self) -> str:
        """Return the text of `slivertune compare --help`."""
        return render_help(
            usage="slivertune compare [--option value ...] [options of slivertune train]",
            description=_DESCRIPTION,
            examples=_EXAMPLES,
            groups=[_OWN],
            notes=("slivertune train --help lists the other options.",),
        )

    def describe_number(self, option: str, kind: str) -> str:
        """Add an option's range to its kind of number."""
        return f"{kind}, {_rules()[option].describe()}"


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareArguments:
    """Parsed arguments of a comparison."""

    rows: tuple[Row, ...]
    budget: Budget
    rates: tuple[float, ...] | None
    """Learning rates to search. Empty for rates around each row's own, None for no search."""
    seeds: tuple[int, ...]
    folder: Path
    common: tuple[str, ...]
    """Options of `slivertune train` for all rows."""


def _check_row(row: Row, *, is_searched: bool) -> None:
    """Refuse options of a row that the comparison sets itself, since the row's own would have no effect."""
    for name in _typed(row.options):
        if name in _BETWEEN_RUNS:
            raise ValueError(f"--rows {row.name}: --{name} differs between its runs. Use {_BETWEEN_RUNS[name]}")
        if name in _ALIKE_IN_ROWS:
            raise ValueError(
                f"--rows {row.name}: --{name} is the same for all rows of a comparison. Give it outside --rows"
            )
        if name == "learning_rate" and is_searched:
            raise ValueError(
                f"--rows {row.name}: --search_rates sets the rates of all rows. Leave out --learning_rate, or search "
                "around each row's own by --search_rates without rates"
            )


def _typed(words: Sequence[str]) -> list[str]:
    """Return the names of the options in a command line, with underscores."""
    return [word.partition("=")[0].lstrip("-").replace("-", "_") for word in words if word.startswith("--")]


def _rules() -> dict[str, NumberRule]:
    """Return the rules of the options that take numbers, as those of the single runs."""
    seed, rate = (number_rule(train_options()[name]) for name in ("seed", "learning_rate"))
    assert seed is not None and rate is not None
    return {"seeds": seed, "search_rates": replace(rate, excludes_least=True)}


def make_parser() -> OptionParser:
    """Make the parser of the options that are not `slivertune train`'s."""
    parser = _Parser(prog="slivertune compare")
    parser.add_argument("--rows", nargs="+", default=DEFAULT_ROWS)
    parser.add_argument("--budget", nargs="+", default=("steps",))
    parser.add_argument("--search_rates", nargs="*", type=float)
    parser.add_argument("--seeds", nargs="+", action=PartedWords, type=int, default=(42,))
    parser.add_argument("--output_dir", default=DEFAULT_FOLDER)
    return parser


def parse_compare_arguments(argv: Sequence[str]) -> CompareArguments:
    """Parse the command line. `--help` prints the help and exits.

    Args:
        argv: Words after `slivertune compare`.

    Raises:
        ValueError: If an option is unknown or contradicts another.
    """
    own, common = make_parser().parse_known_args(argv)
    rows = parse_rows(own.rows)
    for name, instead in (("method", "--rows"), *_BETWEEN_RUNS.items()):
        if name in _typed(common):
            raise ValueError(f"--{name} differs between the runs of a comparison. Use {instead}")
    for row in rows:
        _check_row(row, is_searched=bool(own.search_rates))
    rates = None if own.search_rates is None else tuple(own.search_rates)
    if rates is not None and len(set(rates)) == 1:
        raise ValueError(f"--search_rates {rates[0]:g}: one rate is no search. Give three or more, or --learning_rate")
    for name, rule in _rules().items():
        values = getattr(own, name) or ()
        for value in values:
            if not rule.allows(value):
                raise ValueError(f"--{name} {value} must be {rule.describe()}")
        if len(set(values)) < len(values):
            raise ValueError(f"--{name} {' '.join(map(str, values))}: one of them is there twice. Give each once")
    if not own.output_dir:
        raise ValueError("--output_dir '' is empty. Name a folder, or leave it out")
    folder = user_path(own.output_dir)
    check_place(folder)
    return CompareArguments(
        rows=rows,
        budget=parse_budget(own.budget),
        rates=rates,
        seeds=tuple(own.seeds),
        folder=folder,
        common=tuple(common),
    )
