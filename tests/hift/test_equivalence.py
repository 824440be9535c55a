"""HiFT against the bare optimizer (one group) and against the naive reference (several groups), to the bit."""

import functools
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from slivertune import HiFT, HiFTConfig
from tests.helpers.models import (
    LAYERS,
    ODD_LAYERS,
    assert_all_moved,
    assert_same_bits,
    label_batches,
    odd_model,
    small_decoder,
    tiny_bert,
    tiny_gpt2,
    tiny_llama,
    token_batches,
    trainable,
    twin,
    weights,
)
from tests.helpers.pairwise import pairwise, rotated
from tests.helpers.reference import NaiveHiFT, decay_split, grouped_optimizer, naive_groups, train
from tests.hift.cases import BIG_VOCAB, DTYPES, OPTIMIZERS, WITH_LR, cosine, hift_over, warm_cosine

ONE_GROUP = {"layers_per_group": LAYERS, "steps_per_group": 1}
ORDERS = ["bottom2up", "top2down", "random"]


def equals_the_bare_optimizer(
    model: torch.nn.Module,
    name: str,
    batches: list[dict[str, torch.Tensor]],
    options: dict[str, Any] | None = None,
    *,
    split: Any = None,
    scheduled: bool = False,
    max_norm: float | None = None,
    **config: Any,
) -> None:
    """Train a model by HiFT with one group, and a twin by the base optimizer; compare every loss and weight."""
    optimizer_class, usual = OPTIMIZERS[name]
    options = options or usual
    bare, settings = twin(model), HiFTConfig.paper(**ONE_GROUP, **config)
    if split is None:
        plain = optimizer_class(bare.parameters(), **options)
        hift = HiFT(model, optimizer_class, config=settings, **options)
    else:
        plain = grouped_optimizer(bare, optimizer_class, split, **options)
        hift = HiFT.wrap(grouped_optimizer(model, optimizer_class, split, **options), model, config=settings)
    losses = []
    for trained, optimizer in ((model, hift), (bare, plain)):
        torch.manual_seed(5)
        schedule = cosine(optimizer, len(batches)) if scheduled else None
        losses.append(train(trained, optimizer, batches, len(batches), max_norm=max_norm, scheduler=schedule))
    assert losses[0] == losses[1]
    assert_same_bits(model, bare)


BIG_BATCHES = token_batches(5, vocab=BIG_VOCAB)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_group_equals_the_bare_optimizer(name: str) -> None:
    model = small_decoder(vocab=BIG_VOCAB)
    before = weights(model)
    equals_the_bare_optimizer(model, name, BIG_BATCHES)
    assert_all_moved(model, before)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_group_of_bf16_weights_without_masters_equals_the_bare_optimizer(name: str) -> None:
    equals_the_bare_optimizer(small_decoder(torch.bfloat16, vocab=BIG_VOCAB), name, BIG_BATCHES, master="none")


