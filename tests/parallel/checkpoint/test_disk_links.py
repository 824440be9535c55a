"""Checkpoints of state that waits in files: links to these, which stay what they were."""

import errno
import gc
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import Trainer, TrainingArguments

import slivertune as st
from slivertune import HiFT, HiFTConfig
from slivertune.core.manifest import MANIFEST_NAME, DamagedCheckpointError, check_whole, find_damage
from slivertune.parallel.checkpoint.sidecar import load_state, save_state
from tests.helpers.accelerator import one_device
from tests.helpers.models import assert_same_bits, assert_same_tree, differing, tiny_llama, token_batches, weights
from tests.helpers.ranks import run_ranks
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


@pytest.mark.parametrize("name", ["AdamW", "AdamW8bit", "SGD"])
def test_a_checkpoint_is_links_that_never_change_and_go_on_to_the_bit(name: str, tmp_path: Path) -> None:
    model, hift = built(tmp_path / "state", name=name)
    train(model, hift, BATCHES, 8)
    save_state(hift, tmp_path / "saved")
    then, kept = weights(model), digests(tmp_path / "saved")
    for group in range(hift.num_groups):
        file, link = hift.saved_file(group), tmp_path / f"saved/group-{group:05d}.rank-00000.safetensors"
        assert file is not None
        assert (file.stat().st_ino, link.stat().st_nlink) == (link.stat().st_ino, 2)
    stamps = json.loads((tmp_path / "saved" / MANIFEST_NAME).read_text())["files"]
    assert {key for stamp in stamps.values() for key in stamp if "group" not in key} == {"bytes", "blake2b"}
    assert [name for name, stamp in stamps.items() if "blake2b" in stamp] == ["header.pt"]
    train(model, hift, BATCHES, 12, start=8)
    assert digests(tmp_path / "saved") == kept
    assert {path.stat().st_nlink for path in (tmp_path / "saved").glob("group-*")} == {1}
    for place in (tmp_path / "again", None):  # on a disk, and in host memory
        again, resumed = built(place, seed=9, name=name)
        again.load_state_dict(then)
        load_state(resumed, tmp_path / "saved")
        assert resumed.updates == 8
        train(again, resumed, BATCHES, 12, start=8)
        assert_same_bits(again, model)
        assert_same_tree(reloaded(resumed.state_dict()["state"]), reloaded(hift.state_dict()["state"]))
    assert digests(tmp_path / "saved") == kept


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP])
def test_where_links_fail_files_are_copied_and_hashed(number: int, tmp_path: Path) -> None:
    model, hift = built(tmp_path / "state")
    train(model, hift, BATCHES, 8)
    with mock.patch.object(os, "link", side_effect=OSError(number, os.strerror(number))):
        save_state(hift, tmp_path / "saved")
    assert {path.stat().st_nlink for path in (tmp_path / "saved").iterdir()} == {1}
    stamps = json.loads((tmp_path / "saved" / MANIFEST_NAME).read_text())["files"]
    assert len(stamps) == hift.num_groups + 1 and all("blake2b" in stamp for stamp in stamps.values())
    again, resumed = built(tmp_path / "again", seed=9)
    load_state(resumed, tmp_path / "saved")
    for each, optimizer in ((model, hift), (again, resumed)):
        train(each, optimizer, BATCHES, 12, start=8)
    assert_same_bits(again, model)


@pytest.mark.parametrize("config", [{"state_ram_bytes": 200_000}, {"name": "torch Adafactor"}])
def test_what_has_no_file_of_a_checkpoint_s_form_is_written(config: dict[str, Any], tmp_path: Path) -> None:
    model, hift = built(tmp_path / "state", **config)
    train(model, hift, BATCHES, 8)
    save_state(hift, tmp_path / "saved")
    again, resumed = built(tmp_path / "again", seed=9, **config)
    load_state(resumed, tmp_path / "saved")
    for each, optimizer in ((model, hift), (again, resumed)):
        train(each, optimizer, BATCHES, 12, start=8)
    assert_same_bits(again, model)


def test_a_link_that_was_cut_short_or_is_missing_is_named(tmp_path: Path) -> None:
    model, hift = built(tmp_path / "state")
    train(model, hift, BATCHES, 8)
    save_state(hift, tmp_path / "saved")
    file = tmp_path / "saved" / "group-00002.rank-00000.safetensors"
    content = file.read_bytes()
    file.unlink()
    assert find_damage(tmp_path / "saved") == f"{file.name} is missing"
    file.write_bytes(content[:-1])
    with pytest.raises(DamagedCheckpointError, match=r"group-00002.* bytes where"):
        load_state(hift, tmp_path / "saved")


