"""What a script does to a prepared model between two steps: on every layout it changes nothing, or an error says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import slivertune as st
from slivertune.core.layout import Layout
from tests.helpers.models import LAYERS, differing, tiny_llama, token_batches
from tests.helpers.ranks import run_ranks
from tests.parallel.sft.runs import Case, Run, accelerator_of, plain_state
from tests.parallel.test_loaded_weights import whole

pytestmark = pytest.mark.slow

LAYOUTS: tuple[Layout, ...] = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
CASE, SPARSE = Case(model="llama"), Case(model="llama", density=0.1)
Change = Callable[[Any], object]
"""Of the user's own model, which the prepared one wraps or is."""


def new_head(model: Any) -> None:
    model.lm_head = nn.Linear(32, 97, bias=False)


def new_projection(model: Any) -> None:
    model.model.layers[1].self_attn.q_proj = nn.Linear(32, 32, bias=False)


def new_parameter(model: Any) -> None:
    model.probe = nn.Linear(2, 2)


def cast(model: Any) -> None:
    model.to(torch.bfloat16)


def elsewhere(model: Any) -> None:
    """Other memory behind a weight, as `model.to(device)` and loaders make it."""
    model.lm_head.weight.data = model.lm_head.weight.data.clone()


def unfreeze(model: Any) -> None:
    """As PEFT's `disable_adapter` does when it ends."""
    model.requires_grad_(True)


def freeze(model: Any) -> None:
    model.requires_grad_(False)


HARMLESS: dict[str, Change] = {"unfreeze": unfreeze, "freeze": freeze}
REFUSED: dict[str, tuple[Change, str]] = {
    "new head": (new_head, "lm_head.weight, which HiFT trains, is no longer in the model"),
    "new parameter": (new_parameter, "probe.weight and 1 more came into the model after HiFT was built"),
    "cast": (cast, "was torch.float32 when HiFT was built and is torch.bfloat16 now"),
}


REFUSED_BY_SFT: dict[str, tuple[Change, str]] = {
    "new projection": (new_projection, "model.layers.1.self_attn.q_proj.weight was replaced after SFT was built"),
    "new parameter": (new_parameter, "probe.weight came into the model after SFT was built"),
}


def train(accelerator: Any, layout: Layout, rank: int, change: Change, at: int = 3) -> dict[str, torch.Tensor]:
    bare: nn.Module = tiny_llama()
    # Two updates in a turn: where it changes, everything is frozen anew.
    hift = st.HiFT(bare, torch.optim.AdamW, config=st.HiFTConfig(steps_per_group=2), lr=1e-2)
    model, optimizer = st.prepare(accelerator, bare, hift)
    for update, batch in enumerate(token_batches(2 * LAYERS, seed=rank)):
        if update >= at:
            change(getattr(model, "module", model))
        accelerator.backward(model(**batch).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        optimizer.zero_grad()
    return whole(model, layout)


def train_sft(accelerator: Any, layout: Layout, rank: int, change: Change) -> dict[str, Any]:
    run = Run(SPARSE, accelerator, rank)
    run.train(0, 3)
    for update in range(3, 7):
        change(getattr(run.model, "module", run.model))
        run.train(update, update + 1)
    return {f"{name}.{key}": each for name, state in plain_state(run.sft).items() for key, each in state.items()}


def everywhere(rank: int, num_ranks: int) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for layout in LAYOUTS:
        for name, change in {"nothing": lambda model: None, "elsewhere": elsewhere, **HARMLESS}.items():
            with accelerator_of(layout, CASE) as accelerator:
                found[layout, name] = tried(accelerator, layout, rank, change)
        for name, (change, _) in REFUSED.items():
            with accelerator_of(layout, CASE) as accelerator:
                found[layout, name] = tried(accelerator, layout, rank, change)
        changes = {name: change for name, (change, _) in REFUSED_BY_SFT.items()}
        for name, change in {"nothing": lambda model: None, **HARMLESS, **changes}.items():
            with accelerator_of(layout, SPARSE) as accelerator:
                found["SFT", layout, name] = tried(accelerator, layout, rank, change, train_sft)
    return found


def tried(accelerator: Any, layout: Layout, rank: int, change: Change, by: Any = train) -> Any:
    """What the training came to, or what was said."""
    try:
        return by(accelerator, layout, rank, change)
    except RuntimeError as error:
        return str(error)


@pytest.fixture(scope="module")
def ran() -> list[dict[Any, Any]]:
    return run_ranks(everywhere, 2)


@pytest.mark.parametrize("change", HARMLESS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_requires_grad_of_others_changes_nothing(layout: Layout, change: str, ran: list[dict[Any, Any]]) -> None:
    for found in ran:
        assert differing(found[layout, change], found[layout, "nothing"]) == []


@pytest.mark.parametrize("change", REFUSED)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_tensors_are_an_error_that_names_them(layout: Layout, change: str, ran: list[dict[Any, Any]]) -> None:
    # FSDP2 itself refuses to cast its shards.
    expected = "Couldn't swap" if (layout, change) == ("fsdp2", "cast") else REFUSED[change][1]
    for found in ran:
        assert expected in found[layout, change]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_memory_behind_a_weight_is_followed_or_an_error(layout: Layout, ran: list[dict[Any, Any]]) -> None:
    for found in ran:
        if layout in ("zero1", "zero2"):
            assert "lm_head.weight lies in other memory than DeepSpeed" in found[layout, "elsewhere"]
        else:
            assert differing(found[layout, "elsewhere"], found[layout, "nothing"]) == []


@pytest.mark.parametrize("change", HARMLESS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_requires_grad_of_others_changes_nothing_for_sft(
    layout: Layout, change: str, ran: list[dict[Any, Any]]
) -> None:
    for found in ran:
        assert differing(found["SFT", layout, change], found["SFT", layout, "nothing"]) == []


@pytest.mark.parametrize("change", REFUSED_BY_SFT)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sft_names_other_tensors(layout: Layout, change: str, ran: list[dict[Any, Any]]) -> None:
    for found in ran:
        assert REFUSED_BY_SFT[change][1] in found["SFT", layout, change]
