"""Ranks that differ in their settings or do other things: all say so, before anything is averaged or updated."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from slivertune import HiFT, HiFTConfig
from slivertune.core.layout import Layout
from slivertune.parallel.consistency.headers import Header, Stage
from slivertune.parallel.consistency.heartbeat import Heartbeat
from slivertune.parallel.ddp.gradient_sync import BucketedAllReduce
from slivertune.parallel.prepare import prepare as prepare_ranks
from tests.helpers.models import differing, tiny_llama, weights
from tests.helpers.ranks import quick, run_ranks
from tests.parallel.contract.hift import HiFTCase
from tests.parallel.contract.runs import ZERO, Case, Run, message_of, refusal_of, running
from tests.parallel.contract.sft import SFTCase
from tests.parallel.ddp.test_gradient_sync import recorded_sums, rows, shared
from tests.parallel.reference import ADAMW, whole_weights


@dataclass(frozen=True, kw_only=True)
class Plain(HiFTCase):
    """HiFT without a schedule."""

    is_scheduled: bool = False
    lr: float = ADAMW["lr"]
    base: type = torch.optim.AdamW
    frozen: str = ""
    """A module that is not trained."""

    def build_optimizer(self, model: nn.Module, **changes: Any) -> HiFT:
        if self.frozen:
            model.get_submodule(self.frozen).requires_grad_(False)
        return HiFT(model, self.base, config=HiFTConfig.paper(**self.settings), **{**ADAMW, "lr": self.lr})


HIFT = Plain()
SFT = SFTCase(model="llama", density=0.05, interval=4, gamma=2)
METHODS: dict[str, Case] = {"hift": HIFT, "sft": SFT}
SHUFFLED = Plain(settings={"order": "random", "seed": 0})


def having(case: Case, **settings: Any) -> Case:
    return replace(case, settings={**case.settings, **settings})


DIFFERENT: dict[str, tuple[Case, Case, str]] = {
    "groups": (HIFT, Plain(frozen="model.layers.1.mlp.gate_proj"), "disagree on group 2"),
    "order": (
        having(HIFT, order="bottom2up"),
        having(HIFT, order="top2down"),
        "disagree on config.order: 'bottom2up' on rank 0, 'top2down' on rank 1",
    ),
    "seed": (SHUFFLED, having(SHUFFLED, seed=1), "disagree on config.seed: 0 on rank 0, 1 on rank 1"),
    "steps": (HIFT, having(HIFT, steps_per_group=2), "disagree on config.steps_per_group: 1 on rank 0, 2 on rank 1"),
    "lr": (HIFT, Plain(lr=2e-2), "disagree on lr of param group 0: 0.01 on rank 0, 0.02 on rank 1"),
    "class": (HIFT, Plain(base=torch.optim.Adam), "disagree on base optimizer"),
    "sft, seed": (SFT, having(SFT, seed=1), "disagree on config.seed"),
    "sft, density": (SFT, replace(SFT, density=0.06), "disagree on config.density"),
}
"""What rank 0 and rank 1 prepare, and what is said."""
OF_ZERO: dict[str, tuple[Case, Case, str]] = {
    "order": (
        HIFT,
        having(HIFT, order="random"),
        "disagree on config.order: 'bottom2up' on rank 0, 'random' on rank 1",
    ),
    "layers": (HIFT, having(HIFT, layers_per_group=2), "disagree on config.layers_per_group: 1 on rank 0, 2 on rank 1"),
    "steps": DIFFERENT["steps"],
    "config": (
        Plain(bare=True),
        Plain(bare=True, clip=0.1),
        "disagree on the DeepSpeed config's gradient_clipping: '0.0' on rank 0, '0.1' on rank 1",
    ),
}
PREPARED: dict[tuple[Layout, str], tuple[Case, Case, str]] = {
    **{(layout, what): cases for layout in ("ddp", "fsdp2") for what, cases in DIFFERENT.items()},
    **{("zero2", what): cases for what, cases in OF_ZERO.items()},
}


def prepare(rank: int, num_ranks: int, layout: Layout, what: str) -> str:
    case = PREPARED[layout, what][rank]
    with left_out(case):
        return refusal_of(case, layout, rank)


@pytest.mark.parametrize(("layout", "what"), PREPARED)
def test_settings_that_differ_are_named_at_prepare(layout: Layout, what: str) -> None:
    for said in run_ranks(prepare, 2, layout, what):
        assert said.startswith("ValueError: the ranks disagree on")
        assert PREPARED[layout, what][2] in said


def prepare_alike(rank: int, num_ranks: int, layout: Layout, what: str) -> str:
    own_places = having(HIFT, state="disk", state_dir=f"of-rank-{rank}")
    return refusal_of(SHUFFLED if what == "same" else own_places, layout, rank)


@pytest.mark.parametrize("what", ["same", "place of files"])
@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_the_same_settings_pass(layout: Layout, what: str) -> None:
    assert run_ranks(prepare_alike, 2, layout, what) == ["", ""]


def prepare_other_weights(rank: int, num_ranks: int) -> tuple[dict[str, torch.Tensor], str]:
    with running(HIFT, "ddp", rank, seed=rank) as run:
        of_ddp = whole_weights(run.model)
    return of_ddp, refusal_of(HIFT, "fsdp2", rank, seed=rank)


def test_ddp_sends_the_weights_of_rank_0_and_fsdp2_refuses_different_ones() -> None:
    for of_ddp, said in run_ranks(prepare_other_weights, 2):
        assert differing(of_ddp, weights(tiny_llama(seed=0))) == []
        assert "disagree on the bits of model.embed_tokens.weight" in said


def backward(run: Run) -> None:
    run.backward(run.case.batch(len(run.losses), 0, run.rank))


def update(run: Run, count: int) -> None:
    run.train(len(run.losses), len(run.losses) + count)


def miss_a_step(run: Run) -> None:
    update(run, 2)
    backward(run)
    if run.rank == 0:
        run.step()
    update(run, 3)


def miss_a_backward(run: Run) -> None:
    update(run, 2)
    if run.rank == 0:
        backward(run)
    run.step()


def miss_a_batch(run: Run) -> None:
    """One rank has a batch less and is never told, until the last."""
    update(run, 2 if run.rank else 3)
    run.accelerator.end_training()


def lose_the_gradients(run: Run) -> None:
    update(run, 2)
    backward(run)
    if run.rank:
        for parameter in run.model.parameters():
            parameter.grad = None
    run.step()


def another(key: str, value: float, count: int) -> Callable[[Run], None]:
    """Set a hyperparameter in mid-cycle, where HiFT holds the rate: it is applied, and seen, when the next begins."""

    def loop(run: Run) -> None:
        update(run, 2)
        if run.rank:
            run.optimizer.param_groups[0][key] = value
        update(run, count)

    return loop


def drift(
    end: Callable[[Run], object], count: int = 2, weight: str = "model.embed_tokens.weight"
) -> Callable[[Run], None]:
    """A weight of rank 1 changes behind everyone's back."""

    def loop(run: Run) -> None:
        update(run, count)
        if run.rank:
            with torch.no_grad():
                run.model.get_parameter(weight)[3, 4] += 1e-4
        end(run)

    return loop


