"""TokenTune on CUDA: the kernels chosen there must give what the CPU's do."""

from typing import Any

import pytest
import torch

import slivertune as st
from slivertune.core.checkpointing import enable_checkpointing
from tests.helpers.models import VOCAB, tiny_gpt2, tiny_llama

DEVICE = torch.device("cuda", 0)
BUILDS = {"grouped queries": tiny_llama, "gpt2": tiny_gpt2}


def inputs(device: torch.device) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, VOCAB, (3, 13), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(3, 13, dtype=torch.long)
    mask[1, 9:] = 0
    return {
        name: each.to(device)
        for name, each in {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}.items()
    }


def gradients(model: Any, device: torch.device) -> dict[str, torch.Tensor]:
    model.to(device).zero_grad()
    model(**inputs(device)).loss.backward()
    return {name: each.grad.cpu().clone() for name, each in model.named_parameters()}  # else it moves with its model


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
@pytest.mark.parametrize("ratio", [0.4, 1.0])
def test_selection_and_gradients_are_the_cpus(build: Any, ratio: float) -> None:
    model = build()
    found, selected = {}, {}
    for device in (torch.device("cpu"), DEVICE):
        with st.TokenTune(ratio=ratio).attach(model) as handle:
            found[device.type] = gradients(model, device)
        assert handle.last_selection is not None
        selected[device.type] = handle.last_selection.cpu()
    assert torch.equal(selected["cpu"], selected["cuda"])
    for name, each in found["cpu"].items():
        # fp32 sums in another order; matrix products in full precision are torch's default.
        torch.testing.assert_close(found["cuda"][name], each, rtol=0, atol=1e-5 * each.abs().max().item())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_gives_the_same_gradients(use_reentrant: bool) -> None:
    model = tiny_llama().to(DEVICE)
    with st.TokenTune(ratio=0.4).attach(model) as handle:
        expected = gradients(model, DEVICE)
        handle.num_draws = 0
        enable_checkpointing(model, {"use_reentrant": use_reentrant})
        found = gradients(model, DEVICE)
    for name, each in expected.items():
        torch.testing.assert_close(found[name], each, rtol=0, atol=1e-6 * each.abs().max().item())


def test_bf16_autocast_trains() -> None:
    model = tiny_llama().to(DEVICE)
    with st.TokenTune(ratio=0.4).attach(model), torch.autocast("cuda", torch.bfloat16):
        model(**inputs(DEVICE)).loss.backward()
    assert all(each.grad is not None and each.grad.isfinite().all() for each in model.parameters())
