"""SFTTrainer with TokenTune on two ranks: the updates of the loss by hand, over what both ranks have selected."""

from pathlib import Path
from typing import Any

import pytest
import torch

import slivertune
from tests.helpers.models import tiny_llama, weights
from tests.helpers.ranks import run_ranks
from tests.helpers.tolerance import assert_step_close, with_exact
from tests.interop.test_losses import CAP, SGD, STEPS, TUNE, selected_loss
from tests.interop.trainer_runs import recorded_draws
from tests.interop.trl_runs import sft_trainer

RANKS, MICRO = 2, 2
Weights = dict[str, torch.Tensor]


def train_rank(rank: int, num_ranks: int, folder: Path) -> tuple[Weights, Weights, list[Any]]:
    """Weights before and after, and of each forward: its tokens, all labels of its update, and what it selected."""
    trainer = sft_trainer(folder / str(rank), **SGD)
    before = weights(trainer.model)
    slivertune.attach(trainer, TUNE)
    attached, forwards = trainer.compute_loss, []

    def compute_loss(model: Any, inputs: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        forwards.append(({name: each.clone() for name, each in inputs.items()}, int(num_items_in_batch)))
        return attached(model, inputs, num_items_in_batch=num_items_in_batch, **kwargs)

    trainer.compute_loss = compute_loss
    with recorded_draws() as draws:
        trainer.train()
    assert trainer.accelerator.num_processes == num_ranks
    return before, weights(trainer.model), [(*each, drawn) for each, drawn in zip(forwards, draws, strict=True)]


@pytest.mark.slow
def test_two_ranks_make_the_updates_of_all_that_they_have_selected(tmp_path: Path) -> None:
    ranks = run_ranks(train_rank, RANKS, tmp_path)
    before, after, _ = ranks[0]
    assert all(torch.equal(each, ranks[1][1][name]) for name, each in after.items())
    drawn = [[drawn for _, _, drawn in forwards] for _, _, forwards in ranks]
    assert not all(torch.equal(*pair) for pair in zip(*drawn, strict=True) if pair[0].shape == pair[1].shape)

    def by_hand() -> Weights:
        model = tiny_llama(vocab=len(before["model.embed_tokens.weight"]))
        for step in range(STEPS):
            forwards = [each for *_, all_of_rank in ranks for each in all_of_rank[step * MICRO : (step + 1) * MICRO]]
            labelled = sum(int((inputs["labels"][:, 1:] != -100).sum()) for inputs, _, _ in forwards)
            for inputs, num_items, selection in forwards:
                assert num_items == labelled
                selected_loss(model, dict(inputs), selection, num_items)[0].backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= SGD["learning_rate"] * parameter.grad
                    parameter.grad = None
        return {name: value - before[name] for name, value in weights(model).items()}

    expected, exact = with_exact(by_hand)
    assert_step_close({name: value - before[name] for name, value in after.items()}, expected, exact, cap=CAP)
