import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from slivertune import HiFT, HiFTConfig
from slivertune.core.layout import Layout
from slivertune.core.manifest import DamagedCheckpointError, write_manifest
from slivertune.parallel.checkpoint import hift_sidecar, sidecar
from slivertune.parallel.checkpoint.sidecar import load_state, save_state
from tests.helpers.models import assert_same_tree, differing, tiny_llama, token_batches, weights
from tests.helpers.ranks import ran_once, run_ranks
from tests.parallel.contract.hift import HiFTCase
from tests.parallel.contract.runs import load, running, save
from tests.parallel.reference import ADAMW, whole_weights

LAYOUTS: tuple[Layout, ...] = ("ddp", "fsdp2")
WAYS = {f"{source} to {target}": (source, target) for source in LAYOUTS for target in LAYOUTS}
CASE = HiFTCase(dtype=torch.bfloat16, is_scheduled=False)
"""With masters, so that the folder tells the weights, and without a schedule, which it does not have."""


def save_and_go_on(rank: int, num_ranks: int, layout: Layout, folder: Path) -> dict[str, torch.Tensor]:
    """The weights at the end of a run whose state is saved after seven updates."""
    with running(CASE, layout, rank) as run:
        save_state(run.train(0, 7).optimizer, folder / layout)
        return whole_weights(run.train(7, 13).model)


def go_on_from(rank: int, num_ranks: int, source: Layout, target: Layout, folder: Path) -> dict[str, torch.Tensor]:
    with running(CASE, target, rank, seed=4) as run:
        load_state(run.optimizer, folder / source)
        assert run.sliver.updates == 7
        return whole_weights(run.train(7, 13).model)


def failing(rank: int, num_ranks: int, folder: Path) -> dict[str, Any]:
    """Rank 1 can't write in its second attempt."""
    full = mock.patch.object(hift_sidecar, "save_file", side_effect=OSError("the disk is full"))
    with running(HiFTCase(), "fsdp2", rank) as run:
        save_state(run.train(0, 1).optimizer, folder / "failing")
        run.train(1, 2)
        with full if rank == 1 else nullcontext(), pytest.raises(OSError, match="disk is full") as raised:
            save_state(run.optimizer, folder / "failing")
        load_state(run.optimizer, folder / "failing")
        left = [path.name for path in folder.iterdir() if "failing" in path.name]
        return {"message": str(raised.value), "updates": run.sliver.updates, "left": left}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sidecar")


GoneOn = Callable[[Layout], list[dict[str, torch.Tensor]]]


@pytest.fixture(scope="module")
def gone_on(folder: Path) -> GoneOn:
    return ran_once(save_and_go_on, 2, folder)


@pytest.mark.parametrize("way", WAYS)
def test_a_run_goes_on_under_the_other_layout_with_the_same_bits(way: str, gone_on: GoneOn, folder: Path) -> None:
    source, target = WAYS[way]
    expected = gone_on(source)
    for found, wanted in zip(run_ranks(go_on_from, 2, source, target, folder), expected, strict=True):
        assert differing(found, wanted) == []


def test_a_rank_that_cannot_write_fails_all_and_leaves_the_older_state(tmp_path: Path) -> None:
    for found in run_ranks(failing, 2, tmp_path):
        assert "rank 1: OSError: the disk is full" in found["message"]
        assert found["updates"] == 1
        assert found["left"] == ["failing"]


def test_one_process_reads_what_two_wrote(gone_on: GoneOn, folder: Path) -> None:
    loaded = []
    for layout in LAYOUTS:
        gone_on(layout)
        hift = HiFT(tiny_llama(torch.bfloat16, seed=9), torch.optim.AdamW, config=HiFTConfig.paper(), **ADAMW)
        load_state(hift, folder / layout)
        assert hift.updates == 7 and hift.active_group == 2
        loaded.append(hift.state_dict())
    assert loaded[0]["state"].keys() == weights(tiny_llama()).keys()
    assert_same_tree(loaded[0]["state"], loaded[1]["state"])


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """The folder of one process after three updates."""
    model = tiny_llama(torch.bfloat16)
    hift = HiFT(model, torch.optim.AdamW, config=HiFTConfig.paper(), **ADAMW)
    for batch in token_batches(3):
        model(**batch).loss.backward()
        hift.step()
    save_state(hift, tmp_path / "hift")
    return tmp_path / "hift"


def _hift(**config: Any) -> HiFT:
    return HiFT(tiny_llama(torch.bfloat16), torch.optim.AdamW, config=HiFTConfig.paper(**config), **ADAMW)


@pytest.mark.parametrize(
    ("taken", "damage", "problem"),
    [
        (
            None,
            r"group-00000\.rank-00000\.safetensors is missing",
            r"group-00000\.rank-00000\.safetensors is not there",
        ),
        (
            "group-00001.rank-00000.safetensors",
            r"group-00000\.rank-00000\.safetensors has",
            "which this model does not train in that group",
        ),
    ],
    ids=["lost", "of another group"],
)
def test_a_file_that_is_lost_or_of_another_group_is_named(
    taken: str | None, damage: str, problem: str, written: Path
) -> None:
    file = written / "group-00000.rank-00000.safetensors"
    if taken is None:
        file.unlink()
    else:
        shutil.copy(written / taken, file)
    hift = _hift()
    with pytest.raises(DamagedCheckpointError, match=damage):
        load_state(hift, written)
    write_manifest(written)
    with pytest.raises(ValueError, match=problem):
        load_state(hift, written)
    assert hift.updates == 0


def test_rows_that_are_lost_are_noticed(gone_on: GoneOn, folder: Path, tmp_path: Path) -> None:
    gone_on("fsdp2")
    shutil.copytree(folder / "fsdp2", tmp_path / "hift")
    header = torch.load(tmp_path / "hift" / "header.pt")
    torch.save({**header, "num_ranks": 1}, tmp_path / "hift" / "header.pt")
    write_manifest(tmp_path / "hift")
    hift = _hift()
    with pytest.raises(ValueError, match=r"has shape \(49, 32\), and the weight \(97, 32\)"):
        load_state(hift, tmp_path / "hift")
    assert hift.updates == 0


def test_the_state_of_another_grouping_is_refused(written: Path) -> None:
    with pytest.raises(ValueError, match=r"does not train in that group|another grouping"):
        load_state(_hift(layers_per_group=2), written)
    with pytest.raises(ValueError, match="another order of turns"):
        load_state(_hift(order="top2down"), written)


def test_what_is_no_hift_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="the state of a SGD is not HiFT's or SFT's"):
        save_state(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]), tmp_path / "hift")
    assert list(tmp_path.iterdir()) == []


def test_one_process_keeps_its_state_in_the_optimizers_own_file(tmp_path: Path) -> None:
    with running(CASE, "single", 0) as run:
        run.train(0, 1)
        save(run, tmp_path / "state")
        assert not (tmp_path / "state" / "hift").exists()
        before = weights(run.plain)
        run.train(1, 2)
        load(run, tmp_path / "state")
        assert run.sliver.updates == 1
        assert differing(weights(run.plain), before) == []


def test_a_method_of_another_package_has_the_sidecar_that_it_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sidecar, "_sidecars", dict(sidecar._sidecars))

    class Another(HiFT):
        method = "another"

    optimizer = Another(tiny_llama(), torch.optim.AdamW, lr=0.01)
    own = hift_sidecar.HiFTSidecar(optimizer)
    sidecar.register_sidecar("another", lambda each: own if each is optimizer else None)
    assert sidecar.sidecar_of(optimizer) is own
