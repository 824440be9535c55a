"""Groups that the batches of some ranks, or of all, do not reach: the updates of one process on the whole batch."""

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

from slivertune import HiFT, HiFTConfig
from slivertune.core.layout import Layout
from slivertune.parallel.ddp.hift import share_hift
from tests.helpers.models import assert_same_tree, differing, seeded
from tests.helpers.ranks import quick, ran_once, run_ranks
from tests.helpers.tolerance import assert_step_close, with_exact
from tests.parallel.contract.hift import HiFTCase
from tests.parallel.contract.runs import ZERO, Run, load, message_of, running, save
from tests.parallel.reference import ADAMW, OneProcess, whole_weights

Used = Callable[[int, int, int], frozenset[int]]
"""By update, micro-batch and rank: which blocks a forward goes through."""

WIDTH = 6
LAYERS = (("first",), ("blocks.0",), ("blocks.1",), ("last",))
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

    def forward(self, x: torch.Tensor, used: frozenset[int]) -> CausalLMOutput:
        x = torch.tanh(self.first(x))
        for index in sorted(used):
            x = x + self.blocks[index](x)
        return CausalLMOutput(loss=self.last(x).square().mean())


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


@dataclass(frozen=True, kw_only=True)
class DroppingCase(HiFTCase):
    updates: int = STEPS
    is_scheduled: bool = False
    used: Used = alike
    layers: tuple[tuple[str, ...], ...] = LAYERS

    @property
    def blocks_of_fsdp2(self) -> list[str]:
        return ["Block"]

    def build_model(self, seed: int = 0) -> nn.Module:
        return seeded(Dropping, 3)

    def build_optimizer(self, model: nn.Module, **changes: Any) -> HiFT:
        return HiFT(model, torch.optim.AdamW, config=HiFTConfig.paper(layers=self.layers), **ADAMW)

    def batch(self, update: int, micro: int, rank: int) -> dict[str, Any]:
        return {"x": make_input(update, micro, rank), "used": self.used(update, micro, rank)}

    def reference(self, scale: float = 1.0) -> OneProcess:
        """A plain rotation; in fp16 where losses are scaled."""
        model: Any = seeded(Dropping, 3)
        if scale != 1.0:
            model.forward = torch.autocast("cpu", torch.float16)(model.forward)
        return OneProcess(
            model,
            [[name for name, _ in model.named_parameters() if name.startswith(layers)] for layers in self.layers],
            ranks=2,
            accumulation=self.accumulation,
            max_norm=self.clip,
            lr_of=lambda updates: 1.0,
            scales=[scale] * STEPS,
            make_batch=self.batch,
        ).run(STEPS)


CASES: dict[str, tuple[Layout, DroppingCase]] = {
    "DDP, on one rank": ("ddp", DroppingCase(used=on_one_rank)),
    "DDP, a part of a group on one rank": (
        "ddp",
        DroppingCase(used=on_one_rank, layers=(("first",), ("blocks.0", "blocks.1"), ("last",))),
    ),
    "DDP, dropped": ("ddp", DroppingCase(used=dropped)),
    "DDP, dropped, accumulated, clipped": ("ddp", DroppingCase(used=dropped, accumulation=2, clip=0.05)),
    "FSDP2, dropped by all": ("fsdp2", DroppingCase()),
    **{f"ZeRO-{layout[-1]}, dropped by all": (layout, DroppingCase()) for layout in ZERO},
}
REACHED = [name for name in CASES if name.endswith("on one rank")]
QUICK = [name for name in CASES if not name.startswith("ZeRO")]


NOTHING_REACHED = "no (gradient|batch of a whole cycle) reached"


def train(rank: int, num_ranks: int, name: str, folder: Path) -> dict[str, Any]:
    warnings.filterwarnings("ignore", NOTHING_REACHED)
    layout, case = CASES[name]
    with running(case, layout, rank) as run:
        run.train(0, 7)
        if layout in ZERO:
            save(run, folder / layout)
        run.train(7, STEPS)
        found = what_it_came_to(run)
        if layout not in ZERO:
            run.sliver.detach()
            found["free"] = [parameter.requires_grad for parameter in run.model.parameters()]
            found["free grads"] = has_own_gradients(run)
    if layout in ZERO:
        with running(case, layout, rank, seed=1) as run:
            load(run, folder / layout)
            found["resumed"] = what_it_came_to(run.train(7, STEPS))
    return found


