"""What one `step` does: closures, GradScaler, missing and non-finite gradients, what it frees."""

from typing import Any

import pytest
import torch
from torch.amp import GradScaler

from slivertune import HiFT
from tests.helpers.models import (
    LAYERS,
    Batch,
    assert_all_moved,
    assert_same_bits,
    differing,
    small_decoder,
    token_batches,
    trainable,
    twin,
    weights,
)
from tests.helpers.reference import naive_groups, train
from tests.hift.cases import DTYPES, hift_over, with_reference


def test_step_frees_the_gradients_and_rotates() -> None:
    model, hift = hift_over(small_decoder(), torch.optim.AdamW, lr=1e-2)
    groups = naive_groups(model, 1)
    for update in range(7):
        assert trainable(model) == set(groups[update % LAYERS])
        assert hift.active_group == update % LAYERS and hift.updates == update
        model(**token_batches(1)[0]).loss.backward()
        assert {name for name, p in model.named_parameters() if p.grad is not None} == set(groups[update % LAYERS])
        hift.step()
        assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("config", [{"layers_per_group": LAYERS}, {"steps_per_group": 3}, {"state": "device"}])
@DTYPES
def test_step_frees_the_gradients_where_the_group_stays_too(dtype: torch.dtype, config: dict[str, Any]) -> None:
    model, hift = hift_over(small_decoder(dtype), torch.optim.AdamW, lr=1e-2, **config)
    for batch in token_batches(4):
        model(**batch).loss.backward()
        assert any(parameter.grad is not None for parameter in model.parameters())
        hift.step()
        assert all(parameter.grad is None for parameter in model.parameters())


def test_the_group_stays_during_accumulation_and_when_zero_grad_clears_the_gradients() -> None:
    model, hift = hift_over(small_decoder(), torch.optim.AdamW, lr=1e-2)
    first = trainable(model)
    for batch in token_batches(4):
        model(**batch).loss.backward()
        assert trainable(model) == first and hift.updates == 0
    hift.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert trainable(model) == first and hift.updates == 0


def test_a_step_without_any_gradient_is_no_update() -> None:
    model, hift = hift_over(small_decoder(), torch.optim.AdamW, steps_per_group=2, lr=1e-2, weight_decay=0.5)
    before, first = weights(model), trainable(model)
    for _ in range(3):
        hift.step()
    assert hift.updates == 0 and hift.active_group == 0 and trainable(model) == first
    assert differing(weights(model), before) == []