@pytest.mark.parametrize("scheduled", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("name", WITH_LR)
def test_one_group_wrapped_with_decay_groups_equals_the_bare_optimizer(name: str, scheduled: bool) -> None:
    options = {key: value for key, value in OPTIMIZERS[name][1].items() if key != "weight_decay"}
    model = small_decoder(vocab=BIG_VOCAB)
    split = decay_split(model)
    split[1][1]["lr"] = options["lr"] / 3
    equals_the_bare_optimizer(model, name, BIG_BATCHES, options, split=split, scheduled=scheduled, max_norm=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_LR)
def test_one_group_with_cosine_and_warmup_equals_the_bare_optimizer(name: str) -> None:
    equals_the_bare_optimizer(small_decoder(vocab=BIG_VOCAB), name, BIG_BATCHES, scheduled=True)


@pytest.mark.parametrize("kernel", [{"foreach": True}, {"fused": True}])
def test_one_group_passes_the_choice_of_kernel_on(kernel: dict[str, bool]) -> None:
    equals_the_bare_optimizer(small_decoder(), "AdamW", token_batches(6), {"lr": 1e-2, **kernel})


def test_one_group_draws_no_random_numbers() -> None:
    equals_the_bare_optimizer(tiny_bert(dropout=0.2), "AdamW", label_batches(10), {"lr": 1e-2})


def hift_and_reference(
    model: torch.nn.Module,
    name: str = "AdamW",
    *,
    cycles: int = 2,
    accumulation: int = 1,
    max_norm: float | None = None,
    split: bool = False,
    scheduled: bool = True,
    big: bool = False,
    batches: list[dict[str, torch.Tensor]] | None = None,
    **config: Any,
) -> tuple[HiFT, list[list[str]]]:
    """Train a model by HiFT and a twin by the reference; compare every loss and weight; return what was active."""
    optimizer_class, options = OPTIMIZERS[name]
    other, before = twin(model), weights(model)
    groups = naive_groups(model, config.get("layers_per_group", 1))
    if split:
        options = {key: value for key, value in options.items() if key != "weight_decay"}
        hift = HiFT.wrap(
            grouped_optimizer(model, optimizer_class, decay_split(model), **options),
            model,
            config=HiFTConfig.paper(**config),
        )
    else:
        hift = HiFT(model, optimizer_class, config=HiFTConfig.paper(**config), **options)
    steps_per_group = config.get("steps_per_group", 1)
    total = cycles * len(groups) * steps_per_group
    batches = batches or token_batches(total * accumulation, vocab=BIG_VOCAB if big else 97)
    active = [sorted(trainable(model))]
    hift_losses = train(
        model,
        hift,
        batches,
        total,
        accumulation=accumulation,
        max_norm=max_norm,
        scheduler=LambdaLR(hift, lambda step: warm_cosine(step, total)) if scheduled else None,
        after_step=lambda _: active.append(sorted(trainable(model))),
    )
    cycle = active[: len(groups) * steps_per_group]
    order = [next(i for i, group in enumerate(groups) if sorted(group) == names) for names in cycle[::steps_per_group]]
    reference = NaiveHiFT(
        other,
        optimizer_class,
        groups=groups,
        order=order,
        steps_per_group=steps_per_group,
        master=config.get("master", "fp32"),
        discard=config.get("state") == "discard",
        split=decay_split(other) if split else None,
        **options,
    )
    assert hift_losses == train(
        other,
        reference,
        batches,
        total,
        accumulation=accumulation,
        max_norm=max_norm,
        scheduler=LambdaLR(reference.carrier, lambda step: warm_cosine(step, total)) if scheduled else None,
    )
    assert_same_bits(model, other)
    assert_all_moved(model, before)
    assert hift.updates == total
    return hift, active


GRID: list[dict[str, Any]] = [
    {"order": order, "layers_per_group": m, "steps_per_group": steps, "accumulation": accumulation, "max_norm": norm}
    for order in ORDERS
    for m, steps, accumulation, norm in [(1, 1, 1, None), (2, 3, 4, 1e-3), (3, 3, 1, 1e-3), (4, 1, 4, None)]
]


# Of combinations of settings each pair is in test_pairwise.py.
@pytest.mark.slow
@DTYPES
@pytest.mark.parametrize("case", GRID, ids=lambda case: "-".join(map(str, case.values())))
def test_several_groups_equal_the_reference(case: dict[str, Any], dtype: torch.dtype) -> None:
    hift_and_reference(small_decoder(dtype), **case)


@rotated(name=OPTIMIZERS, dtype=[torch.float32, torch.bfloat16])
def test_every_optimizer_equals_the_reference(name: str, dtype: torch.dtype) -> None:
    config = {"cycles": 3, "layers_per_group": 2, "steps_per_group": 2, "scheduled": name in WITH_LR, "big": True}
    hift_and_reference(small_decoder(dtype, vocab=BIG_VOCAB), name, **config)


@pytest.mark.parametrize("name", ["AdamW", "SGD momentum", "torch Adafactor"])
def test_bf16_weights_without_masters_equal_the_reference(name: str) -> None:
    hift_and_reference(small_decoder(torch.bfloat16), name, layers_per_group=2, master="none")


@rotated(order=ORDERS, dtype=[torch.float32, torch.bfloat16])
def test_decay_groups_inside_a_group_equal_the_reference(order: str, dtype: torch.dtype) -> None:
    hift_and_reference(small_decoder(dtype), split=True, order=order, layers_per_group=2, max_norm=1e-3)


ARCHITECTURES: dict[str, tuple[Any, Any]] = {
    "tied llama": (functools.partial(tiny_llama, tied=True), token_batches),
    "gpt2": (tiny_gpt2, token_batches),
    "bert": (tiny_bert, label_batches),
}


@rotated(architecture=ARCHITECTURES, dtype=[torch.bfloat16, torch.float32])
def test_other_architectures_equal_the_reference(architecture: str, dtype: torch.dtype) -> None:
    build, make_batches = ARCHITECTURES[architecture]
    model = build(dtype)
    hift, _ = hift_and_reference(model, batches=make_batches(10))
    assert [list(group.parameter_names) for group in hift.groups] == naive_groups(model, 1)


@pairwise(
    dtypes=["fp32", "bf16", "bf16 and fp32"],
    name=["AdamW", "SGD", "torch Adafactor"],
    stream_bytes=[4096, 134_217_728],
)
def test_odd_parameters_equal_the_reference(name: str, dtypes: str, stream_bytes: int) -> None:
    # torch's Adafactor divides by the number of elements, so it can't step an empty tensor in any case.
    model = odd_model(
        torch.float32 if dtypes == "fp32" else torch.bfloat16,
        with_empty=name != "torch Adafactor",
        fp32_gates="and" in dtypes,
    )
    assert not model.get_parameter("layers.0.across").is_contiguous()
    hift_and_reference(model, name, cycles=3, layers=ODD_LAYERS, layers_per_group=2, stream_bytes=stream_bytes)


@rotated(steps_per_group=[3, 1], dtype=[torch.bfloat16, torch.float32])
def test_discarded_state_and_masters_are_new_at_each_turn(dtype: torch.dtype, steps_per_group: int) -> None:
    hift_and_reference(small_decoder(dtype), state="discard", layers_per_group=2, steps_per_group=steps_per_group)


@pytest.mark.parametrize("layers_per_group", [1, 2, 3, 4, 5])
def test_groups_are_cut_from_the_bottom_and_the_last_may_be_smaller(layers_per_group: int) -> None:
    model, hift = hift_over(small_decoder(), torch.optim.SGD, layers_per_group=layers_per_group, lr=0.1)
    expected = naive_groups(model, layers_per_group)
    assert [list(group.parameter_names) for group in hift.groups] == expected
    assert hift.num_groups == len(expected) == -(-LAYERS // layers_per_group)
    assert [group.index for group in hift.groups] == list(range(len(expected)))


def orders_of(seed: int, order: str = "random", layers_per_group: int = 1, *, cycles: int = 3) -> list[list[int]]:
    """List the trainable group of each turn, cycle by cycle, by the weights that require a gradient."""
    model = small_decoder(blocks=6)
    groups = [sorted(group) for group in naive_groups(model, layers_per_group)]
    _, hift = hift_over(model, torch.optim.SGD, order=order, seed=seed, layers_per_group=layers_per_group, lr=0.1)
    assert hift.cycle_length == len(groups)
    seen = [groups.index(sorted(trainable(model)))]
    train(
        model,
        hift,
        token_batches(1),
        cycles * len(groups) - 1,
        after_step=lambda _: seen.append(groups.index(sorted(trainable(model)))),
    )
    return [seen[start : start + len(groups)] for start in range(0, len(seen), len(groups))]


def test_bottom2up_and_top2down_visit_the_groups_in_order() -> None:
    assert orders_of(0, "bottom2up", 3) == [[0, 1, 2]] * 3
    assert orders_of(0, "top2down", 3) == [[2, 1, 0]] * 3


def test_random_order_is_one_seeded_permutation_for_the_whole_run() -> None:
    first = orders_of(7)
    assert sorted(first[0]) == list(range(8))
    assert first[1] == first[0] and first[2] == first[0]
    torch.manual_seed(123)
    assert orders_of(7, cycles=1) == first[:1]
    assert len({tuple(orders_of(seed, cycles=1)[0]) for seed in range(4)}) > 1
