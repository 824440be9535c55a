from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from slivertune.hift import HiFT, HiFTConfig
from slivertune.sft import SFT, SFTConfig
from slivertune.training.attach import attach_hift, attach_sft, count_updates
from tests.training.test_callbacks import ROWS, make_trainer


def test_attaching_twice_or_to_a_trainer_with_an_optimizer_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    optimizer = attach_hift(trainer, HiFTConfig())
    assert trainer.optimizer is optimizer
    assert isinstance(optimizer, HiFT)
    with pytest.raises(RuntimeError, match="has an optimizer already"):
        attach_hift(trainer, HiFTConfig())


def test_the_base_optimizer_is_the_trainers_own(tmp_path: Path) -> None:
    options = {"optim": "sgd", "optim_args": "momentum=0.5", "weight_decay": 0.3, "learning_rate": 0.25}
    stock = make_trainer(tmp_path, **options).create_optimizer()
    trainer = make_trainer(tmp_path, **options)
    hift = attach_hift(trainer, HiFTConfig())
    assert [group["weight_decay"] for group in hift.param_groups] == [0.3, 0.0]
    for ours, theirs in zip(hift.param_groups, stock.param_groups, strict=True):
        assert len(ours["params"]) == len(theirs["params"])
        assert {k: v for k, v in ours.items() if k != "params"} == {k: v for k, v in theirs.items() if k != "params"}


def sft_config(**options: Any) -> SFTConfig:
    return SFTConfig(**{"density": 0.1, "reselection_interval": 6, **options})


def test_sft_is_attached_once_to_a_trainer_without_an_optimizer(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    optimizer = attach_sft(trainer, sft_config())
    assert trainer.optimizer is optimizer
    assert isinstance(optimizer, SFT)
    with pytest.raises(RuntimeError, match="has an optimizer already; give it none, and attach SFT"):
        attach_sft(trainer, sft_config())


def test_sft_has_the_trainers_rate_decay_and_adams_settings(tmp_path: Path) -> None:
    options = {"learning_rate": 0.25, "weight_decay": 0.3, "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-3}
    (group,) = attach_sft(make_trainer(tmp_path, **options), sft_config()).param_groups
    expected = {"lr": 0.25, "weight_decay": 0.3, "betas": (0.8, 0.9), "eps": 1e-3}
    assert {name: group[name] for name in expected} == expected
    momentum = sft_config(selection="momentum")
    (group,) = attach_sft(make_trainer(tmp_path, **options), momentum, momentum=0.5).param_groups
    expected = {"lr": 0.25, "weight_decay": 0.3, "momentum": 0.5}
    assert {name: group[name] for name in expected} == expected
    assert group["eps"] < 1e-3 and "betas" not in group, "SM3's own"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # 16 rows in batches of 2.
        ({"max_steps": 3}, 3),
        ({"max_steps": -1, "num_train_epochs": 2}, 16),
        ({"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 3}, 6),
        ({"max_steps": -1, "num_train_epochs": 1.4, "gradient_accumulation_steps": 3}, 5),
        ({"max_steps": -1, "num_train_epochs": 1, "gradient_accumulation_steps": 20}, 1),
        ({"max_steps": -1, "num_train_epochs": 1, "rows": 15}, 8),
        ({"max_steps": -1, "num_train_epochs": 1, "rows": 15, "dataloader_drop_last": True}, 7),
        ({"max_steps": -1, "num_train_epochs": 0.1}, 1),
    ],
)
def test_the_updates_of_a_run_are_counted_as_the_trainer_counts_them(
    options: dict[str, Any], expected: int, tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path, **{name: value for name, value in options.items() if name != "rows"})
    trainer.train_dataset = ROWS[: options.get("rows", len(ROWS))]
    assert count_updates(trainer) == expected
    optimizer = attach_sft(trainer, sft_config())
    trainer.train()
    assert trainer.state.global_step == trainer.state.max_steps == optimizer.updates == expected


def test_the_end_of_the_run_decides_how_much_a_reselection_replaces(tmp_path: Path) -> None:
    kept = {}
    for max_steps in (6, 60):
        trainer = make_trainer(tmp_path, max_steps=max_steps)
        optimizer = attach_sft(trainer, sft_config(estimation_steps=2, replacement_rate=1.0))
        watches = Positions(optimizer, 5), Positions(optimizer, 6)
        for callback in (*watches, StopAfter(6)):
            trainer.add_callback(callback)
        trainer.train()
        before, after = (watch.seen for watch in watches)
        kept[max_steps] = [len(before[name] & after[name]) / len(before[name]) for name in before]
    # alpha times the share of updates to come: none of 6, nine tenths of 60, rounded down in each tensor.
    assert set(kept[6]) == {1.0}
    assert all(0.1 <= share < 0.1 + 0.02 for share in kept[60])


class Positions(TrainerCallback):
    def __init__(self, optimizer: SFT, step: int) -> None:
        self.optimizer, self.step = optimizer, step
        self.seen: dict[str, set[int]] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.seen = {name: set(delta.indices.tolist()) for name, delta in self.optimizer.deltas().items()}


class StopAfter(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == self.step


@pytest.mark.parametrize("selection", ["accumulated_gradient", "momentum"])
def test_the_trainer_clips_the_norm_of_the_trained_weights_gradient(selection: str, tmp_path: Path) -> None:
    limit, seen = 1e-2, []
    trainer = make_trainer(tmp_path, max_grad_norm=limit, max_steps=8)
    optimizer = attach_sft(trainer, sft_config(selection=selection))

    class Norm(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(float(optimizer.grad_norm))

    trainer.add_callback(Norm())
    trainer.train()
    logged = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    assert len(logged) == len(seen) == 8
    assert min(logged) > limit
    # Clipping divides by the norm plus 1e-6.
    assert all(limit * 0.999 < norm <= limit * 1.0001 for norm in seen)
