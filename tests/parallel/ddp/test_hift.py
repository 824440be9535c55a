from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import slivertune
from slivertune import HiFT, HiFTConfig
from slivertune.core.ledger import Ledger
from slivertune.parallel.checkpoint.sidecar import keep_sidecar
from slivertune.parallel.ddp import gradient_sync
from slivertune.parallel.ddp.hift import share_hift
from tests.helpers.models import differing, tiny_llama, weights
from tests.helpers.ranks import run_ranks
from tests.helpers.reference import naive_groups
from tests.helpers.tolerance import assert_step_close, with_exact
from tests.parallel.reference import (
    ADAMW,
    CAP,
    OneProcess,
    after_two_ranks,
    batch_of,
    halving,
    largest_difference,
    on_ranks,
)

CYCLE = 5
"""Groups of the tiny Llama: embedding, three blocks, head."""


class Run:
    """A training loop under an Accelerator with plain DDP, written as users write it."""

    def __init__(
        self,
        accelerator: Any,
        rank: int,
        model: nn.Module,
        *,
        accumulation: int = 1,
        max_norm: float | None = None,
        **config: Any,
    ) -> None:
        self.accelerator, self.rank = accelerator, rank
        self.accumulation, self.max_norm = accumulation, max_norm
        self.hift = HiFT(model, torch.optim.AdamW, config=HiFTConfig(**config), **ADAMW)
        schedule = LambdaLR(self.hift, halving)
        self.model, self.optimizer, self.scheduler = slivertune.prepare(accelerator, model, self.hift, schedule)
        self.norms: list[float] = []

    def train(self, start: int, stop: int) -> Run:
        for update in range(start, stop):
            for micro in range(self.accumulation):
                with self.accelerator.accumulate(self.model):
                    loss = self.model(**batch_of(update, micro, self.rank)).loss
                    self.accelerator.backward(loss)
                    if self.max_norm is not None and self.accelerator.sync_gradients:
                        self.norms.append(
                            float(self.accelerator.clip_grad_norm_(self.model.parameters(), self.max_norm))
                        )
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
        return self

    def state(self) -> dict[str, torch.Tensor]:
        whole = self.hift.whole_state()["state"]
        return {f"{name}/{key}": value for name, values in whole.items() for key, value in values.items()}

    def masters(self) -> dict[str, torch.Tensor]:
        return {
            name: state["master"].clone()
            for name, state in self.hift.whole_state()["state"].items()
            if "master" in state
        }


