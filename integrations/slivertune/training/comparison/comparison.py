"""Runs of a comparison, one after the other: their lengths, learning rates and outcomes."""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from slivertune.training.command_line.parse import TrainArguments, parse_train_arguments
from slivertune.training.comparison.arguments import CompareArguments
from slivertune.training.comparison.inputs import hash_inputs
from slivertune.training.comparison.outcome import Outcome, best_of, mean, mean_badness, read_outcome
from slivertune.training.comparison.record import Record
from slivertune.training.comparison.rows import Row
from slivertune.training.data.splits import check_datasets
from slivertune.training.embedded.built_in import REFERENCE
from slivertune.training.options.parser import given_values, without_unset
from slivertune.training.run_process import FailedError, run_process
from slivertune.training.trial import Trial

Say = Callable[[str], None]

TRAIN_PROGRAM = ("-m", "slivertune", "train")
_EMBEDDED_UPDATES = 120
"""Default number of updates per row on the embedded data. All rows and the base model take under ten minutes."""
_EVALUATIONS = 4
"""Number of evaluations per run, including the one at its end."""
_SEARCHED = (0.5, 1.0, 2.0)
"""Factors of a row's own rate. Further rates follow while the best is at the edge of the tried ones."""
_MOST_RATES = 7
"""Maximum number of rates in a search that chooses its own."""
_OF_A_COMPARISON = {
    "save_strategy": "no",
    "sample_tokens": "0",
    "report": "false",
    "disable_tqdm": "true",
}
"""Options of `slivertune train` that differ in a comparison, unless they were given."""
_OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True, kw_only=True, slots=True)
class RowResult:
    """Outcomes of the runs of a row."""

    row: Row
    rates: dict[float, Outcome]
    """Outcomes by rate, with the first seed. More than one if rates were searched."""
    outcomes: tuple[Outcome, ...]
    """Outcomes by seed, at the best rate."""
    failure: str | None = None
    """Reason why the row is incomplete. None if it is complete."""

    @property
    def is_at_edge(self) -> bool:
        """Whether a search found its best at the largest or the smallest rate, so that a better rate may lie beyond."""
        return len(self.rates) > 1 and self.outcomes[0].rate in (min(self.rates), max(self.rates))


