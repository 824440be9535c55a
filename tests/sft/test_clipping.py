"""Gradient norms and clipping: the optimizer's own, torch's, and what a loss scaler does."""

from functools import partial

import pytest
import torch
from torch import nn

from slivertune import SFT, SFTConfig
from tests.helpers.models import assert_same_tree, bits, small_decoder, token_batches, twin, weights
from tests.helpers.pairwise import rotated
from tests.helpers.tolerance import assert_sums_close, sum_limit
from tests.sft.reference import NAMES, SHAPES, Prescribed, prescribed_gradients
from tests.sft.runs import sft_over, train

LIMIT = 0.05


build = partial(sft_over, eps=1e-3, total_steps=20)


def masked_gradients(model: nn.Module, optimizer: SFT, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Dense gradients of a twin, zero where nothing is trained."""
    other = small_decoder(next(model.parameters()).dtype)
    other.load_state_dict(model.state_dict())
    for name, delta in optimizer.deltas().items():
        # The layer form's weights hold no delta.
        base = optimizer.base_values()[name]
        flat = other.get_parameter(name).data.view(-1)
        flat[delta.indices.long()] = (base.float() + delta.values).to(base.dtype)
    other(**batch).loss.backward()
    found = {}
    for name, delta in optimizer.deltas().items():
        gradient = other.get_parameter(name).grad
        mask = torch.zeros(gradient.numel(), dtype=torch.bool)
        mask[delta.indices.long()] = True
        found[name] = torch.where(mask.view(gradient.shape), gradient, 0).float()
    return found


@rotated(form=["optimizer", "layer"], dtype=[torch.float32, torch.bfloat16])
def test_the_norm_of_the_models_gradients_is_that_of_the_masked_dense_ones(form: str, dtype: torch.dtype) -> None:
    model = small_decoder(dtype)
    optimizer = build(model, form=form)
    for batch in token_batches(8):
        dense = masked_gradients(model, optimizer, batch)
        wanted = torch.nn.utils.get_total_norm(dense.values())
        model(**batch).loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        # The same squares, summed in another order; a root halves what that makes.
        num_terms = sum(delta.indices.numel() for delta in optimizer.deltas().values())
        assert_sums_close(norm, wanted, num_terms)
        assert norm > LIMIT
        gathered = dict(zip(optimizer.deltas(), optimizer.param_groups[0]["params"], strict=False))
        for name, delta in optimizer.deltas().items():
            expected = dense[name].flatten()[delta.indices.long()] * (LIMIT / (wanted + 1e-6))
            assert_sums_close(gathered[name].grad, expected, num_terms, size=expected.abs().double())
        optimizer.step()


@rotated(form=["optimizer", "layer"], selection=["accumulated_gradient", "momentum"])
def test_clipping_outside_and_inside_is_the_same_to_the_bit(form: str, selection: str) -> None:
    model = small_decoder()
    other = twin(model)
    outside = build(model, form=form, selection=selection)
    inside = build(other, form=form, selection=selection, max_grad_norm=LIMIT)
    for batch in token_batches(14):
        model(**batch).loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        outside.step()
        train(other, inside, [batch])
        assert inside.grad_norm is not None and outside.grad_norm is not None
        num_terms = sum(delta.indices.numel() for delta in inside.deltas().values())
        assert_sums_close(inside.grad_norm, norm, num_terms)
        # torch divides by the norm and 1e-6.
        assert_sums_close(outside.grad_norm, LIMIT * norm / (norm + 1e-6), num_terms)
        assert_same_tree(inside.state_dict(), outside.state_dict())


def test_the_candidates_gradients_are_clipped_as_well() -> None:
    """Two runs whose gradients differ by a factor per update that clipping takes out again: the same estimates."""
    runs = []
    for factors in ([1.0] * 6, [1.0, 8.0, 64.0, 2.0, 32.0, 4.0]):
        model = Prescribed(SHAPES)
        optimizer = build(model, targets=NAMES, max_grad_norm=LIMIT)
        sums = []
        for factor, gradients in zip(factors, prescribed_gradients(6), strict=True):
            model({name: factor * value for name, value in gradients.items()}).backward()
            optimizer.step()
            state = optimizer.state_dict()["state"]["first.weight"]
            sums.append({end: each["sum"].clone() for end, each in state.get("estimates", {}).items()})
        runs.append((sums, optimizer.state_dict()["state"]))
    # Both divide by the norm, which is a sum of squares, and 1e-6, of which a norm below 1 would notice more.
    num_terms = sum(len(state["indices"]) for state in runs[0][1].values())
    limit = 4 * LIMIT * (sum_limit(num_terms, torch.float32) + 1e-6)
    for one, other in zip(*(sums for sums, _ in runs), strict=True):
        assert one.keys() == other.keys()
        for end, value in one.items():
            assert (value - other[end]).abs().max() <= limit
            assert value.abs().max() < 4 * LIMIT
    for name in NAMES:
        assert torch.equal(runs[0][1][name]["indices"], runs[1][1][name]["indices"])


def test_a_loss_scaler_is_undone_before_anything_is_estimated() -> None:
    """fp16 autocast scales the loss by a power of two; unscaled, nothing may differ by a bit."""
    model = small_decoder()
    other = twin(model)
    plain, scaled = build(model), build(other)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    for batch in token_batches(14):
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        plain.step()
        scaler.scale(other(**batch).loss).backward()
        scaler.unscale_(scaled)
        torch.nn.utils.clip_grad_norm_(other.parameters(), 1e9)
        scaler.step(scaled)
        scaler.update()
        scaled.zero_grad()
        assert_same_tree(plain.state_dict(), scaled.state_dict())


class Skipping(nn.Module):
    """Leaves its only target out where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.below, self.target = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, hidden: torch.Tensor, *, skips: bool) -> torch.Tensor:
        hidden = self.below(hidden)
        loss: torch.Tensor = (hidden if skips else self.target(hidden)).square().mean()
        return loss


@pytest.mark.parametrize("lr", [1e-2, 0.0])
def test_a_loss_scaler_passes_over_backwards_that_reach_no_target(lr: float) -> None:
    """Each update has two micro-batches; the second update reaches nothing, the others by one or by both."""
    runs = []
    for is_scaled in (False, True):
        model = Skipping()
        optimizer = SFT(model, config=SFTConfig(density=0.5, targets=["target"]), lr=lr, total_steps=9)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000, enabled=is_scaled)
        for skips in ((False, True), (True, True), (True, False), (False, False)):
            for each in skips:
                rows = torch.ones(2, 8)
                scaler.scale(model(rows, skips=each) / 2).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert optimizer.updates == 3
        runs.append(optimizer.state_dict())
    assert_same_tree(*runs)


def test_an_overflow_skips_the_update_and_leaves_no_trace() -> None:
    model = small_decoder()
    other, before = twin(model), weights(model)
    undisturbed, disturbed = build(model), build(other)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    for update, batch in enumerate(token_batches(14)):
        if update in (1, 2, 7):
            (scaler.scale(other(**batch).loss) * float("inf")).backward()
            scaler.step(disturbed)
            scaler.update(new_scale=4.0)
            disturbed.zero_grad()
            assert disturbed.updates == update
        train(model, undisturbed, [batch])
        scaler.scale(other(**batch).loss).backward()
        scaler.step(disturbed)
        scaler.update()
        disturbed.zero_grad()
        assert_same_tree(undisturbed.state_dict(), disturbed.state_dict())
    assert any(not torch.equal(bits(model.get_parameter(name)), bits(value)) for name, value in before.items())
