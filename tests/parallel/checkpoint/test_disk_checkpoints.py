"""Checkpoints of state that is stored in files: copies of these, one group after the other."""

import hashlib
import itertools
import json
import os
import signal
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import Trainer, TrainingArguments

import slivertune as st
from slivertune import HiFT, HiFTConfig
from slivertune.core.manifest import MANIFEST_NAME, DamagedCheckpointError, check_whole, find_damage, write_manifest
from slivertune.hift import group_file
from slivertune.hift.disk import Disk
from slivertune.parallel.checkpoint.sidecar import load_state, save_state
from tests.helpers.accelerator import one_device
from tests.helpers.hift_parts import part_of
from tests.helpers.models import assert_same_bits, assert_same_tree, differing, tiny_llama, token_batches, weights
from tests.helpers.ranks import RankError, quick, run_ranks
from tests.helpers.reference import train
from tests.hift.cases import hift_over, reloaded
from tests.parallel.contract.hift import HiFTCase
from tests.parallel.contract.runs import running
from tests.parallel.reference import whole_weights

BATCHES = token_batches(40)


def built(folder: Path | None, *, seed: int = 0, name: str = "AdamW", **config: Any) -> tuple[Any, HiFT]:
    place = {} if folder is None else {"state": "disk", "state_dir": folder}
    return hift_over(tiny_llama(torch.bfloat16, seed=seed), name, stream_bytes=16_384, **place, **config)


def digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("AdamW", {}),
        ("AdamW8bit", {"order": "random", "steps_per_group": 2}),
        ("torch Adafactor", {"state_ram_bytes": 200_000}),
        ("SGD", {}),
    ],
)
def test_a_checkpoint_is_a_copy_that_never_changes_and_goes_on_to_the_bit(
    name: str, config: dict[str, Any], tmp_path: Path
) -> None:
    model, hift = built(tmp_path / "state", name=name, **config)
    on_host, reference = built(None, name=name, **{**config, "state_ram_bytes": 0})
    for each, optimizer in ((model, hift), (on_host, reference)):
        train(each, optimizer, BATCHES, 8)
    save_state(hift, tmp_path / "saved")
    save_state(reference, tmp_path / "saved from host")
    then, kept = weights(model), digests(tmp_path / "saved")
    of_groups = {file: digest for file, digest in kept.items() if file.startswith("group")}
    assert len(of_groups) == 5 and of_groups.items() <= digests(tmp_path / "saved from host").items()
    train(model, hift, BATCHES, 12, start=8)
    assert digests(tmp_path / "saved") == kept
    for place in (tmp_path / "again", None):  # on a disk, and in host memory
        given = config if place else {**config, "state_ram_bytes": 0}
        again, resumed = built(place, seed=9, name=name, **given)
        again.load_state_dict(then)
        load_state(resumed, tmp_path / "saved")
        assert resumed.updates == 8
        train(again, resumed, BATCHES, 12, start=8)
        assert_same_bits(again, model)
        assert_same_tree(reloaded(resumed.state_dict()["state"]), reloaded(hift.state_dict()["state"]))
    assert digests(tmp_path / "saved") == kept


def test_each_of_two_models_in_one_accelerator_gets_its_own_state_back(tmp_path: Path) -> None:
    """A teacher and its student are of one architecture: either's state would fit the other."""
    pairs = [built(tmp_path / "state", seed=seed) for seed in (0, 9)]
    with one_device() as accelerator:
        prepared = [st.prepare(accelerator, *pair) for pair in pairs]
        for each in prepared:
            train(*each, BATCHES, 3)
        accelerator.save_state(str(tmp_path / "saved"))
        ends = []
        for _ in range(2):
            for each in prepared:
                train(*each, BATCHES, 6, start=3)
            ends.append([weights(model) for model, _ in pairs])
            accelerator.load_state(str(tmp_path / "saved"))
    assert all(differing(*end) == [] for end in zip(*ends, strict=True))
    assert [optimizer.updates for _, optimizer in pairs] == [3, 3]
    assert {path.name for path in (tmp_path / "saved").glob("hift*")} == {"hift", "hift_1"}


def test_an_accelerator_that_let_a_run_go_saves_and_loads_the_next_one_alone(tmp_path: Path) -> None:
    with one_device() as accelerator:
        first = st.prepare(accelerator, *built(tmp_path / "state", layers_per_group=2))
        train(*first, BATCHES, 2)
        gone = weakref.ref(first[1].optimizer)
        first = accelerator.free_memory(*first)
        assert gone() is None
        model, hift = built(tmp_path / "state")
        train(*st.prepare(accelerator, model, hift), BATCHES, 2)
        accelerator.save_state(str(tmp_path / "saved"))
        then = weights(model)
        train(model, hift, BATCHES, 4, start=2)
        accelerator.load_state(str(tmp_path / "saved"))
    assert differing(weights(model), then) == []
    assert {path.name for path in (tmp_path / "saved").glob("hift*")} == {"hift"}


