"""A plan in its own process. In a rank, torch and DeepSpeed would shard the plan's model and optimizer as well."""

from __future__ import annotations

import logging
import multiprocessing
import signal
import warnings
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from slivertune.planning.plan import Plan
    from slivertune.planning.request import PlanRequest


def plan_in_process(request: PlanRequest, config: PreTrainedConfig) -> Plan:
    """Run `slivertune.planning.make.make_plan` in its own process.

    Raises:
        concurrent.futures.process.BrokenProcessPool: If the process died.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=_be_quiet) as pool:
        return pool.submit(_plan, request, config).result()


def _be_quiet() -> None:
    """Leave Ctrl-C to the run, and warnings to the training that they are about."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def _plan(request: PlanRequest, config: PreTrainedConfig) -> Plan:
    # Only when the process is quiet, since some of the imported modules log.
    from slivertune.planning.make import make_plan

    return make_plan(request, config)
