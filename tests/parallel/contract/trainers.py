"""Runs of SFT by a stock Trainer that are saved on their way and taken up again."""

from functools import partial
from pathlib import Path
from typing import Any

import torch

from slivertune import SFTConfig
from slivertune.core.layout import Layout
from tests.helpers.models import differing
from tests.helpers.tolerance import with_exact
from tests.interop import test_trainer_layouts as trainers
from tests.interop.test_trainer_ranks import BATCH
from tests.parallel.contract.runs import ZERO, quiet

TRAINED: dict[str, SFTConfig] = {
    "AG": trainers.SFT,
    "MA": SFTConfig(density=0.1, reselection_interval=5, selection="momentum"),
}
"""Twelve updates, saved after seven: MA's weights are reselected after 5 and 10."""
TRAINERS: list[tuple[Layout, str]] = [(layout, "MA") for layout in ("ddp", "fsdp2", *ZERO)] + [("zero1", "AG")]
"""The other runs of AG are in the Trainer's own tests of layouts."""


def resume_trainer(layout: Layout, name: str, folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The deltas of a run that saved a checkpoint and went on, and of one that was taken up there."""
    quiet()
    output = folder / "trainer" / layout / name
    options: dict[str, dict[str, Any]] = {
        "straight": {"save_strategy": "steps", "save_steps": trainers.STOP},
        "resumed": {"resume": str(output / f"checkpoint-{trainers.STOP}")},
    }
    deltas = {}
    for kind, each in options.items():
        with trainers.states(layout):
            trainer, (deltas[kind],) = trainers.train(output, BATCH, layout, TRAINED[name], **each)
            trainer.accelerator.free_memory()
    return deltas


def assert_trainer_went_on(results: list[dict[str, dict[str, torch.Tensor]]], name: str, folder: Path) -> None:
    """Both runs of every rank have the same bits, and about those of one process on the whole batch."""
    with trainers.states(None):
        ((_, (expected,)), (_, (exact,))) = with_exact(
            partial(trainers.train, folder, len(results) * BATCH, None, TRAINED[name])
        )
    for each in results:
        assert differing(each["straight"], each["resumed"]) == []
        trainers.assert_near(each["straight"], expected, exact)
