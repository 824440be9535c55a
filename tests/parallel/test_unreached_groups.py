"""Groups that the batches of some ranks, or of all, do not reach: the updates of one process on the whole batch."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import slivertune
from slivertune import HiFT, HiFTConfig
from slivertune.parallel.ddp.hift import share_hift
from tests.helpers.models import differing
from tests.helpers.ranks import run_ranks
from tests.helpers.tolerance import assert_step_close, with_exact
from tests.parallel.reference import ADAMW, on_fsdp2_ranks, on_ranks, whole_weights

Used = Callable[[int, int, int], frozenset[int]]
"""By update, micro-batch and rank: which blocks a forward goes through."""

WIDTH = 6
LAYERS = [["first"], ["blocks.0"], ["blocks.1"], ["last"]]
STEPS = 13


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * self.scale


class Dropping(nn.Module):
    """Blocks that a batch may leave out, as LayerDrop does, or an input without images."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, used: frozenset[int]) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        for index in sorted(used):
            x = x + self.blocks[index](x)
        out: torch.Tensor = self.last(x).square().mean()
        return out


def make_model() -> Dropping:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Dropping()


def make_input(update: int, micro: int, rank: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * update + 10 * micro + rank))


def on_one_rank(update: int, micro: int, rank: int) -> frozenset[int]:
    """The second block is a pooler that rank 1 alone uses."""
    return frozenset({0, 1}) if rank == 1 else frozenset({0})


