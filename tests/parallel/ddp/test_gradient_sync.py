from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from slivertune.parallel.consistency.heartbeat import Heartbeat
from slivertune.parallel.ddp import gradient_sync
from slivertune.parallel.ddp.gradient_sync import BucketedAllReduce, _fill_buckets
from tests.helpers.models import differing, odd_model, token_batches
from tests.helpers.ranks import run_ranks
from tests.helpers.tolerance import sum_limit

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


class Sent:
    """Records what goes through `all_reduce`."""

    def __init__(self) -> None:
        self.elements: list[int] = []
        self._original = dist.all_reduce

    def __enter__(self) -> Sent:
        def record(tensor: torch.Tensor, **options: Any) -> Any:
            self.elements.append(tensor.numel())
            return self._original(tensor, **options)

        gradient_sync.dist.all_reduce = record  # type: ignore[assignment]
        return self

    def __exit__(self, *error: object) -> None:
        gradient_sync.dist.all_reduce = self._original


def checkpointing(rank: int, num_ranks: int) -> dict[str, Any]:
    want = mean_of_ranks(num_ranks, alone)
    found = {}
    for name, reentrant in (("none", None), ("reentrant", True), ("not reentrant", False)):
        model = shared(reentrant)
        # The scale last, so that its bucket is the first to start: before the layers' parts of its gradient have come.
        parameters = [*model.layers.parameters(), model.scale]
        BucketedAllReduce(model, parameters, Heartbeat("test"), bucket_bytes=64)
        with Sent() as sent:
            model(rows(rank))["loss"].backward()
        got = gradients(model)
        found[name] = max(float((got[key] - want[key]).abs().max()) for key in want)
        found[f"{name}, sent"] = sum(sent.elements)
    return found


def another_order(rank: int, num_ranks: int) -> float:
    """The ranks go through the layers in other orders, so that gradients arrive in other orders."""
    orders = [(0, 1), (1, 0)]
    want = mean_of_ranks(num_ranks, lambda each: alone(each, order=orders[each]))
    model = shared()
    synchronized(model, bucket_bytes=32)
    model(rows(rank), order=orders[rank])["loss"].backward()
    got = gradients(model)
    return max(float((got[key] - want[key]).abs().max()) for key in want)


def accumulation(rank: int, num_ranks: int) -> dict[str, Any]:
    def two_turns(each: int) -> Gradients:
        model = shared()
        for turn in range(2):
            model(rows(each, turn))["loss"].backward()
        return gradients(model)

    want = mean_of_ranks(num_ranks, two_turns)
    found = {}
    due = [True]
    for name in ("at the end", "every time"):
        model = shared()
        synchronized(model, is_due=lambda: due[0])
        sent = []
        for turn in range(2):
            due[0] = name == "every time" or turn == 1
            with Sent() as each:
                model(rows(rank, turn))["loss"].backward()
            sent.append(len(each.elements))
        got = gradients(model)
        found[name] = max(float((got[key] - want[key]).abs().max()) for key in want)
        found[f"{name}, sent"] = sent
    return found


def frozen_and_odd(rank: int, num_ranks: int) -> dict[str, Any]:
    """Parameters without dimensions, transposed, empty, of two dtypes; half of them frozen."""
    found: dict[str, Any] = {}
    for frozen in (0, 1):
        model = odd_model(torch.bfloat16, fp32_gates=True)
        sync = synchronized(model, bucket_bytes=1000)
        for parameter in model.layers[frozen].parameters():  # type: ignore[index, union-attr]
            parameter.requires_grad_(False)
        with Sent() as sent:
            model(**token_batches(2)[rank]).loss.backward()
        got = gradients(model)

        def compute(each: int, frozen: int = frozen) -> Gradients:
            other = odd_model(torch.bfloat16, fp32_gates=True)
            other(**token_batches(2)[each]).loss.backward()
            return {name: g for name, g in gradients(other).items() if f"layers.{frozen}." not in name}

        want = mean_of_ranks(num_ranks, compute)
        active = sum(p.numel() for p in model.parameters() if p.requires_grad)
        found[f"differing {frozen}"] = differing(got, want)
        found[f"sent {frozen}"] = (sum(sent.elements) - active, max(sent.elements), len(sent.elements))
        sync.remove()
        with Sent() as silent:
            model(**token_batches(2)[rank]).loss.backward()
        found[f"silent {frozen}"] = len(silent.elements)
    return found


def after_a_failure(rank: int, num_ranks: int) -> float:
    """A backward pass that raises on every rank leaves nothing behind."""
    model = shared()
    synchronized(model, bucket_bytes=32)
    out = model(rows(rank))["loss"]
    handle = model.scale.register_post_accumulate_grad_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        out.backward()
    handle.remove()
    model.zero_grad()
    model(rows(rank))["loss"].backward()
    want, got = mean_of_ranks(num_ranks, alone), gradients(model)
    return max(float((got[key] - want[key]).abs().max()) for key in want)


