"""Blocks that stay in host memory while a Trainer moves the rest of its model; "meta" stands for the device."""

from pathlib import Path

import pytest
import torch
from transformers import Trainer, TrainingArguments

import slivertune
from slivertune import HiFTConfig
from slivertune.parked.kept_on_host import keep_blocks_on_host
from tests.helpers.accelerator import forgotten
from tests.helpers.models import assert_all_moved, assert_same_bits, differing, tiny_llama, token_batches, twin, weights
from tests.helpers.reference import train
from tests.hift.cases import hift_over

DEVICE = torch.device("meta")


def lies(model: torch.nn.Module) -> dict[str, set[str]]:
    """Where blocks and where all else of a model lie."""
    found: dict[str, set[str]] = {"blocks": set(), "rest": set()}
    for name, each in [*model.named_parameters(), *model.named_buffers()]:
        found["blocks" if ".layers." in name else "rest"].add(each.device.type)
    return found


@pytest.mark.parametrize("waiting", [None, "int8"])
def test_a_trainer_moves_all_but_the_blocks(
    waiting: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama(torch.bfloat16)
    before = {name: value for name, value in weights(model).items() if ".layers." in name}
    handle = slivertune.park_for_hift(model, HiFTConfig(waiting=waiting, weights="host"))  # type: ignore[arg-type]
    with forgotten():
        arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
        monkeypatch.setattr(TrainingArguments, "device", DEVICE)
        Trainer(model, arguments)
    assert lies(model) == {"blocks": {"cpu"}, "rest": {"meta"}}
    shown = model.state_dict()
    assert all(torch.equal(shown[name] + 0, value) for name, value in before.items())
    model.to("meta", torch.float32)
    assert {(each.dtype, each.device.type) for each in model.model.layers[0].parameters()} == {(torch.float32, "cpu")}
    handle.remove()
    assert not any("_apply" in vars(block) for block in model.model.layers)
    if waiting is None:
        assert lies(model.to("meta")) == {"blocks": {"meta"}, "rest": {"meta"}}


@pytest.mark.parametrize("waiting", [pytest.param(None, marks=pytest.mark.slow), "int8"])
def test_hift_takes_them_over_under_the_trainer(waiting: str | None, tmp_path: Path) -> None:
    config = HiFTConfig.paper(weights="host", waiting=waiting, resident_bytes=0)  # type: ignore[arg-type]
    batches = token_batches(6)
    rows = [{key: value[0] for key, value in batch.items()} for batch in batches]
    base = tiny_llama(torch.bfloat16)
    trained = []
    for keeps in (True, False):
        model = twin(base)
        if keeps:
            slivertune.park_for_hift(model, config)
        with forgotten():
            arguments = TrainingArguments(
                str(tmp_path), max_steps=6, per_device_train_batch_size=2, use_cpu=True, report_to=[],
                save_strategy="no", learning_rate=1e-2,
            )  # fmt: skip
            trainer = Trainer(model, arguments, train_dataset=rows)
            slivertune.attach(trainer, config)
            trainer.train()
        trained.append(model)
    assert_same_bits(*trained)
    assert_all_moved(trained[0], weights(base))


def test_casts_are_made_and_copies_are_moved_as_any_other() -> None:
    model = tiny_llama()
    expected = weights(twin(model).bfloat16())
    keep_blocks_on_host(model)
    model.bfloat16()
    assert differing(weights(model), expected) == []
    assert lies(twin(model).to("meta")) == {"blocks": {"meta"}, "rest": {"meta"}}
    other, hift = hift_over(model, "AdamW", weights="host", resident_bytes=0)
    train(other, hift, token_batches(2), 2)
    hift.detach()


def test_after_an_error_nothing_is_parked() -> None:
    model = tiny_llama(torch.bfloat16)
    before = weights(model)
    model.model.layers[1].input_layernorm.to("meta")
    with pytest.raises(ValueError, match=r"layers.1.* is on meta already"):
        slivertune.park_for_hift(model, HiFTConfig(waiting="int8", weights="host"))
    kept = {name: value for name, value in weights(model).items() if value.device.type == "cpu"}
    assert len(kept) == len(before) - 1 and all(torch.equal(value, before[name]) for name, value in kept.items())
    assert not any({"forward", "_apply"} & vars(module).keys() for module in model.modules())


def test_a_model_that_was_moved_before_is_refused() -> None:
    with pytest.raises(ValueError, match=r"layers.0.* is on meta already, where all blocks fit.*before it is"):
        keep_blocks_on_host(tiny_llama().to("meta"))
