"""The process that plans how long an update takes, beside the training: `python -m` this module.

It reads a pickled `TimeQuestion` from standard input, eight bytes of length first, and writes one line of JSON to
standard output: the fields of an `UpdatePlan`, or `error`, why there is none. Its standard input stays open as long as
someone wants the answer; when it is closed, the process ends. It computes in one thread and with the lowest priority.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import signal
import sys
import threading
import warnings
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

# What is imported here is imported before the question is read, for which the training waits.
if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from slivertune.planning.cards import Rates
    from slivertune.planning.plan import Plan

LENGTH_BYTES = 8
_LOWEST_PRIORITY = 19


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeQuestion:
    """What the process is asked."""

    plan: Plan
    config: PreTrainedConfig
    rates: Rates


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdatePlan:
    """How long an update is planned to take."""

    seconds: float
    num_tokens: int
    """That it trains on, on all devices."""
    num_operators: float
    """That Python issues for it, in the mean over all updates."""
    disk_bytes_per_hour: float = 0.0
    """That each process writes to files."""

    @property
    def tokens_per_second(self) -> float:
        """On all devices."""
        return self.num_tokens / self.seconds


def answer(question: TimeQuestion) -> UpdatePlan:
    """Plan an update's time.

    Args:
        question: What is to be planned.

    Raises:
        ValueError: If the model can't be run without data.
    """
    from slivertune.planning.planned_time import play_run, record_run

    schedule = record_run(question.plan.request, question.config)
    planned = play_run(question.plan, schedule, question.rates)
    return UpdatePlan(
        seconds=planned.seconds,
        num_tokens=planned.num_tokens,
        num_operators=schedule.mean_of_operators(lambda cost: 1),
        disk_bytes_per_hour=planned.disk_bytes_per_hour,
    )


def main() -> None:
    """Answer the question on standard input."""
    # Ctrl-C is for the training, which ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(_LOWEST_PRIORITY)
    question = sys.stdin.buffer.read(int.from_bytes(sys.stdin.buffer.read(LENGTH_BYTES), "big"))
    threading.Thread(target=_end_when_nobody_asks, daemon=True).start()
    # Libraries may print; the answer is all that is said.
    line = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    said: dict[str, object]
    try:
        import torch

        torch.set_num_threads(1)
        said = asdict(answer(pickle.loads(question)))
    # Whatever a plan stumbles over, the run may do.
    except Exception as error:
        said = {"error": " ".join(str(error).split()) or type(error).__name__}
    with line:
        json.dump(said, line)


def _end_when_nobody_asks() -> None:
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