def sparse(rank: int, num_ranks: int) -> str:
    model = nn.Embedding(7, 3, sparse=True)
    synchronized(model)
    with pytest.raises(ValueError, match=r"shape \(7, 3\) is sparse, .* set sparse=False") as raised:
        model(torch.tensor([rank])).sum().backward()
    return str(raised.value)


def everything(rank: int, num_ranks: int) -> dict[str, Any]:
    return {
        "checkpointing": checkpointing(rank, num_ranks),
        "order": another_order(rank, num_ranks),
        "accumulation": accumulation(rank, num_ranks),
        "odd": frozen_and_odd(rank, num_ranks),
        "failure": after_a_failure(rank, num_ranks),
        "sparse": sparse(rank, num_ranks),
    }


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(everything, 2)


# Halves are exact and the sum of two has one order, so the mean has the bits of the one made by hand; a parameter that
# a reentrant checkpoint uses as well gets its gradient in parts, which are added in another order: three parts of 0.1
# on each of two ranks.
@pytest.mark.parametrize(
    ("kind", "within"), [("none", 0.0), ("reentrant", sum_limit(6, torch.float32, 0.1)), ("not reentrant", 0.0)]
)
def test_gradients_are_the_mean_of_the_ranks_under_checkpointing(
    found: list[dict[str, Any]], kind: str, within: float
) -> None:
    assert all(each["checkpointing"][kind] <= within for each in found)


def test_only_what_arrives_in_parts_is_sent_twice(found: list[dict[str, Any]]) -> None:
    parameters = sum(parameter.numel() for parameter in shared().parameters())
    buckets = _fill_buckets([*shared().layers.parameters(), shared().scale], 64)
    once = parameters + sum(len(bucket.parameters) for bucket in buckets)
    for each in found:
        assert each["checkpointing"]["none, sent"] == each["checkpointing"]["not reentrant, sent"] == once
        assert once < each["checkpointing"]["reentrant, sent"] < 2 * once


def test_gradients_that_arrive_in_another_order_on_each_rank_meet_their_like(found: list[dict[str, Any]]) -> None:
    assert [each["order"] for each in found] == [0.0, 0.0]


def test_a_sync_after_the_last_micro_batch_is_enough_and_one_after_each_does_no_harm(
    found: list[dict[str, Any]],
) -> None:
    for each in found:
        assert each["accumulation"]["at the end"] == 0.0
        assert each["accumulation"]["at the end, sent"][0] == 0 < each["accumulation"]["at the end, sent"][1]
        # Two turns of two ranks, of gradients of 0.1.
        assert each["accumulation"]["every time"] <= sum_limit(4, torch.float32, 0.1)
        assert min(each["accumulation"]["every time, sent"]) > 0


def test_frozen_parameters_are_not_sent_and_odd_ones_arrive(found: list[dict[str, Any]]) -> None:
    for each in found:
        for frozen in (0, 1):
            assert each["odd"][f"differing {frozen}"] == []
            counts, largest, num_sent = each["odd"][f"sent {frozen}"]
            assert num_sent > 5 and 0 < counts <= 3 * num_sent
            assert largest <= 500 + 4  # 1,000 bytes of bf16, and a count for each part
            assert each["odd"][f"silent {frozen}"] == 0


def test_a_backward_pass_that_raised_leaves_nothing_behind(found: list[dict[str, Any]]) -> None:
    assert [each["failure"] for each in found] == [0.0, 0.0]


def test_a_sparse_gradient_is_refused(found: list[dict[str, Any]]) -> None:
    assert all("is sparse" in each["sparse"] for each in found)


def test_buckets_cut_what_is_larger_and_hold_every_element_once() -> None:
    parameters = [nn.Parameter(torch.zeros(size)) for size in (3, 50, 0, 7, 20)]
    parameters[3].requires_grad_(False)
    buckets = _fill_buckets(parameters, 4 * 16)
    sizes = [[stop - start for _, start, stop in bucket._parts] for bucket in buckets]
    assert sizes == [[16], [4, 12], [16], [16], [6, 3]]
    covered: dict[nn.Parameter, list[tuple[int, int]]] = {}
    for bucket in buckets:
        for parameter, start, stop in bucket._parts:
            covered.setdefault(parameter, []).append((start, stop))
    assert [covered.get(parameter) for parameter in parameters] == [
        [(0, 3)],
        [(0, 12), (12, 28), (28, 44), (44, 50)],
        None,
        None,
        [(0, 16), (16, 20)],
    ]