class Comparison:
    """Runs the trials and trainings that are missing from the record.

    Args:
        arguments: Arguments of the comparison.
        record: Record of earlier measurements.
        console: Console that shows the current run.
        say: Function that prints a line for each step.
        program: Arguments of this Python that start a run, before the options of `slivertune train`. A script that
            registers a method or a task of another package may stand there. Trials know none of these.

    Raises:
        ValueError: If the options of a row contradict each other. The message names the row. Or if a file that the
            recorded runs read has changed.
    """

    def __init__(
        self,
        arguments: CompareArguments,
        record: Record,
        console: Console,
        say: Say,
        program: Sequence[str] = TRAIN_PROGRAM,
    ) -> None:
        self._arguments = arguments
        self._program = program
        self._record = record
        self._console = console
        self._say = say
        self._parsed = {row.name: self._parse(row) for row in arguments.rows}
        self._dates: dict[str | None, str] = {}
        """Dates that the chat templates of the models wrote in the first runs, for all other runs."""
        for row in arguments.rows:
            self._hash_inputs(row)
            for outcome in record.outcomes_of(row.name):
                self._note_date(row, outcome)
        self._amount = arguments.budget.amount
        num_updates = self._parsed[arguments.rows[0].name].training.max_steps
        if self._amount is None and arguments.budget.length == "steps" and num_updates > 0:
            self._amount = num_updates

    @property
    def amount(self) -> float | None:
        """Updates, tokens or seconds per row. None before it is known."""
        return self._amount

    def run(self) -> list[RowResult]:
        """Train all rows that are not in the record. A row that fails does not stop the others.

        Returns:
            Results of all rows, in their order.

        Raises:
            FailedError: If the first row fails and the others take their tokens or seconds from it.
            ValueError: If a file changed that a recorded run has read.
        """
        results = []
        for number, row in enumerate(self._arguments.rows, 1):
            self._say(f"[{number}/{len(self._arguments.rows)}] {row.name}: {shlex.join(row.options)}")
            results.append(self._run_row(row))
            # If the first row fails, the next one gives the number of updates; its tokens or seconds were asked for.
            if self._amount is None and (results[-1].outcomes or self._arguments.budget.length != "steps"):
                self._amount = self._spent(results[-1])
        return results

    def _parse(self, row: Row) -> TrainArguments:
        """Parse the settings of a row's runs, so that they are checked before the first run starts."""
        try:
            place = ("--output_dir", str(self._arguments.folder / row.name / "run"))
            parsed = parse_train_arguments(_with(self._words(row), *place))
            check_datasets(parsed.data)
        except ValueError as error:
            raise ValueError(f"--rows {row.name}: {error}") from error
        return parsed

    def _words(self, row: Row) -> list[str]:
        """Return the options of `slivertune train` that all runs of a row share."""
        common = list(self._arguments.common)
        given = given_values([*common, *row.options])
        defaults = {name: value for name, value in _OF_A_COMPARISON.items() if name not in given}
        if "dataset" not in given:
            defaults["dataset"] = REFERENCE
            if not {"max_steps", "num_train_epochs"} & given.keys():
                defaults["max_steps"] = str(_EMBEDDED_UPDATES)
        added = (word for name, value in defaults.items() for word in (f"--{name}", value))
        # An option in `--unset` counts as not given, and can be set.
        return without_unset([*common, *added, *row.options], defaults)

    def _run_row(self, row: Row) -> RowResult:
        rates, by_rate = self._rates(row), dict[float, Outcome]()
        first, *others = self._arguments.seeds
        by_seed: list[list[Outcome]] = []
        failure = None
        try:
            words = self._sized(row)
            words = _with(words, *self._length(row, words))
            for rate in rates:
                by_rate[rate] = self._run(row, words, rate, first)
            best = best_of(list(by_rate.values()))
            while self._arguments.rates == () and (further := _beyond(by_rate, best)) is not None:
                by_rate[further] = self._run(row, words, further, first)
                best = best_of(list(by_rate.values()))
            if best.badness == float("inf"):
                raise FailedError("its evaluation is no number after any run. Give lower --search_rates")
            for candidate in sorted(by_rate.values(), key=lambda each: each.badness):
                if by_seed and candidate.badness >= min(map(mean_badness, by_seed)):
                    break  # with the first seed alone it is worse than the best mean
                by_seed.append([candidate])
                by_seed[-1] += [self._run(row, words, candidate.rate, seed) for seed in others]
            by_seed.sort(key=mean_badness)
            if len(by_rate) > 1:
                tried = ", ".join(f"{rate:g}" for rate in sorted(by_rate))
                self._say(f"  the best rate of {tried}: {by_seed[0][0].rate:g}")
        except FailedError as error:
            self._say(f"  failed: {error}")
            failure = str(error)
        return RowResult(row=row, rates=by_rate, outcomes=tuple(by_seed[0]) if by_seed else (), failure=failure)

    def _rates(self, row: Row) -> tuple[float, ...]:
        own = self._parsed[row.name].training.learning_rate
        if self._arguments.rates is None:
            return (own,)
        return tuple(sorted(self._arguments.rates or (own * factor for factor in _SEARCHED)))

    def _sized(self, row: Row) -> list[str]:
        """Return a row's options with the most rows per forward whose measured peak is within the limit."""
        words, limit = self._words(row), self._arguments.budget.limit_bytes
        if limit is None:
            return words
        training = self._parsed[row.name].training
        num_rows = training.per_device_train_batch_size
        whole = num_rows * training.gradient_accumulation_steps
        for size in (size for size in range(num_rows, 0, -1) if whole % size == 0):
            rows = ("--per_device_train_batch_size", str(size))
            sized = _with(words, *rows, "--gradient_accumulation_steps", str(whole // size))
            try:
                peak = self._trial(row, f"{row.name}, {size} rows per forward", sized).peak_bytes
            except FailedError as error:
                if _OUT_OF_MEMORY not in str(error):
                    raise
                continue
            if peak is None:
                raise FailedError("its peak is not measured with --memory_ledger off. Leave that out")
            if peak <= limit:
                return sized
        raise FailedError(
            f"does not fit {self._arguments.budget.describe()} even with one row per forward. Raise the limit, or "
            "leave the row out"
        )

    def _length(self, row: Row, words: Sequence[str]) -> list[str]:
        """Return the options for the number of updates and for evaluations in between."""
        training, length = self._parsed[row.name].training, self._arguments.budget.length
        num_updates = training.max_steps
        if self._amount is not None and length == "steps":
            num_updates = int(self._amount)
        elif self._amount is not None:
            trial = self._trial(row, row.name, words)
            one = trial.seconds_per_update if length == "seconds" else trial.tokens_per_update
            if not one:
                raise FailedError("batches have no input_ids to count tokens of. Use --budget seconds")
            num_updates = max(1, round(self._amount / one))
        options = ["--max_steps", str(num_updates)] if num_updates > 0 else []
        given = self._parsed[row.name].given
        if "eval_strategy" not in given:
            options += ["--eval_strategy", "steps" if options or "eval_steps" in given else "epoch"]
            if options[-1] == "steps" and "eval_steps" not in given:
                options += ["--eval_steps", str(max(1, num_updates // _EVALUATIONS))]
        return options

    def _trial(self, row: Row, name: str, words: Sequence[str]) -> Trial:
        """Measure a few updates, unless the record has them."""
        trial = self._record.trials.get(name, words)
        if trial is None:
            inputs = self._hash_inputs(row)
            measured = self._record.folder / f"trial of {name}.json"
            module = "slivertune.training.trial"
            self._process(
                ["-m", module, str(measured), "2", *words], measured.with_suffix(".log"), f"  trial of {name}"
            )
            trial = Trial(**json.loads(measured.read_text(encoding="utf-8")))
            measured.unlink()
            self._record.trials.keep(name, words, trial, inputs)
        return trial

    def _run(self, row: Row, words: Sequence[str], rate: float, seed: int) -> Outcome:
        words = _with(words, "--learning_rate", repr(rate), "--seed", str(seed))
        name, model = _run_name(row, rate, seed), self._parsed[row.name].model.model_name_or_path
        outcome = self._record.outcomes.get(name, words)
        if outcome is None:
            inputs = self._hash_inputs(row)
            folder = self._record.folder / name
            place = ["--output_dir", str(folder), "--resume_from_checkpoint", "auto"]
            if model in self._dates:
                place += ["--chat_template_date", self._dates[model]]
            self._process(
                [*self._program, *_with(words, *place)],
                folder.with_name(f"{folder.name}.log"),
                f"  rate {rate:g}, seed {seed}",
            )
            try:
                outcome = read_outcome(folder)
            except ValueError as error:
                raise FailedError(str(error)) from error
            self._record.outcomes.keep(name, words, outcome, inputs)
        self._note_date(row, outcome)
        self._say(f"  {describe(outcome)}")
        return outcome

    def _hash_inputs(self, row: Row) -> dict[str, str]:
        """Hash the files that a row's runs read, and refuse those that have changed since recorded runs."""
        run_file = next((word for word in self._arguments.common[:1] if not word.startswith("-")), None)
        inputs = hash_inputs(self._parsed[row.name], run_file)
        self._record.check_inputs(inputs)
        return inputs

    def _note_date(self, row: Row, outcome: Outcome) -> None:
        if outcome.chat_template_date is not None:
            self._dates.setdefault(self._parsed[row.name].model.model_name_or_path, outcome.chat_template_date)

    def _process(self, words: Sequence[str], log: Path, title: str) -> None:
        try:
            run_process(words, log, title, self._console)
        except FailedError as error:
            raise FailedError(f"{error} (see {log})") from error

    def _spent(self, first: RowResult) -> float:
        """Return the length of the first row, for the others."""
        length = self._arguments.budget.length
        values = {"steps": "num_updates", "tokens": "num_tokens", "seconds": "seconds"}
        spent = mean([getattr(each, values[length]) for each in first.outcomes])
        if spent is None:
            raise FailedError(
                f"--budget {length}: the first row, {first.row.name}, has no {length} to share "
                f"({first.failure or 'not counted'}). Give a number: {length}=..."
            )
        return round(spent) if length == "steps" else spent


def _with(words: Sequence[str], *added: str) -> list[str]:
    """Add options to a command line, and drop them from its `--unset`."""
    names = {word.removeprefix("--") for word in added if word.startswith("--")}
    return [*without_unset(words, names), *added]


def _beyond(by_rate: Mapping[float, Outcome], best: Outcome) -> float | None:
    """Return the next rate to try if the best is at the edge of the tried ones, else None."""
    if len(by_rate) >= _MOST_RATES or best.badness == float("inf"):
        return None
    if best.rate == max(by_rate):
        return 2 * best.rate
    return best.rate / 2 if best.rate == min(by_rate) else None


def _run_name(row: Row, rate: float, seed: int) -> str:
    """Return the name of a run in the record, which is also its folder in that of the comparison."""
    return f"{row.name}/rate{rate:g}-seed{seed}"


def describe(outcome: Outcome) -> str:
    """Describe a run in one line."""
    name = outcome.metric.removeprefix("eval_")
    seconds = "" if outcome.seconds is None else f" in {outcome.seconds:,.1f} s"
    return (
        f"rate {outcome.rate:g}, seed {outcome.seed}: {name} {outcome.before[outcome.metric]:.4f} -> "
        f"{outcome.after[outcome.metric]:.4f}, {outcome.num_updates:,} updates{seconds}"
    )


def as_json(result: RowResult) -> dict[str, Any]:
    """Convert a result to plain JSON. The record has the runs themselves."""
    return {
        "name": result.row.name,
        "options": list(result.row.options),
        "runs": [_run_name(result.row, each.rate, each.seed) for each in result.outcomes],
        "is_searched": len(result.rates) > 1,
        "is_at_edge": bool(result.outcomes) and result.is_at_edge,
        "failure": result.failure,
    }
