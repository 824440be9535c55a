"""Ctrl-C while a run trains: the checkpoint stands, and the printed command goes on to the bits of a whole run."""

import functools
import os
import shlex
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from matplotlib.figure import Figure
from torch._subclasses.fake_tensor import FakeTensor
from transformers import LlamaForCausalLM, Trainer

from slivertune.cli import main
from slivertune.core.manifest import write_manifest
from slivertune.training import interruption
from slivertune.training.folders import newest_whole
from slivertune.training.interruption import Interruption
from tests.training.tiny_runs import UNMEASURED, Runs, assert_same_bits, train


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Take Ctrl-C as a command in the foreground does, and give it back."""
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, old)


def interrupted(monkeypatch: pytest.MonkeyPatch, calls: set[int], *, in_training: bool = True) -> None:
    """Let Ctrl-C come inside of these batches, counted from 1, of training or of evaluations."""
    owner, name = (LlamaForCausalLM, "forward") if in_training else (Trainer, "prediction_step")
    original, count = getattr(owner, name), 0

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        output = original(self, *args, **kwargs)
        # A memory plan has no data, and the trial of the loss no gradients.
        is_counted = (
            in_training and self.training and torch.is_grad_enabled() and not isinstance(output.logits, FakeTensor)
        )
        if is_counted or not in_training:
            count += 1
            if count in calls:
                signal.raise_signal(signal.SIGINT)
        return output

    monkeypatch.setattr(owner, name, call)


@pytest.fixture(scope="module")
def whole(tiny_base: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a run by a method with some options that nothing has stopped, made when it is first asked for."""
    folder = tmp_path_factory.mktemp("whole")

    @functools.cache
    def run(method: str, *more: str) -> Path:
        place = folder / str(run.cache_info().misses)
        train(tiny_base, texts, place, *more, *UNMEASURED, method=method)
        return place

    return run


EVALUATED = ("--eval_strategy", "steps", "--eval_steps", "2")


