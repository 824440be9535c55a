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


def prepare_otherwise(rank: int, num_ranks: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: refusal_of(replace(CASE, settings=settings), "fsdp2", rank) for name, settings in REFUSED.items()
    }
    with running(CASE, "fsdp2", rank) as run:
        run.train(0, 2)
        placeholder = run.optimizer.state_dict()
        found["placeholder"] = [sorted(placeholder), {key for each in placeholder["state"].values() for key in each}]
        run.train(2, 3)
        run.sliver.load_state_dict(placeholder)
        found["placeholder alone"] = message_of(lambda: run.train(3, 4))
    return found


@pytest.fixture(scope="module")
def otherwise() -> list[dict[str, Any]]:
    return run_ranks(prepare_otherwise, 2)


@pytest.mark.parametrize("what", REFUSED)
def test_what_layers_cannot_add_is_refused_and_says_why(what: str, otherwise: list[dict[str, Any]]) -> None:
    for found in otherwise:
        assert "FSDP2 shares the weights out" in found[what] and 'form="layer"' in found[what]
        assert "or use DDP" in found[what]


def test_a_placeholder_is_not_trained_from(otherwise: list[dict[str, Any]]) -> None:
    for found in otherwise:
        assert found["placeholder"] == [["param_groups", "state"], {"sft_updates"}]
        assert "made after 2 updates, but SFT's own state" in found["placeholder alone"]
