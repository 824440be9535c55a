"""What a Trainer leaves behind when a training ends: a model that anybody may train, and one that goes on."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback

import slivertune
from slivertune import HiFTConfig, TokenTune
from tests.helpers.models import assert_same_bits, differing, tiny_llama, trainable, weights
from tests.hift.test_model_hooks import hooks_of
from tests.interop.test_trainer import attach_sliver
from tests.training.test_callbacks import ROWS, collate, make_trainer


class Stop(TrainerCallback):
    """Ends a training by an error."""

    def __init__(self, error: BaseException, step: int) -> None:
        self.error, self.step = error, step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise self.error


ENDS: dict[str, BaseException | None] = {
    "as planned": None,
    "by an error": ValueError("a broken batch"),
    "by Ctrl-C": KeyboardInterrupt(),
}


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
def test_a_plain_trainer_afterwards_trains_every_tensor(end: str, tmp_path: Path) -> None:
    model, error = tiny_llama(), ENDS[end]
    everything = trainable(model)
    trainer = make_trainer(tmp_path / "hift", *([Stop(error, 2)] if error else []), model=model)
    slivertune.attach(trainer, HiFTConfig.paper(), TokenTune(ratio=0.5))
    assert trainable(model) != everything
    with pytest.raises(type(error)) if error else nullcontext():
        trainer.train()
    assert trainable(model) == everything
    assert hooks_of(model) == 0
    trainer.evaluate()
    trainer.save_model(str(tmp_path / "saved"))
    trainer.predict(trainer.eval_dataset)
    before, other = weights(model), tiny_llama()
    other.load_state_dict(model.state_dict())
    for each in (model, other):
        make_trainer(tmp_path / "plain", model=each, max_steps=3).train()
    assert set(differing(weights(model), before)) == everything and len(everything) == 30
    assert_same_bits(model, other)


def test_another_attach_to_the_same_model_after_a_training_works(tmp_path: Path) -> None:
    model = tiny_llama()
    first = make_trainer(tmp_path / "1", model=model)
    attach_sliver(first)
    with pytest.raises(ValueError, match=r"trained by another HiFT.*detach\(\)"):
        slivertune.attach(make_trainer(tmp_path / "2", model=model), HiFTConfig.paper())
    first.train()
    second = make_trainer(tmp_path / "3", model=model)
    hift = attach_sliver(second)
    second.train()
    assert hift.updates == 6
    assert trainable(model) == set(weights(model))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["a second call", "resumed"])
def test_a_second_training_goes_on_with_rotation_state_and_tokens(way: str, tmp_path: Path) -> None:
    model = tiny_llama()
    options: dict[str, Any] = {"lr_scheduler_type": "constant", "save_strategy": "steps", "save_steps": 3}
    trainer = make_trainer(tmp_path / "hift", model=model, max_steps=3, **options)
    attachment = slivertune.attach(trainer, HiFTConfig.paper(), TokenTune(ratio=0.5, seed=4))
    hift = attachment.optimizer
    assert attachment.tokens is not None
    trainer.train()
    assert hift.updates == 3 and attachment.tokens.num_draws == 3
    with pytest.raises(RuntimeError, match="detach"):
        hift.step()
    if way == "a second call":
        trainer.train()
    else:
        trainer.args.max_steps = 6
        trainer.train(resume_from_checkpoint=str(tmp_path / "hift" / "checkpoint-3"))
    assert trainer.optimizer.optimizer is hift
    assert hift.updates == 6 and attachment.tokens.num_draws == 6
    assert trainable(model) == set(weights(model)) and hooks_of(model) == 0

    if way == "resumed":
        whole = make_trainer(tmp_path / "whole", max_steps=6, **options)
        slivertune.attach(whole, HiFTConfig.paper(), TokenTune(ratio=0.5, seed=4))
        whole.train()
        assert_same_bits(model, whole.model)


def test_evaluating_before_and_training_again_work(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    hift = attach_sliver(trainer)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before
    trainer.train()
    assert hift.updates == 12


@pytest.mark.parametrize("settings", [(HiFTConfig.paper(), TokenTune(ratio=0.5)), (TokenTune(ratio=0.5),)])
def test_model_init_makes_a_new_model_that_gets_what_was_attached_for_each_training(
    settings: tuple[Any, ...], tmp_path: Path
) -> None:
    made: list[torch.nn.Module] = []

    def model_init() -> torch.nn.Module:
        made.append(tiny_llama())
        return made[-1]

    args = make_trainer(tmp_path).args
    trainer = Trainer(model_init=model_init, args=args, train_dataset=ROWS, data_collator=collate)
    attachment = slivertune.attach(trainer, *settings)
    for number in (2, 3):
        optimizer, tokens = attachment.optimizer, attachment.tokens
        trainer.train()
        assert attachment.tokens not in (None, tokens) and attachment.tokens.num_draws == 6
        if len(settings) == 2:
            assert attachment.optimizer not in (None, optimizer) and attachment.optimizer.updates == 6
        assert len(made) == number
        assert all(trainable(model) == set(weights(model)) and hooks_of(model) == 0 for model in made)