@DTYPES
def test_parameters_without_a_gradient_are_left_alone(dtype: torch.dtype) -> None:
    model, hift, other, reference = with_reference(
        small_decoder(dtype), torch.optim.AdamW, layers_per_group=2, lr=1e-2, weight_decay=0.1
    )
    for update, batch in enumerate(token_batches(9)):
        for trained, optimizer in ((model, hift), (other, reference)):
            trained(**batch).loss.backward()
            for index, (_, parameter) in enumerate(trained.named_parameters()):
                # Another half of the parameters each cycle, so that their step counts differ.
                if (index + update // 3) % 2:
                    parameter.grad = None
            optimizer.step()
            optimizer.zero_grad()
    assert hift.updates == 9
    assert_same_bits(model, other)


@DTYPES
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_gradients_reach_the_weights_as_with_the_base_optimizer(value: float, dtype: torch.dtype) -> None:
    model, hift, other, reference = with_reference(small_decoder(dtype), torch.optim.AdamW, layers_per_group=2, lr=1e-2)
    for trained, optimizer in ((model, hift), (other, reference)):
        for update in range(6):
            trained(**token_batches(1)[0]).loss.backward()
            for parameter in trained.parameters():
                if parameter.grad is not None:
                    # A loss that is no longer a number would hide what the step does with the other elements.
                    parameter.grad = parameter.grad.nan_to_num(1e-3, 1e-3, -1e-3)
            if update == 0:
                trained.get_parameter("model.embed_tokens.weight").grad[3, 5] = value
            optimizer.step()
            optimizer.zero_grad()
    assert hift.updates == 6
    assert not torch.isfinite(model.get_parameter("model.embed_tokens.weight")).all()
    for (name, left), right in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(left.isnan(), right.isnan()), name
        assert torch.equal(left.nan_to_num(), right.nan_to_num()), name


def closure_of(model: torch.nn.Module, optimizer: Any, batch: Batch) -> Any:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        return loss

    return closure


def over_the_bare_optimizer() -> tuple[Any, HiFT, Any, torch.optim.Optimizer]:
    """A model under HiFT with one group, and its twin under the base optimizer."""
    bare = small_decoder()
    model, hift = hift_over(twin(bare), torch.optim.AdamW, layers_per_group=LAYERS, lr=1e-2)
    return model, hift, bare, torch.optim.AdamW(bare.parameters(), lr=1e-2)


def test_closures_behave_as_with_the_base_optimizer() -> None:
    model, hift, bare, plain = over_the_bare_optimizer()
    for batch in token_batches(5):
        loss = hift.step(closure_of(model, hift, batch))
        expected = plain.step(closure_of(bare, plain, batch))
        assert isinstance(loss, torch.Tensor) and torch.equal(loss, expected)
    assert_same_bits(model, bare)
    assert hift.updates == 5


def test_closures_run_once_with_gradients_enabled_and_before_the_rotation() -> None:
    model, hift, other, reference = with_reference(small_decoder(), torch.optim.AdamW, lr=1e-2)
    calls: list[set[str]] = []
    for batch in token_batches(7):
        inner = closure_of(model, hift, batch)

        def closure(inner: Any = inner) -> Any:
            calls.append(trainable(model))
            return inner()

        with torch.no_grad():
            loss = hift.step(closure=closure)
        assert loss is not None
        train(other, reference, [batch], 1)
    assert calls == [set(reference.groups[update % LAYERS]) for update in range(7)]
    assert_same_bits(model, other)


def test_a_closure_that_makes_no_gradient_is_no_update_and_returns_its_value() -> None:
    _, hift = hift_over(small_decoder(), torch.optim.AdamW, lr=1e-2)
    assert hift.step(lambda: 1.5) == 1.5
    assert hift.updates == 0


@pytest.mark.parametrize("layers_per_group", [1, LAYERS])
def test_grad_scaler_overflow_skips_the_update_and_keeps_the_rotation(layers_per_group: int) -> None:
    model, hift, other, reference = with_reference(
        small_decoder(), torch.optim.AdamW, layers_per_group=layers_per_group, lr=1e-2
    )
    before = weights(model)
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=10_000)
    scale, applied = 2.0**10, 0
    for update, batch in enumerate(token_batches(12)):
        overflow = update in (0, 3, 7)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        if overflow:
            next(p for p in model.parameters() if p.grad is not None).grad.view(-1)[0] = float("inf")
        scaler.unscale_(hift)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
        active = hift.active_group
        scaler.step(hift)
        scaler.update()
        hift.zero_grad()
        if overflow:
            scale /= 2
            assert hift.active_group == active
        else:
            with torch.autocast("cpu", dtype=torch.float16):
                expected = other(**batch).loss
            (expected * scale).backward()
            reference.keep_active_gradients()
            for parameter in other.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(1 / scale)
            torch.nn.utils.clip_grad_norm_(other.parameters(), 1e-2)
            reference.step()
            applied += 1
            assert torch.equal(loss, expected)
        assert scaler.get_scale() == scale
        assert hift.updates == applied
        assert_same_bits(model, other)
    assert_all_moved(model, before)


def test_grad_scaler_without_unscale_equals_the_base_optimizer() -> None:
    model, hift, bare, plain = over_the_bare_optimizer()
    for trained, optimizer in ((model, hift), (bare, plain)):
        scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        for batch in token_batches(6):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = trained(**batch).loss
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert_same_bits(model, bare)


def test_hooks_on_the_optimizer_run_once_per_step() -> None:
    model, hift = hift_over(small_decoder(), torch.optim.AdamW, lr=1e-2)
    calls = []
    hift.register_step_pre_hook(lambda *_: calls.append("before"))
    hift.register_step_post_hook(lambda *_: calls.append("after"))
    train(model, hift, token_batches(1), 2)
    assert calls == ["before", "after"] * 2


def test_evaluation_between_updates_changes_nothing() -> None:
    runs, batches = [hift_over(small_decoder(), torch.optim.AdamW, lr=1e-2) for _ in range(2)], token_batches(6)
    (model, _), (other, _) = runs

    def evaluate(_: int) -> None:
        model.eval()
        with torch.no_grad():
            model(**batches[0])
        model.train()

    for run, after in zip(runs, (evaluate, None), strict=True):
        train(*run, batches, 6, after_step=after)
    assert_same_bits(model, other)


def test_add_param_group_is_refused() -> None:
    model, hift = hift_over(small_decoder(), torch.optim.AdamW, lr=1e-2)
    with pytest.raises((RuntimeError, NotImplementedError), match=r"add_param_group|parameter"):
        hift.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
    assert len(hift.param_groups) == 1
    train(model, hift, token_batches(1), 6)
