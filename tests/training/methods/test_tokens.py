import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slivertune.core.manifest import find_damage, read_entries
from slivertune.interop.checkpoints import TOKENS_NAME
from slivertune.tokentune.config import TokenTune
from slivertune.training.callbacks import CheckpointMarker
from slivertune.training.methods.tokens import attach_tokens, tokens_line
from slivertune.training.options.arguments import TokenArguments
from tests.helpers.models import tiny_bert, tiny_llama
from tests.interop.trainer_runs import recorded_draws
from tests.training.test_callbacks import make_trainer

HALF = TokenArguments(token_ratio=0.5)


def attach(trainer: Any, arguments: TokenArguments = HALF, **options: Any) -> Any:
    return attach_tokens(trainer, arguments, **{"checkpoint": None, **options})


def test_a_training_forward_selects_the_share_asked_for(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=3)
    tokens = attach(trainer)
    with recorded_draws() as draws:
        trainer.train()
    assert [tuple(each.shape) for each in draws] == 3 * [(2, 4)], "two rows of eight tokens"
    assert (tokens.settings.ratio, tokens.pattern) == (0.5, "chunks")


def test_no_share_attaches_nothing(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    assert attach(trainer, TokenArguments()) is None
    TokenTune(ratio=0.5).attach(trainer.model).remove()


@pytest.mark.parametrize(
    ("arguments", "build", "pattern", "line"),
    [
        (HALF, tiny_llama, "chunks", "50 % of each sequence carry gradient (chunks of 16)"),
        (HALF, tiny_bert, "random", "50 % of each sequence carry gradient (drawn one by one)"),
        (
            TokenArguments(token_ratio=0.125, token_pattern="block"), tiny_llama, "block",
            "12.5 % of each sequence carry gradient (one block)",
        ),
    ],
)  # fmt: skip
def test_the_pattern_suits_the_model_unless_it_is_given(
    arguments: TokenArguments, build: Any, pattern: str, line: str, tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path)
    trainer.model = build()
    tokens = attach(trainer, arguments)
    assert (tokens.pattern, tokens_line(tokens)) == (pattern, f"  tokens  {line}")


def test_a_checkpoint_holds_the_selections_state_and_gives_it_back(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=4, save_strategy="steps", save_steps=2, seed=9)
    attach(trainer)
    trainer.add_callback(CheckpointMarker({}))
    trainer.train()
    checkpoint = tmp_path / "checkpoint-2"
    assert find_damage(checkpoint) is None
    assert TOKENS_NAME in read_entries(checkpoint)["files"]
    assert json.loads((checkpoint / TOKENS_NAME).read_text())["num_draws"] == 2
    assert attach(make_trainer(tmp_path, seed=9), checkpoint=checkpoint).num_draws == 2
    with pytest.raises(ValueError, match="was saved with seed=9, and this run has seed=8"):
        attach(make_trainer(tmp_path, seed=8), checkpoint=checkpoint)


def test_what_is_not_selected_carries_no_gradient(tmp_path: Path) -> None:
    model: Any = tiny_llama()
    arguments = TokenArguments(token_ratio=0.25, token_pattern="random")
    tokens = attach(make_trainer(tmp_path, model=model), arguments).settings.attach(model)
    ids = torch.arange(16).reshape(2, 8)
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    model.train()(inputs_embeds=embedded, labels=ids).loss.backward()
    with_gradient = {tuple(place) for place in embedded.grad.abs().sum(-1).nonzero().tolist()}
    selected = {(row, int(place)) for row in (0, 1) for place in tokens.last_selection[row]}
    assert with_gradient and with_gradient <= selected and len(selected) == 4
