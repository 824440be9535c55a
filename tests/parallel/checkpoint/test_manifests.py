"""Checkpoints of `accelerator.save_state` with their manifests: on two ranks, and what one process makes of them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR

import slivertune
from slivertune import SFT, HiFT, SFTConfig
from slivertune.core.manifest import MANIFEST_NAME, DamagedCheckpointError, find_damage, read_entries, write_manifest
from slivertune.parallel.checkpoint.sharded_weights import check_form, load_sharded_weights
from tests.helpers.accelerator import one_device
from tests.helpers.models import assert_same_tree, differing, tiny_llama
from tests.helpers.ranks import run_ranks
from tests.parallel.reference import ADAMW, batch_of, halving, on_fsdp2_ranks, on_ranks, whole_weights

LAYOUTS: dict[str, Any] = {"ddp": on_ranks, "fsdp2": on_fsdp2_ranks}
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


class Prepared:
    """HiFT on a tiny Llama, in bf16 with masters, so that neither weights nor masters alone tell all."""

    def __init__(self, accelerator: Any, rank: int, *, seed: int = 0) -> None:
        self.accelerator, self.rank = accelerator, rank
        plain = tiny_llama(torch.bfloat16, seed=seed)
        self.hift = HiFT(plain, torch.optim.AdamW, **ADAMW)
        schedule = LambdaLR(self.hift, halving)
        self.model, self.optimizer, self.schedule = slivertune.prepare(accelerator, plain, self.hift, schedule)

    def train(self, until: int) -> None:
        for update in range(self.hift.updates, until):
            self.accelerator.backward(self.model(**batch_of(update, 0, self.rank)).loss)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()


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


def save_and_be_refused(rank: int, num_ranks: int, root: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for layout, accelerators in LAYOUTS.items():
        place = Path(root) / layout
        with accelerators() as accelerator:
            run = Prepared(accelerator, rank)
            run.train(SAVED - 1)
            accelerator.save_state(str(place / "first"))
            accelerator.save_state(str(place / "saved"))  # and written over by the next
            run.train(SAVED)
            accelerator.save_state(str(place / "saved"))
            found[layout] = {"weights": whole_weights(run.model), "refused": {}}
        with accelerators() as accelerator:
            run = Prepared(accelerator, rank, seed=3)
            before = whole_weights(run.model)
            for name in DAMAGED:
                if rank == 0:
                    shutil.copytree(place / "saved", place / name)
                    damage(place / name, name)
                dist.barrier()
                try:
                    accelerator.load_state(str(place / name))
                    message = "was not refused"
                except DamagedCheckpointError as error:
                    message = str(error)
                found[layout]["refused"][name] = message
            found[layout]["untouched"] = differing(whole_weights(run.model), before) == [] and run.hift.updates == 0
            found[layout]["full disk"] = full_disk(run, place / "saved", rank)
            if layout == "ddp":  # what ranks with shards have saved, by ranks with whole weights
                dist.barrier()
                accelerator.load_state(str(place / "saved"))
                found[layout]["loaded"] = whole_weights(run.model)
    with on_fsdp2_ranks() as accelerator:
        run = Prepared(accelerator, rank, seed=5)
        try:
            accelerator.load_state(str(Path(root) / "ddp" / "saved"))
            found["ddp by fsdp2"] = "was not refused"
        except ValueError as error:
            found["ddp by fsdp2"] = str(error)
    with on_ranks() as accelerator:
        run = Prepared(accelerator, rank, seed=5)
        accelerator.load_state(str(Path(root) / "fsdp2" / "saved"))
        found["fsdp2 by ddp"] = {"weights": whole_weights(run.model), "updates": run.hift.updates}
        found["optimizers"] = len(accelerator._optimizers)
    return found


def full_disk(run: Prepared, folder: Path, rank: int) -> str:
    """What rank 0 says where rank 1 can't write; the folder that it wrote into is not whole, and others are."""
    original = torch.save
    if rank == 1:

        def full(*_: Any, **__: Any) -> None:
            raise OSError("the disk is full")

        torch.save = full  # type: ignore[assignment]
    try:
        run.accelerator.save_state(str(folder.parent / "full"))
        return "was saved"
    except OSError as error:
        return str(error)
    finally:
        torch.save = original  # type: ignore[assignment]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("manifests")


