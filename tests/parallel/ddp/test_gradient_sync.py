from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from slivertune.parallel.consistency.heartbeat import Heartbeat
from slivertune.parallel.ddp.gradient_sync import BucketedAllReduce, _fill_buckets
from tests.helpers.models import differing, odd_model, token_batches
from tests.helpers.ranks import run_ranks
from tests.helpers.tolerance import sum_limit
from tests.parallel.reference import largest_difference

Gradients = dict[str, torch.Tensor]


class Shared(nn.Module):
    """Two layers and a scale; `scale` is used inside of every layer and after them."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])
        self.scale = nn.Parameter(torch.full((5,), 0.7))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor, order: tuple[int, ...] = (0, 1)) -> dict[str, torch.Tensor]:
        x.requires_grad_(True)
        for index in order:
            if self.reentrant is None:
                x = self._layer(x, index)
            else:
                x = checkpoint(self._layer, x, index, use_reentrant=self.reentrant)
        return {"loss": (x * self.scale).square().mean()}

    def _layer(self, x: torch.Tensor, index: int) -> torch.Tensor:
        return torch.tanh(self.layers[index](x) * self.scale)


def shared(reentrant: bool | None = None) -> Shared:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return Shared(reentrant)


def rows(rank: int, turn: int = 0) -> torch.Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * turn + rank))


def gradients(model: nn.Module) -> Gradients:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def mean_of_ranks(num_ranks: int, compute: Callable[[int], Gradients]) -> Gradients:
    """What each rank computes by itself, averaged by hand."""
    each = [compute(rank) for rank in range(num_ranks)]
    return {name: sum((g[name] / num_ranks for g in each[1:]), each[0][name] / num_ranks) for name in each[0]}


def alone(rank: int, **forward: Any) -> Gradients:
    model = shared()
    model(rows(rank), **forward)["loss"].backward()
    return gradients(model)


def synchronized(model: nn.Module, **options: Any) -> BucketedAllReduce:
    return BucketedAllReduce(model, list(model.parameters()), Heartbeat("test"), **options)


def recorded_sums() -> Any:
    """Records the calls of `all_reduce` inside."""
    return mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce)


def sent_by(loss: torch.Tensor) -> list[int]:
    """The elements of each tensor that goes through `all_reduce` in a backward pass."""
    with recorded_sums() as sums:
        loss.backward()
    return [call.args[0].numel() for call in sums.call_args_list]


# Halves are exact and the sum of two has one order, so the mean has the bits of the one made by hand; a parameter that
# a reentrant checkpoint uses as well gets its gradient in parts, which are added in another order: three parts of 0.1
# on each of two ranks.
def gradients_under_checkpointing_are_the_mean_and_only_what_arrives_in_parts_is_sent_twice(rank: int) -> None:
    sent, apart = {}, {}
    for reentrant in (None, True, False):
        model = shared(reentrant)
        # The scale last, so that its bucket is the first to start: before the layers' parts of its gradient have come.
        parameters = [*model.layers.parameters(), model.scale]
        BucketedAllReduce(model, parameters, Heartbeat("test"), bucket_bytes=64)
        sent[reentrant] = sum(sent_by(model(rows(rank))["loss"]))
        apart[reentrant] = largest_difference(gradients(model), mean_of_ranks(2, alone))
    # After all collectives, so that a rank that fails here leaves no other one waiting.
    assert apart[None] == apart[False] == 0.0 and apart[True] <= sum_limit(6, torch.float32, 0.1), apart
    once = sum(each.numel() for each in parameters)
    once += sum(len(bucket.parameters) for bucket in _fill_buckets(parameters, 64))
    assert sent[None] == sent[False] == once < sent[True] < 2 * once, sent


def gradients_that_arrive_in_another_order_on_each_rank_meet_their_like(rank: int) -> None:
    orders = [(0, 1), (1, 0)]
    model = shared()
    synchronized(model, bucket_bytes=32)
    model(rows(rank), order=orders[rank])["loss"].backward()
    assert differing(gradients(model), mean_of_ranks(2, lambda each: alone(each, order=orders[each]))) == []


def a_sync_after_the_last_micro_batch_is_enough_and_one_after_each_does_no_harm(rank: int) -> None:
    def two_turns(each: int) -> Gradients:
        model = shared()
        for turn in range(2):
            model(rows(each, turn))["loss"].backward()
        return gradients(model)

    due, sent, apart = [True], {}, {}
    for is_due_first in (False, True):
        model = shared()
        synchronized(model, is_due=lambda: due[0])
        for turn in range(2):
            due[0] = is_due_first or turn == 1
            sent[is_due_first, turn] = len(sent_by(model(rows(rank, turn))["loss"]))
        apart[is_due_first] = largest_difference(gradients(model), mean_of_ranks(2, two_turns))
    # Two turns of two ranks, of gradients of 0.1.
    assert apart[False] == 0.0 and apart[True] <= sum_limit(4, torch.float32, 0.1), apart
    assert sent[False, 0] == 0 < min(sent[False, 1], sent[True, 0], sent[True, 1]), sent


def frozen_parameters_are_not_sent_and_odd_ones_arrive(rank: int) -> None:
    """Parameters without dimensions, transposed, empty, of two dtypes; half of them frozen."""
    found = []
    for frozen in (0, 1):
        model = odd_model(torch.bfloat16, fp32_gates=True)
        sync = synchronized(model, bucket_bytes=1000)
        for parameter in model.layers[frozen].parameters():  # type: ignore[index, union-attr]
            parameter.requires_grad_(False)
        sent = sent_by(model(**token_batches(2)[rank]).loss)

        def compute(each: int, frozen: int = frozen) -> Gradients:
            other = odd_model(torch.bfloat16, fp32_gates=True)
            other(**token_batches(2)[each]).loss.backward()
            return {name: g for name, g in gradients(other).items() if f"layers.{frozen}." not in name}

        apart = differing(gradients(model), mean_of_ranks(2, compute))
        counts = sum(sent) - sum(p.numel() for p in model.parameters() if p.requires_grad)
        sync.remove()
        found.append((apart, sent, counts, sent_by(model(**token_batches(2)[rank]).loss)))
    for apart, sent, counts, sent_when_removed in found:
        assert apart == sent_when_removed == [], (apart, sent_when_removed)
        assert len(sent) > 5 and 0 < counts <= 3 * len(sent), (sent, counts)
        assert max(sent) <= 500 + 4, sent  # 1,000 bytes of bf16, and a count for each part


def a_backward_pass_that_raised_on_every_rank_leaves_nothing_behind(rank: int) -> None:
    model = shared()
    synchronized(model, bucket_bytes=32)
    out = model(rows(rank))["loss"]
    handle = model.scale.register_post_accumulate_grad_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        out.backward()
    handle.remove()
    model.zero_grad()
    model(rows(rank))["loss"].backward()
    assert differing(gradients(model), mean_of_ranks(2, alone)) == []


def a_sparse_gradient_is_refused(rank: int) -> None:
    model = nn.Embedding(7, 3, sparse=True)
    synchronized(model)
    with pytest.raises(ValueError, match=r"shape \(7, 3\) is sparse and .* Set sparse=False"):
        model(torch.tensor([rank])).sum().backward()


CHECKS = {
    check.__name__: check
    for check in (
        gradients_under_checkpointing_are_the_mean_and_only_what_arrives_in_parts_is_sent_twice,
        gradients_that_arrive_in_another_order_on_each_rank_meet_their_like,
        a_sync_after_the_last_micro_batch_is_enough_and_one_after_each_does_no_harm,
        frozen_parameters_are_not_sent_and_odd_ones_arrive,
        a_backward_pass_that_raised_on_every_rank_leaves_nothing_behind,
        a_sparse_gradient_is_refused,
    )
}


def check_on_a_rank(rank: int, num_ranks: int, check: str) -> None:
    CHECKS[check](rank)


@pytest.mark.parametrize("check", CHECKS)
def test_on_both_ranks(check: str) -> None:
    run_ranks(check_on_a_rank, 2, check)


def test_buckets_cut_what_is_larger_and_hold_every_element_once() -> None:
    parameters = [nn.Parameter(torch.zeros(size)) for size in (3, 50, 0, 7, 20)]
    parameters[3].requires_grad_(False)
    buckets = _fill_buckets(parameters, 4 * 16)
    sizes = [[stop - start for _, start, stop in bucket._parts] for bucket in buckets]
    assert sizes == [[16], [4, 12], [16], [16], [6, 3]]
    parts = [part for bucket in buckets for part in bucket._parts]
    assert [[(start, stop) for each, start, stop in parts if each is parameter] for parameter in parameters] == [
        [(0, 3)],
        [(0, 12), (12, 28), (28, 44), (44, 50)],
        [],
        [],
        [(0, 16), (16, 20)],
    ]
