"""SFT under FSDP2: what layers can't add, and a placeholder without its state."""

from dataclasses import replace
from typing import Any

import pytest

from tests.helpers.ranks import run_ranks
from tests.parallel.contract.runs import message_of, refusal_of, running
from tests.parallel.contract.sft import SFTCase

pytestmark = pytest.mark.slow

CASE = SFTCase(model="llama", density=0.02)
REFUSED: dict[str, dict[str, Any]] = {"embeddings": {"embeddings": True}, "norms": {"targets": ["input_layernorm"]}}


def refuse(rank: int, num_ranks: int, what: str) -> str:
    return refusal_of(replace(CASE, settings=REFUSED[what]), "fsdp2", rank)


@pytest.mark.parametrize("what", REFUSED)
def test_what_layers_cannot_add_is_refused_and_says_why(what: str) -> None:
    for message in run_ranks(refuse, 2, what):
        assert "FSDP2 shards the weights" in message and 'form="layer"' in message
        assert "or use DDP" in message


def load_a_placeholder(rank: int, num_ranks: int) -> tuple[list[str], set[str], str]:
    """The keys of a placeholder and of its state, and what is said where it alone is loaded."""
    with running(CASE, "fsdp2", rank) as run:
        run.train(0, 2)
        placeholder = run.optimizer.state_dict()
        keys = {key for each in placeholder["state"].values() for key in each}
        run.train(2, 3)
        run.sliver.load_state_dict(placeholder)
        return sorted(placeholder), keys, message_of(lambda: run.train(3, 4))


def test_a_placeholder_is_not_trained_from() -> None:
    for names, keys, message in run_ranks(load_a_placeholder, 2):
        assert (names, keys) == (["param_groups", "state"], {"sft_updates"})
        assert "made after 2 updates, but SFT's own state" in message
