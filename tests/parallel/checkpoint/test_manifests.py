"""Checkpoints of `accelerator.save_state` with their manifests: on two ranks, and what one process makes of them."""

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR

import slivertune
from slivertune.core.layout import Layout
from slivertune.core.manifest import MANIFEST_NAME, DamagedCheckpointError, find_damage, read_entries, write_manifest
from slivertune.parallel.checkpoint.sharded_weights import check_form, load_sharded_weights
from tests.helpers.accelerator import one_device
from tests.helpers.models import differing, tiny_llama
from tests.helpers.ranks import ran_once, run_ranks
from tests.parallel.contract.hift import HiFTCase
from tests.parallel.contract.runs import Case, load, message_of, running, save
from tests.parallel.contract.sft import SFTCase
from tests.parallel.reference import halving, whole_weights

LAYOUTS: tuple[Layout, ...] = ("ddp", "fsdp2")
CASE = HiFTCase(dtype=torch.bfloat16)
"""With masters, so that neither weights nor masters alone tell all."""
SAVED = 4
DAMAGED = {
    "header": ("hift/header.pt", "flip"),
    "rank file": ("hift/group-00001.rank-00000.safetensors", "remove"),
    "model": ("model.safetensors", "cut"),
    "scheduler": ("scheduler.bin", "remove"),
    "random state": ("random_states_1.pkl", "flip"),
    "manifest": (MANIFEST_NAME, "remove"),
    "older half": ("hift", "older"),
}


def damage(folder: Path, name: str) -> None:
    place, kind = DAMAGED[name]
    path = folder / place
    if path.name == "model.safetensors" and not path.exists():
        path = next(path for path in (folder / "pytorch_model_fsdp_0").iterdir() if path.suffix == ".distcp")
    if kind == "remove":
        path.unlink()
    elif kind == "cut":
        path.write_bytes(path.read_bytes()[:-10])
    elif kind == "older":  # whole in itself, of another save
        shutil.rmtree(path)
        shutil.copytree(folder.parent / "first" / place, path)
    else:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


SaveOnce = Callable[[Layout], list[None]]


def save_some(rank: int, num_ranks: int, layout: Layout, root: Path) -> None:
    place = root / layout
    with running(CASE, layout, rank) as run:
        run.train(0, SAVED - 1)
        save(run, place / "first")
        save(run, place / "saved")  # and written over by the next
        run.train(SAVED - 1, SAVED)
        save(run, place / "saved")


def load_damaged(rank: int, num_ranks: int, layout: Layout, name: str, root: Path) -> tuple[str, bool]:
    """What is said, and whether all is as before."""
    place = root / layout
    with running(CASE, layout, rank, seed=3) as run:
        before = whole_weights(run.model)
        if rank == 0:
            shutil.copytree(place / "saved", place / name)
            damage(place / name, name)
        dist.barrier()
        message = message_of(partial(load, run, place / name))
        return message, differing(whole_weights(run.model), before) == [] and run.sliver.updates == 0


def save_where_a_disk_is_full(rank: int, num_ranks: int, layout: Layout, root: Path) -> None:
    # What a rank says where rank 1 can't write; the folder that it wrote into is not whole, and others are.
    full = mock.patch.object(torch, "save", side_effect=OSError("the disk is full"))
    refused = pytest.raises(OSError, match="disk is full")
    with running(CASE, layout, rank, seed=3) as run, full if rank == 1 else nullcontext(), refused:
        save(run, root / layout / "full")