def dropped(update: int, micro: int, rank: int) -> frozenset[int]:
    """Another draw for each forward; group 2 is reached by rank 0, rank 1, nobody, in turn."""
    if update % 4 == 2:
        return frozenset({1} if (update // 4, micro) in ((0, 0), (1, 1)) and rank == update // 4 % 2 else set())
    return frozenset(index for index in (0, 1) if (update * 7 + micro * 3 + rank * 5 + index) % 3)


def alike(update: int, micro: int, rank: int) -> frozenset[int]:
    """The same on all ranks: FSDP2 gathers what a forward goes through."""
    return dropped(update, 0, 0)


class Reference:
    """A plain rotation: the mean over micro-batches and ranks, zeros for who has none; nobody's gradient, no update.

    With `scale` it computes under fp16 autocast, from losses times that.
    """

    def __init__(
        self,
        used: Used,
        *,
        ranks: int = 2,
        accumulation: int = 1,
        max_norm: float | None = None,
        scale: float | None = None,
    ) -> None:
        self.model = make_model()
        self.skipped: dict[int, int] = {}
        self.updates = 0
        groups = [list(self.model.get_submodule(names[0]).parameters()) for names in LAYERS]
        optimizers = [torch.optim.AdamW(parameters, **ADAMW) for parameters in groups]
        for step in range(STEPS):
            index = step % len(groups)
            for micro in range(accumulation):
                for rank in range(ranks):
                    with torch.autocast("cpu", torch.float16, enabled=scale is not None):
                        loss = self.model(make_input(step, micro, rank), used(step, micro, rank))
                    (loss * (scale or 1.0)).backward()
            for parameter in groups[index]:
                if parameter.grad is not None:
                    parameter.grad /= accumulation * ranks * (scale or 1.0)
            if all(parameter.grad is None for parameter in groups[index]):
                self.skipped[index] = self.skipped.get(index, 0) + 1
            else:
                if max_norm is not None:
                    torch.nn.utils.clip_grad_norm_(groups[index], max_norm)
                optimizers[index].step()
                self.updates += 1
            self.model.zero_grad()


def train(accelerator: Any, rank: int, used: Used, *, accumulation: int = 1, max_norm: float | None = None) -> Any:
    model = make_model()
    hift = HiFT(model, torch.optim.AdamW, config=HiFTConfig(layers=LAYERS), **ADAMW)
    prepared, optimizer = slivertune.prepare(accelerator, model, hift)
    for step in range(STEPS):
        for micro in range(accumulation):
            with accelerator.accumulate(prepared):
                accelerator.backward(prepared(make_input(step, micro, rank), used(step, micro, rank)))
                if max_norm is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(prepared.parameters(), max_norm)
                optimizer.step()
                optimizer.zero_grad()
    return prepared, hift


CASES: dict[str, tuple[str, Used, dict[str, Any]]] = {
    "DDP, on one rank": ("DDP", on_one_rank, {}),
    "DDP, dropped": ("DDP", dropped, {}),
    "DDP, dropped, accumulated, clipped": ("DDP", dropped, {"accumulation": 2, "max_norm": 0.05}),
    "FSDP2, dropped by all": ("FSDP2", alike, {}),
}


def all_cases(rank: int, num_ranks: int) -> dict[str, Any]:
    warnings.filterwarnings("ignore", "no (gradient|batch of a whole cycle) reached")
    found: dict[str, Any] = {}
    for name, (layout, used, options) in CASES.items():
        made: Any = on_ranks if layout == "DDP" else on_fsdp2_ranks
        plugin = {"plugin": {"transformer_cls_names_to_wrap": ["Block"]}} if layout == "FSDP2" else {}
        with made(gradient_accumulation_steps=options.get("accumulation", 1), **plugin) as accelerator:
            model, hift = train(accelerator, rank, used, **options)
            reference = Reference(used, ranks=num_ranks, **options)
            hift.detach()
            found[name] = {
                "free": [parameter.requires_grad for parameter in model.parameters()],
                "free grads": has_own_gradients(accelerator, model, rank),
                "weights": whole_weights(model),
                "updates": (hift.updates, reference.updates),
                "skipped": (hift.skipped_turns, reference.skipped),
            }
    found["scaled"] = under_a_scaler(rank)
    return found


def has_own_gradients(accelerator: Any, model: nn.Module, rank: int) -> bool:
    """After `detach`: every parameter has a gradient, and nothing of ours meets or averages any more."""
    if rank == 0 and accelerator.distributed_type == "MULTI_CPU":
        return True  # the other rank is alone, which would hang if it exchanged
    accelerator.backward(model(make_input(0, 0, rank), frozenset({0, 1})))
    complete = all(parameter.grad is not None for parameter in model.parameters())
    model.zero_grad()
    return complete


def under_a_scaler(rank: int) -> dict[str, Any]:
    """fp16 autocast: what a GradScaler looks at on a rank without a gradient must not hide the others' gradients."""
    model = make_model()
    hift = HiFT(model, torch.optim.AdamW, config=HiFTConfig(layers=LAYERS), **ADAMW)
    share_hift(model, hift)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    for step in range(STEPS):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(make_input(step, 0, rank), dropped(step, 0, rank))
        scaler.scale(loss).backward()
        scaler.unscale_(hift)
        scaler.step(hift)
        scaler.update()
        hift.zero_grad()
    reference = Reference(dropped, scale=2.0**4)
    return {
        "weights": whole_weights(model),
        "updates": (hift.updates, reference.updates),
        "skipped": (hift.skipped_turns, reference.skipped),
    }


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(all_cases, 2)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_step_what_any_of_them_reached_as_one_process_does(found: list[dict[str, Any]], case: str) -> None:
    for each in found:
        for what in ("updates", "skipped"):
            ours, theirs = each[case][what]
            assert ours == theirs
    _, used, options = CASES[case]
    expected, exact = with_exact(lambda: whole_weights(Reference(used, **options).model))
    for each in found:
        if "accumulation" in options:
            # Four gradients have several orders; one too many or too few moves weights by a step, 1e-2.
            assert_step_close(each[case]["weights"], expected, exact, cap=1e-5)
        else:
            assert differing(each[case]["weights"], expected) == []
    assert (found[0][case]["skipped"][0] == {}) == (case == "DDP, on one rank")


@pytest.mark.parametrize("case", CASES)
def test_a_model_is_free_again_after_detach(found: list[dict[str, Any]], case: str) -> None:
    for each in found:
        assert all(each[case]["free"]) and each[case]["free grads"]


def test_a_grad_scaler_steps_on_the_ranks_that_had_no_gradient(found: list[dict[str, Any]]) -> None:
    for each in found:
        for what in ("updates", "skipped"):
            ours, theirs = each["scaled"][what]
            assert ours == theirs
        # A mean of two has one order, and scales are powers of two.
        assert differing(each["scaled"]["weights"], whole_weights(Reference(dropped, scale=2.0**4).model)) == []


def run_other_layers(rank: int, num_ranks: int) -> tuple[str, float]:
    """FSDP2 gathers a block where a forward goes through it: ranks that go through others wait for each other."""
    with on_fsdp2_ranks(plugin={"transformer_cls_names_to_wrap": ["Block"]}) as accelerator:
        began = time.monotonic()
        try:
            train(accelerator, rank, on_one_rank)
        except RuntimeError as error:
            return str(error), time.monotonic() - began
    return "", 0.0


@pytest.mark.slow
def test_ranks_that_run_other_layers_under_fsdp2_are_told_where_each_is_within_the_timeout() -> None:
    for rank, (message, seconds) in enumerate(run_ranks(run_other_layers, 2, collective_timeout_s=6)):
        assert f"rank {rank} failed" in message
        assert "this rank is at update 0, group 0" in message
        assert f"rank {1 - rank} was last seen at update 0, group 0" in message or f"rank {1 - rank} has" in message
        assert seconds < 40
