from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slivertune.core.ledger import Ledger
from slivertune.training.methods.sft import SFTArguments, SFTMethod
from slivertune.training.models import LoadedModel
from tests.helpers.models import tiny_llama
from tests.training.test_callbacks import make_trainer
from tests.training.test_models import make_task


def attached(folder: Path, **settings: Any) -> SFTMethod:
    method = SFTMethod(SFTArguments(**{"density": 0.1, **settings}))
    method.attach(make_trainer(folder))
    return method


@pytest.mark.parametrize(("interval", "updates"), [(20, 20), (8, 8), (6, 12), (3, 9), (0, 8)])
def test_a_line_takes_as_many_intervals_as_make_eight_updates(interval: int, updates: int) -> None:
    arguments = SFTArguments(density=0.1, reselection_interval=interval, estimation_steps=2)
    assert SFTMethod(arguments).logging_steps() == updates


def test_a_rate_that_nobody_chose_for_sft_is_pointed_at(tmp_path: Path) -> None:
    method = attached(tmp_path)
    (note,) = method.notes(tiny_llama(), learning_rate=5e-5)
    assert note.endswith("--learning_rate was not given, so 5e-05 is used")
    assert method.notes(tiny_llama(), learning_rate=None) == []


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({}, "  chosen  by gradients accumulated over 5 updates, at update 5 and then every 20 updates"),
        ({"selection": "momentum"}, "  chosen  by SM3's accumulators, anew every 20 updates"),
        ({"reselection_interval": 0}, "  chosen  at random, once for the whole run"),
    ],
)
def test_it_says_how_weights_are_chosen(settings: dict[str, Any], line: str, tmp_path: Path) -> None:
    assert attached(tmp_path, **settings).lines()[1] == line


def test_it_says_so_when_it_is_asked_before_it_is_attached() -> None:
    with pytest.raises(RuntimeError, match="attached to no Trainer; call attach first"):
        SFTMethod(SFTArguments()).lines()


def test_the_runs_seed_decides_the_first_choice(tmp_path: Path) -> None:
    chosen = []
    for seed in (0, 0, 1):
        method = SFTMethod(SFTArguments(density=0.1))
        method.attach(make_trainer(tmp_path, seed=seed))
        chosen.append(torch.cat([delta.indices for delta in method.optimizer.deltas().values()]))
    assert torch.equal(chosen[0], chosen[1])
    assert not torch.equal(chosen[0], chosen[2])


def test_a_ledger_that_is_entered_later_counts_all_state_once_it_is_claimed(tmp_path: Path) -> None:
    method = SFTMethod(SFTArguments(density=0.1, reselection_interval=0))
    trainer = make_trainer(tmp_path)
    method.attach(trainer)
    model: Any = trainer.model
    with Ledger(model) as ledger:
        method.claim_state()
        # Index, delta, pretrained value, two moments, and an age of two bytes.
        assert ledger.current().state == 22 * method.optimizer.num_weights


def test_new_weights_are_refused_and_pretrained_ones_taken_as_they_are() -> None:
    method, model = SFTMethod(SFTArguments()), tiny_llama()
    assert method.adapt(LoadedModel(model=model, new_modules=()), make_task()) is model  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^model.norm, score of LlamaForCausalLM is new, and --method sft trains"):
        method.adapt(LoadedModel(model=model, new_modules=("model.norm", "score")), make_task())  # type: ignore[arg-type]


def test_closing_takes_sft_off_and_keeps_what_was_learned(tmp_path: Path) -> None:
    method = SFTMethod(SFTArguments(density=0.1))
    method.close()
    trainer = make_trainer(tmp_path)
    model: Any = trainer.model
    names = [name for name, _ in model.named_parameters()]
    method.attach(trainer)
    trainer.train()
    trained = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    method.close()
    assert [name for name, _ in model.named_parameters()] == names
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all(torch.equal(tensor, trained[name]) for name, tensor in model.state_dict().items())
