"""The file of a loss's own weights in a checkpoint: what is not of that loss is refused in our words."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file
from torch import nn

from slivertune.interop import loss_weights
from slivertune.interop.loss_weights import LOSS_NAME, load_loss_weights

WEIGHT = nn.Parameter(torch.zeros(2, 3))


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(loss_weights, "loss_weights", lambda *_: {"classifier.weight": WEIGHT})
    return SimpleNamespace(model=None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "holds no state that can be read"),
        (save({"classifier.weight": torch.ones(2, 3)})[:-4], "holds no state that can be read"),
        (save({"classifier.weight": torch.ones(3, 2)}), "Resume with the loss of the saved run"),
        (save({"classifier.weight": torch.ones(2, 3, dtype=torch.int32)}), "Resume with the loss"),
        (save({"classifier.weight": torch.full((2, 3), torch.nan)}), "holds NaN or infinity. Use another checkpoint"),
    ],
)
def test_weights_that_are_not_the_losss_are_refused(content: bytes, message: str, trainer: Any, tmp_path: Path) -> None:
    (tmp_path / LOSS_NAME).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_loss_weights(trainer, tmp_path)
    assert not WEIGHT.any()


def test_those_of_the_loss_are_loaded(trainer: Any, tmp_path: Path) -> None:
    save_file({"classifier.weight": torch.ones(2, 3)}, tmp_path / LOSS_NAME)
    load_loss_weights(trainer, tmp_path)
    assert bool((WEIGHT == 1).all())
    WEIGHT.data.zero_()
