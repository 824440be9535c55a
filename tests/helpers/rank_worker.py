"""The process of a rank: one case after another, each as if the process had just begun."""

import faulthandler
import gc
import importlib
import itertools
import os
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from tests.helpers.process_baseline import Baseline
from tests.helpers.process_state import forget_accelerate, forget_engines, release_attention, reset_torch, seed_all


def serve(connection: Connection, rank: int, num_ranks: int, folder: Path, collective_timeout_s: float) -> None:
    """Run the cases that come through a connection, until it is closed or one of them fails.

    Args:
        connection: Brings the environment of a case, and takes the names of state that the case before has left behind.
            Then brings the pickled function and arguments, and takes the pickled outcome: whether it returned, and
            the result or the traceback.
        rank: This rank.
        num_ranks: Ranks.
        folder: Shared by the ranks; this one prints to a file there.
        collective_timeout_s: Seconds until a collective raises.
    """
    with log_of(folder, rank).open("wb", buffering=0) as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # prints where a rank hangs
    importlib.import_module("tests.helpers.rank_imports")
    # The Trainer before transformers 5.18 reads its state onto "cpu:0" there, which torch knows as "cpu" alone.
    torch.serialization.register_package(0, lambda _: None, lambda obj, place: obj if place == "cpu:0" else None)
    working_folder, num_modules, baseline = Path.cwd(), freeze_modules(0), Baseline()
    for number in itertools.count():
        try:
            environment = pickle.loads(connection.recv_bytes())
            begin(working_folder, {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            connection.send(baseline.restore())
            case = connection.recv_bytes()
        except EOFError:
            os._exit(0)
        try:
            join_group(folder / f"store-{number}", rank, num_ranks, collective_timeout_s)
            function, arguments = pickle.loads(case)
            num_modules = freeze_modules(num_modules)
            baseline.add_modules()
            with warnings.catch_warnings():
                succeeded, outcome = True, pickle.dumps((True, function(rank, num_ranks, *arguments)))
        except BaseException:
            succeeded, outcome = False, pickle.dumps((False, traceback.format_exc()))
        connection.send_bytes(outcome)
        if not succeeded:
            # Engines leave threads and groups behind whose teardown has aborted processes after their work was done.
            os._exit(1)


def begin(working_folder: Path, environment: Mapping[str, str]) -> None:
    """Forget the case before, from which every rank has returned by now.

    Args:
        working_folder: The one to be in.
        environment: All of its variables.
    """
    os.chdir(working_folder)
    os.environ.clear()
    os.environ.update(environment)
    forget_accelerate()
    release_attention()
    forget_engines()
    reset_torch()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    seed_all()


def join_group(store: Path, rank: int, num_ranks: int, timeout_s: float) -> None:
    """Join the ranks' process group, which stays unless a case destroys it."""
    if not dist.is_initialized():
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(store), num_ranks),
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=timeout_s),
        )


def freeze_modules(known: int) -> int:
    """Keep the garbage collector from looking through modules, which takes 0.2 s, if there are more than were known.

    What modules hold is never garbage, and DeepSpeed's stage 3 collects garbage for each optimizer that it makes.
    """
    if len(sys.modules) > known:
        gc.freeze()
    return len(sys.modules)


def log_of(folder: Path, rank: int) -> Path:
    """The file of what a rank has printed."""
    return folder / f"{rank}.txt"
