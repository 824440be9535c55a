"""`slivertune train --torch_compile`."""

from collections.abc import Iterator

import pytest
from torch._dynamo.utils import counters

from tests.helpers.accelerator import forgotten
from tests.helpers.compilation import IGNORED, CountedBackend
from tests.helpers.models import differing
from tests.training.tiny_runs import COMBINATIONS, TINY_CYCLE, UNMEASURED, Runs, final_weights

pytestmark = IGNORED

OPTIONS = {
    "dense": ("--method", "dense"),
    "hift": ("--method", "hift", "--gradient_checkpointing"),
    **{name: COMBINATIONS[name] for name in ("hift with tokens", "sft", "lora", "sft in 4 bits", "qlora with tokens")},
}


@pytest.fixture(autouse=True)
def own_state() -> Iterator[None]:
    with forgotten():
        yield


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_a_compiled_run_ends_with_the_same_bits_and_its_loss_in_chunks(
    name: str, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    more = (*OPTIONS[name], "--max_steps", str(2 * TINY_CYCLE), *UNMEASURED)
    compiling = ("--torch_compile", "--torch_compile_backend", "eager")
    plain = runs.train("plain", *more)
    CountedBackend()
    runs.printed()
    compiled = runs.train("compiled", *more, *compiling)
    said = capsys.readouterr()
    assert counters["stats"]["unique_graphs"] >= 2
    # SFT's layer form notes what its backward brings, for which torch breaks the graph.
    assert bool(counters["graph_break"]) is (name == "sft in 4 bits")
    assert "whole logits" not in said.out and "compiled as a whole" not in said.err
    assert compiled["after"] == plain["after"]
    assert not differing(final_weights(runs["compiled"]), final_weights(runs["plain"]))