def drift_of_sft(run: Run) -> None:
    update(run, 4)
    if run.rank:
        for parameter in run.model.parameters():
            if parameter.requires_grad and parameter.ndim == 1 and parameter.numel() > 2:
                parameter.data = parameter.data.flip(0)
    update(run, 1)


def own_gradients(run: Run) -> None:
    loss = run.case.loss(run.model, run.case.batch(0, 0, run.rank))
    run.accelerator.gradient_state._set_sync_gradients(False)
    loss.backward()
    run.sliver.step()


def left_out(case: Case) -> AbstractContextManager[Any]:
    """Expect the warning of a model of which some is frozen."""
    is_frozen = isinstance(case, Plain) and case.frozen
    return pytest.warns(UserWarning, match="HiFT keeps them frozen") if is_frozen else nullcontext()


@dataclass(frozen=True, kw_only=True)
class Disturbance:
    """What goes wrong on ranks, and what is said."""

    method: str
    layout: Layout
    loop: Callable[[Run], None]
    said: tuple[str, ...]
    updates: int = 2
    """Those that were made."""
    is_weight: bool = False
    """Whether it is the ranks' weights that differ."""
    case: Case | None = None

    def do(self, rank: int) -> dict[str, Any]:
        case = self.case or METHODS[self.method]
        with left_out(case), running(case, self.layout, rank) as run:
            return {
                "message": message_of(lambda: self.loop(run)),
                "updates": run.sliver.updates,
                "weights": whole_weights(run.model),
            }