def what_it_came_to(run: Run) -> dict[str, Any]:
    return {
        "weights": whole_weights(run.model),
        "updates": run.sliver.updates,
        "skipped": run.sliver.skipped_turns,
    }


def has_own_gradients(run: Run) -> bool:
    """After `detach`: every parameter has a gradient, and nothing of ours meets or averages any more."""
    if run.rank == 0 and run.layout == "ddp":
        return True  # the other rank is alone, which would hang if it exchanged
    run.accelerator.backward(run.model(make_input(0, 0, run.rank), frozenset({0, 1})).loss)
    complete = all(parameter.grad is not None for parameter in run.model.parameters())
    run.model.zero_grad()
    return complete


def under_a_scaler(rank: int, num_ranks: int) -> dict[str, Any]:
    """fp16 autocast: what a GradScaler looks at on a rank without a gradient must not hide the others' gradients."""
    warnings.filterwarnings("ignore", NOTHING_REACHED)
    model = seeded(Dropping, 3)
    hift = HiFT(model, torch.optim.AdamW, config=HiFTConfig.paper(layers=LAYERS), **ADAMW)
    share_hift(model, hift)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    for step in range(STEPS):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(make_input(step, 0, rank), dropped(step, 0, rank)).loss
        scaler.scale(loss).backward()
        scaler.unscale_(hift)
        scaler.step(hift)
        scaler.update()
        hift.zero_grad()
    return {"weights": whole_weights(model), "updates": hift.updates, "skipped": hift.skipped_turns}


Trained = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return ran_once(train, 2, tmp_path_factory.mktemp("skipped"))


@pytest.mark.parametrize("case", quick(CASES, QUICK))
def test_two_ranks_step_what_any_of_them_reached_as_one_process_does(trained: Trained, case: str) -> None:
    layout, run = CASES[case]
    reference = run.reference()
    expected, exact = with_exact(lambda: whole_weights(run.reference().model))
    for each in trained(case):
        assert each["updates"] == reference.updates and each["skipped"] == reference.skipped
        if run.accumulation > 1 or layout in ZERO:
            # Gradients have several orders; one too many or too few moves weights by a step, 1e-2.
            assert_step_close(each["weights"], expected, exact, cap=1e-5)
        else:
            assert differing(each["weights"], expected) == []
        assert_same_tree(each.get("resumed", {}), {key: each[key] for key in each.get("resumed", {})})
    assert (reference.skipped == {}) == (case in REACHED)


@pytest.mark.parametrize("case", QUICK)
def test_a_model_is_free_again_after_detach(trained: Trained, case: str) -> None:
    assert all(all(each["free"]) and each["free grads"] for each in trained(case))


def test_a_grad_scaler_steps_on_the_ranks_that_had_no_gradient() -> None:
    reference = DroppingCase(used=dropped).reference(scale=2.0**4)
    for each in run_ranks(under_a_scaler, 2):
        assert (each["updates"], each["skipped"]) == (reference.updates, reference.skipped)
        # A mean of two has one order, and scales are powers of two.
        assert differing(each["weights"], whole_weights(reference.model)) == []


def run_on_one_rank(rank: int, num_ranks: int, layout: Layout) -> tuple[str, float]:
    """Ranks that go through other layers wait for each other where a layout gathers them or reduces at the end."""
    began = time.monotonic()
    with running(DroppingCase(used=on_one_rank), layout, rank) as run:
        return message_of(lambda: run.train(0, 6)), time.monotonic() - began


@pytest.mark.slow
def test_ranks_that_run_other_layers_under_fsdp2_are_told_where_each_is_within_the_timeout() -> None:
    for rank, (message, seconds) in enumerate(run_ranks(run_on_one_rank, 2, "fsdp2", collective_timeout_s=6)):
        assert f"rank {rank} failed" in message and "this rank is at update 0, group 0" in message
        assert f"rank {1 - rank} was last seen at update 0, group 0" in message or f"rank {1 - rank} has" in message
        assert seconds < 40


@pytest.mark.slow
def test_ranks_that_run_other_layers_under_zero_are_told_where_each_is_within_the_timeout() -> None:
    (message, seconds), _ = run_ranks(run_on_one_rank, 2, "zero2", may_die=(1,), timeout_s=90, collective_timeout_s=6)
    assert "rank 0 is averaging gradients at update 2, group 2, without a gradient; rank 1 is" in message
    assert seconds < 36  # and the few seconds in which it looks for the others
