"""What HiFT on DeepSpeed holds on a rank's device, counted by the ledger; on a CPU, the host's share is a claim."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from slivertune.core.ledger import Census, Ledger
from tests.helpers.ranks import ran_once
from tests.parallel.contract.hift import HiFTCase
from tests.parallel.contract.runs import BUCKET, ZERO, Run, running

pytestmark = pytest.mark.slow

NUM_RANKS = 2
CASES: dict[Any, HiFTCase] = {
    (layout, str(dtype).removeprefix("torch.")): HiFTCase(dtype=dtype, bare=True)
    for layout in ZERO
    for dtype in (torch.float32, torch.bfloat16)
}


@dataclass
class Turn:
    """One turn of a group on one rank, in the second cycle."""

    group: int
    after: Census
    """After the step."""
    highest: Census
    """Each kind's highest in the switch, forward, backward and step."""
    flat_gradient_bytes: int
    """Of all groups' flat gradients on ZeRO-3 together."""
    bucket_elements: int
    """Elements of all groups' reduce buckets together, at their highest."""


@dataclass
class Counted:
    """What a run held."""

    sizes: list[int]
    """Elements of each group."""
    padding: int
    """Elements by which DeepSpeed may have rounded a group's share up."""
    turns: list[Turn]
    weight_bytes: int
    """Of this rank's share of the weights under ZeRO-3, of all weights else."""
    host_bytes: int
    """What the movers say that they keep on the host, all groups together."""
    hooks: int
    """On the first block's forward, from ZeRO-3."""


def count_case(rank: int, num_ranks: int, *key: str) -> Counted:
    with running(CASES[key], key[0], rank) as run:
        return count(run)


def count(run: Run) -> Counted:
    schedule, num_groups = run.model.hift_schedule, run.sliver.num_groups
    parameters = [[weight.parameter for weight in run.sliver.weights_of(group)] for group in range(num_groups)]
    run.train(0, num_groups)
    turns = []
    for update in range(num_groups, 2 * num_groups):
        with watched_buckets(run) as seen, Ledger(run.plain) as ledger:
            # Made before the ledger looked; what moves from now on, it sees.
            ledger.track(state_tensors(schedule))
            ledger.reset_peak()
            run.train(update, update + 1)
            flat = sum(each.untyped_storage().nbytes() for each in flat_gradients(schedule))
            turns.append(Turn(schedule.active, ledger.current(), ledger.highest, flat, max(seen)))
    children = schedule.children.values()
    flats = [
        flat.untyped_storage()
        for child in children
        for flat in ([child.lp_param_buffer] if schedule.stage == 3 else child.bit16_groups_flat)
    ]
    return Counted(
        sizes=[sum(int(getattr(p, "ds_numel", p.numel())) for p in group) for group in parameters],
        padding=NUM_RANKS * max(len(group) for group in parameters),
        turns=turns,
        weight_bytes=sum({flat.data_ptr(): flat.nbytes() for flat in flats}.values()),
        host_bytes=sum(schedule.movers[group].host_bytes() for group in range(num_groups)),
        hooks=len(run.plain.get_submodule("model.layers.0.mlp")._forward_pre_hooks),
    )


def state_tensors(schedule: Any) -> Iterator[torch.Tensor]:
    for group, child in schedule.children.items():
        for master in schedule.movers[group].masters:
            yield master.data
            yield from (value for value in child.optimizer.state[master].values() if value.dim())
    yield from flat_gradients(schedule)


def flat_gradients(schedule: Any) -> list[torch.Tensor]:
    children = schedule.children.values() if schedule.stage == 3 else ()
    return [child.grad_partitions_flat_buffer for child in children]


