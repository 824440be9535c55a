"""Weights that a script puts into a prepared model: the next steps start from them on every layout, or say so."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

import slivertune as st
from slivertune.core.layout import Layout
from slivertune.parallel.zero.shares import fp32_weights
from tests.helpers.models import LAYERS, differing, tiny_llama, token_batches, weights
from tests.helpers.ranks import run_ranks
from tests.parallel.sft.runs import Case, Run, accelerator_of

pytestmark = pytest.mark.slow

LAYOUTS: tuple[Layout, ...] = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
IN_SHARDS: tuple[Layout, ...] = ("fsdp2", "zero3")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SPARSE = Case(model="llama", density=0.1)


@contextmanager
def gathered(model: nn.Module, layout: Layout) -> Iterator[None]:
    """Where ZeRO-3 lets weights be read and written; what rank 0 has written goes to all."""
    if layout != "zero3":
        yield
        return
    from deepspeed.runtime.zero import GatheredParameters

    with GatheredParameters(list(model.parameters()), modifier_rank=0):
        yield


def plain(name: str) -> str:
    return name.removeprefix("module.")


def put_in(model: nn.Module, values: Mapping[str, torch.Tensor], layout: Layout) -> None:
    """Write weights as averaging libraries do, which leaves no trace."""
    with gathered(model, layout):
        for name, parameter in model.named_parameters():
            value = values[plain(name)]
            if isinstance(parameter, DTensor):
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
            parameter.data.copy_(value)


def whole(model: nn.Module, layout: Layout) -> dict[str, torch.Tensor]:
    with gathered(model, layout):
        return {
            plain(name): (each.full_tensor() if isinstance(each, DTensor) else each).detach().clone()
            for name, each in model.named_parameters()
        }


def hift_on(layout: Layout, kind: str, rank: int, folder: Path) -> dict[str, Any]:
    """A cycle, other weights, and a cycle at rate zero, before which a checkpoint is written under ZeRO."""
    dtype = DTYPES[kind]
    found: dict[str, Any] = {}
    with accelerator_of(layout, Case(model="llama", dtype=dtype)) as accelerator:
        bare: nn.Module = tiny_llama(dtype)
        hift = st.HiFT(bare, torch.optim.AdamW, lr=1e-2, weight_decay=0.0)
        model, optimizer = st.prepare(accelerator, bare, hift)

        def cycle(start: int) -> None:
            for batch in token_batches(2 * LAYERS, seed=rank)[start : start + LAYERS]:
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()

        cycle(0)
        before = whole(model, layout)
        put_in(model, weights(tiny_llama(dtype, seed=7)), layout)
        if layout.startswith("zero") and kind == "bf16":
            model.save_checkpoint(str(folder / layout))
        for group in hift.param_groups:
            group["lr"] = 0.0
        cycle(LAYERS)
        found["weights"], found["trained"] = whole(model, layout), differing(before, weights(tiny_llama(dtype)))
        found["updates"] = hift.updates
    return found


def hift_everywhere(rank: int, num_ranks: int, folder: Path) -> dict[tuple[Layout, str], dict[str, Any]]:
    return {(layout, kind): hift_on(layout, kind, rank, folder / kind) for layout in LAYOUTS for kind in DTYPES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("loaded")


@pytest.fixture(scope="module")
def hift(folder: Path) -> list[dict[tuple[Layout, str], dict[str, Any]]]:
    return run_ranks(hift_everywhere, 2, folder)


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_cycle_at_rate_zero_does_not_bring_the_old_weights_back(
    layout: Layout, kind: str, hift: list[dict[tuple[Layout, str], dict[str, Any]]]
) -> None:
    new = weights(tiny_llama(DTYPES[kind], seed=7))
    for found in hift:
        assert found[layout, kind]["updates"] == 2 * LAYERS
        assert sorted(found[layout, kind]["trained"]) == sorted(new)
        assert differing(found[layout, kind]["weights"], new) == []


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout.startswith("zero")])
def test_a_checkpoint_that_is_written_before_the_next_step_has_their_masters(
    layout: Layout, folder: Path, hift: list[dict[tuple[Layout, str], dict[str, Any]]]
) -> None:
    new = weights(tiny_llama(torch.bfloat16, seed=7))
    (saved,) = [path for path in (folder / "bf16" / layout).iterdir() if path.is_dir()]
    found = fp32_weights(saved)
    assert differing({name: found[name].to(torch.bfloat16) for name in new}, new) == []


def sft_everywhere(rank: int, num_ranks: int) -> dict[Layout, dict[str, Any]]:
    return {layout: sft_on(layout, rank) for layout in LAYOUTS}


def sft_on(layout: Layout, rank: int) -> dict[str, Any]:
    """Some steps, other weights, and what was trained next, or what was said."""
    found: dict[str, Any] = {}
    with accelerator_of(layout, SPARSE) as accelerator:
        run = Run(SPARSE, accelerator, rank, reselection_interval=None)
        run.train(0, 2)
        put_in(run.model, {**whole(run.model, layout), **new_targets(run.sft)}, layout)
        actions: dict[str, Callable[[], Any]] = {"step": lambda: run.train(2, 3), "merge": run.sft.detach}
        for name, act in actions.items():
            try:
                act()
            except RuntimeError as error:
                found[name] = str(error)
        found["updates"] = run.sft.updates
        if layout not in IN_SHARDS:
            found["bases"] = run.sft.base_values()
            found["expected"] = {
                name: new_targets(run.sft)[name].view(-1)[at.long()] for name, at in run.sft.positions().items()
            }
    return found


def new_targets(sft: st.SFT) -> dict[str, torch.Tensor]:
    other = weights(tiny_llama(seed=7))
    return {name: other[name] for name in sft.positions()}


@pytest.fixture(scope="module")
def sft() -> list[dict[Layout, dict[str, Any]]]:
    return run_ranks(sft_everywhere, 2)


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout not in IN_SHARDS])
def test_sft_takes_whole_weights_for_pretrained_ones(layout: Layout, sft: list[dict[Layout, dict[str, Any]]]) -> None:
    for found in sft:
        assert found[layout].keys() == {"updates", "bases", "expected"}
        assert found[layout]["updates"] == 3
        assert differing(found[layout]["bases"], found[layout]["expected"]) == []


@pytest.mark.parametrize("act", ["step", "merge"])
@pytest.mark.parametrize("layout", IN_SHARDS)
def test_sft_refuses_weights_that_were_put_into_shards(
    layout: Layout, act: str, sft: list[dict[Layout, dict[str, Any]]]
) -> None:
    for found in sft:
        assert found[layout]["updates"] == 2
        assert "self_attn.q_proj.weight were set by something else than SFT" in found[layout][act]
        assert "before slivertune.prepare" in found[layout][act]