def test_a_checkpoint_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    """Such as were links to the groups' files: gaps between tensors, and a manifest that tells their sizes alone."""
    model, hift = built(tmp_path / "state")
    train(model, hift, BATCHES, 8)
    save_state(hift, tmp_path / "saved")
    for path in (tmp_path / "saved").glob("group-*"):
        with safe_open(path, "pt") as file:
            tensors, metadata = {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118
        save_file({**tensors, "gap 0": torch.zeros(64, dtype=torch.uint8)}, path, metadata)
    write_manifest(tmp_path / "saved")
    manifest = tmp_path / "saved" / MANIFEST_NAME
    said = json.loads(manifest.read_text())
    del said["blake2b of all else"]
    for name, stamp in said["files"].items():
        if name.startswith("group"):
            del stamp["blake2b"]
    own = hashlib.blake2b(json.dumps(said, sort_keys=True).encode(), digest_size=32).hexdigest()
    manifest.write_text(json.dumps({**said, "blake2b of all else": own}))
    again, resumed = built(tmp_path / "again", seed=9)
    again.load_state_dict(weights(model))
    load_state(resumed, tmp_path / "saved")
    for each, optimizer in ((model, hift), (again, resumed)):
        train(each, optimizer, BATCHES, 12, start=8)
    assert_same_bits(again, model)
    (tmp_path / "saved" / "group-00002.rank-00000.safetensors").write_bytes(b"cut short")
    with pytest.raises(DamagedCheckpointError, match=r"group-00002.* bytes where"):
        load_state(hift, tmp_path / "saved")


def test_every_file_of_a_checkpoint_is_hashed(tmp_path: Path) -> None:
    model, hift = built(tmp_path / "state")
    train(model, hift, BATCHES, 8)
    save_state(hift, tmp_path / "saved")
    stamps = json.loads((tmp_path / "saved" / MANIFEST_NAME).read_text())["files"]
    assert len(stamps) == hift.num_groups + 1 and all("blake2b" in stamp for stamp in stamps.values())
    file = tmp_path / "saved" / "group-00002.rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert find_damage(tmp_path / "saved") == f"{file.name} holds other bytes than were written"


def test_saving_reads_no_file_of_another_content(tmp_path: Path) -> None:
    """What a disk returns wrongly gets into no checkpoint."""
    model, hift = built(tmp_path / "state")
    train(model, hift, BATCHES, 8)
    hift.state_dict()
    files = part_of(hift, Disk).files
    assert files is not None
    file = files[hift.rotation.coming_groups[3]]
    os.pwrite(file._descriptor, b"other", file.used_bytes // 2)
    with pytest.raises(OSError, match="other bytes than were written"):
        save_state(hift, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_accelerate_saves_files_and_resumes_at_any_step(tmp_path: Path) -> None:
    total = 12

    def run(start: int, stop: int, folder: Path | None, *, loads: Path | None = None, seed: int = 0) -> Any:
        with one_device() as accelerator:
            network, hift = built(folder, seed=seed)
            model, optimizer = st.prepare(accelerator, network, hift)
            if loads is not None:
                accelerator.load_state(str(loads))
                assert hift.updates == start
            for update in range(start, stop):
                accelerator.backward(model(**BATCHES[update]).loss)
                optimizer.step()
                optimizer.zero_grad()
                if loads is None:
                    accelerator.save_state(str(tmp_path / f"saved-{update + 1}"))
            return weights(network)

    straight = run(0, total, tmp_path / "straight")
    for done in range(1, total):
        saved = tmp_path / f"saved-{done}"
        check_whole(saved)
        assert (saved / "hift" / MANIFEST_NAME).is_file() and (saved / "optimizer.bin").stat().st_size < 50_000
        # On a disk and in host memory by turns, so that each begins once with each of the five groups.
        folder = tmp_path / f"resumed-{done}" if done % 2 else None
        assert differing(run(done, total, folder, loads=saved, seed=9), straight) == []


def test_the_trainer_saves_files_and_resumes(tmp_path: Path) -> None:
    rows = [{key: value[0] for key, value in batch.items()} for batch in BATCHES]

    def trainer(seed: int, folder: str) -> Any:
        arguments = TrainingArguments(
            output_dir=str(tmp_path / folder),
            max_steps=9,
            save_steps=4,
            per_device_train_batch_size=1,
            use_cpu=True,
            report_to=[],
            learning_rate=1e-2,
            disable_tqdm=True,
        )
        made = Trainer(model=tiny_llama(torch.bfloat16, seed=seed), args=arguments, train_dataset=rows)
        st.attach(made, HiFTConfig.paper(state="disk", state_dir=tmp_path / f"state-{folder}"))
        return made

    straight, resumed = trainer(0, "straight"), trainer(9, "resumed")
    straight.train()
    saved = tmp_path / "straight" / "checkpoint-4"
    assert len(list((saved / "hift").glob("group-*.safetensors"))) == 5
    resumed.train(resume_from_checkpoint=str(saved))
    assert_same_bits(resumed.model, straight.model)


CASE = HiFTCase(dtype=torch.bfloat16, is_scheduled=False)


def saved_and_resumed(layout: Any, rank: int, folder: Path) -> dict[str, Any]:
    """What differs from state on the host, straight on and resumed; and what files have names when it is saved."""
    with running(CASE, layout, rank) as run:
        expected = whole_weights(run.train(0, 14).model)
    case = HiFTCase(dtype=torch.bfloat16, is_scheduled=False, settings={"state": "disk", "state_dir": folder / "state"})
    with running(case, layout, rank) as run:
        save_state(run.train(0, 7).optimizer, folder / "saved")
        found: dict[str, Any] = {"files": [path.name for path in (folder / "state").rglob("*")]}
        found["straight"] = differing(whole_weights(run.train(7, 14).model), expected)
    with running(case, layout, rank, seed=4) as run:
        load_state(run.optimizer, folder / "saved")
        found["resumed"] = differing(whole_weights(run.train(7, 14).model), expected)
    return found


def under_ddp(rank: int, num_ranks: int, folder: Path) -> dict[str, Any]:
    return saved_and_resumed("ddp", rank, folder)


def under_fsdp2(rank: int, num_ranks: int, folder: Path) -> dict[str, Any]:
    return saved_and_resumed("fsdp2", rank, folder)


@pytest.mark.parametrize("run", [under_ddp, under_fsdp2])
def test_ranks_have_files_without_names_and_equal_host_state(run: Callable[..., Any], tmp_path: Path) -> None:
    """Under DDP files of their own, which pass through two buffers; under FSDP2 memory-mapped ones."""
    for found in run_ranks(run, 2, tmp_path):
        assert found == {"files": [], "straight": [], "resumed": []}


def run_to_the_end(folder: Path) -> torch.nn.Module:
    """A user's script: it goes on from the newest checkpoint, and saves one every three updates."""
    model, hift = built(folder / "state", seed=0)
    found = sorted((folder / "checkpoints").glob("update-*"))
    if found:
        model.load_state_dict(torch.load(found[-1] / "model.pt"))
        load_state(hift, found[-1] / "hift")
    while hift.updates < 14:
        train(model, hift, BATCHES, 1, start=hift.updates)
        if hift.updates % 3 == 0:
            save_state(hift, folder / "partial" / "hift")
            torch.save(model.state_dict(), folder / "partial" / "model.pt")
            (folder / "checkpoints").mkdir(exist_ok=True)
            (folder / "partial").rename(folder / "checkpoints" / f"update-{hift.updates:03d}")
    return model


def run_until_killed(rank: int, num_ranks: int, folder: Path, kill_at: int) -> None:
    """Run that script in small writes, and end the process by SIGKILL within the given one."""
    dist.destroy_process_group()
    write, calls = os.pwritev, itertools.count(1)

    def pwritev(descriptor: int, buffers: Any, offset: int) -> int:
        if next(calls) == kill_at:
            write(descriptor, [buffers[0][:4096]], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return write(descriptor, buffers, offset)

    with mock.patch.object(group_file, "_PART_BYTES", 8192), mock.patch.object(os, "pwritev", pwritev):
        run_to_the_end(folder)


@pytest.mark.parametrize("kill_at", quick([3, 60, 110], [60]))
def test_a_run_that_is_killed_in_mid_write_resumes_to_the_same_bits(kill_at: int, tmp_path: Path) -> None:
    expected = run_to_the_end(tmp_path / "undisturbed")
    with pytest.raises(RankError, match=r"rank 0 vanished \(exit code -9\)"):
        run_ranks(run_until_killed, 1, tmp_path / "killed", kill_at)
    assert list((tmp_path / "killed" / "state").iterdir()) == [], "nothing stays behind"
    whole = sorted((tmp_path / "killed" / "checkpoints").glob("update-*"))
    kept = {path: digests(path) for path in whole}
    for path in whole:
        check_whole(path / "hift")
    partial = tmp_path / "killed" / "partial"
    if partial.exists():
        partial.rename(tmp_path / "aside")
    assert_same_bits(run_to_the_end(tmp_path / "killed"), expected)
    assert {path: digests(path) for path in whole} == kept
