"""LISA of the benchmarks (`benchmarks/lisa.py`) against AdamW written out, on the blocks that were drawn."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from slivertune.core.layers import find_layers
from tests.conftest import CHECKOUT
from tests.helpers.models import tiny_llama, token_batches, weights

sys.path.append(str(CHECKOUT / "benchmarks"))
from lisa import LisaArguments, LisaMethod

RATE, EPS, BETAS, NUM_UPDATES, INTERVAL = 1e-2, 1e-3, (0.9, 0.999), 9, 2
CAP = 2e-5
"""A gradient of fp32 is off by less than 1e-7, an update so by RATE x 1e-7 / EPS = 1e-6, nine by 9e-6, and later
gradients follow; a state that is kept where it is to be dropped makes 4e-3."""


class Seen(TrainerCallback):
    """Notes what trains in each update."""

    def __init__(self) -> None:
        self.trained: list[set[str]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **kwargs: Any) -> None:
        self.trained.append({name for name, each in model.named_parameters() if each.requires_grad})


def train(model: Any, folder: Path, *, seed: int = 0, num_updates: int = NUM_UPDATES, **more: Any) -> list[set[str]]:
    """Each batch is the same row, so that it does not matter in which order rows come."""
    batch = token_batches(1)[0]
    row = {"input_ids": batch["input_ids"][0], "labels": batch["input_ids"][0]}
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=num_updates, per_device_train_batch_size=1, learning_rate=RATE,
        adam_epsilon=EPS, lr_scheduler_type="constant", max_grad_norm=0.0, seed=seed, report_to="none", use_cpu=True,
        save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=[row] * 4)
    seen = Seen()
    LisaMethod(LisaArguments(lisa_interval=INTERVAL, **more)).attach(trainer)
    trainer.add_callback(seen)
    trainer.train()
    return seen.trained


def naive(model: Any, trained: list[set[str]]) -> dict[str, torch.Tensor]:
    """AdamW in fp64 over what was drawn; of what was not drawn it forgets everything."""
    model = model.double()
    ids = token_batches(1)[0]["input_ids"][:1]
    state: dict[str, tuple[int, torch.Tensor, torch.Tensor]] = {}
    for names in trained:
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        state = {name: each for name, each in state.items() if name in names}
        for name, weight in model.named_parameters():
            if name not in names:
                continue
            count, mean, square = state.get(name, (0, torch.zeros_like(weight), torch.zeros_like(weight)))
            count, mean = count + 1, BETAS[0] * mean + (1 - BETAS[0]) * weight.grad
            square = BETAS[1] * square + (1 - BETAS[1]) * weight.grad**2
            state[name] = count, mean, square
            root = (square / (1 - BETAS[1] ** count)).sqrt()
            weight.data -= RATE * mean / (1 - BETAS[0] ** count) / (root + EPS)
    return weights(model)


def test_its_steps_are_those_of_adamw_on_the_drawn_blocks(tmp_path: Path) -> None:
    model = tiny_llama(blocks=4)
    trained = train(model, tmp_path)
    expected = naive(tiny_llama(blocks=4), trained)
    for name, weight in weights(model).items():
        assert (weight - expected[name]).abs().max() < CAP, name


def test_two_blocks_train_beside_all_that_is_in_none_and_are_drawn_again_by_the_seed(tmp_path: Path) -> None:
    model = tiny_llama(blocks=4)
    block_of = {
        name: index
        for index, layer in enumerate(layer for layer in find_layers(model) if layer.kind == "block")
        for name in layer.parameter_names
    }
    others = {name for name, _ in model.named_parameters()} - block_of.keys()
    trained = train(model, tmp_path / "one")
    draws = [{block_of[name] for name in names if name in block_of} for names in trained]
    assert all(len(blocks) == 2 for blocks in draws) and all(others <= names for names in trained)
    assert all(draws[update] == draws[update - update % INTERVAL] for update in range(NUM_UPDATES))
    assert len({frozenset(blocks) for blocks in draws}) > 1 and set().union(*draws) == {0, 1, 2, 3}
    assert train(tiny_llama(blocks=4), tmp_path / "two") == trained
    assert train(tiny_llama(blocks=4), tmp_path / "three", seed=1) != trained


def test_blocks_that_are_not_there_can_not_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"lisa_blocks=3 must be in \[1, 2\], the model's blocks"):
        train(tiny_llama(blocks=2), tmp_path, lisa_blocks=3)