def against_one_process(
    rank: int,
    num_ranks: int,
    *,
    updates: int,
    dtype: torch.dtype = torch.float32,
    tied: bool = False,
    checkpointing: bool | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Largest differences of a run on the ranks to the reference."""
    # Every rank begins with other weights: those of rank 0 count.
    model = tiny_llama(dtype, tied=tied, seed=rank)
    if checkpointing is not None:
        model.gradient_checkpointing_enable(  # type: ignore[operator]
            gradient_checkpointing_kwargs={"use_reentrant": checkpointing}
        )
    config = {key: options.pop(key) for key in ("steps_per_group", "stream_bytes") if key in options}
    with on_ranks(gradient_accumulation_steps=options.get("accumulation", 1)) as accelerator:
        assert str(accelerator.distributed_type).endswith("MULTI_CPU")
        run = Run(accelerator, rank, model, **options, **config).train(0, updates)
    assert not isinstance(run.model, nn.parallel.DistributedDataParallel)
    assert run.hift.updates == updates
    config.pop("stream_bytes", None)
    other = tiny_llama(dtype, tied=tied)
    before = weights(other)
    reference = OneProcess(other, naive_groups(other, 1), ranks=num_ranks, **options, **config).run(updates)
    return {
        "weights": largest_difference(weights(run.model), weights(other)),
        "masters": largest_difference(run.masters(), {k: v.detach() for k, v in reference.masters.items()})
        if dtype == torch.bfloat16
        else 0.0,
        "norms": max((abs(a / b - 1) for a, b in zip(run.norms, reference.norms, strict=True)), default=0.0),
        "moved": len(differing(weights(run.model), before)) == len(before),
        "clipped": all(norm > (options.get("max_norm") or 0) for norm in run.norms),
    }


CASES: dict[str, dict[str, Any]] = {
    "fp32": {"updates": 2 * CYCLE + 1},
    "accumulation 2, clipping": {"updates": 2 * CYCLE, "accumulation": 2, "max_norm": 0.05},
    "bf16 weights, fp32 masters": {"updates": 2 * CYCLE + 1, "dtype": torch.bfloat16},
    "bf16, accumulation 2, clipping": {
        "updates": 2 * CYCLE,
        "dtype": torch.bfloat16,
        "accumulation": 2,
        "max_norm": 0.05,
    },
    "three steps a group": {"updates": 6 * CYCLE + 1, "steps_per_group": 3},
    "checkpointing": {"updates": 2 * CYCLE, "checkpointing": False},
    "reentrant checkpointing": {"updates": 2 * CYCLE, "checkpointing": True},
    "tied embeddings": {"updates": 2 * CYCLE, "tied": True},
    "small pieces": {"updates": 2 * CYCLE, "dtype": torch.bfloat16, "stream_bytes": 16_384},
    "whole groups": {"updates": 2 * CYCLE, "dtype": torch.bfloat16, "stream_bytes": 0},
}


def all_cases(rank: int, num_ranks: int, bucket_bytes: int) -> dict[str, Any]:
    gradient_sync.BUCKET_BYTES = bucket_bytes
    return {name: against_one_process(rank, num_ranks, **dict(case)) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def figures() -> list[dict[str, Any]]:
    # Buckets of 3,000 bytes cut every weight of the tiny model, most of them in several parts.
    return run_ranks(all_cases, 2, 3_000)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_one_process_that_sees_both_ranks_rows(figures: list[dict[str, Any]], case: str) -> None:
    for each in figures:
        figure = each[case]
        assert figure["moved"] and figure["clipped"]
        # The mean of two is exact but for the one rounding that the reference makes too, so nothing may differ.
        assert (figure["weights"], figure["masters"], figure["norms"]) == (0.0, 0.0, 0.0)


def save_and_resume(rank: int, num_ranks: int, folder: str) -> dict[str, Any]:
    """Seven updates, saved in mid-cycle after three; the same again from the saved state."""
    figures: dict[str, Any] = {}
    for dtype, master in ((torch.float32, "fp32"), (torch.bfloat16, "fp32"), (torch.bfloat16, "split")):
        place = f"{folder}/{dtype}-{master}"
        with on_ranks() as accelerator:
            run = Run(accelerator, rank, tiny_llama(dtype), master=master).train(0, 7)
            accelerator.save_state(place)
            accelerator.wait_for_everyone()
            placeholder = torch.load(f"{place}/optimizer.bin")["state"]
            run.train(7, 15)
        with on_ranks() as accelerator:
            again = Run(accelerator, rank, tiny_llama(dtype, seed=7), master=master)
            accelerator.load_state(place)
            assert again.hift.updates == 7 and again.hift.active_group == 2
            again.train(7, 15)
        figures[f"{dtype} {master}"] = (
            differing(weights(run.model), weights(again.model))
            + differing(run.state(), again.state())
            + [key for key in ("lr",) if run.hift.held_lr != again.hift.held_lr]
        )
        figures["elements of the placeholder"] = max(
            v.numel() for values in placeholder.values() for v in values.values()
        )
    return figures


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def resumed(checkpoints: Path) -> list[dict[str, Any]]:
    return run_ranks(save_and_resume, 2, str(checkpoints))


def test_a_run_that_is_resumed_in_mid_cycle_has_the_bits_of_one_that_went_on(resumed: list[dict[str, Any]]) -> None:
    for each in resumed:
        assert (
            each.pop("elements of the placeholder") == 1
        )  # what accelerate and the Trainer move to the GPU fits there
        assert len(each) == 3 and all(names == [] for names in each.values()), each


def go_on(rank: int, num_ranks: int, folder: str) -> dict[str, Any]:
    """Load what two ranks saved after seven updates, and go on to fifteen with other ranks."""
    with on_ranks() as accelerator:
        run = Run(accelerator, rank, tiny_llama(seed=5))
        accelerator.load_state(folder)
        at_load = run.hift.updates
        run.train(7, 15)
    return {"updates": at_load, "weights": weights(run.model)}


def test_three_ranks_go_on_from_what_two_saved(resumed: list[dict[str, Any]], checkpoints: Path) -> None:
    expected, exact = with_exact(lambda: after_two_ranks(3, 15))
    for each in run_ranks(go_on, 3, f"{checkpoints}/torch.float32-fp32"):
        assert each["updates"] == 7
        # Three thirds are summed in another order than the reference's.
        assert_step_close(each["weights"], expected, exact, cap=CAP)


def test_one_process_goes_on_from_what_two_saved(resumed: list[dict[str, Any]], checkpoints: Path) -> None:
    with on_ranks() as accelerator:
        model = tiny_llama(torch.bfloat16, seed=5)
        hift = HiFT(model, torch.optim.AdamW, **ADAMW)
        prepared, optimizer, schedule = slivertune.prepare(accelerator, model, hift, LambdaLR(hift, halving))
        keep_sidecar(accelerator, hift)  # so that it reads what several ranks have written
        accelerator.load_state(f"{checkpoints}/torch.bfloat16-fp32")
        assert hift.updates == 7
        for update in range(7, 15):
            accelerator.backward(prepared(**batch_of(update, 0, 0)).loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    assert differing(weights(model), after_two_ranks(1, 15, torch.bfloat16)) == []


class Forked(nn.Module):
    """A model whose second layer is used where `use` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.last = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.second[0](x))
        if use:
            x = x + self.second[1](x)
        out: torch.Tensor = self.last(x).square().mean()
        return out


