"""Comparisons of tiny runs, in this process: lengths, rates, limits, what is kept, what fails."""

import importlib.util
import json
import math
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from slivertune.cli import main
from slivertune.training import trial as trials
from slivertune.training.comparison import comparison as comparing
from slivertune.training.comparison.command import run_compare
from slivertune.training.comparison.outcome import Outcome
from slivertune.training.options.parser import given_values
from slivertune.training.run_process import FailedError, run_process
from tests.training.tiny_runs import TINY_CYCLE, UNMEASURED, complaint, results_of

ROWS = 2
"""Of a forward."""
LENGTH = 16
"""Tokens of each row, packed."""


MEASURED = ("--memory_ledger", "every_cycle")
"""For what looks at bytes."""

SCRIPT = "own.py"
"""Trains as `python -m slivertune train` does."""


class Comparison:
    """A comparison in a test's own folder; it runs in this process what it would start, and keeps the words.

    Args:
        folder: What it writes to lies there.
        common: Words for every row.
        capsys: Takes what is printed.
    """

    def __init__(self, folder: Path, common: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder / "compared"
        self.common = common
        self._capsys = capsys
        self.ran: list[list[str]] = []
        self.trial: Callable[[list[str]], dict[str, Any]] | None = None
        """What a trial measures; None measures."""
        self.is_dry = False
        """Whether runs are left out."""

    def words(self, *more: str, rows: Sequence[str] = ("dense", "hift")) -> list[str]:
        """Return the command line; `more` has the last word."""
        return ["compare", "--rows", *rows, "--output_dir", str(self.folder), *self.common, *more]

    def make(self, *more: str, rows: Sequence[str] = ("dense", "hift")) -> int:
        """Compare, and return the exit code."""
        return main(self.words(*more, rows=rows))

    def complaint(self, *more: str, rows: Sequence[str] = ("dense", "hift")) -> str:
        return complaint(self._capsys, self.words(*more, rows=rows))

    def record(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "compare.json").read_text(encoding="utf-8"))
        return found

    def run(self, words: Sequence[str], log: Path, title: str, console: Any) -> None:
        """Run in this process, in place of `run_process`."""
        words = list(words)
        self.ran.append(words)
        log.parent.mkdir(parents=True, exist_ok=True)
        if words[:2] == ["-m", "slivertune"] or words[0] == SCRIPT:
            command = ["train", *words[1:]] if words[0] == SCRIPT else words[2:]
            if not self.is_dry and (code := main(command)):
                raise FailedError(f"ended with code {code}")
        elif self.trial is None:
            trials.main(words[2:])
        else:
            Path(words[2]).write_text(json.dumps(self.trial(words[4:])), encoding="utf-8")

    def num_runs(self) -> int:
        return sum(words[:2] == ["-m", "slivertune"] for words in self.ran)


