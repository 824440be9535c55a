"""Ranks that die or stop: the others end, and say which it was and where it was last seen."""

import os
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from slivertune.core.layout import Layout
from tests.helpers.ranks import quick, run_ranks
from tests.parallel.contract.hift import HiFTCase
from tests.parallel.contract.runs import Case, message_of, running
from tests.parallel.contract.sft import SFTCase

METHODS: dict[str, Case] = {"hift": HiFTCase(), "sft": SFTCase(model="llama", density=0.05, interval=4, gamma=2)}


def vanish(rank: int, num_ranks: int, method: str, layout: Layout, moment: str, folder: Path) -> tuple[str, float]:
    with running(replace(METHODS[method], bare=moment == "bare"), layout, rank) as run:
        run.train(0, 2)
        if rank == 1:
            if moment == "saving":
                # After the ranks have compared their work and written what is ours.
                run.accelerator.register_save_state_pre_hook(lambda *_: os._exit(1))
            elif moment == "in a forward":
                run.model.model.layers[0].register_forward_hook(lambda *_: os._exit(1))
            elif moment == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            else:
                os._exit(1)
        began = time.monotonic()
        call = partial(run.accelerator.save_state, folder) if moment == "saving" else partial(run.train, 2, 3)
        return message_of(call), time.monotonic() - began


AT_2 = "this rank is at update 2"
SEEN = "rank 1 was last seen at update 2"
VANISHED: dict[tuple[str, Layout, str], tuple[str, ...]] = {
    ("hift", "ddp", "training"): (f"rank 0 failed averaging gradients: {AT_2}, group 2", f"{SEEN}, group 2"),
    ("hift", "ddp", "saving"): (f"rank 0 failed saving a checkpoint: {AT_2}", f"; rank 1 has ended; {SEEN}"),
    ("hift", "fsdp2", "training"): (f"rank 0 failed beginning a forward pass: {AT_2}, group 2", f"{SEEN}, group 2"),
    ("hift", "fsdp2", "in a forward"): (f"rank 0 failed in a forward pass: {AT_2}, group 2", f"{SEEN}, group 2"),
    ("hift", "zero2", "bare"): (
        f"rank 0 failed in the backward of group 2: {AT_2}, group 2",
        "rank 1 was last seen at update 1, group 1",
    ),
    ("sft", "fsdp2", "training"): (f"rank 0 failed beginning a forward pass: {AT_2}", f"; rank 1 has ended; {SEEN}"),
    ("sft", "fsdp2", "saving"): (f"rank 0 failed saving a checkpoint: {AT_2}", f"; rank 1 has ended; {SEEN}"),
    ("sft", "ddp", "training"): ("rank 0 failed", SEEN),
    ("hift", "zero2", "training"): ("rank 1 has ended",),
    ("hift", "zero2", "stopped"): ("rank 1 is stopped (SIGSTOP, or a debugger)",),
}
LIMIT = 6
"""Seconds that the user gives a collective, where the other rank does not end."""


@pytest.mark.parametrize(
    ("method", "layout", "moment"), quick(VANISHED, [*list(VANISHED)[:5], ("sft", "fsdp2", "saving")])
)
def test_a_rank_that_vanishes_is_named_with_where_it_was(
    method: str, layout: Layout, moment: str, tmp_path: Path
) -> None:
    (message, seconds), _ = run_ranks(
        vanish,
        2,
        method,
        layout,
        moment,
        tmp_path / "saved",
        may_die=(1,),
        timeout_s=90,
        collective_timeout_s=LIMIT if moment == "stopped" else 60,
    )
    assert message.startswith("RuntimeError: ")
    assert all(part in message for part in VANISHED[method, layout, moment]), message
    # At once where the other has ended; else within the limit and the few seconds in which it looks for the others.
    assert seconds < (LIMIT + 30 if moment == "stopped" else 30)
