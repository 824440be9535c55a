"""The training run that `faults.py` ends: a user's script with checkpoints, which it can end by itself at any call."""

import hashlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from accelerators import make_accelerator
from llama import LlamaSizes, build_llama, random_batch
from torch.optim.lr_scheduler import LambdaLR

import slivertune as st

SIZES = LlamaSizes(hidden=32, intermediate=64, blocks=2, heads=2, vocabulary=97, batch_size=2, length=16)
UPDATES = 12
"""Three cycles of HiFT's four groups."""
SAVE_EVERY = 3
COLLECTIVE_TIMEOUT_S = 20
CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Kill:
    """When a run is ended."""

    phase: str
    update: int
    """Counted from 1."""
    call: int
    """Of the calls and returns, in Python and in C, that the phase makes."""
    rank: int
    """Whose calls are counted."""
    everyone: bool
    """Whether all ranks are ended in that moment, or that rank alone."""


class Watch:
    """Counts the calls of each phase of each update, and ends the run at the one that was asked for.

    Args:
        folder: Where the moment is recorded before the end.
        kill: When to end; never when None.
    """

    def __init__(self, folder: Path, kill: Kill | None) -> None:
        self.folder, self.kill = folder, kill
        self.counts: dict[str, dict[int, int]] = {}

    @contextmanager
    def phase(self, name: str, update: int) -> Iterator[None]:
        calls = 0
        at = self.kill.call if self.kill and (self.kill.phase, self.kill.update) == (name, update) else None

        def count(frame: Any, event: str, argument: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == at:
                self.end(frame, event, argument)

        sys.setprofile(count)
        try:
            yield
        finally:
            sys.setprofile(None)
            self.counts.setdefault(name, {})[update] = calls
        if at is not None:
            self.end(None, "after the last call", None)  # a run that loaded a checkpoint may make fewer

    def end(self, frame: Any, event: str, argument: Any) -> None:
        sys.setprofile(None)
        assert self.kill is not None
        where = getattr(argument, "__qualname__", "") if event.startswith("c_") else getattr(frame, "f_code", None)
        name = getattr(where, "co_qualname", where) or ""
        record = {**asdict(self.kill), "event": event, "function": str(name)}
        (self.folder / "killed.json").write_text(json.dumps(record), encoding="utf-8")
        if self.kill.everyone:
            os.killpg(os.getpgrp(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


class Run:
    """The user's script under one layout with one method.

    Args:
        layout: "single", "ddp", "fsdp2", "zero2" or "zero3".
        method: "hift", "sft" or "tokentune_hift".
    """

    def __init__(self, layout: str, method: str) -> None:
        self.accelerator = make_accelerator(layout, bf16=True)
        if layout == "fsdp2":
            # Accelerate chooses FSDP for GPUs alone, and asks here again when it saves.
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        network: Any = build_llama(SIZES, dtype=torch.bfloat16, device=CPU, seed=0)
        self.handle = st.TokenTune(ratio=0.5, seed=5).attach(network) if method == "tokentune_hift" else None
        optimizer: Any
        if method == "sft":
            config = st.SFTConfig(density=0.1, reselection_interval=5, estimation_steps=2)
            optimizer = st.SFT(network, config=config, lr=1e-2, total_steps=UPDATES)
        else:
            optimizer = st.HiFT(network, torch.optim.AdamW, config=st.HiFTConfig.paper(), lr=1e-2)
        self.built = optimizer
        schedule = LambdaLR(optimizer, lambda ticks: 1 / (1 + 0.1 * ticks))
        self.model, self.optimizer, self.schedule = st.prepare(self.accelerator, network, optimizer, schedule)
        if self.handle is not None:
            self.accelerator.register_for_checkpointing(self.handle)
        for layer in network.model.layers:
            layer.register_forward_hook(call_in_backward)

    def train(self, start: int, checkpoints: Path, watch: Watch) -> dict[str, str]:
        """Train from an update to the end, with a checkpoint every few; each update's loss, to the bit."""
        losses = {}
        rank, num_ranks = self.accelerator.process_index, self.accelerator.num_processes
        for update in range(start + 1, UPDATES + 1):
            batch = random_batch(SIZES, device=CPU, seed=num_ranks * update + rank)
            with watch.phase("forward", update):
                loss = self.model(**batch).loss
            with watch.phase("backward", update):
                self.accelerator.backward(loss)
            with watch.phase("step", update):
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            losses[str(update)] = float(loss.detach()).hex()
            if update % SAVE_EVERY == 0 and update < UPDATES:
                self.save(checkpoints, update, watch)
        return losses

    def save(self, checkpoints: Path, update: int, watch: Watch) -> None:
        """Write a checkpoint under another name, and rename it once all ranks have written."""
        partial = checkpoints / f"partial-{update}"
        with watch.phase("save", update):
            self.accelerator.save_state(str(partial))
            self.accelerator.wait_for_everyone()
        with watch.phase("rename", update):
            if self.accelerator.is_main_process:
                partial.rename(checkpoints / f"checkpoint-{update}")
        self.accelerator.wait_for_everyone()

    def weights(self) -> str:
        """Hash the weights that this rank holds, and SFT's deltas."""
        return bytes_digest(self.accelerator.unwrap_model(self.model), self.built)


def bytes_digest(model: Any, optimizer: Any) -> str:
    """Hash the weights that this rank holds, and SFT's deltas."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        held = parameter.ds_tensor if hasattr(parameter, "ds_id") else parameter.detach()
        held = held.to_local() if hasattr(held, "to_local") else held
        digest.update(name.encode() + bytes_of(held))
    for name, delta in optimizer.deltas().items() if isinstance(optimizer, st.SFT) else ():
        digest.update(name.encode() + bytes_of(delta.indices) + bytes_of(delta.values))
    return digest.hexdigest()


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy())


def call_in_backward(module: Any, args: Any, output: Any) -> None:
    """Give the backward pass a call of Python at each block, so that a run can be ended between two of them."""
    hidden = output[0] if isinstance(output, tuple) else output
    if hidden.requires_grad:
        hidden.register_hook(lambda gradient: None)


def newest(checkpoints: Path) -> Path | None:
    """Return the newest checkpoint that was renamed, so that all ranks have written it."""
    found = sorted(checkpoints.glob("checkpoint-*"), key=lambda path: int(path.name.removeprefix("checkpoint-")))
    return found[-1] if found else None


def join(rank: int, num_ranks: int, folder: Path) -> None:
    """Become a rank of a group over a file; alone, a process as any other."""
    torch.set_num_threads(1)
    if num_ranks == 1:
        return
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "LOCAL_WORLD_SIZE": str(num_ranks)}
    os.environ.update(address, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks))
    store = dist.FileStore(str(folder / "store"), num_ranks)
    limit = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=limit)


def train(rank: int, num_ranks: int, folder: Path, checkpoints: Path, cell: tuple[str, str], kill: Kill | None) -> None:
    """One rank of a run that goes on from the newest checkpoint; writes what it came to."""
    join(rank, num_ranks, folder)
    watch = Watch(folder, kill if kill and kill.rank == rank else None)
    run = Run(*cell)
    found = newest(checkpoints)
    if found is not None:
        run.accelerator.load_state(str(found))
    if run.accelerator.is_main_process:
        for left in checkpoints.glob("partial-*"):
            shutil.rmtree(left)
    run.accelerator.wait_for_everyone()
    start = int(found.name.removeprefix("checkpoint-")) if found is not None else 0
    losses = run.train(start, checkpoints, watch)
    result = {"start": start, "losses": losses, "weights": run.weights(), "calls": watch.counts}
    report(rank, num_ranks, folder, result)


def load(rank: int, num_ranks: int, folder: Path, checkpoint: Path, cell: tuple[str, str]) -> None:
    """One rank of a run that loads a folder and makes one update; writes whether that was refused, and how."""
    join(rank, num_ranks, folder)
    run = Run(*cell)
    try:
        run.accelerator.load_state(str(checkpoint))
        run.accelerator.backward(run.model(**random_batch(SIZES, device=CPU, seed=rank)).loss)
        run.optimizer.step()
    except BaseException as error:  # torch.distributed.checkpoint's own is no Exception
        report(rank, num_ranks, folder, {"refused": f"{type(error).__name__}: {error}"})
    else:
        report(rank, num_ranks, folder, {"refused": None})


def report(rank: int, num_ranks: int, folder: Path, result: dict[str, Any]) -> None:
    """Write a rank's result whole, and wait for the others', whose connections this rank's end would break."""
    temporary = folder / f"rank-{rank}.partial"
    temporary.write_text(json.dumps(result), encoding="utf-8")
    temporary.rename(folder / f"rank-{rank}.json")
    deadline = time.monotonic() + COLLECTIVE_TIMEOUT_S
    while len(list(folder.glob("rank-*.json"))) < num_ranks and time.monotonic() < deadline:
        time.sleep(0.02)