FORKED_LAYERS = [["first"], ["second"], ["last"]]


def _forked() -> Forked:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Forked()


def _input(update: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * update + rank))


def missing_on_one_rank(rank: int, num_ranks: int) -> dict[str, Any]:
    model = _forked()
    hift = HiFT(model, torch.optim.AdamW, config=HiFTConfig(layers=FORKED_LAYERS), **ADAMW)
    share_hift(model, hift)
    for update in range(7):
        model(_input(update, rank), use=rank == 1).backward()
        hift.step()
    error = ""
    try:  # the group of `first`, without any gradient on rank 1
        lonely = _forked()
        hift = HiFT(lonely, torch.optim.AdamW, config=HiFTConfig(layers=FORKED_LAYERS), **ADAMW)
        share_hift(lonely, hift)
        if rank == 0:
            lonely(_input(0, rank), use=True).backward()
        hift.step()
    except RuntimeError as raised:
        error = str(raised)
    return {"weights": weights(model), "error": error}


def forked_on_one_process() -> dict[str, torch.Tensor]:
    model = _forked()
    optimizers = [torch.optim.AdamW(getattr(model, name[0]).parameters(), **ADAMW) for name in FORKED_LAYERS]
    for update in range(7):
        loss = (model(_input(update, 0), use=False) + model(_input(update, 1), use=True)) / 2
        loss.backward()
        optimizers[update % 3].step()
        model.zero_grad()
    return weights(model)


