from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer

import slivertune
from slivertune import SFT, HiFT, SFTConfig
from slivertune.parallel.layout import layout_of
from tests.helpers.models import assert_same_bits, tiny_llama


def pretended(distributed_type: str, **plugins: Any) -> Any:
    """What `layout_of` reads of an Accelerator."""
    return SimpleNamespace(
        distributed_type=SimpleNamespace(value=distributed_type),
        num_processes=plugins.pop("num_processes", 2),
        state=SimpleNamespace(**plugins),
    )


def ids() -> torch.Tensor:
    return torch.arange(24).view(2, 12) % 31


def train(accelerator: Accelerator, model: Any, optimizer: Any, num_steps: int) -> None:
    for _ in range(num_steps):
        accelerator.backward(model(input_ids=ids(), labels=ids()).loss)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("accelerator", "layout"),
    [
        (pretended("NO"), "single"),
        (pretended("MULTI_GPU"), "ddp"),
        (pretended("MULTI_CPU"), "ddp"),
        (pretended("FSDP", fsdp_plugin=SimpleNamespace(fsdp_version=2)), "fsdp2"),
        *((pretended("DEEPSPEED", deepspeed_plugin=SimpleNamespace(zero_stage=n)), f"zero{n}") for n in (1, 2, 3)),
    ],
)
def test_a_layout_is_known_by_its_name(accelerator: Any, layout: str) -> None:
    assert layout_of(accelerator) == layout


@pytest.mark.parametrize(
    ("accelerator", "way_out"),
    [
        (pretended("FSDP", fsdp_plugin=SimpleNamespace(fsdp_version=1)), "set fsdp_version to 2"),
        (pretended("MEGATRON_LM"), "does not run under MEGATRON_LM; use DDP, FSDP2 or DeepSpeed"),
        (pretended("DEEPSPEED", deepspeed_plugin=SimpleNamespace(zero_stage=0)), "use stage 1, 2 or 3, or DDP"),
        (
            pretended("DEEPSPEED", num_processes=1, deepspeed_plugin=SimpleNamespace(zero_stage=0)),
            "leave DeepSpeed out on one device",
        ),
    ],
)
def test_a_layout_without_an_integration_is_refused_with_what_to_use(accelerator: Any, way_out: str) -> None:
    with pytest.raises(ValueError, match=way_out):
        layout_of(accelerator)


def test_on_one_device_prepare_is_the_accelerators_own() -> None:
    results = []
    for through_us in (True, False):
        accelerator = Accelerator(cpu=True)
        model = tiny_llama()
        hift = HiFT(model, torch.optim.AdamW, lr=0.01)
        prepare: Any = slivertune.prepare if through_us else Accelerator.prepare
        prepared, optimizer = prepare(accelerator, model, hift)
        assert prepared is model and type(optimizer) is AcceleratedOptimizer and optimizer.optimizer is hift
        train(accelerator, prepared, optimizer, 3)
        results.append(model)
    assert_same_bits(*results)


def test_on_one_device_load_state_reads_the_folder_that_several_ranks_write_beside(tmp_path: Path) -> None:
    runs = []
    for _ in range(2):
        accelerator = Accelerator(cpu=True)
        model = tiny_llama()
        hift = HiFT(model, torch.optim.AdamW, lr=0.01)
        runs.append((accelerator, hift, *slivertune.prepare(accelerator, model, hift)))
    accelerator, hift, model, optimizer = runs[0]
    hift.use_sidecar("DDP")
    train(accelerator, model, optimizer, 4)
    accelerator.save_state(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "hift").is_dir()
    resumed_accelerator, resumed, resumed_model, resumed_optimizer = runs[1]
    resumed_accelerator.load_state(str(tmp_path / "saved"))
    assert resumed.updates == 4
    train(accelerator, model, optimizer, 3)
    train(resumed_accelerator, resumed_model, resumed_optimizer, 3)
    assert_same_bits(model, resumed_model)


def test_what_slivertune_did_not_make_goes_to_the_accelerator() -> None:
    accelerator = Accelerator(cpu=True)
    model = tiny_llama()
    adamw = torch.optim.AdamW(model.parameters())
    _, optimizer = slivertune.prepare(accelerator, model, adamw)
    assert optimizer.optimizer is adamw


def test_an_optimizer_without_its_model_is_refused_on_several_ranks() -> None:
    hift = HiFT(tiny_llama(), torch.optim.AdamW, lr=0.01)
    with pytest.raises(ValueError, match="0 models and 1 slivertune optimizers were passed; under ddp, prepare"):
        slivertune.prepare(pretended("MULTI_CPU"), hift)


@pytest.mark.parametrize("method", ["hift", "sft"])
def test_an_optimizer_that_has_stepped_is_refused_on_several_ranks(method: str) -> None:
    model = tiny_llama()
    optimizer: Any = (
        HiFT(model, torch.optim.AdamW, lr=0.01)
        if method == "hift"
        else SFT(model, config=SFTConfig(density=0.1), lr=0.01, total_steps=10)
    )
    model(input_ids=ids(), labels=ids()).loss.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="has already made 1 updates; prepare it before its first step"):
        slivertune.prepare(pretended("MULTI_CPU"), model, optimizer)


@pytest.mark.parametrize("method", ["hift", "sft"])
def test_an_optimizer_that_was_built_over_another_model_is_refused_on_several_ranks(method: str) -> None:
    model, other = tiny_llama(), tiny_llama()
    optimizer: Any = (
        HiFT(model, torch.optim.AdamW, lr=0.01)
        if method == "hift"
        else SFT(model, config=SFTConfig(density=0.1), lr=0.01, total_steps=10)
    )
    with pytest.raises(ValueError, match="another model than the one that was passed; build it over this model"):
        slivertune.prepare(pretended("MULTI_CPU"), other, optimizer)
    optimizer.check_built_over(model)
