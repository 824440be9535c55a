"""The ranks of the tests: each case reports for itself, and begins as if its processes had just started."""

import logging
import os
import random
import re
import signal
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.overrides import BaseTorchFunctionMode

from slivertune.core import ledger
from slivertune.parallel.ddp import gradient_sync
from tests.helpers.ranks import RankError, ran_once, run_ranks


def process_id(rank: int, num_ranks: int) -> int:
    return os.getpid()


def fail_on_one(rank: int, num_ranks: int) -> None:
    print(f"seen on {rank}")
    if rank == 1:
        raise ValueError("only here")


def die_on_one(rank: int, num_ranks: int) -> None:
    if rank == 1:
        os.write(2, b"last words")
        os.abort()


def hang(rank: int, num_ranks: int, what: str) -> None:
    if rank == 0:
        time.sleep(600)


@pytest.mark.slow
def test_ranks_stay_for_the_next_case() -> None:
    assert run_ranks(process_id, 2) == run_ranks(process_id, 2)
    assert set(run_ranks(process_id, 2)).isdisjoint(run_ranks(process_id, 2, is_first=True))
    assert set(run_ranks(process_id, 2)).isdisjoint(run_ranks(process_id, 1))


@pytest.mark.parametrize(
    ("function", "args", "said"),
    [
        (fail_on_one, (), r"^fail_on_one\(\)\nrank 1 failed:(?s:.*)ValueError: only here\n\nand printed:\nseen on 1$"),
        (
            die_on_one,
            (),
            r"^die_on_one\(\)\nrank 1 vanished \(exit code -6\)\nand printed:\nlast wordsFatal(?s:.*)die_on_",
        ),
        (
            hang,
            ("here",),
            r"^hang\('here'\)\nrank 0 did not return within 2 s(?s:.*)test_ranks.py\", line \d+ in hang",
        ),
    ],
    ids=["fails", "dies", "hangs"],
)
def test_a_case_that_fails_is_named_with_the_rank_and_what_it_printed_and_the_next_has_new_ranks(
    function: object, args: tuple[str, ...], said: str
) -> None:
    before, began = run_ranks(process_id, 2), time.monotonic()
    with pytest.raises(RankError) as raised:
        run_ranks(function, 2, *args, timeout_s=2)  # type: ignore[arg-type]
    assert re.search(said, str(raised.value)), str(raised.value)
    assert time.monotonic() - began < 60, "the case's own limit, and not that of its collectives"
    assert not any(Path(f"/proc/{process}").exists() for process in before)
    assert set(run_ranks(process_id, 2)).isdisjoint(before)


def test_ranks_that_may_die_are_not_waited_for() -> None:
    assert run_ranks(die_on_one, 2, may_die=(1,)) == [None, None]
    began = time.monotonic()
    assert run_ranks(hang, 2, "here", may_die=(0,)) == [None, None]
    assert time.monotonic() - began < 60


def count(rank: int, num_ranks: int, folder: Path) -> int:
    path = folder / str(rank)
    path.write_text(path.read_text() + "x" if path.exists() else "x")
    if rank == 1:
        raise ValueError("only here")
    return rank


def test_how_a_case_ended_is_known_when_it_is_asked_for_again(tmp_path: Path) -> None:
    run = ran_once(count, 2, tmp_path)
    for _ in range(2):
        with pytest.raises(RankError, match="only here"):
            run()
    assert (tmp_path / "0").read_text() == (tmp_path / "1").read_text() == "x"