RATES = "the learning rate of param group 0 is 0.01 on rank 0, 0.02 on rank 1"
DOING = {"ddp": "averaging gradients", "fsdp2": "beginning a forward pass"}


def disturbances_of(method: str, layout: Layout) -> dict[str, Disturbance]:
    """What each method has under each layout whose ranks compare what they do, by name."""
    group, of = ", group 2" if method == "hift" else "", partial(Disturbance, method=method, layout=layout)
    apart = ("the ranks are not at the same place", "Nothing was shared or updated") if layout == "ddp" else ()
    stepping = f"rank 0 is stepping the optimizer at update 2{group}"
    lost = ("rank 0 is stepping", "with gradients; rank 1", "without a gradient")
    found = {
        "a step is missed": of(
            loop=miss_a_step, said=(stepping, f"rank 1 is {DOING[layout]} at update 2{group}", *apart)
        ),
        "a batch is missed": of(
            loop=miss_a_batch,
            said=(f"rank 0 is {DOING[layout]}", "rank 1 is saving or ending the training at update 2"),
        ),
        "another rate": of(
            loop=another("lr", 0.02, 5),
            said=(RATES if method == "hift" else "lr is 0.01 on rank 0, 0.02 on rank 1", "The update was not made"),
            updates=5 if method == "hift" else 2,
        ),
        "another decay": of(loop=another("weight_decay", 0.2, 1), said=("weight_decay", "0.2 on rank 1")),
        **({"gradients are lost": of(loop=lose_the_gradients, said=lost)} if method == "hift" else {}),
    }
    return {f"{method}, {layout}: {name}": each for name, each in found.items()}


ON_DDP = partial(Disturbance, method="hift", layout="ddp")
DRIFTED = partial(
    ON_DDP, said=("the sum of the bits of model.embed_tokens.weight is", "Resume from it"), is_weight=True
)
DISTURBANCES: dict[str, Disturbance] = {
    name: each for method in METHODS for layout in DOING for name, each in disturbances_of(method, layout).items()
} | {
    # Under FSDP2 a backward pass takes part in FSDP2's own collectives, whatever we do.
    "hift, ddp: a backward pass is missed": ON_DDP(
        loop=miss_a_backward, said=("rank 0 is averaging gradients", "rank 1 is stepping the optimizer")
    ),
    "hift, ddp: drift, saved": DRIFTED(loop=drift(lambda run: run.accelerator.save_state("nowhere"))),
    "hift, ddp: drift, ended": DRIFTED(loop=drift(lambda run: run.accelerator.end_training())),
    "hift, ddp: drift of a weight that another optimizer may train": DRIFTED(
        loop=drift(lambda run: run.accelerator.save_state("nowhere"), weight="model.layers.1.mlp.up_proj.weight"),
        said=("the sum of the bits of model.layers.1.mlp.up_proj.weight is", "Resume from it"),
        case=Plain(frozen="model.layers.1.mlp.up_proj"),
    ),
    # Changed when the embedding had had its second turn, so seen at the end of the third cycle, in its last step.
    "hift, ddp: drift in a cycle": DRIFTED(
        loop=drift(lambda run: update(run, 14), count=6),
        said=("the ranks have drifted apart, at update 15", "the sum of the weights' bits is"),
        updates=15,
    ),
    "sft, ddp: drift until a reselection": DRIFTED(
        method="sft",
        loop=drift_of_sft,
        said=("the ranks have drifted apart", "the positions of the trained weights"),
        updates=5,
        case=SFTCase(model="llama", density=0.02),
    ),
    "sft, ddp: gradients of one rank": ON_DDP(
        method="sft", loop=own_gradients, said=("are those of this rank alone",), updates=0
    ),
    "hift, ddp: gradients of one rank": ON_DDP(
        loop=own_gradients,
        said=("are those of this rank alone", "Step the optimizer that slivertune.prepare returned"),
        updates=0,
    ),
    **{
        f"hift, {layout}: another rate": Disturbance(
            method="hift",
            layout=layout,
            loop=another("lr", 0.02, 5),
            said=("the ranks have drifted apart", RATES),
            updates=5,
        )
        for layout in ZERO
    },
}


