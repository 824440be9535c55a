"""Settings of HiFT together: wherever state, gradients and weights are, the reference's bits; resumed, the same.

Each legal pair of settings has a row. Copies come as late as their events allow, into poisoned memory; whether each
comes after what it depends on is checked on a pretended device (`tests/pretended_cuda/test_hift.py`). Tests of single
settings leave their combinations to this table.
"""

import copy
import functools
import random
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from slivertune import HiFT, HiFTConfig, keep_activations
from slivertune.core.checkpointing import enable_checkpointing
from tests.helpers.delayed_streams import delayed
from tests.helpers.models import LAYERS, assert_same_bits, bits, differing, small_decoder, token_batches, weights
from tests.helpers.pairwise import Row, assert_has_every_legal_pair, drawn_rows, pairwise_rows, row_params
from tests.helpers.reference import NaiveHiFT, naive_groups
from tests.hift.cases import BIG_VOCAB, OPTIMIZERS, hift_over, reloaded, run, warm_cosine
from tests.hift.test_waiting import NaiveWaiting

CONFIG: dict[str, tuple[Any, ...]] = {
    "layers_per_group": (1, 2, 3, LAYERS),
    "steps_per_group": (1, 2),
    "order": ("bottom2up", "top2down", "random"),
    "state": ("host", "disk", "device", "discard"),
    "master": ("fp32", "none", "stochastic"),
    "stream_bytes": (15_000, 0),
    "prefetch_bytes": (0, 60_000, 10**9),
    "gradients": ("device", "host", "stepped"),
    "waiting": (None, "int8", "nf4"),
    "weights": ("device", "host"),
    "resident_bytes": (0, 15_000),
    "max_grad_norm": (None, 0.1),
    "inactive": ("frozen", "above"),
}
FACTORS: dict[str, tuple[Any, ...]] = {
    **CONFIG,
    "optimizer": ("AdamW", "SGD momentum", "AdamW8bit", "transformers Adafactor with lr"),
    "dtype": ("bf16", "fp32"),
    "blocks": ("none checkpointed", "all, reentrant", "all", "one keeps its activations"),
    "accumulation": (1, 2),
    "copies": ("all late", "some late"),
}
ILLEGAL: tuple[Row, ...] = (
    {"gradients": "stepped", "max_grad_norm": 0.1},
    {"gradients": "host", "state": "device"},
    {"weights": "host", "state": "device"},
    {"weights": "device", "resident_bytes": 15_000},
    {"state": "device", "resident_bytes": 15_000},
    {"state": "device", "prefetch_bytes": 60_000},
    {"state": "device", "prefetch_bytes": 10**9},
    *({"waiting": form, "state": state} for form in ("int8", "nf4") for state in ("device", "discard")),
    *({"inactive": "above", "gradients": place} for place in ("device", "host")),
    *({"inactive": "above", "waiting": form} for form in ("int8", "nf4")),
    *({"inactive": "above", **other} for other in ({"weights": "host"}, {"resident_bytes": 15_000})),
    {"inactive": "above", "max_grad_norm": 0.1},
)
NOT_WITH_DTYPE: tuple[Row, ...] = (
    {"master": "stochastic", "dtype": "fp32"},
    *({"inactive": "above", "master": master, "dtype": "bf16"} for master in ("fp32", "none")),
)
"""Rows that HiFT refuses by the model's dtype."""
SEED = 5
MORE = 2
"""Turns after the first cycle."""


def is_legal(row: Row) -> bool:
    return not any(pair.items() <= row.items() for pair in (*ILLEGAL, *NOT_WITH_DTYPE))


def table() -> list[Row]:
    """Rows with every pair; the seed is one whose order of factors and values makes few updates of them."""
    draw = random.Random(590)
    names = draw.sample(list(FACTORS), len(FACTORS))
    rows = pairwise_rows({name: draw.sample(FACTORS[name], len(FACTORS[name])) for name in names}, is_legal)
    return [{name: row[name] for name in FACTORS} for row in rows]


