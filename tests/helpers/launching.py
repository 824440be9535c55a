"""Starts a script under a launch preset, `torchrun` or `deepspeed`, on CPUs, and reads what each rank reported.

A preset is launched as it stands. The command line lowers the number of its processes to what two cores bear, and the
environment takes the GPUs away; nothing else is overridden, so that what the preset says decides what the script sees.
"""

import contextlib
import fcntl
import io
import json
import os
import runpy
import shlex
import signal
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import yaml  # type: ignore[import-untyped]

import slivertune
from slivertune.parallel.zero.shm_comm import build_folder, check_build

CHECKOUT = Path(__file__).resolve().parents[2]
MAX_PROCESSES = 2
Report = dict[str, Any]


class LaunchError(AssertionError):
    """A launched command failed, hung, or left ranks without a report."""


def environment(programs: Path | None = None, **variables: str) -> dict[str, str]:
    """The environment of a launched command: this interpreter's programs and packages, CPUs alone, as many threads."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "FSDP_"))},
        "PATH": os.pathsep.join(
            [*([] if programs is None else [str(programs)]), str(Path(sys.executable).parent), os.environ["PATH"]]
        ),
        "PYTHONPATH": os.pathsep.join([str(Path(slivertune.__file__).resolve().parents[1]), str(CHECKOUT)]),
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        **variables,
    }


def run_python(
    *arguments: object, cwd: Path, expect: int = 0, timeout_s: float = 300, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run this interpreter to its end, and see that it ends as expected.

    Args:
        *arguments: Of the interpreter.
        cwd: The working folder.
        expect: The exit code; where it is another, what was printed is shown.
        timeout_s: Seconds until it counts as hung.
        **variables: Of the environment, on top of this process's.
    """
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return done


def run_here(script: Path, *options: str, cwd: Path) -> str:
    """Run a script in this process, which has the libraries that it imports, as `python SCRIPT OPTIONS` would.

    Args:
        script: Its folder is on the search path meanwhile.
        *options: Of its command line.
        cwd: The working folder.

    Returns:
        All that it prints.
    """
    printed = io.StringIO()
    with (
        mock.patch.object(sys, "argv", [str(script), *options]),
        mock.patch.object(sys, "path", [str(script.parent), *sys.path]),
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(printed),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # as in a process of its own, whose warnings nobody makes errors
        runpy.run_path(str(script), run_name="__main__")
    return printed.getvalue()


def build_deepspeed_collectives() -> None:
    """Let DeepSpeed compile its collectives for CPUs, which takes minutes once on a machine, before a test's time runs.

    Raises:
        LaunchError: If it can't, or if a build that was killed has left its lock behind, which is named.
    """
    folder = build_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "tests_of_slivertune.lock").open("w") as ours:
        fcntl.flock(ours, fcntl.LOCK_EX)  # one of several test processes; it ends with the process
        try:
            check_build(print)
        except RuntimeError as error:
            raise LaunchError(str(error)) from error
        done = subprocess.run(
            [sys.executable, "-c", "from deepspeed.comm.torch import build_shm_op; build_shm_op()"],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    if done.returncode:
        raise LaunchError(f"DeepSpeed's collectives can't be compiled\n{done.stdout}\n{done.stderr}")


def launch_preset(preset: Path, script: Sequence[str], folder: Path, *, options: Sequence[str] = ()) -> list[Report]:
    """Launch a script under a preset with at most two processes.

    Args:
        preset: The preset's YAML file.
        script: The script and its arguments; it reports with `report`.
        folder: Working folder, in which nothing but the reports lie.
        options: For `accelerate launch`, after those that lower the number of processes.

    Returns:
        What each rank reported, by rank.

    Raises:
        LaunchError: If it failed, hung, or another number of ranks reported than was asked for.
    """
    own, num_processes = options_of_launch(preset)
    return launch(["accelerate", "launch", *own, *options, *script], folder, num_processes)


def options_of_launch(preset: Path) -> tuple[list[str], int]:
    """The options of `accelerate launch` for a preset, and the processes that it is to start: at most two."""
    num_processes = min(yaml.safe_load(preset.read_text(encoding="utf-8"))["num_processes"], MAX_PROCESSES)
    options = ["--config_file", preset, "--num_processes", num_processes, "--main_process_port", 0]
    return list(map(str, options)), num_processes


def asked_of_processes(preset: Path, script: Sequence[str]) -> tuple[int, dict[str, str]]:
    """Let `accelerate launch` read a preset and start nothing.

    Args:
        preset: The preset's YAML file.
        script: The script and its arguments.

    Returns:
        How many processes it would have started with this script, and their environment.
    """
    from accelerate.commands import launch as accelerates
    from torch.distributed import run as torchruns

    options, _ = options_of_launch(preset)
    asked: list[tuple[int, dict[str, str]]] = []

    def run(arguments: Any) -> None:
        config, _, words = torchruns.config_from_args(arguments)
        assert words[-len(script) :] == list(script), words
        asked.append((config.max_nodes * config.nproc_per_node, dict(os.environ)))

    def start(command: Sequence[str], env: dict[str, str]) -> Any:
        assert command[-len(script) :] == list(script), command
        asked.append((1, env))
        return mock.Mock(returncode=0)

    with mock.patch.object(torchruns, "run", run), mock.patch.object(accelerates.subprocess, "Popen", start):
        accelerates.launch_command(accelerates.launch_command_parser().parse_args([*options, *script]))
    (found,) = asked
    return found


def launch(
    command: Sequence[str],
    folder: Path,
    num_ranks: int,
    *,
    variables: Mapping[str, str] | None = None,
    programs: Path | None = None,
    timeout_s: float = 240,
) -> list[Report]:
    """Run a command and read what each rank reported.

    Args:
        command: The command.
        folder: Its working folder.
        num_ranks: Ranks that must report.
        variables: Of the environment, on top of `environment()`.
        programs: A folder of programs that come before all others.
        timeout_s: Seconds until it counts as hung.

    Returns:
        What each rank reported, by rank.

    Raises:
        LaunchError: With everything that was printed.
    """
    process = subprocess.Popen(
        list(command),
        cwd=folder,
        env=environment(programs, SLIVERTUNE_REPORTS=str(folder), **(variables or {})),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=timeout_s)
        ended = f"exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        printed, _ = process.communicate()
        ended = f"hung for {timeout_s} s"
    paths = sorted(folder.glob("rank-*.json"), key=lambda path: int(path.stem.removeprefix("rank-")))
    if process.returncode != 0 or [path.stem for path in paths] != [f"rank-{rank}" for rank in range(num_ranks)]:
        names = ", ".join(path.name for path in paths) or "none"
        raise LaunchError(f"{shlex.join(command)}\n{ended}; reports of {num_ranks} ranks: {names}\n{printed}")
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def report(rank: int, facts: Report) -> None:
    """Write what a rank saw; called by the launched script.

    Args:
        rank: The rank.
        facts: What JSON holds.
    """
    path = Path(os.environ["SLIVERTUNE_REPORTS"]) / f"rank-{rank}.json"
    if path.exists():
        raise FileExistsError(f"two processes call themselves rank {rank}")
    path.write_text(json.dumps(facts), encoding="utf-8")