@pytest.mark.parametrize(
    ("method", "more", "call", "in_training", "step"),
    [
        pytest.param("hift", (), 3, True, 3, marks=pytest.mark.slow, id="before the first checkpoint"),
        pytest.param("sft", ("--density", "0.1", "--gradient_accumulation_steps", "2"), 5, True, 3, id="accumulating"),
        pytest.param("dense", ("--save_strategy", "no", "--save_only_model"), 1, True, 1, id="saving nothing"),
        pytest.param("dense", ("--save_strategy", "epoch", *EVALUATED), 2, True, 2, id="with an evaluation due"),
        # The evaluation before the training has one batch.
        pytest.param("hift", EVALUATED, 2, False, 2, id="in an evaluation between updates"),
        pytest.param("hift", ("--token_ratio", "0.4"), 4, True, 4, marks=pytest.mark.slow, id="tokens"),
        pytest.param("lora", ("--lora_dropout", "0.1"), 4, True, 4, marks=pytest.mark.slow, id="lora"),
    ],
)
def test_the_first_ctrl_c_saves_and_the_printed_command_goes_on_to_the_same_bits(
    method: str,
    more: tuple[str, ...],
    call: int,
    in_training: bool,
    step: int,
    whole: Callable[..., Path],
    runs: Runs,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Saving and evaluating on the way changes no bit.
    expected = whole(method, *(more if more[:1] in (("--density",), ("--token_ratio",), ("--lora_dropout",)) else ()))
    more = (*more, *UNMEASURED)
    with monkeypatch.context() as patched:
        interrupted(patched, {call}, in_training=in_training)
        assert main(runs.arguments("parts", *more, method=method)) == 130
    captured = capsys.readouterr()
    assert "interrupted: ending this update and saving a checkpoint; Ctrl-C again ends at once. Until" in captured.out
    checkpoint, passed_over = newest_whole(runs["parts"])
    assert checkpoint == runs["parts"] / f"checkpoint-{step}" and passed_over == []
    said, _, command = captured.err.strip().splitlines()[-1].partition("continue with: ")
    assert f"the last whole checkpoint is {checkpoint}" in said
    program, *words = shlex.split(command)
    assert program == "slivertune" and main(words) == 0
    assert_same_bits(expected, runs["parts"])


@pytest.mark.parametrize(
    ("more", "kept", "again"),
    [
        pytest.param(("--save_steps", "2"), "checkpoint-2", ("--resume_from_checkpoint", "auto"), id="an earlier one"),
        # The command that is printed copes with the half of a checkpoint.
        pytest.param((), None, None, id="none"),
    ],
)
def test_a_save_that_is_cut_short_leaves_the_checkpoint_that_the_first_line_names(
    more: tuple[str, ...],
    kept: str | None,
    again: tuple[str, ...] | None,
    whole: Callable[..., Path],
    runs: Runs,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    more = (*more, *UNMEASURED)

    def write(checkpoint: Path, entries: Any) -> None:
        if checkpoint.name == "checkpoint-3":
            raise KeyboardInterrupt
        write_manifest(checkpoint, entries)

    with monkeypatch.context() as patched:
        interrupted(patched, {3})
        patched.setattr("slivertune.training.callbacks.write_together", write)
        assert main(runs.arguments("parts", *more)) == 130
    captured = capsys.readouterr()
    checkpoint = None if kept is None else runs["parts"] / kept
    state = "no checkpoint is whole" if checkpoint is None else f"{checkpoint} is the last whole checkpoint"
    assert f"Ctrl-C again ends at once. Until that is done, {state}\n" in captured.out
    assert newest_whole(runs["parts"])[0] == checkpoint and (runs["parts"] / "checkpoint-3").is_dir()
    _, *printed = shlex.split(captured.err.strip().splitlines()[-1].rpartition(" with: ")[2])
    assert main(printed if again is None else runs.arguments("parts", *more, *again)) == 0
    assert_same_bits(whole("hift"), runs["parts"])


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        ({2, 3}, "interrupted before the first checkpoint; start again with: slivertune train"),
        ({6, 7}, "interrupted; the last whole checkpoint is {folder}/checkpoint-1; continue with: slivertune train"),
    ],
    ids=["in the first update", "in the second"],
)
def test_a_second_ctrl_c_ends_at_once(calls: set[int], said: str, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(monkeypatch, calls)
    more = ("--gradient_accumulation_steps", "4", "--save_steps", "1", *UNMEASURED)
    assert said.format(folder=runs["out"]) in runs.complaint(*more, code=130)
    assert len(list(runs["out"].glob("checkpoint-*"))) == min(calls) // 4


def test_ctrl_c_after_the_last_update_lets_the_run_end(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(monkeypatch, {2}, in_training=False)
    assert runs.train("out", "--save_strategy", "no", *UNMEASURED)["num_steps"] == 6
    assert "interrupted: evaluating and saving the model; Ctrl-C again ends at once" in runs.printed()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_while_the_picture_is_drawn_ends_the_picture_alone(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Figure, "savefig", lambda *args, **more: signal.raise_signal(signal.SIGINT))
    more = ("--report", "true", "--logging_steps", "1", *UNMEASURED)
    results = runs.train("out", *more, method="dense")
    out = " ".join(runs.printed().split())
    assert "note: no report.png: it was interrupted. Draw it with: " in out and f" report {runs['out']}" in out
    assert not list(runs["out"].glob(".*.partial")) and results["steps_per_second"] is not None
    assert runs.train("out", *more, "--resume_from_checkpoint", "true", method="dense") == results
    assert "is finished after 6 updates; nothing was trained" in runs.printed()


def test_ctrl_c_after_all_is_saved_says_that_the_run_is_finished(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slivertune.training.run.print_results", Mock(side_effect=KeyboardInterrupt))
    error = runs.complaint(*UNMEASURED, code=130, method="dense")
    assert f"the run in {runs['out']} is finished after 6 updates, and saved; draw it with: " in error
    assert error.strip().endswith(f" report {runs['out']}")


@pytest.mark.parametrize(
    ("again_s", "said"),
    [
        (60.0, "the last whole checkpoint is {folder}/checkpoint-1; continue with: "),
        (0.0, "interrupted before the first checkpoint; start again with: "),
    ],
    ids=["passed on", "typed again"],
)
def test_ctrl_c_that_a_launcher_passes_on_does_not_end_the_saving_and_a_later_one_does(
    again_s: float, said: str, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interruption, "_AGAIN_S", again_s)
    monkeypatch.setenv("SLIVERTUNE_COMPARED", "1")
    interrupted(monkeypatch, {2, 3})
    assert said.format(folder=runs["out"]) in runs.complaint(
        "--gradient_accumulation_steps", "4", *UNMEASURED, code=130
    )
    assert len(list(runs["out"].glob("checkpoint-*"))) == (again_s > 0)


def test_a_run_from_the_checkpoint_of_another_folder_names_that_one(tmp_path: Path) -> None:
    said: list[str] = []
    callback, nothing = Interruption(said.append), Mock()
    callback.on_train_begin(
        Mock(output_dir=str(tmp_path), resume_from_checkpoint="other/checkpoint-5"), nothing, nothing
    )
    signal.raise_signal(signal.SIGINT)
    callback.close()
    assert "Until that is done, other/checkpoint-5 is the last whole checkpoint" in said[0]


@pytest.mark.parametrize(
    ("variables", "is_left"),
    [
        pytest.param((), False, id="no launcher"),
        pytest.param(("LOCAL_RANK", "TORCHELASTIC_RUN_ID"), False, id="torchrun"),
        pytest.param(("LOCAL_RANK", "TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"), False, id="accelerate"),
        pytest.param(("ACCELERATE_MIXED_PRECISION",), True, id="accelerate with one process"),
        pytest.param(("LOCAL_RANK", "CROSS_RANK"), True, id="deepspeed"),
    ],
)
def test_the_line_names_a_kill_for_a_launcher_that_leaves_the_terminal_to_the_shell(
    variables: tuple[str, ...], is_left: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOCAL_RANK", "TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    for name in variables:
        monkeypatch.setenv(name, "0")
    said: list[str] = []
    callback, nothing, ended = Interruption(said.append), Mock(), signal.getsignal(signal.SIGTERM)
    callback.on_train_begin(Mock(output_dir=str(tmp_path), resume_from_checkpoint=None), nothing, nothing)
    signal.raise_signal(signal.SIGINT)
    callback.close()
    signal.signal(signal.SIGTERM, ended)
    kill = f"; if the shell is back already, kill -s INT -- -{os.getpgrp()} does" if is_left else ""
    assert f"saving a checkpoint; Ctrl-C again ends at once{kill}. Until that is done" in said[0]


def test_sigterm_of_a_launcher_that_comes_before_its_ctrl_c_is_the_same_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOCAL_RANK", "CROSS_RANK"):  # as deepspeed sets them
        monkeypatch.setenv(name, "0")
    said: list[str] = []
    callback, nothing, control = Interruption(said.append), Mock(), Mock(should_save=False)
    ended = signal.getsignal(signal.SIGTERM)
    callback.on_train_begin(Mock(output_dir=str(tmp_path), resume_from_checkpoint=None), nothing, nothing)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
        signal.raise_signal(number)
    callback.on_step_end(Mock(device=torch.device("cpu")), nothing, control)
    assert control.should_save and len(said) == 1 and said[0].startswith("interrupted: ending this update")
    with pytest.raises(KeyboardInterrupt):
        callback.on_save(nothing, nothing, control)
    callback.close()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN, "the launcher sends it again"
    signal.signal(signal.SIGTERM, ended)


def test_a_shell_that_lets_ctrl_c_be_ignored_is_obeyed(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    interrupted(monkeypatch, {2})
    assert runs.train("out", *UNMEASURED)["num_steps"] == 6


def test_a_worker_of_the_data_leaves_ctrl_c_to_its_parent() -> None:
    said: list[str] = []
    callback, nothing = Interruption(said.append), Mock()
    callback.on_train_begin(nothing, nothing, nothing)
    callback._process = -1
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)
    callback.close()
    assert said == [] and signal.getsignal(signal.SIGINT) is signal.default_int_handler