ROWS = table()


def settings_of(row: Row, folder: Path) -> dict[str, Any]:
    """HiFT's fields."""
    own = {name: row[name] for name in CONFIG} | ({"state_dir": folder} if row["state"] == "disk" else {})
    return own | {"seed": SEED}


def kernels_of(row: Row) -> dict[str, Any]:
    """The base optimizer's option for other kernels, which a table of another device has."""
    return {row["kernels"]: True} if row.get("kernels") else {}


class Run:
    """A model that is trained by a row's settings, over and over the same batches."""

    def __init__(self, row: Row, folder: Path, *, seed: int = 0, device: str = "cpu") -> None:
        self.row, self.device = row, device
        self.model: Any = made(row, seed).to("cpu" if row["weights"] == "host" else device)
        if row["blocks"] != "none checkpointed":
            enable_checkpointing(self.model, {"use_reentrant": row["blocks"] == "all, reentrant"})
        _, self.hift = hift_over(self.model, row["optimizer"], **settings_of(row, folder), **kernels_of(row))
        self.schedule = LambdaLR(self.hift, lambda step: warm_cosine(step, 30))

    def train(self, updates: range) -> tuple[list[float], list[int]]:
        """The losses, and which group was active in each update."""
        keeps = keep_activations(self.model, 1) if "keeps" in self.row["blocks"] else nullcontext()
        with keeps:
            return train(self.model, self.hift, self.schedule, self.row, updates, self.device)

    def states(self) -> list[Any]:
        return [each.state_dict() for each in (self.model, self.hift, self.schedule)]

    def load(self, states: Sequence[Any]) -> None:
        for each, state in zip((self.model, self.hift, self.schedule), states, strict=True):
            each.load_state_dict(state)


def made(row: Row, seed: int = 0) -> nn.Module:
    model: Any = small_decoder(torch.bfloat16 if row["dtype"] == "bf16" else torch.float32, vocab=BIG_VOCAB, seed=seed)
    model.config.use_cache = False  # as under checkpointing
    return model


def train(
    model: Any, optimizer: Any, schedule: Any, row: Row, updates: range, device: str = "cpu"
) -> tuple[list[float], list[int]]:
    losses, active = [], []
    batches = [
        {name: value.to(device) for name, value in batch.items()}
        for batch in token_batches(updates.stop * row["accumulation"], vocab=BIG_VOCAB)
    ]
    for update in updates:
        for micro in reversed(range(row["accumulation"])):
            loss = model(**batches[update * row["accumulation"] + micro]).loss / row["accumulation"]
            with optimizer.accumulating() if micro and isinstance(optimizer, HiFT) else nullcontext():
                loss.backward()
            losses.append(loss.item())
        if isinstance(optimizer, HiFT):
            active.append(optimizer.active_group)
        else:
            optimizer.keep_active_gradients()
            if row["max_grad_norm"] is not None:
                norm = nn.utils.clip_grad_norm_(model.parameters(), row["max_grad_norm"])
                assert norm > row["max_grad_norm"], "the clipping must bite, or this compares nothing"
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return losses, active


def reference(row: Row, model: nn.Module, order: list[int]) -> Any:
    """A dense model that takes the groups in that order, its weights quantised by hand where they wait."""
    optimizer_class, options = OPTIMIZERS[row["optimizer"]]
    kind: Any = NaiveHiFT if row["waiting"] is None else NaiveWaiting
    return kind(
        model,
        optimizer_class,
        groups=naive_groups(model, row["layers_per_group"]),
        order=order,
        steps_per_group=row["steps_per_group"],
        master=row["master"],
        seed=SEED,
        discard=row["state"] == "discard",
        above=HiFTConfig().inactive_rate if row["inactive"] == "above" else None,
        **({} if row["waiting"] is None else {"form": row["waiting"]}),
        **{**options, **kernels_of(row)},
    )


