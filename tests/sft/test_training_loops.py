"""SFT in the loops of others: prepared by an Accelerator, and handed to the Trainer.

The Trainer calls `model.zero_grad()`, clips, logs the norm, and saves and resumes.
"""

from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

from slivertune import SFT
from tests.helpers.accelerator import one_device
from tests.helpers.models import (
    assert_same_bits,
    assert_same_tree,
    deterministic,
    tiny_llama,
    token_batches,
    twin,
)
from tests.helpers.ranks import quick
from tests.sft.runs import over, sft_over, token_rows, train

UPDATES = 14
LIMIT = 0.05


def with_schedule(model: Any, selection: str) -> tuple[SFT, LambdaLR]:
    optimizer = sft_over(model, selection=selection, reselection_interval=6, estimation_steps=4, total_steps=UPDATES)
    return optimizer, LambdaLR(optimizer, lambda step: 1 / (1 + step))


def loader(count: int) -> Any:
    return DataLoader(token_rows(count), batch_size=2)


@pytest.mark.parametrize(
    "settings",
    [
        {"form": "optimizer"},
        {"form": "layer", "dtype": torch.bfloat16},
        {"form": "layer", "selection": "momentum", "momentum": 0.9},
        {"form": "optimizer", "packed": True, "dtype": torch.bfloat16},
    ],
    ids=str,
)
def test_where_algorithms_must_be_deterministic_the_bits_are_the_same(settings: dict[str, Any]) -> None:
    options = {key: value for key, value in settings.items() if key != "dtype"}
    models = []
    for context in (nullcontext(), deterministic()):
        model, sft = over(tiny_llama(settings.get("dtype", torch.float32)), **options)
        with context:
            train(model, sft, token_batches(9))
        models.append(model)
    assert sft.updates == 9
    assert_same_bits(*models)


@pytest.mark.slow
@pytest.mark.parametrize("selection", ["accumulated_gradient", "momentum"])
@pytest.mark.parametrize(("accumulation", "mixed_precision"), [(1, "no"), (3, "no"), (2, "bf16")])
def test_prepared_training_equals_a_plain_loop(selection: str, accumulation: int, mixed_precision: str) -> None:
    model = tiny_llama()
    other = twin(model)
    sft, schedule = with_schedule(model, selection)
    plain, its_schedule = with_schedule(other, selection)
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
                    norms.append(float(accelerator.clip_grad_norm_(prepared.parameters(), LIMIT)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    for at, batch in enumerate(loader(UPDATES * accumulation), 1):
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed_precision == "bf16"):
            loss = other(**batch).loss
        expected.append(loss.item())
        (loss / accumulation).backward()
        if at % accumulation == 0:
            wanted.append(float(torch.nn.utils.clip_grad_norm_(other.parameters(), LIMIT)))
            plain.step()
            its_schedule.step()
    assert sft.updates == UPDATES
    assert losses == expected and norms == wanted and min(norms) > LIMIT
    assert_same_tree(sft.state_dict(), plain.state_dict())
    sft.detach()
    plain.detach()
    assert_same_bits(model, other)


def test_a_saved_accelerator_continues_to_the_bit_inside_an_open_phase(tmp_path: Path) -> None:
    def run(first: int, last: int, load: Path | None, save: Path | None) -> tuple[Any, SFT]:
        model = tiny_llama(torch.bfloat16)
        sft, schedule = with_schedule(model, "accumulated_gradient")
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
    sft, _ = with_schedule(model, "accumulated_gradient")
    train(model, sft, token_batches(2))
    before = sft.state_dict()
    with one_device() as accelerator:
        accelerator.prepare(model, sft)
        assert_same_tree(sft.state_dict(), before)


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = control.should_save = state.global_step == self.step


def run_trainer(
    folder: Path,
    selection: str,
    *,
    form: str = "optimizer",
    stop: int | None = None,
    resume: str | None = None,
    fed: list[dict[str, torch.Tensor]] | None = None,
) -> tuple[Any, SFT, list[float]]:
    model, optimizer = over(tiny_llama(), selection=selection, form=form, total_steps=UPDATES)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=UPDATES,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_grad_norm=LIMIT,
        logging_steps=1,
        save_strategy="no" if stop is None else "steps",
        save_steps=1000,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=token_rows(2 * UPDATES),
        optimizers=(optimizer, LambdaLR(optimizer, lambda step: 1 / (1 + step))),
        callbacks=[] if stop is None else [StopAt(stop)],
    )
    if fed is not None:
        model.register_forward_pre_hook(lambda module, args, batch: fed.append(dict(batch)), with_kwargs=True)
    trainer.train(resume_from_checkpoint=resume)
    return model, optimizer, [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]


@pytest.mark.parametrize("selection", ["accumulated_gradient", "momentum"])
def test_the_trainers_run_equals_a_plain_loop(selection: str, tmp_path: Path) -> None:
    fed: list[dict[str, torch.Tensor]] = []
    trained, optimizer, norms = run_trainer(tmp_path, selection, fed=fed)
    model = tiny_llama()
    plain, schedule = with_schedule(model, selection)
    wanted = []
    for update in range(UPDATES):
        for batch in fed[2 * update : 2 * update + 2]:
            model(**batch).loss.backward()
        wanted.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)))
        plain.step()
        schedule.step()
    assert len(fed) == 2 * UPDATES and norms == wanted and min(norms) > LIMIT
    assert_same_tree(optimizer.state_dict(), plain.state_dict())
    assert all(parameter.grad is None for parameter in trained.parameters())
    optimizer.detach()
    plain.detach()
    assert_same_bits(trained, model)


@pytest.mark.parametrize(("form", "stop"), quick(product(["optimizer", "layer"], [4, 9]), [("layer", 9)]))
def test_a_stopped_run_resumes_to_the_bit(form: str, stop: int, tmp_path: Path) -> None:
    whole, its_optimizer, its_norms = run_trainer(tmp_path / "whole", "accumulated_gradient", form=form)
    run_trainer(tmp_path / "cut", "accumulated_gradient", form=form, stop=stop)
    checkpoint = tmp_path / "cut" / f"checkpoint-{stop}"
    resumed, optimizer, norms = run_trainer(tmp_path / "cut", "accumulated_gradient", form=form, resume=str(checkpoint))
    assert norms == its_norms
    assert_same_tree(optimizer.state_dict(), its_optimizer.state_dict())
    assert_same_bits(whole, resumed)
