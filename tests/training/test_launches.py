"""`slivertune train` in two processes, as each launcher starts it."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from slivertune.core.manifest import find_damage
from slivertune.training import interruption
from slivertune.training.folders import checkpoint_step, newest_whole
from tests.helpers.launching import build_deepspeed_collectives, environment
from tests.helpers.models import differing
from tests.helpers.tolerance import assert_step_close, assert_sums_close, exact_sums
from tests.training.tiny_runs import (
    EVALUATED_TOKENS,
    Runs,
    assert_same_bits,
    final_weights,
    results_of,
    saved_weights,
    train,
)

TORCHRUN = ("torchrun", "--nproc_per_node=2", "--standalone", "-m", "slivertune")
ACCELERATE = (
    *("accelerate", "launch", "--multi_gpu", "--num_processes=2", "--num_machines=1", "--mixed_precision=no"),
    *("--dynamo_backend=no", "--main_process_port=0", "-m", "slivertune"),
)
DEEPSPEED = ("deepspeed", "--num_accelerators=2", "--master_port=29581", "--module", "slivertune")
ACCELERATE_ONE = (
    *("accelerate", "launch", "--num_processes=1", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"),
    *("-m", "slivertune"),
)
LAUNCHERS = {
    "torchrun": TORCHRUN,
    "accelerate": ACCELERATE,
    "deepspeed": DEEPSPEED,
    "accelerate, one process": ACCELERATE_ONE,
}
"""Commands, whose last two words are the module."""
LEAVE = ("deepspeed", "accelerate, one process")
"""Launchers that end at Ctrl-C while their processes save."""
TIMEOUT_S = 240
GRACE_S = 30
"""After which launchers kill their processes."""
SHORT_GRACES_S = {"torchrun": 3, "accelerate": 3, "deepspeed": GRACE_S}
"""The shortest that can be set. deepspeed's is fixed, and accelerate never kills its only process."""
CAP = 1e-4
"""Of the largest weight: with a rate that is off by 1 % they are 1e-3 apart."""


def start(command: tuple[str, ...], folder: Path, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, list[str]]:
    """The exit code, what was printed, and what this command said on standard error, without the launcher's words."""
    try:
        out, err = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"hung for {TIMEOUT_S} s\n{out}\n{err}")
    return process.returncode, out, [line for line in err.splitlines() if line.startswith("slivertune train:")]


def zero2_config(folder: Path, **stage: int) -> str:
    """A configuration of DeepSpeed, whose other figures the Trainer fills in."""
    config = folder / "zero2.json"
    auto = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    settings = {**dict.fromkeys(auto, "auto"), "zero_optimization": {"stage": 2, **stage}}
    config.write_text(json.dumps(settings), encoding="utf-8")
    return str(config)


def engine_of(launcher: str, folder: Path) -> tuple[str, ...]:
    """The engine that is trained under a launcher, as options of the command: ZeRO-2 under deepspeed, else none."""
    if launcher != "deepspeed":
        return ()
    build_deepspeed_collectives()
    return ("--deepspeed", zero2_config(folder))