# Ranks compare all of these at one place, whatever the method, the layout and ZeRO's stage.
ALIKE = [
    *(
        f"{method_and_layout}: {name}"
        for method_and_layout in ("hift, fsdp2", "sft, ddp")
        for name in ("a batch is missed", "another rate", "another decay")
    ),
    "sft, fsdp2: another decay",
    *(f"hift, {layout}: another rate" for layout in ("zero1", "zero3")),
]


def disturb(rank: int, num_ranks: int, name: str, folder: Path) -> dict[str, Any]:
    os.chdir(folder)
    return DISTURBANCES[name].do(rank)


@pytest.mark.parametrize("name", quick(DISTURBANCES, [name for name in DISTURBANCES if name not in ALIKE]))
def test_every_rank_says_what_each_does_before_anything_is_shared(name: str, tmp_path: Path) -> None:
    ranks = run_ranks(disturb, 2, name, tmp_path)
    for found in ranks:
        assert all(part in found["message"] for part in DISTURBANCES[name].said), found["message"]
        assert found["updates"] == DISTURBANCES[name].updates
    if not DISTURBANCES[name].is_weight:
        # Nothing was averaged or updated by one rank alone.
        assert differing(*(found["weights"] for found in ranks)) == []


def apart_in_the_gradient_sync(rank: int, num_ranks: int) -> dict[str, Any]:
    """Groups of other sizes on each rank: gloo would abort the process at the first bucket."""
    model = shared()
    for parameter in model.layers[rank].parameters() if rank else [model.scale]:
        parameter.requires_grad_(False)
    heartbeat = Heartbeat("unit")
    BucketedAllReduce(
        model,
        list(model.parameters()),
        heartbeat,
        bucket_bytes=32,
        meet=lambda: heartbeat.meet(Header(Stage.GRADIENT_SYNC, 4, rank)),
    )
    with recorded_sums() as sums:
        message = message_of(lambda: model(rows(rank))["loss"].backward())
    return {"message": message, "sent": sums.call_count}


def test_groups_of_other_sizes_are_told_apart_before_the_first_bucket() -> None:
    for found in run_ranks(apart_in_the_gradient_sync, 2):
        said = (f"rank {rank} is averaging gradients at update 4, group {rank}" for rank in (0, 1))
        assert all(part in found["message"] for part in said), found["message"]
        assert found["sent"] == 0


def skip_a_batch(rank: int, num_ranks: int, method: str, who: int, skipped: int) -> str:
    """One rank passes over one of five batches of a prepared loader."""
    accelerator, model = Accelerator(cpu=True), tiny_llama()
    loader = DataLoader(torch.randint(0, 97, (5 * num_ranks, 12), generator=torch.Generator().manual_seed(0)))
    model, optimizer, loader = prepare_ranks(accelerator, model, METHODS[method].build_optimizer(model), loader)

    def train() -> None:
        for index, ids in enumerate(loader):
            if rank == who and index == skipped:
                continue
            accelerator.backward(model(input_ids=ids, labels=ids).loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.end_training()

    return message_of(train)


SKIPPED = [(method, who, skipped) for method in METHODS for who, skipped in ((1, 2), (0, 2), (1, 0), (1, 4))]


@pytest.mark.parametrize(("method", "who", "skipped"), quick(SKIPPED, [*SKIPPED[:4], ("sft", 0, 2), ("sft", 1, 4)]))
def test_a_skipped_batch_is_told_at_the_last_batch_of_one_rank(method: str, who: int, skipped: int) -> None:
    # Of the last batch, only the rank that trains it can say that it is the last; the other has ended.
    is_last = skipped == 4
    update, on_last = (4, 1 - who) if is_last else (3, who)
    for said in run_ranks(skip_a_batch, 2, method, who, skipped):
        assert "the ranks are not at the same place: rank 0 is " in said
        places = said.split("rank 1 is ")
        assert all(f"at update {update}" in each for each in places)
        assert ["on the last batch of its loader" in each for each in places] == [on_last == 0, on_last == 1]
        assert ("rank 1 is saving or ending the training" in said) == is_last