def assert_exact(model: nn.Module, naive: NaiveHiFT) -> None:
    """What is saved of a model are the reference's weights, which show codes where they wait."""
    saved, expected = model.state_dict(), getattr(naive, "exact", naive.parameters)
    others = [name for name, value in expected.items() if not torch.equal(bits(saved[name] + 0), bits(value + 0))]
    assert others == []


def test_the_rows_have_every_legal_pair_and_few_more() -> None:
    assert_has_every_legal_pair(ROWS, FACTORS, is_legal)
    # Two factors alone have sixteen pairs.
    assert 16 <= len(ROWS) <= 32


@pytest.mark.parametrize("pair", ILLEGAL, ids=str)
def test_illegal_pairs_are_refused(pair: Row) -> None:
    with pytest.raises(ValueError, match="|".join(pair)):
        HiFTConfig.paper(**pair)


@pytest.mark.parametrize("row", row_params(ROWS, drawn_rows(FACTORS, is_legal, num_rows=100)))
def test_bits_are_the_references_and_a_run_that_is_resumed_has_them_too(row: Row, tmp_path: Path) -> None:
    before = weights(made(row))
    with delayed(None if row["copies"] == "all late" else 1) as streams:
        whole = Run(row, tmp_path / "whole")
        cycle, turn = whole.hift.cycle_length, row["steps_per_group"]
        last = cycle + MORE * turn
        losses, active = whole.train(range(cycle + 1))
        saved = reloaded(whole.states())
        more, _ = whole.train(range(cycle + 1, last))

        num_groups = cycle // turn
        order = active[:cycle:turn]
        assert active == [group for group in order for _ in range(turn)] + order[:1]
        assert sorted(order) == list(range(num_groups))
        assert row["order"] == "random" or order == sorted(order, reverse=row["order"] == "top2down")
        dense: Any = made(row)
        naive = reference(row, dense, order)
        schedule = LambdaLR(naive.carrier, lambda step: warm_cosine(step, 30))
        assert train(dense, naive, schedule, row, range(last))[0] == losses + more
        assert_exact(whole.model, naive)
        # Of each group something has moved by more than bf16's last bit.
        moved = set(differing(weights(dense), before))
        assert all(moved.intersection(group.parameter_names) for group in whole.hift.groups)
    if row["state"] != "device":
        assert sum(each.num_late for each in streams) > 0

    resumed = Run(row, tmp_path / "resumed", seed=9)
    resumed.load(saved)
    assert resumed.train(range(cycle + 1, last))[0] == more
    assert_exact(resumed.model, naive)


@functools.cache
def adapters() -> Any:
    """A model with adapters of PEFT."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft asks transformers for what is deprecated
        return peft.get_peft_model(small_decoder(vocab=BIG_VOCAB), config).train()


@functools.cache
def trained_adapters(gradients: Any = "device") -> Any:
    """A copy of it, trained."""
    prefetch_bytes = 0 if gradients == "device" else 60_000
    with pytest.warns(UserWarning, match="keeps them frozen"):
        model, hift = hift_over(
            copy.deepcopy(adapters()), "AdamW", stream_bytes=2_000, prefetch_bytes=prefetch_bytes, gradients=gradients
        )
    if gradients != "device":
        enable_checkpointing(model, {"use_reentrant": False})
    with delayed(seed=2):
        run(model, hift, LAYERS + 2, accumulation=2, hift=hift)
    assert hift.updates == LAYERS + 2
    return model


@pytest.mark.parametrize("gradients", ["host", "stepped"])
def test_adapters_of_peft_train_with_the_same_bits(gradients: str) -> None:
    before, expected = adapters(), trained_adapters()
    moved = [
        name
        for name, parameter in expected.named_parameters()
        if "lora_" in name and not torch.equal(parameter, before.get_parameter(name))
    ]
    assert len(moved) == sum("lora_" in name for name, _ in before.named_parameters()) > 10
    assert_same_bits(trained_adapters(gradients), expected)
