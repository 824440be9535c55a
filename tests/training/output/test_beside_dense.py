import io
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from slivertune.cli import main
from slivertune.training import assemble
from slivertune.training.command_line.parse import parse_train_arguments
from slivertune.training.output import beside_dense
from slivertune.training.ranks.launchers import COMPARED
from slivertune.training.run_process import FailedError
from tests.training.tiny_runs import TINY_RECIPE, results_of

MEASURED = {
    "num_updates": 16, "seconds_per_update": 0.5, "tokens_per_update": 512.0, "peak_bytes": 9, "num_rows": 4,
    "accumulation": 2, "highest_bytes": None,
}  # fmt: skip


class Measured:
    """A run that says lines, and a process that measures in its place."""

    def __init__(self, words: Sequence[str], failure: BaseException | None = None) -> None:
        self.said: list[str] = []
        self.words: list[str] = []
        self._failure = failure
        arguments = parse_train_arguments(words)
        self.run: Any = SimpleNamespace(
            arguments=arguments,
            method=arguments.method,
            layout="single",
            source=SimpleNamespace(name_or_path="base"),
            trainer=SimpleNamespace(state=SimpleNamespace(global_step=800)),
            display=SimpleNamespace(say=self.said.append),
        )

    def process(self, words: Sequence[str], log: Path, title: str, console: Console) -> None:
        self.words = list(words)
        if self._failure is not None:
            raise self._failure
        Path(words[2]).write_text(json.dumps(MEASURED), encoding="utf-8")


def measure(made: Measured, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(beside_dense, "run_process", made.process)
    return beside_dense.measure_dense(made.run, Console(file=io.StringIO()))


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_dense_run_has_the_batches_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = ["--use_cpu", "--gradient_accumulation_steps", "2", "--max_length", "32", "--layers_per_group", "2"]
    made = Measured([*typed, "--gradient_checkpointing", "true", "--seed", "7"])
    assert measure(made, monkeypatch).seconds_per_update == 0.5
    assert made.words[:2] == ["-m", "slivertune.training.trial"]
    mine, dense = made.run.arguments, parse_train_arguments([*made.words[4:], "--output_dir", "dense"])
    assert (dense.method.name, dense.model.model_name_or_path) == ("dense", "base")
    assert (dense.data.dataset, dense.data.max_length) == (["builtin:dates"], 32)
    assert dense.training.max_steps == int(made.words[3]) * dense.training.logging_steps
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing", "seed"):
        assert getattr(dense.training, name) == getattr(mine.training, name)
    assert dense.training.use_cpu


def test_the_dense_run_differs_in_the_method_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--optim", "adamw_bnb_8bit", "--chunked_cross_entropy", "false", "--attn_implementation", "eager"]
    made = Measured([*words, "--weights_dtype", "bf16", "--token_tile_size", "8", "--response_separator=---"])
    assert measure(made, monkeypatch) is not None
    mine, dense = made.run.arguments, parse_train_arguments([*made.words[4:], "--output_dir", "dense"])
    assert (dense.run.chunked_cross_entropy, dense.run.token_tile_size) == (False, 8)
    assert (dense.training.optim, dense.data) == (mine.training.optim, mine.data)
    assert (dense.model.attn_implementation, dense.model.weights_dtype) == ("eager", "bf16")


def test_a_shorter_run_is_compared_with_as_few_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Measured([])
    made.run.trainer.state.global_step = 3
    assert measure(made, monkeypatch) is not None
    dense = parse_train_arguments([*made.words[4:], "--output_dir", "dense"]).training
    assert (dense.max_steps, dense.logging_steps) == (9, 3)


def test_the_dense_run_reads_the_same_data(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--dataset", "a.csv", "--task", "classification", "--text_column", "t", "--label_column", "l"]
    made = Measured([*words, "--truncate=true", "--max_train_samples=9"])
    assert measure(made, monkeypatch) is not None
    assert parse_train_arguments([*made.words[4:], "--output_dir", "dense"]).data == made.run.arguments.data


def test_a_row_of_a_comparison_is_not_compared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMPARED, "1")
    made = Measured([])
    assert measure(made, monkeypatch) is None and not made.words


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["--method", "dense"], id="a dense run"),
        pytest.param(["--model_name_or_path", "other"], id="another model"),
        pytest.param(["--memory_ledger", "off"], id="a run whose bytes nobody measures"),
    ],
)
def test_nothing_is_measured_beside(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made = Measured(words)
    assert measure(made, monkeypatch) is None
    assert not made.words and not made.said


def test_several_ranks_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Measured([])
    made.run.layout = "ddp"
    assert measure(made, monkeypatch) is None and not made.words


@pytest.mark.parametrize(
    ("failure", "reason"),
    [(FailedError("out of\nmemory"), "out of memory"), (KeyboardInterrupt(), "it was interrupted")],
)
def test_a_dense_run_that_fails_or_is_interrupted_is_a_line(
    failure: BaseException, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Measured([], failure=failure)
    assert measure(made, monkeypatch) is None
    assert made.said == [f"note: dense fine-tuning was not measured: {reason}"]


@pytest.mark.slow
def test_a_run_of_the_embedded_model_has_the_bytes_of_dense_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(assemble, "BASE_RECIPE", TINY_RECIPE)
    words = ("--max_steps", "4", "--per_device_train_batch_size", "2", "--max_eval_samples", "2", "--use_cpu")
    words += ("--layers_per_group", "1")
    assert main(["train", *words]) == 0
    results = results_of(tmp_path / "runs" / "hift")
    mine, dense = results["highest_bytes"], results["dense"]["highest_bytes"]
    num_parameters = results["num_parameters"]
    # fp32 everywhere: a gradient, and AdamW's two moments and step count of each of the tensors.
    assert dense["gradients"] == 4 * num_parameters
    assert 0 < dense["state"] - 8 * num_parameters < 4 * 64
    assert mine["gradients"] < dense["gradients"]
    assert results["dense"]["num_updates"] == 4 and results["dense"]["seconds_per_update"] > 0
    out = capsys.readouterr().out
    assert "evaluation accuracy" in out
    (line,) = [line for line in out.splitlines() if "time per step" in line]
    seconds = (1 / results["steps_per_second"], results["dense"]["seconds_per_update"])
    assert [cell.strip() for cell in line.split("│")[2:-1]] == [f"{1e3 * each:,.1f} ms/update" for each in seconds]
