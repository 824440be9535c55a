from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from slivertune import SFT
from tests.helpers.accelerator import one_device
from tests.helpers.models import assert_same_bits, assert_same_tree, tiny_llama, token_batches, twin
from tests.sft.runs import sft_over, token_rows, train

UPDATES = 14


def build(model: Any, selection: str) -> tuple[SFT, LambdaLR]:
    optimizer = sft_over(model, selection=selection, reselection_interval=6, estimation_steps=4, total_steps=UPDATES)
    return optimizer, LambdaLR(optimizer, lambda step: 1 / (1 + step))


def loader(count: int) -> Any:
    return DataLoader(token_rows(count), batch_size=2)


@pytest.mark.slow
@pytest.mark.parametrize("selection", ["accumulated_gradient", "momentum"])
@pytest.mark.parametrize(("accumulation", "mixed_precision"), [(1, "no"), (3, "no"), (2, "bf16")])
def test_prepared_training_equals_a_plain_loop(selection: str, accumulation: int, mixed_precision: str) -> None:
    model = tiny_llama()
    other = twin(model)
    sft, schedule = build(model, selection)
    plain, its_schedule = build(other, selection)
    losses, norms, expected, wanted = [], [], [], []
    with one_device(gradient_accumulation_steps=accumulation, mixed_precision=mixed_precision) as accelerator:
        prepared, optimizer, batches, scheduler = accelerator.prepare(
            model, sft, loader(UPDATES * accumulation), schedule
        )
        for batch in batches:
            with accelerator.accumulate(prepared):
                loss = prepared(**batch).loss
                losses.append(loss.item())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(prepared.parameters(), 0.05)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    for at, batch in enumerate(loader(UPDATES * accumulation), 1):
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed_precision == "bf16"):
            loss = other(**batch).loss
        expected.append(loss.item())
        (loss / accumulation).backward()
        if at % accumulation == 0:
            wanted.append(float(torch.nn.utils.clip_grad_norm_(other.parameters(), 0.05)))
            plain.step()
            its_schedule.step()
    assert sft.updates == UPDATES
    assert losses == expected and norms == wanted and min(norms) > 0.05
    assert_same_tree(sft.state_dict(), plain.state_dict())
    sft.detach()
    plain.detach()
    assert_same_bits(model, other)


def test_a_saved_accelerator_continues_to_the_bit_inside_an_open_phase(tmp_path: Path) -> None:
    def run(first: int, last: int, load: Path | None, save: Path | None) -> tuple[Any, SFT]:
        model = tiny_llama(torch.bfloat16)
        sft, schedule = build(model, "accumulated_gradient")
        with one_device() as accelerator:
            prepared, optimizer, scheduler = accelerator.prepare(model, sft, schedule)
            if load is not None:
                accelerator.load_state(load)
            for batch in token_batches(UPDATES)[first:last]:
                accelerator.backward(prepared(**batch).loss)
                optimizer.step()
                scheduler.step()
            if save is not None:
                accelerator.save_state(save)
        return model, sft

    whole, its_optimizer = run(0, UPDATES, None, None)
    _, cut = run(0, 9, None, tmp_path / "checkpoint")
    assert cut.is_estimating and "estimates" in next(iter(cut.state_dict()["state"].values()))
    resumed, optimizer = run(9, UPDATES, tmp_path / "checkpoint", None)
    assert_same_bits(whole, resumed)
    assert_same_tree(its_optimizer.state_dict(), optimizer.state_dict())


def test_prepare_changes_nothing_in_the_optimizer() -> None:
    model = tiny_llama()
    sft, _ = build(model, "accumulated_gradient")
    train(model, sft, token_batches(2))
    before = sft.state_dict()
    with one_device() as accelerator:
        accelerator.prepare(model, sft)
        assert_same_tree(sft.state_dict(), before)