def leave_everything_changed(rank: int, num_ranks: int, folder: Path) -> list[int]:
    import deepspeed
    from accelerate import Accelerator

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which is compiled for a minute, once on a machine
    Accelerator(cpu=True, mixed_precision="bf16")
    deepspeed.init_distributed(dist_backend="gloo")
    deepspeed.utils.groups._clone_world_group()
    with deepspeed.zero.Init(config_dict_or_path={"train_batch_size": num_ranks, "zero_optimization": {"stage": 3}}):
        torch.nn.Linear(2, 2)
    dist.new_group()
    os.chdir(folder)
    os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
    warnings.simplefilter("ignore")
    logging.getLogger("slivertune").setLevel(logging.CRITICAL)
    logging.getLogger().addHandler(logging.NullHandler())
    gradient_sync.BUCKET_BYTES = 1
    gradient_sync.BucketedAllReduce.another = None  # type: ignore[attr-defined]
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)
    torch.set_num_threads(3)
    torch.set_float32_matmul_precision("medium")
    torch.set_autocast_enabled("cpu", True)
    torch.use_deterministic_algorithms(True)
    torch.rand(1, device="cpu"), random.random()
    return [os.getpid()]


def describe_beginning(rank: int, num_ranks: int) -> dict[str, object]:
    """Describe all that `leave_everything_changed` changes."""
    from accelerate.state import AcceleratorState, PartialState

    return {
        "accelerate": (PartialState._shared_state, AcceleratorState._shared_state),
        "groups": len(dist.distributed_c10d._world.pg_map),
        "groups of DeepSpeed": deepspeed_group(),
        "folder": Path.cwd(),
        "environment": {key: value for key, value in os.environ.items() if key != "MASTER_PORT"},
        "filters": list(map(repr, warnings.filters)),
        "logging": (
            logging.getLogger("slivertune").level,
            len(logging.getLogger().handlers),
            logging.getLogger("torch.autograd.graph").getEffectiveLevel(),
        ),
        "attributes": (gradient_sync.BUCKET_BYTES, hasattr(gradient_sync.BucketedAllReduce, "another")),
        "linear": torch.nn.functional.linear.__name__,
        "torch": (
            torch.get_default_dtype(),
            torch.get_default_device(),
            torch.is_grad_enabled(),
            torch.get_num_threads(),
            torch.get_float32_matmul_precision(),
            torch.is_autocast_enabled("cpu"),
            torch.are_deterministic_algorithms_enabled(),
        ),
        "drawn": (float(torch.rand(1)), random.random()),
        "sum": float(dist.all_reduce(torch.ones(1)) or num_ranks),
    }


def deepspeed_group() -> object:
    from deepspeed.utils import groups

    return groups._WORLD_GROUP


def end_the_group(rank: int, num_ranks: int) -> list[int]:
    dist.destroy_process_group()
    return [os.getpid()]


def test_a_case_begins_as_if_its_processes_had_just_started(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    expected = run_ranks(describe_beginning, 2, is_first=True)
    # At DEBUG torch hooks every node of every graph to log it.
    assert [each["logging"] for each in expected] == [(logging.NOTSET, 0, logging.WARNING)] * 2
    for function, args in ((leave_everything_changed, (tmp_path,)), (end_the_group, ())):
        processes = run_ranks(function, 2, *args)
        assert run_ranks(describe_beginning, 2) == expected
        assert [[each] for each in run_ranks(process_id, 2)] == processes, "the same ones"


LEFT: dict[str, Callable[[], object]] = {
    "threads: ": lambda: threading.Thread(target=time.sleep, args=(600,), daemon=True).start(),
    "hooks of all modules: ": lambda: torch.nn.modules.module.register_module_forward_hook(lambda *_: None),
    "modes of torch: ": lambda: BaseTorchFunctionMode().__enter__(),
    "signal handlers: ": lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
    "slivertune.core.ledger._watching of length 1": lambda: ledger._watching.append(ledger.Ledger()),
}


def leave_on_one(rank: int, num_ranks: int, left: str) -> int:
    if rank == 1:
        LEFT[left]()
    return os.getpid()


@pytest.mark.parametrize("left", LEFT)
def test_a_case_that_leaves_what_cannot_be_set_back_is_the_last_of_its_ranks(
    left: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = run_ranks(leave_on_one, 2, left)
    assert set(run_ranks(process_id, 2)).isdisjoint(before)
    assert f"new ranks, since the case before left behind: {left}" in capsys.readouterr().out
