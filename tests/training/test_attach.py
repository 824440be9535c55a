from __future__ import annotations

from pathlib import Path

import pytest

from slivertune.hift import HiFT, HiFTConfig
from slivertune.training.attach import attach_hift
from tests.training.test_callbacks import make_trainer


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