def overflow_on_one_rank(rank: int, num_ranks: int) -> dict[str, Any]:
    """fp32 weights under a GradScaler; at updates 2 and 6 the loss of rank 1 overflows."""
    model = tiny_llama()
    hift = HiFT(model, torch.optim.AdamW, **ADAMW)
    share_hift(model, hift)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    scales = []
    for update in range(12):
        loss = model(**batch_of(update, 0, rank)).loss
        if rank == 1 and update in (2, 6):
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        scaler.unscale_(hift)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(hift)
        scaler.update()
        model.zero_grad()
        scales.append(scaler.get_scale())
    other = tiny_llama()
    OneProcess(other, naive_groups(other, 1), ranks=num_ranks, max_norm=0.05, ticks_per_update=0).run(12, skip=(2, 6))
    return {
        "updates": hift.updates,
        "scales": scales,
        "weights": largest_difference(weights(model), weights(other)),
    }


def bytes_on_the_device(rank: int, num_ranks: int) -> dict[str, Any]:
    """The ledger's highest figures of two cycles, with buckets and pieces that the formula can tell apart."""
    gradient_sync.BUCKET_BYTES = 3_000
    model = tiny_llama(torch.bfloat16)
    with on_ranks() as accelerator:
        run = Run(accelerator, rank, model, stream_bytes=8_192)
        run.train(0, CYCLE)
        with Ledger(model) as ledger:
            run.train(CYCLE, 2 * CYCLE)
            highest = ledger.highest
            after = ledger.current()
    parameters = dict(model.named_parameters())
    buffers = sum(buffer.untyped_storage().nbytes() for buffer in model.buffers())
    groups = [sum(parameters[name].nbytes for name in names) for names in naive_groups(model, 1)]
    return {
        "parameters": highest.parameters - buffers,
        "gradients": highest.gradients,
        "state": highest.state,
        "after": after.gradients + after.state,
        "host": after.host,
        "P": sum(groups),
        "largest group": max(groups),
        "moments and masters": sum(6 * size for size in groups),
    }


def odds_and_ends(rank: int, num_ranks: int) -> dict[str, Any]:
    return {
        "missing": missing_on_one_rank(rank, num_ranks),
        "overflow": overflow_on_one_rank(rank, num_ranks),
        "bytes": bytes_on_the_device(rank, num_ranks),
    }


@pytest.fixture(scope="module")
def odds() -> list[dict[str, Any]]:
    return run_ranks(odds_and_ends, 2)


def test_a_gradient_that_one_rank_lacks_counts_as_zeros_there(odds: list[dict[str, Any]]) -> None:
    # The mean of two is exact but for one rounding, as in the tests above.
    expected = forked_on_one_process()
    for each in odds:
        assert differing(each["missing"]["weights"], expected) == []


def test_a_rank_without_any_gradient_says_so_and_none_hangs(odds: list[dict[str, Any]]) -> None:
    for each in odds:
        assert "rank 0 is averaging gradients at update 0, group 0; rank 1 is stepping" in each["missing"]["error"]


def test_an_overflow_on_one_rank_skips_the_step_on_both(odds: list[dict[str, Any]]) -> None:
    for each in odds:
        assert each["overflow"]["updates"] == 10
        assert each["overflow"]["scales"] == [1024.0] * 2 + [512.0] * 4 + [256.0] * 6
        # Scaled by powers of two: the same bits.
        assert each["overflow"]["weights"] == 0.0


def test_a_rank_holds_the_weights_the_active_gradients_and_two_buckets_and_pieces(odds: list[dict[str, Any]]) -> None:
    for each in odds:
        figure = each["bytes"]
        assert figure["parameters"] == figure["P"]
        # With the counts, two bytes a part; gloo's thread lets go of a third a moment after it is done.
        buckets = 3 * (3_000 + 2 * 40)
        assert figure["largest group"] < figure["gradients"] <= figure["largest group"] + buckets
        assert 0 < figure["state"] <= 2 * 8_192
        assert figure["after"] == 0
        # Two moments and a master in fp32, and each weight's count of steps; gaps between them.
        assert figure["moments and masters"] <= figure["host"] <= 1.2 * figure["moments and masters"]
