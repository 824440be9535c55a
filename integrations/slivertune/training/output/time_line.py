"""The planned time of an update, made beside the training and said when it is there."""

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from slivertune.planning.byte_text import format_bytes
from slivertune.planning.plan import Plan, add_allowance
from slivertune.planning.planned_time import with_room_ahead
from slivertune.planning.time_report import format_seconds
from slivertune.training.assemble import Run
from slivertune.training.output.rates_here import RatesHere, rates_here
from slivertune.training.output.time_process import LENGTH_BYTES, TimeQuestion, UpdatePlan

OPERATOR_SECONDS = 20e-6
"""What Python and torch take to issue an operator; an assumption, of which a plan by rates holds nothing."""
_NOTED_SHARE = 0.1
"""On a CPU issuing comes on top of computing; a smaller share of it is not worth a word."""
COMMAND = (sys.executable, "-m", "slivertune.training.output.time_process")
NOT_READY = "the plan was not ready when training ended"


class TimeLine(TrainerCallback):
    """Has an update's time planned in a process of its own, and says it as soon as an update ends after it is there.

    No failure of it breaks a run. The process has the lowest priority, one thread and no GPU; it ends with `close`, and
    also if this process dies without that.

    Args:
        say: Shows a line to the user.
        is_on_cpu: Whether the run trains on a CPU.
    """

    def __init__(self, say: Callable[[str], None], *, is_on_cpu: bool) -> None:
        self._say = say
        self._is_on_cpu = is_on_cpu
        self._process: subprocess.Popen[bytes] | None = None
        self._source = ""
        self.plan: UpdatePlan | None = None
        """None where there is none, or none yet."""
        self.reason: str | None = None
        """Why there is none at the end."""

    def start(self, question: TimeQuestion, source: str, command: Sequence[str]) -> None:
        """Begin to plan.

        Args:
            question: What.
            source: Says what the rates are.
            command: What answers.

        Raises:
            OSError: If the process can't be started.
        """
        self._source = source
        pickled = pickle.dumps(question)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "OMP_NUM_THREADS": "1",
            # Its context would take half a gigabyte of a GPU that is planned to the last one.
            "CUDA_VISIBLE_DEVICES": "",
        }
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        # One that has ended already says so by its code.
        with suppress(BrokenPipeError):
            self._process.stdin.write(len(pickled).to_bytes(LENGTH_BYTES, "big") + pickled)
            self._process.stdin.flush()

    def fail(self, error: Exception) -> None:
        """Say why there is no plan.

        Args:
            error: What came in the way.
        """
        self.reason = f"not planned: {' '.join(str(error).split()) or type(error).__name__}"
        self._say(f"  time    {self.reason}")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Look whether the plan is there."""
        self.look()

    def look(self) -> None:
        """Say the plan, or why there is none, if the process has ended."""
        process = self._process
        if process is None or process.poll() is None:
            return
        self._process = None
        try:
            self.plan = _read(process)
        except (ValueError, RuntimeError) as error:
            self.fail(error)
            return
        planned, note = self.plan, self.note
        disk = planned.disk_bytes_per_hour
        note = ", ".join(filter(None, (f"{format_bytes(disk)} an hour written to disk" if disk else "", note)))
        self._say(
            f"  time    {format_seconds(planned.seconds)} planned an update ({planned.tokens_per_second:,.0f} tokens a "
            f"second; {self._source})" + (f", {note}" if note else "")
        )

    @property
    def note(self) -> str | None:
        """What the planned time leaves out, where that counts; None where it does not, and without a plan."""
        if self.plan is None:
            return None
        issuing = OPERATOR_SECONDS * self.plan.num_operators
        # A GPU computes while Python issues what comes next.
        if issuing < self.plan.seconds * (_NOTED_SHARE if self._is_on_cpu else 1):
            return None
        return (
            f"from operators alone: Python takes about {format_seconds(issuing)} to issue the "
            f"{self.plan.num_operators:,.0f} of an update"
        )

    def close(self) -> None:
        """Take the plan if it is there, and end the process; harmless when there is none."""
        self.look()
        process, self._process = self._process, None
        if process is not None:
            self.reason = NOT_READY
            process.kill()
            _reap(process)


def plan_time_beside(run: Run, plan: Plan | None) -> TimeLine:
    """Begin to plan how long an update of a run takes, if its peak could be planned. Never raises.

    Args:
        run: About to train.
        plan: Of its peak; None where there is none.

    Returns:
        A callback of the run's Trainer already; to be closed.
    """
    device = run.arguments.training.device
    line = TimeLine(run.display.say, is_on_cpu=device.type == "cpu")
    if plan is None:
        return line
    try:
        here = rates_here(device, plan.request)
        line.start(time_question(run, plan, here), here.source, COMMAND)
    # Whatever a plan stumbles over, the run may do.
    except Exception as error:
        line.fail(error)
        return line
    run.trainer.add_callback(line)
    return line


def time_question(run: Run, plan: Plan, here: RatesHere) -> TimeQuestion:
    """What to plan for a run.

    Args:
        run: About to train.
        plan: Of its peak.
        here: What its device reaches.
    """
    if here.memory_bytes is not None:
        plan = with_room_ahead(add_allowance(plan), here.memory_bytes)
    return TimeQuestion(plan=plan, config=run.source.config, rates=here.rates)


def _read(process: subprocess.Popen[bytes]) -> UpdatePlan:
    """The answer of a process that has ended.

    Raises:
        RuntimeError: If it has none; says why.
    """
    assert process.stdout is not None
    said = process.stdout.read()
    _reap(process)
    if not said:
        raise RuntimeError(f"the process that plans it ended with code {process.returncode}")
    fields = json.loads(said)
    if "error" in fields:
        raise RuntimeError(fields["error"])
    return UpdatePlan(**fields)


def _reap(process: subprocess.Popen[bytes]) -> None:
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.close()
