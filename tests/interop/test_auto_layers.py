"""`layers_per_group="auto"` under a stock Trainer: the number is that of a plan of the same run, and is trained."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import LlamaForCausalLM

import slivertune
from slivertune import HiFTConfig, TokenTune
from slivertune.core.checkpointing import enable_checkpointing
from slivertune.core.kept_activations import keep_activations
from slivertune.interop import auto_layers
from slivertune.planning.cards import card_named
from slivertune.planning.make import make_plan
from slivertune.planning.plan import add_allowance
from slivertune.planning.request import PlanRequest
from tests.helpers.models import assert_same_bits, tiny_llama
from tests.training.test_callbacks import make_trainer

SLOW = replace(card_named("4090"), peak_flops=1e6)
"""On such a card all copies overlap with computation, so that memory alone decides."""
ROWS = Dataset.from_list([{"input_ids": [5] * length, "labels": [5] * length} for length in (24, 24, 31, 24)])
AUTO = HiFTConfig(layers_per_group="auto", steps_per_group=1, order="bottom2up")
ARGUMENTS: dict[str, Any] = {
    "max_steps": 5,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 2,
}
NUM_LAYERS = 5


def checkpointed(model: Any) -> Any:
    enable_checkpointing(model, {"use_reentrant": False})
    return model


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretends a slow card; `device(n)` gives it n bytes."""
    monkeypatch.setattr(auto_layers, "card_here", lambda: SLOW)
    return lambda number: monkeypatch.setattr(auto_layers, "usable_bytes", lambda _: number)


def needed(layers_per_group: int, dtype: torch.dtype, tune: TokenTune | None) -> int:
    """Plan the run by hand."""
    request = PlanRequest(
        precision="fp32" if dtype == torch.float32 else "mixed_hi",
        layers_per_group=layers_per_group,
        steps_per_group=1,
        batch_size=1,
        gradient_accumulation_steps=2,
        seq_length=31,
        gradient_checkpointing=True,
        attn_implementation="sdpa",
        chunked_cross_entropy=False,
        token_ratio=None if tune is None else tune.ratio,
    )
    return add_allowance(make_plan(request, tiny_llama().config)).device_bytes


@pytest.mark.parametrize(
    ("number", "dtype", "tune"),
    [
        (NUM_LAYERS, torch.float32, None),
        # Each trial is a plan of seconds.
        pytest.param(2, torch.bfloat16, None, marks=pytest.mark.slow),
        pytest.param(3, torch.float32, TokenTune(ratio=0.4), marks=pytest.mark.slow),
    ],
)
def test_the_largest_number_that_fits_by_a_plan_is_trained(
    number: int, dtype: torch.dtype, tune: TokenTune | None, device: Any, tmp_path: Path, capsys: Any
) -> None:
    device(needed(number, dtype, tune))
    models = []
    for config in (AUTO, replace(AUTO, layers_per_group=number)):
        trainer = make_trainer(tmp_path, model=checkpointed(tiny_llama(dtype)), **ARGUMENTS)
        trainer.train_dataset = ROWS
        hift = slivertune.attach(trainer, config, *(() if tune is None else (tune,))).optimizer
        assert hift.config.layers_per_group == number
        trainer.train()
        models.append(trainer.model)
    assert_same_bits(*models)
    assert f"chose {number} layers_per_group for a GeForce RTX 4090" in capsys.readouterr().out


class OwnLlama(LlamaForCausalLM):
    pass


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"model": lambda: OwnLlama(tiny_llama().config)}, "OwnLlama, which no AutoModel for text loads, has no plan"),
        ({"attached": lambda model: keep_activations(model, 1)}, "a model with keep_activations has no plan"),
        ({"dataset": [{"input_ids": [5], "labels": [5]}]}, "a training set without a column input_ids has no plan"),
        ({"torch_compile": True}, "torch_compile has no plan"),
        ({"optim": "rmsprop"}, "a plan does not know --optim rmsprop"),
        ({"class": (torch.optim.SGD, {"lr": 0.1})}, "an optimizer class of the Trainer's own has no plan"),
        ({"config": replace(AUTO, state="discard")}, "others or none decide"),
        pytest.param({"bytes": 1}, "one layer per step needs", marks=pytest.mark.slow),
        ({"card": None}, "the rates of this machine's GPU, and there is none whose rates are known"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_can_not_be_chosen_for_says_to_give_a_number(
    change: dict[str, Any], part: str, device: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    device(change.get("bytes", 2**40))
    if "card" in change:
        monkeypatch.setattr(auto_layers, "card_here", lambda: None)
    model = checkpointed(change.get("model", tiny_llama)())
    more = {name: change[name] for name in ("torch_compile", "optim") if name in change}
    trainer = make_trainer(tmp_path, model=model, **ARGUMENTS, **more)
    trainer.train_dataset = change.get("dataset", ROWS)
    trainer.optimizer_cls_and_kwargs = change.get("class")
    change.get("attached", lambda _: None)(model)
    with pytest.raises(ValueError, match=r"layers_per_group='auto': .*Give a number") as refusal:
        slivertune.attach(trainer, change.get("config", AUTO))
    assert part in str(refusal.value)
    assert all(each.requires_grad for each in model.parameters()) and trainer.optimizer is None


def test_several_processes_are_refused(device: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, model=tiny_llama(), **ARGUMENTS)
    monkeypatch.setattr(type(trainer.args), "world_size", 2)
    with pytest.raises(ValueError, match="it is chosen for one GPU, and this run has 2 processes"):
        auto_layers.settle_layers(trainer, trainer.model, AUTO, None)
