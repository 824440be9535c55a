"""Whatever is loaded ahead, wherever gradients wait, whichever blocks keep their activations: the same bits.

Every legal pair of settings stands in a row; copies come as late as their events allow, into poisoned memory.
"""

import copy
import itertools
import random
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from slivertune import HiFT, keep_activations
from slivertune.core.checkpointing import enable_checkpointing
from tests.helpers.delayed_streams import delayed
from tests.helpers.models import LAYERS, assert_all_moved, assert_same_bits, tiny_llama, twin, weights
from tests.hift.cases import BIG_VOCAB, hift_over, run

Row = Mapping[str, Any]
FACTORS: dict[str, tuple[Any, ...]] = {
    "prefetch_bytes": (0, 60_000, 10**9),
    "gradients": ("device", "host", "stepped"),
    "blocks": ("none is checkpointed", "all, reentrant", "all", "one keeps its activations"),
    "optimizer": ("AdamW", "SGD momentum", "AdamW8bit"),
    "accumulation": (1, 4),
    "clip": (None, 0.1),
    "layers_per_group": (1, 2, LAYERS),
}
UPDATES = LAYERS + 2


def is_legal(row: Row) -> bool:
    """Gradients that are gone can't be clipped."""
    return not (row.get("gradients") == "stepped" and row.get("clip") is not None)


def pairs_of(row: Row) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    return set(itertools.combinations(row.items(), 2))


def pairwise_rows() -> list[Row]:
    """Rows in which every legal pair of values stands; drawn, the best of many each time."""
    draw = random.Random(0)
    missing = {
        pair
        for (one, values), (other, more) in itertools.combinations(FACTORS.items(), 2)
        for pair in itertools.product(((one, value) for value in values), ((other, value) for value in more))
        if is_legal(dict(pair))
    }
    rows: list[Row] = []
    while missing:
        wanted = dict(min(missing, key=str))
        drawn = [{name: draw.choice(values) for name, values in FACTORS.items()} | wanted for _ in range(200)]
        rows.append(max(filter(is_legal, drawn), key=lambda row: len(pairs_of(row) & missing)))
        missing -= pairs_of(rows[-1])
    return rows


ROWS = pairwise_rows()


def train(model: Any, hift: HiFT, row: Row) -> None:
    checkpointing = {"all, reentrant": True, "all": False, "one keeps its activations": False}
    if row["blocks"] in checkpointing:
        enable_checkpointing(model, {"use_reentrant": checkpointing[row["blocks"]]})
    with keep_activations(model, 1) if row["blocks"] == "one keeps its activations" else nullcontext():
        run(model, hift, UPDATES, accumulation=row["accumulation"], clip=row["clip"], hift=hift)


def plain(row: Row) -> Row:
    """The same update as it is made with everything where it always was."""
    return {**row, "prefetch_bytes": 0, "gradients": "device", "blocks": "none is checkpointed"}


def trained(model: nn.Module, row: Row) -> Any:
    other = twin(model)
    names = ("prefetch_bytes", "gradients", "layers_per_group")
    other, hift = hift_over(other, row["optimizer"], stream_bytes=20_000, **{name: row[name] for name in names})
    train(other, hift, row)
    assert hift.updates == UPDATES
    return other


def test_the_rows_have_every_legal_pair_and_few_more() -> None:
    found = set().union(*map(pairs_of, ROWS))
    for (one, values), (other, more) in itertools.combinations(FACTORS.items(), 2):
        for value, another in itertools.product(values, more):
            pair = ((one, value), (other, another))
            assert (pair in found) == is_legal(dict(pair)), pair
    # Two factors alone have twelve pairs.
    assert 12 <= len(ROWS) <= 24


@pytest.mark.parametrize("row", ROWS, ids=lambda row: ", ".join(map(str, row.values())))
def test_no_bit_differs(row: Row) -> None:
    model = tiny_llama(torch.bfloat16, vocab=BIG_VOCAB)
    model.config.use_cache = False  # as under checkpointing
    expected = trained(model, plain(row))
    assert_all_moved(expected, weights(model))
    with delayed(seed=1) as streams:
        found = trained(model, row)
    assert sum(each.num_late for each in streams) > 0
    assert_same_bits(found, expected)


@pytest.mark.parametrize("gradients", ["host", "stepped"])
def test_adapters_of_peft_train_with_the_same_bits(gradients: str) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft asks transformers for what is deprecated
        model = peft.get_peft_model(tiny_llama(vocab=BIG_VOCAB), config).train()
    row: Row = {
        "prefetch_bytes": 60_000,
        "gradients": gradients,
        "blocks": "all",
        "optimizer": "AdamW",
        "accumulation": 4,
        "clip": None,
    }
    models = []
    for each in (plain(row), row):
        other = copy.deepcopy(model)
        settings = {name: each[name] for name in ("prefetch_bytes", "gradients")}
        with pytest.warns(UserWarning, match="keeps them frozen"):
            other, hift = hift_over(other, "AdamW", stream_bytes=2_000, **settings)
        with delayed(seed=2):
            train(other, hift, each)
        assert hift.updates == UPDATES
        models.append(other)
    moved = [
        name
        for name, parameter in models[0].named_parameters()
        if "lora_" in name and not torch.equal(parameter, model.get_parameter(name))
    ]
    assert len(moved) == sum("lora_" in name for name, _ in model.named_parameters()) > 10
    assert_same_bits(models[1], models[0])