@contextmanager
def watched_buckets(run: Run) -> Iterator[list[int]]:
    """The elements of all reduce buckets together, looked at as each gradient is there."""
    seen: list[int] = []

    def look(_: torch.Tensor) -> None:
        buckets = [
            bucket for child in run.model.hift_schedule.children.values() for bucket in child.ipg_buckets.values()
        ]
        buffers = [b for each in buckets for b in (each.buffer if isinstance(each.buffer, list) else [each.buffer])]
        seen.append(sum({b.data_ptr(): b.numel() for b in buffers if b is not None}.values()))

    with ExitStack() as hooks:
        for parameter in run.plain.parameters():
            required = parameter.requires_grad
            parameter.requires_grad_(True)
            hooks.callback(parameter.register_post_accumulate_grad_hook(look).remove)
            parameter.requires_grad_(required)
        yield seen


@pytest.fixture(scope="module")
def counts() -> Callable[..., list[Counted]]:
    return ran_once(count_case, NUM_RANKS)


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def counted(case: Any, counts: Callable[..., list[Counted]]) -> list[Counted]:
    """What each rank has counted in a case."""
    return counts(*case)


@pytest.fixture
def turns(counted: list[Counted]) -> list[tuple[Counted, Turn]]:
    return [(each, turn) for each in counted for turn in each.turns]


def test_a_rank_holds_its_share_of_the_active_groups_masters_and_state(
    counted: list[Counted], turns: list[tuple[Counted, Turn]]
) -> None:
    for each, turn in turns:
        share = each.sizes[turn.group] / NUM_RANKS
        # 12 bytes an element: fp32 master, two moments.
        assert 12 * share <= turn.after.state <= 12 * (share + each.padding)
    for each in counted:
        assert len({turn.group for turn in each.turns}) == len(each.sizes)


def test_two_groups_are_never_on_the_device_together(turns: list[tuple[Counted, Turn]]) -> None:
    for each, turn in turns:
        # What leaves is gone before what comes is there.
        assert turn.highest.state <= 12 * (max(each.sizes) / NUM_RANKS + each.padding)
        assert turn.highest.state < 12 * (each.sizes[turn.group] + each.sizes[turn.group - 1]) / NUM_RANKS


def test_the_others_wait_on_the_host(turns: list[tuple[Counted, Turn]]) -> None:
    for each, turn in turns:
        everything = 12 * sum(each.sizes) / NUM_RANKS
        # The active group's places stay allocated, so that nothing is pinned anew.
        assert everything <= each.host_bytes <= everything + 12 * each.padding * len(each.sizes)
        assert turn.after.host >= everything - 12 * each.sizes[turn.group] / NUM_RANKS


def test_only_the_active_group_has_gradients_and_there_is_one_reduce_bucket(
    case: Any, turns: list[tuple[Counted, Turn]]
) -> None:
    byte = CASES[case].dtype.itemsize
    for each, turn in turns:
        size = each.sizes[turn.group]
        # Stage 3 keeps a flat gradient of the group's share, and lets gradients lie in its bucket, which stays.
        kept = byte * (size / NUM_RANKS + each.padding + BUCKET) if case[0] == "zero3" else 0
        assert turn.highest.gradients <= byte * size + kept
        assert turn.after.gradients <= kept
        assert turn.flat_gradient_bytes <= kept
        assert min(each.sizes) > BUCKET, "a bucket of the whole model would not show"
        assert turn.bucket_elements == BUCKET


def test_zero3_gathers_weights_once_and_not_once_for_each_group(case: Any, counted: list[Counted]) -> None:
    # DeepSpeed hooks a module's forward once to gather its weights and once for the end of its backward.
    assert [each.hooks for each in counted] == [2 if case[0] == "zero3" else 0] * NUM_RANKS


def test_weights_are_held_once_and_under_zero3_shared_out(case: Any, turns: list[tuple[Counted, Turn]]) -> None:
    byte, is_shared = CASES[case].dtype.itemsize, case[0] == "zero3"
    for each, turn in turns:
        ideal = byte * sum(each.sizes) / (NUM_RANKS if is_shared else 1)
        slack = byte * each.padding * len(each.sizes)
        assert ideal <= each.weight_bytes <= ideal + slack
        # And a few hundred bytes of buffers.
        assert is_shared or turn.after.parameters <= ideal + slack + 1024
