from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer

import slivertune
from slivertune import HiFT
from slivertune.parallel.layout import layout_of
from tests.helpers.models import assert_same_bits, tiny_llama
from tests.parallel.contract.hift import HiFTCase
from tests.parallel.contract.runs import Case
from tests.parallel.contract.sft import SFTCase
from tests.parallel.reference import batch_of


def pretended(distributed_type: str, **plugins: Any) -> Any:
    """What `layout_of` reads of an Accelerator."""
    return SimpleNamespace(
        distributed_type=SimpleNamespace(value=distributed_type),
        num_processes=plugins.pop("num_processes", 2),
        state=SimpleNamespace(**plugins),
    )


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
        for update in range(3):
            accelerator.backward(prepared(**batch_of(update, 0, 0)).loss)
            optimizer.step()
            optimizer.zero_grad()
        results.append(model)
    assert_same_bits(*results)


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


@pytest.mark.parametrize("case", [HiFTCase(), SFTCase(model="llama")])
def test_an_optimizer_that_has_stepped_or_is_of_another_model_is_refused_on_several_ranks(case: Case) -> None:
    model, other = case.build_model(), case.build_model()
    optimizer = case.build_optimizer(model)
    with pytest.raises(ValueError, match="another model than the one that was passed; build it over this model"):
        slivertune.prepare(pretended("MULTI_CPU"), other, optimizer)
    optimizer.check_built_over(model)
    case.loss(model, case.batch(0, 0, 0)).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="has already made 1 updates; prepare it before its first step"):
        slivertune.prepare(pretended("MULTI_CPU"), model, optimizer)
