"""`accelerator.prepare` on one device, unchanged, against the reference in a plain loop."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from tests.helpers.accelerator import one_device
from tests.helpers.models import (
    assert_all_moved,
    assert_same_bits,
    assert_same_tree,
    small_decoder,
    token_batches,
    twin,
    weights,
)
from tests.helpers.reference import NaiveHiFT, naive_groups, train
from tests.hift.cases import OPTIMIZERS, hift_over, warm_cosine


def loader(updates: int, accumulation: int) -> DataLoader[Any]:
    rows = [
        {key: value[0] for key, value in batch.items()}
        for batch in token_batches(2 * updates * accumulation, batch_size=1)
    ]
    return DataLoader(rows, batch_size=2)  # type: ignore[arg-type]


def reference_losses(
    model: torch.nn.Module, updates: int, accumulation: int, bf16: bool, clip: bool, config: dict[str, Any]
) -> list[float]:
    """The same run without accelerate and without HiFT."""
    optimizer_class, options = OPTIMIZERS["AdamW"]
    reference = NaiveHiFT(
        model,
        optimizer_class,
        groups=naive_groups(model, config["layers_per_group"]),
        steps_per_group=config["steps_per_group"],
        **options,
    )
    scheduler = LambdaLR(reference.carrier, lambda step: warm_cosine(step, updates))
    losses = []
    for micro, batch in enumerate(loader(updates, accumulation), 1):
        with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
            loss = model(**batch).loss
        losses.append(loss.item())
        (loss / accumulation).backward()
        if micro % accumulation == 0:
            reference.keep_active_gradients()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
            reference.step()
            scheduler.step()
    return losses


@pytest.mark.parametrize(
    ("dtype", "accumulation", "clip", "mixed_precision"),
    [
        (torch.float32, 1, True, "no"),
        (torch.float32, 2, True, "bf16"),
        (torch.float32, 2, False, "no"),
        (torch.bfloat16, 1, True, "bf16"),
        (torch.bfloat16, 2, True, "no"),
        (torch.bfloat16, 2, False, "bf16"),
    ],
)
def test_prepared_training_equals_the_reference(
    dtype: torch.dtype, accumulation: int, clip: bool, mixed_precision: str
) -> None:
    config = {"layers_per_group": 2, "steps_per_group": 2}
    updates = 8
    other = small_decoder(dtype)
    before = weights(other)
    model, hift = hift_over(twin(other), "AdamW", **config)
    schedule = LambdaLR(hift, lambda step: warm_cosine(step, updates))
    losses = []
    with one_device(mixed_precision=mixed_precision, gradient_accumulation_steps=accumulation) as accelerator:
        prepared, optimizer, batches, scheduler = accelerator.prepare(
            model, hift, loader(updates, accumulation), schedule
        )
        for batch in batches:
            with accelerator.accumulate(prepared):
                loss = prepared(**batch).loss
                losses.append(loss.item())
                accelerator.backward(loss)
                if clip and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(prepared.parameters(), 1e-2)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    assert hift.updates == updates
    assert losses == reference_losses(other, updates, accumulation, mixed_precision == "bf16", clip, config)
    assert_same_bits(model, other)
    assert_all_moved(model, before)


@pytest.mark.parametrize("steps_before", [0, 3])
def test_prepare_changes_nothing_in_the_optimizer(steps_before: int) -> None:
    model, hift = hift_over(small_decoder(torch.bfloat16), torch.optim.AdamW, lr=1e-2)
    train(model, hift, token_batches(steps_before), steps_before)
    before, active = hift.state_dict(), hift.active_group
    with one_device() as accelerator:
        accelerator.prepare(model, hift)
        assert_same_tree(hift.state_dict(), before)
        assert hift.active_group == active and hift.updates == steps_before


def test_a_prepared_optimizer_passes_closures_on() -> None:
    model, hift = hift_over(small_decoder(), torch.optim.AdamW, lr=1e-2)
    with one_device() as accelerator:
        prepared, optimizer = accelerator.prepare(model, hift)

        def closure() -> torch.Tensor:
            loss: torch.Tensor = prepared(**token_batches(1)[0]).loss
            accelerator.backward(loss)
            return loss

        for update in range(1, 4):
            optimizer.step(closure)
            assert hift.updates == update


def test_the_reported_gradient_norm_is_of_the_active_group() -> None:
    other = small_decoder()
    model, hift = hift_over(twin(other), torch.optim.AdamW, lr=0.0)
    with one_device() as accelerator:
        prepared, optimizer = accelerator.prepare(model, hift)
        for group in naive_groups(model, 1):
            accelerator.backward(prepared(**token_batches(1)[0]).loss)
            norm = accelerator.clip_grad_norm_(prepared.parameters(), 1e9)
            other(**token_batches(1)[0]).loss.backward()
            chosen = [p.grad for name, p in other.named_parameters() if name in group]
            assert norm > 0 and torch.equal(norm, torch.nn.utils.get_total_norm(chosen))
            optimizer.step()
            other.zero_grad()
