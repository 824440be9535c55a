"""No door changes a class of another library: what their classes have, before, within and after a training."""

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from transformers import Trainer, TrainerCallback

import slivertune
from slivertune import HiFTConfig, SFTConfig, TokenTune
from tests.interop.sentence_runs import sentence_trainer
from tests.interop.trl_runs import SFT_TAKES_TOKENS, preference_trainer, sft_trainer

pytest.importorskip("trl")
pytest.importorskip("sentence_transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # they ask others for what is deprecated

TUNE = TokenTune(ratio=0.5)
SPARSE = SFTConfig(density=0.1, reselection_interval=0)
DOORS: dict[str, tuple[Callable[[Path], Any], tuple[Any, ...]]] = {
    "SFTTrainer": (
        lambda folder: sft_trainer(folder, "lora", max_steps=2),
        (HiFTConfig.paper(), TUNE) if SFT_TAKES_TOKENS else (HiFTConfig.paper(),),
    ),
    "RewardTrainer": (lambda folder: preference_trainer("reward", folder, max_steps=2), (SPARSE, TUNE)),
    "DPOTrainer": (lambda folder: preference_trainer("dpo", folder, lora=True, max_steps=2), (HiFTConfig.paper(),)),
    "MultipleNegativesRankingLoss": (lambda folder: sentence_trainer("mnrl", folder, max_steps=2), (SPARSE, TUNE)),
    "SoftmaxLoss": (lambda folder: sentence_trainer("softmax", folder, max_steps=2), (HiFTConfig.paper(), TUNE)),
    "CrossEncoder": (lambda folder: sentence_trainer("cross encoder", folder, max_steps=2), (HiFTConfig.paper(), TUNE)),
}


def with_derived(kind: type) -> Iterator[type]:
    yield kind
    for each in type.__subclasses__(kind):
        yield from with_derived(each)


def attributes() -> dict[tuple[type, str], Any]:
    """Functions, properties and the like of the classes that a training may meet, those of this library left out."""
    found = {}
    for base in (nn.Module, torch.optim.Optimizer, Trainer, TrainerCallback, Accelerator):
        for kind in with_derived(base):
            if kind.__module__.partition(".")[0] not in ("slivertune", "tests"):
                found |= {(kind, name): each for name, each in vars(kind).items() if _is_code(each)}
    return found


def _is_code(each: Any) -> bool:
    return inspect.isroutine(each) or isinstance(each, property | classmethod | staticmethod)


class Look(TrainerCallback):
    """Looks at the classes while a training is under way."""

    seen: dict[tuple[type, str], Any] | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen = attributes()


FAST = ("SFTTrainer", "SoftmaxLoss")


@pytest.mark.parametrize("door", [pytest.param(door, marks=[] if door in FAST else pytest.mark.slow) for door in DOORS])
def test_classes_of_other_libraries_stay_as_they_are(door: str, tmp_path: Path) -> None:
    make, settings = DOORS[door]
    make(tmp_path / "first").train()  # what the libraries themselves change when they are first used
    trainer, look = make(tmp_path / "second"), Look()
    trainer.add_callback(look)
    before = attributes()
    assert len(before) > 1000
    slivertune.attach(trainer, *settings)
    attached = attributes()
    trainer.train()
    for when, after in (("attached", attached), ("within", look.seen), ("afterwards", attributes())):
        assert after is not None
        changed = [(kind, name) for (kind, name), each in before.items() if after.get((kind, name)) is not each]
        added = [key for key in after.keys() - before.keys() if key[0] in {kind for kind, _ in before}]
        assert (changed, added) == ([], []), when
