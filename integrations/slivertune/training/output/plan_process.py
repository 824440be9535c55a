"""A plan in a process of its own: in a rank, torch and DeepSpeed would share its model and optimizer out as well."""

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
    """As `slivertune.planning.make.make_plan`.

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
    # Not before the process is quiet: some of what this imports logs.
    from slivertune.planning.make import make_plan

    return make_plan(request, config)
