"""`slivertune train --keep_activations` on two ranks: the bits of plain checkpointing under each layout."""

from pathlib import Path

import pytest

from tests.helpers.models import differing
from tests.helpers.ranks import run_ranks
from tests.training.tiny_runs import assert_same_bits, results_of
from tests.training.train_runs import Case, Seen, on_a_rank

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.slow

PAIRS = (("hift", "ddp"), ("hift", "zero2"), ("hift", "zero3"), ("dense", "zero3"))
CASES = {
    f"{method}-{layout}-{number}": Case(
        method=method, layout=layout, more=("--gradient_checkpointing", "true", "--keep_activations", str(number))
    )
    for method, layout in PAIRS
    for number in (0, 1)
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(tiny_base: Path, texts: Path, folder: Path) -> list[dict[str, Seen]]:
    env = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    return run_ranks(on_a_rank, 2, CASES, str(tiny_base), str(texts), str(folder), env=env, timeout_s=300)


@pytest.mark.parametrize(("method", "layout"), PAIRS)
def test_ranks_that_keep_activations_end_with_the_bits_of_plain_checkpointing(
    method: str, layout: str, ranks: list[dict[str, Seen]], folder: Path
) -> None:
    none, one = f"{method}-{layout}-0", f"{method}-{layout}-1"
    for rank in ranks:
        assert (rank[none].code, rank[one].code) == (0, 0), rank[one].printed
        assert differing(rank[none].weights, rank[one].weights) == []
    assert_same_bits(folder / none, folder / one)
    assert results_of(folder / one)["layout"] == layout
    assert results_of(folder / one)["settings"]["keep_activations"] == 1
    assert "activations of the uppermost of 2 checkpointed blocks: 1" in ranks[0][one].printed
