"""SFT x TokenTune: the same as SFT over a dense graph whose unselected rows are cut by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import slivertune as st
from tests.tokentune.families import FAMILIES, make_batch, make_model
from tests.tokentune.reference import reference_loss

STEPS = 12


@pytest.mark.parametrize("form", ["optimizer", "layer"])
@pytest.mark.parametrize("selection", ["accumulated_gradient", "momentum"])
@pytest.mark.parametrize("name", ["llama, grouped", "qwen3", "bert, sequences"])
def test_sft_under_tokentune_is_sft_over_the_reference(name: str, selection: Any, form: Any) -> None:
    family = FAMILIES[name]
    model: Any = make_model(family)
    unhooked = copy.deepcopy(model)
    config = st.SFTConfig(density=0.1, selection=selection, reselection_interval=5, estimation_steps=2, form=form)
    # The wide eps keeps Adam from making whole updates out of the last bits of small gradients.
    options: dict[str, Any] = {"lr": 1e-2, "total_steps": STEPS, "eps": 1e-2}
    hooked, reference = (st.SFT(each, config=config, **options) for each in (model, unhooked))
    first = hooked.deltas()
    with st.TokenTune(ratio=0.4).attach(model) as handle:
        for step in range(STEPS):
            batch = make_batch(family, seed=step)
            loss = model(**batch).loss
            assert handle.last_selection is not None
            expected = reference_loss(unhooked, family, batch, handle.last_selection)
            torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-5, atol=0.0)
            loss.backward()
            expected.backward()
            for optimizer in (hooked, reference):
                optimizer.step()
                optimizer.zero_grad()
            torch.testing.assert_close(hooked.grad_norm, reference.grad_norm, rtol=1e-4, atol=0.0)
    found, wanted = hooked.deltas(), reference.deltas()
    for key, delta in wanted.items():
        assert torch.equal(found[key].indices, delta.indices), f"{key}: other weights were grown"
        scale = delta.values.abs().max().item()
        torch.testing.assert_close(found[key].values, delta.values, rtol=0.0, atol=1e-4 * scale)
    assert any(not torch.equal(first[key].indices, delta.indices) for key, delta in wanted.items())


def test_sft_in_the_layer_form_after_tokentune_is_refused_at_the_first_forward() -> None:
    family = FAMILIES["llama, grouped"]
    model: Any = make_model(family)
    with st.TokenTune(ratio=0.4).attach(model):
        st.SFT(model, config=st.SFTConfig(density=0.1, form="layer"), lr=1e-2, total_steps=10)
        with pytest.raises(RuntimeError, match="or its forward, was replaced after TokenTune"):
            model(**make_batch(family))