@pytest.fixture
def comparison(
    tiny_base: Path,
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Comparison:
    """A comparison on forty sentences, of dense and HiFT unless a test names other rows."""
    common = [
        *("--model_name_or_path", str(tiny_base), "--dataset", str(texts)),
        *("--packing", "--max_length", str(LENGTH), "--max_steps", "6", "--learning_rate", "1e-2"),
        *("--per_device_train_batch_size", str(ROWS), "--per_device_eval_batch_size", "4", *UNMEASURED),
    ]
    made = Comparison(tmp_path, common, capsys)
    monkeypatch.setattr(comparing, "run_process", made.run)
    return made


def measured(**values: Any) -> Callable[[list[str]], dict[str, Any]]:
    """A trial that measures what is given."""
    known = {"num_updates": 4, "seconds_per_update": 1.0, "tokens_per_update": 32.0, "peak_bytes": 100}
    return lambda words: {**known, "num_rows": ROWS, "accumulation": 1, **values}


def test_each_row_is_a_run_of_train_that_can_be_repeated_alone(
    comparison: Comparison, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert comparison.make(*MEASURED) == 0
    compared = comparison.record()
    assert list(compared["runs"]) == ["dense/rate0.01-seed42", "hift/rate0.01-seed42"]
    for name, run in compared["runs"].items():
        alone = tmp_path / "alone" / name
        assert main(["train", *run["command"], "--output_dir", str(alone)]) == 0
        results, outcome = results_of(alone), run["outcome"]
        assert (results["before"], results["after"]) == (outcome["before"], outcome["after"])
        assert outcome["num_updates"] == results["num_steps"] == 6
        assert outcome["peak_bytes"]["device"] == results["measured_peak_bytes"]
        assert outcome["num_tokens"] == pytest.approx(6 * ROWS * LENGTH)
        updates, losses = outcome["curve"]
        assert updates == [0, 1, 2, 3, 4, 5, 6] and losses[-1] == results["after"]["eval_loss"]
    text = capsys.readouterr().out
    assert "equal steps: 6\n" in re.sub(r" +\n", "\n", text) and "were not searched" in text and "one seed" in text
    assert (comparison.folder / "compare.png").read_bytes()[:4] == b"\x89PNG"


def test_what_a_run_file_sets_can_be_unset_for_all_rows_or_for_one(
    comparison: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    words = [word.removeprefix("--") for word in comparison.common if word != "--packing"]
    own = {"save_strategy": "epoch", "seed": 3, "weight_decay": 0.1, "output_dir": "elsewhere", "packing": True}
    path.write_text(json.dumps({**dict(zip(words[::2], words[1::2], strict=True)), **own}), encoding="utf-8")
    comparison.common = [str(path), "--unset", "learning_rate", "max_steps", "save_strategy", "seed", "output_dir"]
    comparison.is_dry = True
    monkeypatch.setattr(comparing, "read_outcome", lambda folder: outcome(5e-5, 42, 1.0))
    # The file comes first.
    command = ["compare", *comparison.common, "--rows", "dense", "m:--unset weight_decay"]
    assert main([*command, "--output_dir", str(comparison.folder)]) == 0
    of_dense, of_m = (given_values(each[3:]) for each in comparison.ran)
    for values, name in ((of_dense, "dense"), (of_m, "m")):
        assert values["learning_rate"] == 5e-5 and values["seed"] == 42 and values["save_strategy"] == "no"
        assert Path(values["output_dir"]).parent == comparison.folder / name
    assert "max_steps" not in of_dense and of_m["max_steps"] == 6, "as many as the first row took"
    assert of_dense["weight_decay"] == 0.1 and "weight_decay" not in of_m
    message = complaint(capsys, [*command, "n:--weight_decay 0.2 --unset weight_decay"])
    assert "--rows n: --unset weight_decay resets what --weight_decay 0.2 sets" in message


def test_another_program_runs_every_row(comparison: Comparison) -> None:
    run_compare(comparison.words()[1:], program=(SCRIPT,))
    assert [each[0] for each in comparison.ran] == [SCRIPT, SCRIPT]
    assert [len(row["runs"]) for row in comparison.record()["rows"]] == [1, 1]


def test_what_was_run_is_not_run_again_and_other_settings_are_refused(comparison: Comparison) -> None:
    both = ("dense", "sft:--method sft --density 0.1")
    comparison.common += ["--max_steps", "2"]
    assert comparison.make(rows=["dense"]) == 0 and comparison.num_runs() == 1
    assert comparison.make(rows=both) == 0 and comparison.num_runs() == 2
    assert comparison.make("--seeds", "42", "43", rows=both) == 0 and comparison.num_runs() == 4
    before = comparison.record()
    assert [len(row["runs"]) for row in before["rows"]] == [2, 2]
    text = comparison.complaint("--max_steps", "7", rows=["dense"])
    assert "'dense/rate0.01-seed42' by another command" in text and "Name another --output_dir" in text
    assert comparison.record() == before


def own_data(comparison: Comparison, folder: Path) -> Path:
    """Let a comparison read a copy of its data, which the test may change."""
    place = comparison.common.index("--dataset") + 1
    comparison.common[place] = str(shutil.copy(comparison.common[place], folder / "own.jsonl"))
    return Path(comparison.common[place])


@pytest.mark.parametrize("changed", ["texts.jsonl", "base/config.json", "run.yaml"])
def test_contents_that_changed_since_the_first_runs_are_refused(
    changed: str, comparison: Comparison, tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny_base, tmp_path / "base")
    (tmp_path / "run.yaml").write_text("weight_decay: 0.1\n", encoding="utf-8")
    data = own_data(comparison, tmp_path)
    comparison.common += ["--model_name_or_path", str(tmp_path / "base")]
    # A run file comes first.
    comparison.words = lambda *more, rows: [  # type: ignore[method-assign]
        *("compare", str(tmp_path / "run.yaml"), *comparison.common, *more),
        *("--rows", *rows, "--output_dir", str(comparison.folder)),
    ]
    comparison.is_dry = True
    monkeypatch.setattr(comparing, "read_outcome", lambda folder: outcome(1e-2, 42, 1.0))
    assert comparison.make(rows=["dense"]) == 0
    path = data if changed == "texts.jsonl" else tmp_path / changed
    text = path.read_text(encoding="utf-8")
    path.write_text(f"# A comment.\n{text}" if changed == "run.yaml" else text, encoding="utf-8")
    assert comparison.make(rows=["dense", "hift"]) == 0 and comparison.num_runs() == 2
    path.write_text(text.replace("1", "2"), encoding="utf-8")
    before = comparison.record()
    name = str(tmp_path / "base") if changed.startswith("base") else str(path)
    assert f"{name} has changed since runs in {comparison.folder}" in comparison.complaint(rows=["dense", "lora"])
    assert comparison.record() == before and comparison.num_runs() == 2


def test_a_first_run_that_failed_does_not_keep_its_data_from_being_repaired(
    comparison: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparison.is_dry = True
    path = own_data(comparison, tmp_path)
    monkeypatch.setattr(comparing, "read_outcome", Mock(side_effect=ValueError("bad data")))
    assert comparison.make(rows=["dense"]) == 1
    path.write_text(path.read_text(encoding="utf-8") + '{"text": "one more"}\n', encoding="utf-8")
    monkeypatch.setattr(comparing, "read_outcome", lambda folder: outcome(1e-2, 42, 1.0))
    assert comparison.make(rows=["dense"]) == 0


def test_runs_that_are_added_later_write_the_date_of_the_first(comparison: Comparison) -> None:
    assert comparison.make(rows=("dense",)) == 0
    record = comparison.record()
    ((name, first),) = record["runs"].items()
    first["outcome"]["chat_template_date"] = "2026-01-31"  # as if a template had written it
    (comparison.folder / "compare.json").write_text(json.dumps(record), encoding="utf-8")
    comparison.ran, comparison.is_dry = [], True
    rate = first["outcome"]["rate"]
    comparison.make("--search_rates", str(rate / 2), str(rate), rows=("dense",))
    (words,) = comparison.ran
    assert words[-2:] == ["--chat_template_date", "2026-01-31"] and name.startswith(f"dense/rate{rate:g}")


def test_epochs_of_the_first_row_are_as_many_updates_of_all_rows(comparison: Comparison) -> None:
    rows = ("bad:--method sft --density 0.1 --sft_target_modules nowhere", "dense")
    rows += ("half:--method dense --per_device_train_batch_size 1",)
    assert comparison.make("--max_steps", "-1", "--num_train_epochs", "0.5", rows=rows) == 1
    first, second = (run["outcome"]["num_updates"] for run in comparison.record()["runs"].values())
    assert first == second, "as many as the first row that did not fail"
    assert comparison.record()["title"] == f"equal steps: {first}"


def test_evaluations_are_as_often_as_asked(comparison: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    comparison.is_dry = True
    monkeypatch.setattr(comparing, "read_outcome", lambda folder: outcome(1e-2, 42, 1.0))
    assert comparison.make("--eval_steps", "3", rows=["dense", "own:--method dense --eval_steps 2"]) == 0
    given = [given_values(words[3:]) for words in comparison.ran]
    assert [(each["eval_strategy"], each["eval_steps"]) for each in given] == [("steps", 3), ("steps", 2)]


def test_equal_tokens_are_as_many_updates_as_read_them(comparison: Comparison) -> None:
    rows = ("dense", "half:--method dense --per_device_train_batch_size 1")
    assert comparison.make("--budget", "tokens", rows=rows) == 0
    runs = comparison.record()["runs"].values()
    assert [run["outcome"]["num_updates"] for run in runs] == [6, 12]
    assert [run["outcome"]["num_tokens"] for run in runs] == pytest.approx([6 * ROWS * LENGTH] * 2)


def test_equal_seconds_are_shared_out_by_what_a_trial_measured(comparison: Comparison) -> None:
    comparison.trial = measured(seconds_per_update=0.5)
    assert comparison.make("--budget", "seconds=4") == 0
    record = comparison.record()
    assert [run["outcome"]["num_updates"] for run in record["runs"].values()] == [8, 8]
    assert all(trial["measured"]["seconds_per_update"] == 0.5 for trial in record["trials"].values())


@pytest.mark.slow
def test_without_a_number_all_get_the_seconds_of_the_first(comparison: Comparison) -> None:
    comparison.trial = measured(seconds_per_update=0.001)
    assert comparison.make("--budget", "seconds") == 0
    dense, hift = (run["outcome"] for run in comparison.record()["runs"].values())
    assert dense["num_updates"] == 6
    assert hift["num_updates"] == max(1, round(dense["seconds"] / 0.001))


def test_a_limit_on_bytes_makes_forwards_smaller_and_leaves_the_update_as_it_is(
    comparison: Comparison, capsys: pytest.CaptureFixture[str]
) -> None:
    def peak(options: list[str]) -> dict[str, Any]:
        rows = int(options[len(options) - 1 - options[::-1].index("--per_device_train_batch_size") + 1])
        return measured(peak_bytes=2**20 * (100 if "dense" in options else 1000) * rows)(options)

    comparison.trial = peak
    assert comparison.make("--per_device_train_batch_size", "6", "--budget", "bytes=350MiB") == 1
    dense, hift = comparison.record()["rows"]
    command = comparison.record()["runs"][dense["runs"][0]]["command"]
    assert command.index("--gradient_accumulation_steps") > 0
    results = results_of(comparison.folder / dense["runs"][0])
    assert results["settings"]["per_device_train_batch_size"] == 3
    assert results["settings"]["gradient_accumulation_steps"] == 2
    assert not hift["runs"] and "does not fit" in hift["failure"]
    assert "1 of 2 rows failed: hift" in capsys.readouterr().err


def test_a_trial_measures_whole_cycles_after_the_first(comparison: Comparison, tmp_path: Path) -> None:
    place, words = tmp_path / "trial.json", [*comparison.common, *MEASURED]
    start = [str(place), "2", "--method", "hift", "--preset", "paper", *words]
    trials.main(start)
    found = json.loads(place.read_text(encoding="utf-8"))
    # Six updates, which are fewer than two cycles, are all that there are.
    assert found["num_updates"] == 6 and found["tokens_per_update"] == ROWS * LENGTH
    trials.main([*start, "--max_steps", "50", "--logging_steps", str(TINY_CYCLE)])
    found = json.loads(place.read_text(encoding="utf-8"))
    # A line of HiFT's has as many cycles as make eight updates.
    assert found["num_updates"] == 2 * TINY_CYCLE
    assert found["seconds_per_update"] > 0 and found["peak_bytes"] > found["highest_bytes"]["parameters"] > 0
    assert (found["num_rows"], found["accumulation"]) == (ROWS, 1)


def test_rates_are_searched_with_the_first_seed_and_the_best_trains_the_others(
    comparison: Comparison, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    comparison.is_dry = True
    losses = {1e-5: (2.0, 2.0, 2.0), 1e-2: (2.0, 1.5, 1.6)}
    monkeypatch.setattr(comparing, "read_outcome", lambda folder: outcome(*found(folder, losses)))
    assert comparison.make("--search_rates", "1e-5", "1e-2", "--seeds", "1", "2", rows=["dense"]) == 0
    names = ("rate1e-05-seed1", "rate0.01-seed1", "rate0.01-seed2")
    assert list(comparison.record()["runs"]) == [f"dense/{name}" for name in names]
    assert comparison.record()["rows"][0]["is_at_edge"]
    assert "the largest or the smallest tried: dense" in capsys.readouterr().out


def outcome(rate: float, seed: int, loss: float) -> Outcome:
    """A run that ended with this loss."""
    return Outcome(
        rate=rate,
        seed=seed,
        num_updates=6,
        seconds=1.0,
        num_tokens=None,
        before={"eval_loss": 2.0},
        after={"eval_loss": loss},
        peak_bytes={"device": 1},
        curve=([0, 6], [2.0, loss]),
    )


@pytest.mark.parametrize(
    ("losses", "rate", "num_runs"),
    [
        # What is best with the first seed alone diverges with the others: the next rate has the best mean.
        ({1e-3: (1.5, 1.5, 1.5), 2e-3: (1.4, 3.0, 3.0)}, 1e-3, 6),
        ({1e-3: (1.5, 1.5, 1.5), 2e-3: (1.4, math.nan, 1.4)}, 1e-3, 6),
        # It was luck, but the next rate has worse, and the last is not tried: its first figure is above the mean.
        ({1e-3: (1.45, 1.6, 1.6), 2e-3: (1.4, 1.5, 1.5), 4e-3: (1.5, 1.0, 1.0)}, 2e-3, 7),
        # No rate can be better than this mean.
        ({1e-3: (1.5, 1.3, 1.3), 2e-3: (1.4, 1.5, 1.5)}, 2e-3, 4),
    ],
)
def test_the_best_rate_has_the_best_mean_over_the_seeds(
    losses: dict[float, tuple[float, ...]],
    rate: float,
    num_runs: int,
    comparison: Comparison,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    comparison.is_dry = True
    monkeypatch.setattr(comparing, "read_outcome", lambda folder: outcome(*found(folder, losses)))
    rates = [f"{each:g}" for each in losses]
    assert comparison.make("--search_rates", *rates, "--seeds", "0", "1", "2", rows=["dense"]) == 0
    (row,) = comparison.record()["rows"]
    assert [name.partition("/")[2] for name in row["runs"]] == [f"rate{rate:g}-seed{seed}" for seed in range(3)]
    assert comparison.num_runs() == num_runs


def found(folder: Path, losses: dict[float, tuple[float, ...]]) -> tuple[float, int, float]:
    """Rate, seed and loss of a run, by its folder."""
    rate, _, seed = folder.name.removeprefix("rate").partition("-seed")
    return float(rate), int(seed), losses[float(rate)][int(seed)]


@pytest.mark.slow
def test_a_search_without_rates_tries_those_around_the_rows_own(comparison: Comparison) -> None:
    assert comparison.make("--search_rates", rows=["dense"]) == 0
    losses = {run["outcome"]["rate"]: run["outcome"]["after"] for run in comparison.record()["runs"].values()}
    best = min(losses, key=lambda rate: losses[rate]["eval_loss"])
    assert list(losses)[:3] == [0.005, 0.01, 0.02]
    # The best lies between others, unless seven were not enough.
    assert min(losses) < best < max(losses) or len(losses) == 7
    assert comparison.record()["rows"][0]["is_at_edge"] == (best in (min(losses), max(losses)))


def test_a_row_that_fails_leaves_the_others_whole_and_a_missing_matplotlib_is_noted(
    comparison: Comparison, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else find(name, *rest)
    )
    rows = ("bad:--method sft --density 0.1 --sft_target_modules [bold]nowhere", "dense")
    assert comparison.make(rows=rows) == 1
    bad, dense = comparison.record()["rows"]
    assert bad["failure"] and not bad["runs"] and dense["runs"] and dense["failure"] is None
    captured = capsys.readouterr()
    assert "note: bad failed" in captured.out
    assert "--sft_target_modules '[bold]nowhere'" in captured.out, "the row's options were taken for markup"
    assert "note: no compare.png: a picture of the comparison needs matplotlib" in captured.out
    assert "1 of 2 rows failed: bad" in captured.err
    assert comparison.num_runs() == 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--rows", "dense", "hift:--lora_rank 4"), "--rows hift: .*lora_rank"),
        (("--maxsteps", "3"), "unrecognized arguments: --maxsteps"),
        (("--budget", "second"), "did you mean seconds"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(more: tuple[str, ...], message: str, comparison: Comparison) -> None:
    assert re.search(message, comparison.complaint(*more))
    assert not comparison.ran


def test_ranks_are_refused(comparison: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "Start it without a launcher" in comparison.complaint()
    assert not comparison.ran


@pytest.mark.parametrize("text", ["no json", "[]", '{"trials": {}}'])
def test_a_damaged_record_is_refused_and_kept(text: str, comparison: Comparison) -> None:
    place = comparison.folder / "compare.json"
    place.parent.mkdir()
    place.write_text(text, encoding="utf-8")
    assert str(place) in comparison.complaint()
    assert place.read_text(encoding="utf-8") == text and not comparison.ran


# Tokens are what a trial counts, in a process before the run's.
@pytest.mark.slow
@pytest.mark.parametrize("budget", ["steps=3", "tokens=96"])
def test_it_runs_in_processes_of_its_own(budget: str, comparison: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "run_process", run_process)
    assert comparison.make("--budget", budget, rows=["dense"]) == 0
    log = (comparison.folder / "dense" / "rate0.01-seed42.log").read_text(encoding="utf-8")
    assert "evaluation before" in log
    assert comparison.record()["runs"]["dense/rate0.01-seed42"]["outcome"]["num_updates"] == 3