@pytest.fixture(scope="module")
def ranks(root: Path) -> list[dict[str, Any]]:
    return run_ranks(save_and_be_refused, 2, str(root), timeout_s=300)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_files_are_listed(layout: str, ranks: list[dict[str, Any]], root: Path) -> None:
    folder = root / layout / "saved"
    assert find_damage(folder) is None
    listed = set(read_entries(folder)["files"])
    assert {"random_states_0.pkl", "random_states_1.pkl", "scheduler.bin", f"hift/{MANIFEST_NAME}"} <= listed


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", DAMAGED)
def test_every_rank_names_the_damage_before_anything_is_loaded(
    layout: str, name: str, ranks: list[dict[str, Any]], root: Path
) -> None:
    place, kind = DAMAGED[name]
    words = {"remove": "is missing", "cut": "bytes where", "flip": "holds other bytes", "older": "hift/slivertune_"}
    for rank in ranks:
        message = rank[layout]["refused"][name]
        assert message.startswith(f"{root / layout / name} can't be loaded, and nothing of it was")
        assert "its writing was cut short" in message if name == "manifest" else words[kind] in message
        assert f"such as {root / layout}" in message
        assert name == "model" or Path(place).name in message or name == "older half"
        assert rank[layout]["untouched"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_that_cannot_write_leaves_no_manifest_and_all_say_so(
    layout: str, ranks: list[dict[str, Any]], root: Path
) -> None:
    first, second = (rank[layout]["full disk"] for rank in ranks)
    assert "disk is full" in first and "disk is full" in second
    assert find_damage(root / layout / "full") is not None
    assert find_damage(root / layout / "saved") is None


def test_ranks_with_whole_weights_take_up_what_ranks_with_shards_have_saved(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert differing(rank["ddp"]["loaded"], rank["ddp"]["weights"]) == []
        assert rank["fsdp2 by ddp"]["updates"] == SAVED
        assert differing(rank["fsdp2 by ddp"]["weights"], rank["fsdp2"]["weights"]) == []
        assert rank["optimizers"] == 1


def test_ranks_with_shards_say_which_weights_they_read(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert "ddp/saved has no weights in FSDP's form" in rank["ddp by fsdp2"]
        assert "resume in one process or under DDP" in rank["ddp by fsdp2"]


@pytest.mark.parametrize("layout", ["single", "ddp", "fsdp2"])
def test_what_deepspeed_has_saved_is_refused_elsewhere_and_other_forms_by_deepspeed(
    layout: Any, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="was not saved under DeepSpeed"):
        check_form(tmp_path, "zero2")
    (tmp_path / "pytorch_model").mkdir()
    check_form(tmp_path, "zero2")
    with pytest.raises(ValueError, match="was saved under DeepSpeed: resume at the same stage"):
        check_form(tmp_path, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_process_takes_up_what_two_ranks_have_saved(
    layout: str, ranks: list[dict[str, Any]], root: Path, tmp_path: Path
) -> None:
    states = []
    for _ in range(2):
        with one_device() as accelerator:
            run = Prepared(accelerator, 0, seed=7)
            accelerator.load_state(str(root / layout / "saved") if not states else str(tmp_path / "own"))
            assert run.hift.updates == SAVED
            assert run.schedule.scheduler.last_epoch == 2 * SAVED  # accelerate ticks once for each rank
            assert differing(whole_weights(run.model), ranks[0][layout]["weights"]) == []
            states.append(run.hift.whole_state())
            if len(states) == 1:
                accelerator.save_state(str(tmp_path / "own"))
            run.train(SAVED + 2)
            assert len(accelerator._optimizers) == 1
    assert_same_tree(states[0], states[1])


@pytest.mark.parametrize("method", [HiFT, SFT])
def test_one_process_is_guarded_likewise_and_missing_objects_are_named(method: Any, tmp_path: Path) -> None:
    with one_device() as accelerator:
        model = tiny_llama()
        made: Any = (
            HiFT(model, torch.optim.AdamW, **ADAMW)
            if method is HiFT
            else SFT(model, config=SFTConfig(density=0.1), lr=1e-3, total_steps=100)
        )
        _, optimizer = slivertune.prepare(accelerator, model, made)
        (tmp_path / "saved").mkdir()
        (tmp_path / "saved" / "events.log").write_text("of a logger")
        accelerator.save_state(str(tmp_path / "saved"))
        (tmp_path / "saved" / "events.log").write_text("goes on")
        accelerator.load_state(str(tmp_path / "saved"))
        accelerator.prepare(LambdaLR(optimizer, halving))
        with pytest.raises(DamagedCheckpointError, match=r"saved whole, but without .*scheduler\.bin.*same objects"):
            accelerator.load_state(str(tmp_path / "saved"))
        path = tmp_path / "saved" / "optimizer.bin"
        path.write_bytes(path.read_bytes()[:100])
        with pytest.raises(DamagedCheckpointError, match=r"optimizer\.bin has 100 bytes"):
            accelerator.load_state(str(tmp_path / "saved"))
        (tmp_path / "empty").mkdir()
        with pytest.raises(DamagedCheckpointError, match="empty can't be loaded"):
            accelerator.load_state(str(tmp_path / "empty"))


def test_sharded_weights_without_the_methods_own_state_are_refused(
    ranks: list[dict[str, Any]], root: Path, tmp_path: Path
) -> None:
    shutil.copytree(root / "fsdp2" / "saved", tmp_path / "saved")
    shutil.rmtree(tmp_path / "saved" / "hift")
    write_manifest(tmp_path / "saved")
    with one_device() as accelerator:
        run = Prepared(accelerator, 0, seed=7)
        before = whole_weights(run.model)
        with pytest.raises(ValueError, match="saved has sharded weights and no folder 'hift'"):
            accelerator.load_state(str(tmp_path / "saved"))
        assert differing(whole_weights(run.model), before) == []


def test_weights_of_another_model_are_refused(ranks: list[dict[str, Any]], root: Path) -> None:
    folder = root / "fsdp2" / "saved"
    with pytest.raises(ValueError, match="is of another model: it lacks"):
        load_sharded_weights(tiny_llama(torch.bfloat16, blocks=4), folder)
    with pytest.raises(ValueError, match="is of another model: it lacks nothing, and this model has no"):
        load_sharded_weights(tiny_llama(torch.bfloat16, blocks=1), folder)
