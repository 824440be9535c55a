"""The rotation on DeepSpeed's engine, whatever part of the model a loop calls."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from slivertune.core.layout import Layout
from tests.helpers.models import differing, tiny_llama, weights
from tests.helpers.ranks import quick, ran_once
from tests.parallel.contract.hift import CYCLE, HiFTCase
from tests.parallel.contract.runs import ZERO, message_of, running
from tests.parallel.reference import whole_weights

CASE = HiFTCase(updates=2 * CYCLE, bare=True, is_scheduled=False)
Batch = dict[str, torch.Tensor]


def of_engine(engine: Any, batch: Batch) -> torch.Tensor:
    return engine(**batch).loss


def of_module(engine: Any, batch: Batch) -> torch.Tensor:
    """As `accelerator.unwrap_model(model)(**batch)` does."""
    return engine.module(**batch).loss


def of_submodule(engine: Any, batch: Batch) -> torch.Tensor:
    """With a loss of the user's."""
    net = engine.module
    logits = net.lm_head(net.model(input_ids=batch["input_ids"]).last_hidden_state)
    return net.loss_function(logits=logits, labels=batch["labels"], vocab_size=net.config.vocab_size)


def of_layers(engine: Any, batch: Batch) -> torch.Tensor:
    """Without any module that has two of them."""
    net = engine.module
    hidden = net.model.embed_tokens(batch["input_ids"])
    rotary = net.model.rotary_emb(hidden, torch.arange(hidden.shape[1])[None])
    for block in net.model.layers:
        hidden = block(hidden, position_embeddings=rotary)
    return net.lm_head(net.model.norm(hidden)).float().square().mean()


TRAINED = {"engine": of_engine, "module": of_module, "submodule": of_submodule}


def trained_by(rank: int, num_ranks: int, layout: Layout) -> dict[str, Any]:
    """Return weights and updates, or the error, by the way to call the model."""
    found: dict[str, Any] = {}
    for name, loss_of in {**TRAINED, "layers": of_layers}.items():
        with running(CASE, layout, rank) as run:

            def train(engine: Any = run.model, loss_of: Callable[[Any, Batch], torch.Tensor] = loss_of) -> None:
                for update in range(CASE.updates):
                    engine.backward(loss_of(engine, CASE.batch(update, 0, rank)))
                    engine.step()

            message = message_of(train)
            found[name] = message or {"weights": whole_weights(run.model), "updates": run.sliver.updates}
    with running(CASE, layout, rank) as run:

        def train_late() -> None:
            first, second = (of_engine(run.model, CASE.batch(update, 0, rank)) for update in (0, 1))
            for loss in (first, second):
                run.model.backward(loss)
                run.model.step()
                of_engine(run.model, CASE.batch(2, 0, rank))

        found["late"] = message_of(train_late)
    return found


@pytest.fixture(scope="module")
def trained() -> Callable[..., list[dict[str, Any]]]:
    return ran_once(trained_by, 2)


Trained = Callable[..., list[dict[str, Any]]]
LAYOUTS = pytest.mark.parametrize("layout", quick(ZERO, ["zero2"]))


@LAYOUTS
@pytest.mark.parametrize("way", TRAINED)
def test_each_group_trains_in_its_turn(layout: Layout, way: str, trained: Trained) -> None:
    before = weights(tiny_llama())
    for found in trained(layout):
        assert found[way]["updates"] == CASE.updates
        assert sorted(differing(found[way]["weights"], before)) == sorted(before)
        assert differing(found[way]["weights"], found["engine"]["weights"]) == []


@LAYOUTS
def test_a_step_without_a_forward_that_was_seen_is_an_error(layout: Layout, trained: Trained) -> None:
    for found in trained(layout):
        assert "group 1 is to step, and HiFT has seen no forward since the turn of group 0" in found["layers"]


@LAYOUTS
def test_a_backward_after_the_turn_of_its_forward_is_an_error(layout: Layout, trained: Trained) -> None:
    for found in trained(layout):
        assert "belongs to a forward that was made before the last step, and group 1 trains now" in found["late"]
