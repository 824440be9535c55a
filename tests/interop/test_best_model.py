"""`load_best_model_at_end` where SFT trains: weights, deltas and state are those of the best checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import EarlyStoppingCallback, TrainerCallback

from slivertune import HiFTConfig, SFTConfig, TokenTune
from slivertune.deltas import apply, load
from tests.helpers.models import differing, tiny_llama
from tests.interop.trainer_runs import BEST, UPDATES, assert_ended_with_the_best, run, train_to_the_best


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(SFTConfig(density=0.1, reselection_interval=3, estimation_steps=2), marks=pytest.mark.slow),
        SFTConfig(density=0.1, reselection_interval=5, selection="momentum"),
        SFTConfig(density=0.1, reselection_interval=3, estimation_steps=2, packed=True),
        SFTConfig(density=0.1, reselection_interval=3, estimation_steps=2, form="layer"),
    ],
    ids=["by gradients", "by momentum", "packed", "in the layer"],
)
def test_the_model_ends_with_the_bits_of_the_best_checkpoint(config: SFTConfig, tmp_path: Path) -> None:
    trainer, _, attachment = run(tmp_path / "run", 2, (config,), **BEST)
    optimizer = attachment.optimizer
    best = Path(str(trainer.state.best_model_checkpoint))
    assert best.name in ("checkpoint-4", "checkpoint-8") and trainer.state.global_step == UPDATES
    saved = torch.load(best / "optimizer.pt", weights_only=True)["state"]
    for name, delta in optimizer.deltas().items():
        assert torch.equal(delta.indices, saved[name]["indices"])
        assert torch.equal(delta.values, saved[name]["delta"].float())
    weights = load_file(best / "model.safetensors")
    held = weights_of(trainer.model)
    assert differing(weights, {name: held[name] for name in weights}) == []
    # What is saved is what is held: applied to the base, it makes the best model again.
    optimizer.save_pretrained(tmp_path / "delta")
    optimizer.detach()
    fresh = tiny_llama()
    apply(fresh, load(tmp_path / "delta"))
    assert differing(weights_of(fresh), weights_of(trainer.model)) == []


def test_training_again_goes_on_from_the_best_model(tmp_path: Path) -> None:
    found = train_to_the_best(tmp_path, 2, None)
    assert_ended_with_the_best(found)
    trainer = found["trainer"]
    start = weights_of(trainer.model)
    trainer.args.load_best_model_at_end = False
    trainer.args.max_steps = 2
    trainer.train()
    assert trainer.optimizer.optimizer.updates == found["updates"] + 2
    assert differing(start, weights_of(trainer.model)) != []


def test_with_early_stopping_and_tokens_the_run_ends_soon_and_with_the_best(tmp_path: Path) -> None:
    settings = (SFTConfig(density=0.1, reselection_interval=3, estimation_steps=2), TokenTune(ratio=0.5))
    trainer, weights, attachment = run(
        tmp_path, 2, settings, callbacks=[EarlyStoppingCallback(early_stopping_patience=1)], **BEST
    )
    assert len(weights) == trainer.state.global_step == 8, "the second evaluation is worse"
    assert attachment.optimizer.updates == 4


def test_hift_goes_on_with_its_own_state(tmp_path: Path) -> None:
    trainer, weights, attachment = run(tmp_path, 2, (HiFTConfig.paper(),), **BEST)
    assert attachment.optimizer.updates == UPDATES
    assert differing(weights[3], dict(trainer.model.named_parameters())) == []


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_best_checkpoint_without_its_deltas_is_an_error(damage: str, tmp_path: Path) -> None:
    class Damage(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == UPDATES:
                file = Path(state.best_model_checkpoint) / "optimizer.pt"
                whole = file.read_bytes()
                file.unlink()
                if damage == "cut":
                    file.write_bytes(whole[:100])

    config = SFTConfig(density=0.1, reselection_interval=3, estimation_steps=2)
    with pytest.raises(ValueError, match=r"checkpoint-4/optimizer\.pt"):
        run(tmp_path, 2, (config,), callbacks=[Damage()], **BEST)
