"""SFT x TokenTune: the same as SFT over a dense graph whose unselected rows are cut by hand."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import slivertune as st
from slivertune.deltas.delta import SparseDelta
from tests.helpers.tolerance import assert_step_close, with_exact
from tests.tokentune.families import FAMILIES, make_batch, make_model
from tests.tokentune.reference import reference_loss

# Nor the head of the classifiers here.
pytestmark = pytest.mark.filterwarnings("ignore:SFT trains the linear layers of the blocks")

STEPS = 12
CAP = 1e-3
"""What no limit exceeds; an update too many or too few is a twelfth of all."""


@dataclass(frozen=True)
class Trained:
    """What a run saw, and its deltas before and after."""

    losses: list[float]
    norms: list[float]
    first: dict[str, SparseDelta]
    last: dict[str, SparseDelta]


@pytest.mark.slow
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
    batches = [make_batch(family, seed=step) for step in range(STEPS)]
    selections: list[torch.Tensor] = []

    def train(optimizer: st.SFT, loss_of: Callable[[int], torch.Tensor]) -> Trained:
        first, losses, norms = optimizer.deltas(), [], []
        for step in range(STEPS):
            loss = loss_of(step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            assert optimizer.grad_norm is not None
            norms.append(float(optimizer.grad_norm))
        return Trained(losses, norms, first, optimizer.deltas())

    def by_reference() -> Trained:
        plain = copy.deepcopy(unhooked)
        optimizer = st.SFT(plain, config=config, **options)
        return train(optimizer, lambda step: reference_loss(plain, family, batches[step], selections[step]))

    hooked = st.SFT(model, config=config, **options)
    with st.TokenTune(ratio=0.4).attach(model) as handle:

        def hooked_loss(step: int) -> torch.Tensor:
            loss: torch.Tensor = model(**batches[step]).loss
            assert handle.last_selection is not None
            selections.append(handle.last_selection.clone())
            return loss

        found = train(hooked, hooked_loss)
    expected, exact = with_exact(by_reference)
    assert_step_close(found.losses, expected.losses, exact.losses, cap=CAP)
    assert_step_close(found.norms, expected.norms, exact.norms, cap=CAP)
    for key, delta in expected.last.items():
        assert torch.equal(found.last[key].indices, delta.indices), f"{key}: other weights were grown"
    values = [{key: delta.values for key, delta in each.last.items()} for each in (found, expected, exact)]
    assert_step_close(*values, cap=CAP)
    assert any(not torch.equal(found.first[key].indices, delta.indices) for key, delta in found.last.items())


def test_sft_in_the_layer_form_after_tokentune_is_refused_at_the_first_forward() -> None:
    family = FAMILIES["llama, grouped"]
    model: Any = make_model(family)
    with st.TokenTune(ratio=0.4).attach(model):
        st.SFT(model, config=st.SFTConfig(density=0.1, form="layer"), lr=1e-2, total_steps=10)
        with pytest.raises(RuntimeError, match="or its forward, was replaced after TokenTune"):
            model(**make_batch(family))
