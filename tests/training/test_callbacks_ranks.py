from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from slivertune import HiFTConfig, attach
from slivertune.training.callbacks import NonFiniteGuard
from tests.helpers.models import tiny_llama
from tests.helpers.ranks import run_ranks
from tests.training.test_callbacks import Watch, make_trainer


def say_infinity(model: nn.Module, call: int) -> None:
    """Let one training call report an infinite loss, whose gradient is that of the finite one."""
    count = 0

    def after(module: nn.Module, inputs: Any, output: Any) -> Any:
        nonlocal count
        count += module.training
        if module.training and count == call:
            output["loss"] = output.loss + float("inf")
            return output
        return None

    model.register_forward_hook(after)


def on_a_rank(rank: int, world: int, folder: str) -> dict[str, Any]:
    model, watch, said = tiny_llama(), Watch(), list[str]()
    if rank == 1:
        say_infinity(model, 3)
    trainer = make_trainer(Path(folder), NonFiniteGuard(10, said.append), watch, model=model)
    hift = attach(trainer, HiFTConfig()).optimizer
    assert hift is not None
    trainer.train()
    return {
        "said": said,
        "updates": hift.updates,
        "moved": [watch.moved(step) for step in range(2, 7)],
        "weights": watch.weights[-1],
    }


def test_all_ranks_skip_what_one_of_them_found(tmp_path: Path) -> None:
    first, second = run_ranks(on_a_rank, 2, str(tmp_path))
    assert first["said"] == [
        "step 3: a loss or gradient of another rank is not finite; this update is skipped (1 so far)"
    ]
    assert second["said"] == ["step 3: the loss is inf; this update is skipped (1 so far)"]
    for rank in (first, second):
        assert rank["updates"] == 5
        assert rank["moved"] == [True, False, True, True, True]
    assert all(torch.equal(one, other) for one, other in zip(first["weights"], second["weights"], strict=True))