def load_other_form(rank: int, num_ranks: int, root: Path) -> str:
    with running(CASE, "fsdp2", rank) as run:
        return message_of(lambda: load(run, root / "ddp" / "saved"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("manifests")


@pytest.fixture(scope="module")
def save_once(root: Path) -> SaveOnce:
    """Saves under a layout: `root/layout/saved`, and an older `first`."""
    return ran_once(save_some, 2, root)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_files_are_listed(layout: Layout, save_once: SaveOnce, root: Path) -> None:
    save_once(layout)
    folder = root / layout / "saved"
    assert find_damage(folder) is None
    listed = set(read_entries(folder)["files"])
    assert {"random_states_0.pkl", "random_states_1.pkl", "scheduler.bin", f"hift/{MANIFEST_NAME}"} <= listed


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", DAMAGED)
def test_every_rank_names_the_damage_before_anything_is_loaded(
    layout: Layout, name: str, save_once: SaveOnce, root: Path
) -> None:
    save_once(layout)
    place, kind = DAMAGED[name]
    words = {"remove": "is missing", "cut": "bytes where", "flip": "holds other bytes", "older": "hift/slivertune_"}
    for message, is_as_before in run_ranks(load_damaged, 2, layout, name, root):
        assert message.startswith(
            f"DamagedCheckpointError: {root / layout / name} can't be loaded, and nothing of it was"
        )
        assert "its writing was cut short" in message if name == "manifest" else words[kind] in message
        assert f"such as {root / layout}" in message
        assert name == "model" or Path(place).name in message or name == "older half"
        assert is_as_before


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_that_cannot_write_leaves_no_manifest_and_all_say_so(
    layout: Layout, save_once: SaveOnce, root: Path
) -> None:
    save_once(layout)
    run_ranks(save_where_a_disk_is_full, 2, layout, root)
    assert find_damage(root / layout / "full") is not None
    assert find_damage(root / layout / "saved") is None


def test_ranks_with_shards_say_which_weights_they_read(save_once: SaveOnce, root: Path) -> None:
    save_once("ddp")
    for message in run_ranks(load_other_form, 2, root):
        assert "ddp/saved has no weights in FSDP's form" in message
        assert "Resume in one process or under DDP" in message


@pytest.mark.parametrize("layout", ["single", "ddp", "fsdp2"])
def test_what_deepspeed_has_saved_is_refused_elsewhere_and_other_forms_by_deepspeed(
    layout: Any, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="was not saved under DeepSpeed"):
        check_form(tmp_path, "zero2")
    (tmp_path / "pytorch_model").mkdir()
    check_form(tmp_path, "zero2")
    with pytest.raises(ValueError, match=r"was saved under DeepSpeed\. Resume at the same stage"):
        check_form(tmp_path, layout)


@pytest.mark.parametrize("case", [HiFTCase(), SFTCase(model="llama")])
def test_one_process_is_guarded_likewise_and_missing_objects_are_named(case: Case, tmp_path: Path) -> None:
    with one_device() as accelerator:
        model = case.build_model()
        _, optimizer = slivertune.prepare(accelerator, model, case.build_optimizer(model))
        log = tmp_path / "saved" / "events.log"
        log.parent.mkdir()
        log.write_text("of a logger")
        accelerator.save_state(str(tmp_path / "saved"))
        log.write_text("goes on")
        accelerator.load_state(str(tmp_path / "saved"))
        accelerator.prepare(LambdaLR(optimizer, halving))
        with pytest.raises(DamagedCheckpointError, match=r"is whole, but lacks .*scheduler\.bin.*same objects"):
            accelerator.load_state(str(tmp_path / "saved"))
        path = tmp_path / "saved" / "optimizer.bin"
        path.write_bytes(path.read_bytes()[:100])
        with pytest.raises(DamagedCheckpointError, match=r"optimizer\.bin has 100 bytes"):
            accelerator.load_state(str(tmp_path / "saved"))
        (tmp_path / "empty").mkdir()
        with pytest.raises(DamagedCheckpointError, match="empty can't be loaded"):
            accelerator.load_state(str(tmp_path / "empty"))


def test_sharded_weights_without_the_methods_own_state_are_refused(
    save_once: SaveOnce, root: Path, tmp_path: Path
) -> None:
    save_once("fsdp2")
    shutil.copytree(root / "fsdp2" / "saved", tmp_path / "saved")
    shutil.rmtree(tmp_path / "saved" / "hift")
    write_manifest(tmp_path / "saved")
    with running(CASE, "single", 0, seed=7) as run:
        before = whole_weights(run.model)
        with pytest.raises(ValueError, match="saved has sharded weights and no folder 'hift'"):
            load(run, tmp_path / "saved")
        assert differing(whole_weights(run.model), before) == []


def test_weights_of_another_model_are_refused(save_once: SaveOnce, root: Path) -> None:
    save_once("fsdp2")
    folder = root / "fsdp2" / "saved"
    with pytest.raises(ValueError, match="is of another model: it lacks"):
        load_sharded_weights(tiny_llama(torch.bfloat16, blocks=4), folder)
    with pytest.raises(ValueError, match="is of another model: it lacks nothing, and this model has no"):
        load_sharded_weights(tiny_llama(torch.bfloat16, blocks=1), folder)
