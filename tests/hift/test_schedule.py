"""The delayed learning rate (HiFT, section 3.1): read inside the first step of a cycle, held to its end."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau

from slivertune import HiFT, HiFTConfig
from tests.helpers.models import (
    assert_all_moved,
    assert_same_bits,
    small_decoder,
    token_batches,
    trainable,
    twin,
    weights,
)
from tests.helpers.reference import NaiveHiFT, decay_split, grouped_optimizer, naive_groups, train
from tests.hift.cases import hift_over, warm_cosine


def sgd(lr: float | torch.Tensor = 0.5, **config: Any) -> tuple[torch.nn.Module, HiFT]:
    """A tiny model under plain SGD, whose applied learning rate shows in the weights."""
    return hift_over(small_decoder(), torch.optim.SGD, lr=lr, **config)


def held_rates(model: torch.nn.Module, hift: HiFT, updates: int, scheduler: Any) -> list[float | None]:
    """What is held in each of some updates."""
    held: list[Any] = []
    train(
        model,
        hift,
        token_batches(1),
        updates,
        scheduler=scheduler,
        after_step=lambda _: held.append(hift.held_lr[0]),
    )
    return held


def backward(model: torch.nn.Module) -> None:
    model(**token_batches(1)[0]).loss.backward()


@pytest.mark.parametrize("steps_per_group", [1, 3])
def test_lr_is_read_inside_the_first_step_of_a_cycle_and_held_to_its_end(steps_per_group: int) -> None:
    model, hift = sgd(lr=100.0, layers_per_group=2, steps_per_group=steps_per_group)
    length = 3 * steps_per_group
    assert hift.cycle_length == length
    for update in range(3 * length):
        backward(model)
        written, held = 0.5 / (update + 1), 0.5 / (update // length * length + 1)
        hift.param_groups[0]["lr"] = written
        expected = {n: p.detach().add(p.grad, alpha=-held) for n, p in model.named_parameters() if p.grad is not None}
        hift.step()
        for name, value in expected.items():
            assert torch.equal(model.get_parameter(name), value), (update, name)
        assert hift.param_groups[0]["lr"] == written, "param_groups shows the scheduler's value"
        assert hift.held_lr == [held]


@pytest.mark.parametrize("before", ["a backward", "a step without gradients"])
def test_what_comes_before_a_cycles_first_step_does_not_read_the_lr(before: str) -> None:
    model, hift = sgd(layers_per_group=3)
    train(model, hift, token_batches(2), 2)
    hift.param_groups[0]["lr"] = 7.0
    if before == "a backward":
        backward(model)
    else:
        hift.step()
    hift.param_groups[0]["lr"] = 0.125
    backward(model)
    hift.step()
    assert hift.held_lr == [0.125]


@pytest.mark.parametrize("steps_per_group", [1, 2])
def test_ticking_four_times_per_update_over_four_times_the_length_holds_equal_values(steps_per_group: int) -> None:
    def held(ticks: int) -> list[float | None]:
        model, hift = sgd(layers_per_group=2, steps_per_group=steps_per_group)
        total = 4 * hift.cycle_length
        scheduler = LambdaLR(hift, lambda step: warm_cosine(step, ticks * total))
        values = []
        for update in range(total):
            train(model, hift, token_batches(1), 1, start=update)
            values.append(hift.held_lr[0])
            for _ in range(ticks):
                scheduler.step()
        return values

    once = held(1)
    assert held(4) == once
    assert len(set(once)) == 4, "one value per cycle"


@pytest.mark.parametrize("order", ["bottom2up", "top2down", "random"])
def test_decay_reaches_the_end_of_the_schedule(order: str) -> None:
    model, hift = sgd(order=order)
    cycles, length = 4, hift.cycle_length
    held = held_rates(model, hift, cycles * length, LambdaLR(hift, lambda step: 1 - step / (cycles * length)))
    assert held == [0.5 * (1 - cycle / cycles) for cycle in range(cycles) for _ in range(length)]
    assert hift.param_groups[0]["lr"] == 0.0
    before = weights(model)
    train(model, hift, token_batches(1), 1)
    assert hift.held_lr == [0.0]
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("kind", ["step", "in backward"])
def test_a_warm_up_from_0_loses_its_steps_of_rate_0_and_not_a_cycle(kind: str) -> None:
    model, hift = sgd(gradients="stepped" if kind == "in backward" else "device")
    before, length = weights(model), hift.cycle_length
    warm_up = 2 * length
    held = held_rates(model, hift, 2 * length, LambdaLR(hift, lambda step: max(0, step - 1) / warm_up))
    first, second = 0.5 / warm_up, 0.5 * (length - 1) / warm_up
    assert held == [0.0, 0.0] + [first] * (length - 2) + [second] * length
    assert_all_moved(model, before)


def test_a_rate_of_0_is_held_where_another_param_groups_is_not() -> None:
    model = small_decoder()
    split = decay_split(model)
    split[1][1]["lr"] = 0.0
    hift = HiFT.wrap(grouped_optimizer(model, torch.optim.SGD, split, lr=0.5), model, config=HiFTConfig.paper())
    train(model, hift, token_batches(1), 1)
    hift.param_groups[1]["lr"] = 0.25
    train(model, hift, token_batches(1), 1)
    assert hift.held_lr == [0.5, 0.0]


def compare(
    optimizer_class: type[torch.optim.Optimizer],
    make_scheduler: Callable[[Any], Any],
    *,
    updates: int = 15,
    split: bool = False,
    **options: Any,
) -> HiFT:
    """Train by HiFT and by the reference under the same kind of scheduler, compare, and return HiFT."""
    model = small_decoder()
    other, before, batches = twin(model), weights(model), token_batches(updates)
    if split:
        base = grouped_optimizer(model, optimizer_class, decay_split(model), **options)
        hift = HiFT.wrap(base, model, config=HiFTConfig.paper(layers_per_group=2))
    else:
        hift = hift_over(model, optimizer_class, layers_per_group=2, **options)[1]
    reference = NaiveHiFT(
        other,
        optimizer_class,
        groups=naive_groups(other, 2),
        split=decay_split(other) if split else None,
        **{key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in options.items()},
    )
    assert train(model, hift, batches, updates, scheduler=make_scheduler(hift)) == train(
        other, reference, batches, updates, scheduler=make_scheduler(reference.carrier)
    )
    assert_same_bits(model, other)
    assert_all_moved(model, before)
    for group, carried in zip(hift.param_groups, reference.carrier.param_groups, strict=True):
        assert group["lr"] == carried["lr"]
    assert [float(value) for value in hift.held_lr if value is not None] == [float(value) for value in reference.held]
    return hift


SCHEDULES: dict[str, tuple[Any, Callable[[Any], Any], dict[str, Any]]] = {
    "lambda": (torch.optim.AdamW, lambda o: LambdaLR(o, lambda step: warm_cosine(step, 15)), {"lr": 1e-2}),
    "lambda, decay groups": (
        torch.optim.AdamW,
        lambda o: LambdaLR(o, lambda step: warm_cosine(step, 15)),
        {"lr": 1e-2, "split": True},
    ),
    # A scheduler fills a tensor lr in place, so holding the tensor itself would not hold its value.
    "a tensor": (
        torch.optim.AdamW,
        lambda o: LambdaLR(o, lambda step: warm_cosine(step, 15)),
        {"lr": torch.tensor(1e-2)},
    ),
    "a warm-up from 0": (torch.optim.AdamW, lambda o: LambdaLR(o, lambda step: min(step, 4) / 4), {"lr": 1e-2}),
    "a warm-up from 0 of a tensor": (
        torch.optim.AdamW,
        lambda o: LambdaLR(o, lambda step: min(step, 4) / 4),
        {"lr": torch.tensor(1e-2)},
    ),
    "one cycle, with momentum": (
        torch.optim.SGD,
        lambda o: OneCycleLR(o, max_lr=0.2, total_steps=16, cycle_momentum=True),
        {"lr": 0.1, "momentum": 0.9},
    ),
}


@pytest.mark.parametrize("which", SCHEDULES)
def test_a_schedule_equals_the_reference(which: str) -> None:
    optimizer_class, make_scheduler, options = SCHEDULES[which]
    compare(optimizer_class, make_scheduler, **options)


@pytest.mark.parametrize("split", [False, True])
def test_one_cycle_passes_betas_through_and_delays_the_lr(split: bool) -> None:
    hift = compare(
        torch.optim.AdamW,
        lambda o: OneCycleLR(o, max_lr=0.02, total_steps=16, cycle_momentum=True),
        split=split,
        lr=1e-2,
    )
    assert hift.param_groups[0]["betas"] != (0.9, 0.999)


def test_plateau_schedule_lowers_the_lr_of_the_next_cycle() -> None:
    model, hift = sgd(layers_per_group=2)
    scheduler = ReduceLROnPlateau(hift, factor=0.5, patience=0)
    held = []
    for update, metric in enumerate([1.0, 2.0, 2.0, 2.0, 0.5, 0.4, 0.3]):
        train(model, hift, token_batches(1), 1, start=update)
        scheduler.step(metric)
        held.append(hift.held_lr[0])
    assert held == [0.5, 0.5, 0.5, 0.125, 0.125, 0.125, 0.0625]


def test_lr_of_none_passes_through() -> None:
    model, hift = hift_over(small_decoder(), "transformers Adafactor")
    train(model, hift, token_batches(1), 6)
    assert hift.held_lr == [None]
    assert hift.param_groups[0]["lr"] is None


def test_every_parameter_group_holds_its_own_lr() -> None:
    model = small_decoder()
    split = decay_split(model)
    split[1][1]["lr"] = 0.25
    hift = HiFT.wrap(grouped_optimizer(model, torch.optim.SGD, split, lr=0.5), model, config=HiFTConfig.paper())
    groups, list_before = [id(group) for group in hift.param_groups], id(hift.param_groups)
    scheduler = LambdaLR(hift, lambda step: 1 / (step + 1))
    held = []
    for update in range(6):
        train(model, hift, token_batches(1), 1, start=update, scheduler=scheduler)
        held.append(list(hift.held_lr))
    assert held == [[0.5, 0.25]] * 5 + [[0.5 / 6, 0.25 / 6]]
    assert scheduler.get_last_lr() == [0.5 / 7, 0.25 / 7]
    # Schedulers zip over param_groups strictly, and hold on to the list.
    assert id(hift.param_groups) == list_before and [id(group) for group in hift.param_groups] == groups


def test_param_groups_keep_every_parameter_while_one_group_is_active() -> None:
    model, hift = sgd()
    for update in range(5):
        assert {id(p) for group in hift.param_groups for p in group["params"]} == {id(p) for p in model.parameters()}
        assert len(trainable(model)) < len(list(model.parameters()))
        train(model, hift, token_batches(1), 1, start=update)


def test_a_wrapped_optimizer_keeps_its_groups_options() -> None:
    model = small_decoder()
    base = grouped_optimizer(model, torch.optim.AdamW, decay_split(model, 0.3), lr=1e-2, betas=(0.8, 0.9))
    expected = [{key: value for key, value in group.items() if key != "params"} for group in base.param_groups]
    members = [[id(p) for p in group["params"]] for group in base.param_groups]
    hift = HiFT.wrap(base, model, config=HiFTConfig.paper())
    assert [[id(p) for p in group["params"]] for group in hift.param_groups] == members
    for group, options in zip(hift.param_groups, expected, strict=True):
        assert {key: group[key] for key in options} == options
