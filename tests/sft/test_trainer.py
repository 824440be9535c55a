"""SFT handed to the HF Trainer, which calls `model.zero_grad()`, clips, logs the norm, and saves and resumes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainerCallback, TrainingArguments

from slivertune import SFT
from tests.helpers.models import assert_same_bits, assert_same_tree, tiny_llama
from tests.sft.runs import over, token_rows

UPDATES = 14
LIMIT = 0.05


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = control.should_save = state.global_step == self.step


def build(selection: str, form: str) -> tuple[Any, SFT]:
    return over(tiny_llama(), selection=selection, form=form, total_steps=UPDATES)


def train(
    folder: Path,
    selection: str,
    *,
    form: str = "optimizer",
    stop: int | None = None,
    resume: str | None = None,
    fed: list[dict[str, torch.Tensor]] | None = None,
) -> tuple[Any, SFT, list[float]]:
    model, optimizer = build(selection, form)
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
    trained, optimizer, norms = train(tmp_path, selection, fed=fed)
    model, plain = build(selection, "optimizer")
    schedule = LambdaLR(plain, lambda step: 1 / (1 + step))
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


@pytest.mark.parametrize("form", ["optimizer", "layer"])
@pytest.mark.parametrize("stop", [4, 9])
def test_a_stopped_run_resumes_to_the_bit(form: str, stop: int, tmp_path: Path) -> None:
    whole, its_optimizer, its_norms = train(tmp_path / "whole", "accumulated_gradient", form=form)
    train(tmp_path / "cut", "accumulated_gradient", form=form, stop=stop)
    checkpoint = tmp_path / "cut" / f"checkpoint-{stop}"
    resumed, optimizer, norms = train(tmp_path / "cut", "accumulated_gradient", form=form, resume=str(checkpoint))
    assert norms == its_norms
    assert_same_tree(optimizer.state_dict(), its_optimizer.state_dict())
    assert_same_bits(whole, resumed)