@pytest.mark.parametrize("state", ["disk", "host"])
def test_accelerate_saves_links_and_resumes_at_any_step(state: str, tmp_path: Path) -> None:
    total = 12

    def run(
        start: int, stop: int, folder: str, *, loads: Path | None = None, seed: int = 0, place: str = "disk"
    ) -> Any:
        with one_device() as accelerator:
            network, hift = built(tmp_path / folder if place == "disk" else None, seed=seed)
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

    straight = run(0, total, "straight")
    for done in range(1, total):
        saved = tmp_path / f"saved-{done}"
        check_whole(saved)
        assert (saved / "hift" / MANIFEST_NAME).is_file() and (saved / "optimizer.bin").stat().st_size < 50_000
        assert differing(run(done, total, f"resumed-{done}", loads=saved, seed=9, place=state), straight) == []


def test_the_trainer_saves_links_and_resumes(tmp_path: Path) -> None:
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
        st.attach(made, HiFTConfig(state="disk", state_dir=tmp_path / f"state-{folder}"))
        return made

    straight, resumed = trainer(0, "straight"), trainer(9, "resumed")
    straight.train()
    saved = tmp_path / "straight" / "checkpoint-4"
    assert len(list((saved / "hift").glob("group-*.safetensors"))) == 5
    resumed.train(resume_from_checkpoint=str(saved))
    assert_same_bits(resumed.model, straight.model)


CASE = HiFTCase(dtype=torch.bfloat16, is_scheduled=False)


def saved_and_resumed(layout: Any, rank: int, folder: Path, look: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What differs from state on the host, straight on and resumed; and what is seen when it is saved."""
    with running(CASE, layout, rank) as run:
        expected = whole_weights(run.train(0, 14).model)
    case = HiFTCase(dtype=torch.bfloat16, is_scheduled=False, settings={"state": "disk", "state_dir": folder / "state"})
    with running(case, layout, rank) as run:
        save_state(run.train(0, 7).optimizer, folder / "saved")
        found = look()
        found["straight"] = differing(whole_weights(run.train(7, 14).model), expected)
    with running(case, layout, rank, seed=4) as run:
        load_state(run.optimizer, folder / "saved")
        found["resumed"] = differing(whole_weights(run.train(7, 14).model), expected)
    return found


def under_ddp(rank: int, num_ranks: int, folder: Path) -> dict[str, Any]:
    def look() -> dict[str, Any]:
        return {"links": sorted({path.stat().st_nlink for path in (folder / "saved").glob("group-*")})}

    return saved_and_resumed("ddp", rank, folder, look)


def under_fsdp2(rank: int, num_ranks: int, folder: Path) -> dict[str, Any]:
    def look() -> dict[str, Any]:
        return {"files": [path.name for path in (folder / "state").rglob("*")]}

    return saved_and_resumed("fsdp2", rank, folder, look)


def test_ranks_of_fsdp2_have_mapped_files_without_names_and_equal_host_state(tmp_path: Path) -> None:
    for found in run_ranks(under_fsdp2, 2, tmp_path):
        assert found == {"files": [], "straight": [], "resumed": []}


def test_ranks_of_ddp_have_files_of_their_own_and_equal_host_state(tmp_path: Path) -> None:
    for found in run_ranks(under_ddp, 2, tmp_path):
        assert found == {"links": [2], "straight": [], "resumed": []}


SCRIPT = """
import os, signal, sys
from pathlib import Path
from slivertune.core import direct_files
from tests.helpers.models import token_batches
from tests.helpers.reference import train
from tests.parallel.checkpoint.test_disk_links import BATCHES, built, run_to_the_end

folder, kill_at = Path(sys.argv[1]), int(sys.argv[2])
direct_files.PART_BYTES = 8192
write, calls = os.pwritev, [0]

def pwritev(descriptor, buffers, offset):
    calls[0] += 1
    if calls[0] == kill_at:
        write(descriptor, [buffers[0][:4096]], offset)
        os.kill(os.getpid(), signal.SIGKILL)
    return write(descriptor, buffers, offset)

os.pwritev = pwritev
run_to_the_end(folder)
"""


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


@pytest.mark.parametrize("kill_at", [3, 60, 110])
def test_a_run_that_is_killed_in_mid_write_resumes_to_the_same_bits(kill_at: int, tmp_path: Path) -> None:
    expected = run_to_the_end(tmp_path / "undisturbed")
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "killed"), str(kill_at)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    left = list((tmp_path / "killed" / "state").rglob("*.partial/group-*.partial"))
    assert left, "it was killed in the middle of a file"
    whole = sorted((tmp_path / "killed" / "checkpoints").glob("update-*"))
    kept = {path: digests(path) for path in whole}
    for path in whole:
        check_whole(path / "hift")
    partial = tmp_path / "killed" / "partial"
    if partial.exists():
        partial.rename(tmp_path / "aside")
    assert_same_bits(run_to_the_end(tmp_path / "killed"), expected)
    assert {path: digests(path) for path in whole} == kept
    gc.collect()
    assert list((tmp_path / "killed" / "state").iterdir()) == []