def await_checkpoint(output: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not list(output.glob("checkpoint-*/slivertune_checkpoint.json")):
        assert process.poll() is None and time.monotonic() < deadline, finish(process)
        time.sleep(0.02)


def kill_all(process: subprocess.Popen[str]) -> None:
    """Kill a launcher's processes, and the launcher."""
    children = [int(each) for each in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    for each in (*children, process.pid):
        os.kill(each, signal.SIGKILL)


def await_line(start: str, process: subprocess.Popen[str]) -> str:
    """Return the next line of the process that begins so."""
    assert process.stdout is not None
    while not (line := process.stdout.readline()).startswith(start):
        assert line, finish(process)
    return line


def launch(launcher: tuple[str, ...], arguments: list[str], folder: Path) -> tuple[dict[str, Any], str]:
    """Run the command, which must end well.

    Returns:
        What is in results.json, and what was printed.
    """
    code, out, said = finish(start((*launcher, *arguments), folder))
    assert (code, said) == (0, []), out
    return results_of(Path(arguments[arguments.index("--output_dir") + 1])), out


# Where a gradient is next to nothing, Adam's first step turns its rounding into a whole step.
STEPS = ("--max_steps", "12", "--save_steps", "5", "--adam_epsilon", "1e-4")


@pytest.fixture(scope="module")
def alone(tiny_base: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folders of one process on the whole batch, and of the same with exact sums."""
    folder = tmp_path_factory.mktemp("alone")
    more = (*STEPS, "--per_device_train_batch_size", "4")
    with exact_sums():
        train(tiny_base, texts, folder / "exact", *more)
    train(tiny_base, texts, folder / "one", *more)
    return folder / "one", folder / "exact"


def assert_trained_as_alone(run: Path, alone: tuple[Path, Path]) -> None:
    # Sums over ranks are rounded in another order than sums over one batch.
    assert_step_close(*map(final_weights, (run, *alone)), cap=CAP)
    assert_sums_close(losses_of(run), losses_of(alone[0]), EVALUATED_TOKENS)


def losses_of(run: Path) -> torch.Tensor:
    """Those of the evaluations before and after."""
    return torch.tensor([results_of(run)[when]["eval_loss"] for when in ("before", "after")])


@pytest.mark.slow
def test_two_processes_of_torchrun_train_as_one_does_on_the_whole_batch_and_resume(
    alone: tuple[Path, Path], runs: Runs, tmp_path: Path
) -> None:
    arguments = runs.arguments("two", *STEPS, method="hift")
    results, out = launch(TORCHRUN, arguments, tmp_path)
    assert (results["world_size"], results["layout"], results["method"]) == (2, "ddp", "hift")
    assert "batch   4 rows per update: 2 at a time, on each of 2 ranks (ddp)" in out
    assert "the memory ledger counts rank 0 only, of 2 ranks" in out
    # Beside so small a model, the batch and what ranks tell each other count for a twentieth.
    assert results["planned_peak_bytes"] == pytest.approx(results["measured_peak_bytes"], rel=0.1)
    assert out.count("evaluation before") == 1 and out.count("evaluation loss") == 1, "one process speaks"
    one = results_of(alone[0])
    assert (one["world_size"], one["layout"]) == (1, "single")
    assert_trained_as_alone(runs["two"], alone)
    assert results["after"]["eval_loss"] < results["before"]["eval_loss"]
    checkpoint = runs["two"] / "checkpoint-5"
    assert find_damage(checkpoint) is None and (checkpoint / "hift").is_dir()
    more = ("--resume_from_checkpoint", str(checkpoint), "--output_dir", str(runs["again"]))
    again, out = launch(TORCHRUN, [*arguments, *more], tmp_path)
    assert again["world_size"] == 2
    assert again["before"] == results["before"], "known from the checkpoint"
    assert_same_bits(runs["two"], runs["again"])


@pytest.mark.slow
def test_one_command_goes_on_after_all_processes_were_killed(runs: Runs, tmp_path: Path) -> None:
    more = ("--max_steps", "60", "--save_steps", "5", "--memory_ledger", "off")
    launch(TORCHRUN, runs.arguments("whole", *more), tmp_path)
    arguments = runs.arguments("cut", *more, "--resume_from_checkpoint", "auto")
    process = start((*TORCHRUN, *arguments), tmp_path)
    await_checkpoint(runs["cut"], process)
    kill_all(process)
    finish(process)
    assert not (runs["cut"] / "results.json").exists()
    _, out = launch(TORCHRUN, arguments, tmp_path)
    assert f"continuing from {runs['cut'] / 'checkpoint-'}" in "".join(out.split("\n"))
    assert_same_bits(runs["whole"], runs["cut"])
    code, out, said = finish(start((*TORCHRUN, *arguments), tmp_path))
    assert (code, said) == (0, [])
    assert out.count("is finished after 60 updates; nothing was trained") == 1, "one process speaks"


@pytest.mark.slow
def test_two_processes_of_accelerate_launch_train_sft_on_tokens(runs: Runs, tmp_path: Path) -> None:
    reselection = ("--reselection_interval", "4", "--estimation_steps", "2")
    more = ("--density", "0.1", *reselection, "--token_ratio", "0.5", "--max_steps", "9")
    arguments = runs.arguments("out", *more, method="sft")
    results, _ = launch(ACCELERATE, arguments, tmp_path)
    assert (results["world_size"], results["layout"], results["method"]) == (2, "ddp", "sft")
    assert results["settings"]["token_ratio"] == 0.5
    assert results["after"]["eval_loss"] < results["before"]["eval_loss"]
    base, trained = saved_weights(runs.base), saved_weights(runs["out"] / "model")
    changed = sum(int((base[name] != value).sum()) for name, value in trained.items())
    assert 0 < changed <= results["num_trained"] * 1.01


@pytest.mark.slow
def test_two_processes_of_the_deepspeed_launcher_train_on_zero2(
    alone: tuple[Path, Path], runs: Runs, tmp_path: Path
) -> None:
    build_deepspeed_collectives()
    config = zero2_config(tmp_path, reduce_bucket_size=20000)
    arguments = runs.arguments("two", *STEPS, "--deepspeed", config, method="hift")
    results, _ = launch(DEEPSPEED, arguments, tmp_path)
    assert (results["world_size"], results["layout"]) == (2, "zero2")
    assert_trained_as_alone(runs["two"], alone)
    assert find_damage(runs["two"] / "checkpoint-10") is None


@pytest.mark.slow
def test_sft_on_zero2_goes_on_from_its_last_whole_checkpoint(runs: Runs, tmp_path: Path) -> None:
    reselection = ("--density", "0.1", "--reselection_interval", "4", "--estimation_steps", "2")
    more = (*reselection, "--max_steps", "6", "--save_steps", "3", "--resume_from_checkpoint", "auto")
    engine = ("--deepspeed", zero2_config(tmp_path), "--memory_ledger", "off")
    arguments = runs.arguments("out", *more, *engine, method="sft")
    launch(TORCHRUN, arguments, tmp_path)
    wanted = final_weights(runs["out"])
    (runs["out"] / "results.json").unlink()
    (runs["out"] / "checkpoint-6" / "slivertune_checkpoint.json").unlink()
    _, out = launch(TORCHRUN, arguments, tmp_path)
    assert "checkpoint-3" in out and "checkpoint-6 is not whole" in "".join(out.split("\n"))
    assert differing(final_weights(runs["out"]), wanted) == []


@pytest.mark.slow
def test_what_both_processes_meet_is_said_once_and_what_one_meets_names_it(runs: Runs, tmp_path: Path) -> None:
    arguments = runs.arguments("out")
    code, _, said = finish(start((*TORCHRUN, *arguments, "--layers_per_group", "0"), tmp_path))
    assert code != 0
    assert len(said) == 1 and said[0].startswith("slivertune train: error: layers_per_group=0 must be")
    # Each process gets another seed.
    script = runs["start.sh"]
    script.write_text(f'exec {sys.executable} -m slivertune "$@" --seed $RANK\n', encoding="utf-8")
    launcher = ("torchrun", "--nproc_per_node=2", "--standalone", "--no-python", "sh", str(script))
    code, _, said = finish(start((*launcher, *arguments), tmp_path))
    assert code != 0
    (line,) = said
    assert line.startswith("slivertune train: error: the processes were given different arguments: rank 0")
    assert "'--seed', '0'" in line and "'--seed', '1'" in line
    assert not runs["out"].exists()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ctrl_c_leaves_a_whole_checkpoint_and_one_line_whose_command_goes_on_to_the_same_bits(
    launcher: str, runs: Runs, tmp_path: Path
) -> None:
    length = ("--max_steps", "300", "--save_steps", "300", "--logging_steps", "1", "--memory_ledger", "off")
    more = (*length, *engine_of(launcher, tmp_path))
    command = LAUNCHERS[launcher]
    process = start((*command, *runs.arguments("out", *more, method="dense")), tmp_path)
    await_line("step ", process)
    os.killpg(process.pid, signal.SIGINT)
    asked_at = time.monotonic()
    code, out, said = finish(process)
    assert code != 0
    if not said and time.monotonic() > asked_at + GRACE_S:
        assert "interrupted: ending this update and saving a checkpoint" in out
        pytest.skip(f"{launcher} killed its processes after {GRACE_S} s: this machine is too busy to save in that time")
    (line,) = said
    assert line.startswith("slivertune train: interrupted; the last whole checkpoint is ")
    checkpoint = Path(line.split("checkpoint is ")[1].split(";")[0])
    assert find_damage(checkpoint) is None and checkpoint_step(checkpoint) < 300
    # The launcher and its options are the user's to repeat; the rest is printed.
    _, module, words = line.partition("--module slivertune ")
    results, _ = launch(command[:-2], shlex.split(module + words), tmp_path)
    assert results["num_steps"] == 300
    launch(command, runs.arguments("whole", *more, method="dense"), tmp_path)
    assert_same_bits(runs["whole"], runs["out"])


STALLS = """
import os, sys, time
from slivertune.cli import main
from slivertune.training import callbacks

write = callbacks.write_together
callbacks.write_together = lambda folder, entries: (
    write(folder, entries) if folder.name == "checkpoint-5" or os.environ.get("RANK", "0") != "0" else time.sleep(600)
)
sys.exit(main())
"""
"""A program whose first rank never completes a checkpoint after the first one, while the others wait for it."""


def interrupt_again(line: str, process: subprocess.Popen[str]) -> bool:
    """Run the `kill` command of the first line, or send Ctrl-C again if there is none.

    Returns:
        Whether the launcher has ended before, so that its shell has the terminal.
    """
    command = re.search(r"kill -s INT -- -\d+", line)
    time.sleep(interruption._AGAIN_S + 2)
    has_ended = process.poll() is not None
    subprocess.run(["sh", "-c", command[0] if command else f"kill -s INT -- -{process.pid}"], check=False)
    return has_ended


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "ending"),
    [
        ("torchrun", "killed"),
        *((launcher, "by its grace") for launcher in SHORT_GRACES_S),
        *((launcher, "by Ctrl-C again") for launcher in LAUNCHERS),
    ],
)
def test_processes_that_end_while_they_save_leave_the_checkpoint_that_the_line_names(
    launcher: str, ending: str, runs: Runs, tmp_path: Path
) -> None:
    program = tmp_path / "stalls.py"
    program.write_text(STALLS, encoding="utf-8")
    length = ("--max_steps", "12", "--save_steps", "5", "--memory_ledger", "off")
    arguments = runs.arguments("out", *length, *engine_of(launcher, tmp_path))
    grace_s = SHORT_GRACES_S[launcher] if ending == "by its grace" else GRACE_S
    command = (*LAUNCHERS[launcher][:-2], str(program), *arguments)
    process = start(command, tmp_path, TORCH_ELASTIC_SHUTDOWN_TIMEOUT=str(grace_s))
    await_checkpoint(runs["out"], process)
    os.killpg(process.pid, signal.SIGINT)
    asked_at = time.monotonic()
    line = await_line("interrupted: ", process)
    has_ended = None
    if ending == "killed":
        kill_all(process)
    elif ending == "by Ctrl-C again":
        has_ended = interrupt_again(line, process)
    code, _, said = finish(process)
    assert has_ended in (None, launcher in LEAVE)
    assert (f"kill -s INT -- -{process.pid} does" in line) == (launcher in LEAVE)
    assert code != 0
    assert (time.monotonic() > asked_at + grace_s) == (ending == "by its grace")
    kept = runs["out"] / "checkpoint-5"
    assert line.endswith(f"Until that is done, {kept} is the last whole checkpoint\n")
    # After a second Ctrl-C, torchrun may kill the rank before it has printed.
    interrupted = [each for each in said if "interrupted" in each]
    assert all(ending == "by Ctrl-C again" and f"checkpoint is {kept};" in each for each in interrupted)
    assert newest_whole(runs["out"])[0] == kept
    _, out = launch(LAUNCHERS[launcher], [*arguments, "--resume_from_checkpoint", "auto"], tmp_path)
    assert f"continuing from {kept}" in "".join(out.split("\n"))
