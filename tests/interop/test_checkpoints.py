"""Checkpoints of a stock Trainer with something attached: damage is named first, and one process reads many ranks'."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slivertune import HiFTConfig, TokenTune
from slivertune.core.manifest import MANIFEST_NAME, DamagedCheckpointError, find_damage, read_entries, write_manifest
from tests.helpers.ranks import run_ranks
from tests.helpers.tolerance import with_exact
from tests.interop.test_trainer import run, sft_config
from tests.interop.test_trainer_layouts import HIFT, SFT, STOP, assert_near, states, train
from tests.interop.test_trainer_ranks import BATCH, RANKS

SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3}
METHODS: dict[str, Any] = {"hift": (HiFTConfig(),), "sft": (sft_config(),), "tokens": (TokenTune(ratio=0.5),)}


@pytest.fixture(scope="module", params=METHODS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A method, and the folder of its run with whole checkpoints after 3 and 6 updates."""
    folder = tmp_path_factory.mktemp(request.param)
    run(folder, *METHODS[request.param], stop=6, **SAVING)
    return request.param, folder


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_the_manifest_lists_all_that_the_trainer_and_we_have_written(saved: tuple[str, Path]) -> None:
    method, folder = saved
    listed = set(read_entries(folder / "checkpoint-6")["files"])
    there = {str(path.relative_to(folder / "checkpoint-6")) for path in (folder / "checkpoint-6").rglob("*")}
    assert listed == there - {MANIFEST_NAME}
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"} <= listed
    assert ("slivertune_tokens.json" in listed) == (method == "tokens")


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "rng_state.pth", "trainer_state.json"])
@pytest.mark.parametrize("damage", ["gone", "cut", "flipped"])
def test_damage_is_named_before_anything_is_read(
    saved: tuple[str, Path], name: str, damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, source = saved
    shutil.copytree(source, tmp_path / "run")
    path = tmp_path / "run" / "checkpoint-6" / name
    if damage == "gone":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    else:
        flip(path)

    def opened(*_: Any, **__: Any) -> None:
        raise AssertionError("a file of the checkpoint was opened")

    monkeypatch.setattr(torch, "load", opened)
    monkeypatch.setattr("safetensors.torch.load_file", opened)
    words = {"gone": "is missing", "cut": "bytes where", "flipped": "holds other bytes"}[damage]
    with pytest.raises(DamagedCheckpointError) as caught:
        run(tmp_path / "run", *METHODS[method], resume=True, **SAVING)
    text = str(caught.value)
    assert f"{path.parent} can't be loaded" in text and name in text and words in text
    assert text.endswith(f"use an older checkpoint, such as {tmp_path / 'run' / 'checkpoint-3'}")


def test_a_checkpoint_that_was_cut_short_is_refused_where_a_method_needs_its_state(
    saved: tuple[str, Path], tmp_path: Path
) -> None:
    method, source = saved
    shutil.copytree(source, tmp_path / "run")
    (tmp_path / "run" / "checkpoint-6" / MANIFEST_NAME).unlink()
    if method == "tokens":  # any Trainer's checkpoint will do
        assert run(tmp_path / "run", *METHODS[method], resume=True, **SAVING).state.global_step == 8
        return
    with pytest.raises(DamagedCheckpointError, match=r"checkpoint-6 can't be loaded.*its writing was cut short"):
        run(tmp_path / "run", *METHODS[method], resume=True, **SAVING)
    (empty := tmp_path / "run" / "checkpoint-7").mkdir()
    with pytest.raises(DamagedCheckpointError, match=r"checkpoint-7 can't be loaded.*its writing was cut short"):
        run(tmp_path / "run", *METHODS[method], resume=str(empty), **SAVING)


def test_a_run_that_had_made_all_its_updates_makes_no_other(saved: tuple[str, Path], tmp_path: Path) -> None:
    method, source = saved
    shutil.copytree(source, tmp_path / "run")
    again = run(tmp_path / "run", *METHODS[method], resume=True, max_steps=6, **SAVING)
    assert again.state.global_step == 6
    whole = load_file(source / "checkpoint-6" / "model.safetensors")
    found: Any = again.model
    assert all(torch.equal(value, found.state_dict()[name]) for name, value in whole.items())


def test_weights_whose_state_only_deepspeed_reads_are_refused_elsewhere(
    saved: tuple[str, Path], tmp_path: Path
) -> None:
    method, source = saved
    if method == "tokens":
        return
    shutil.copytree(source, tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoint-6"
    (checkpoint / "optimizer.pt").unlink()
    (checkpoint / "global_step6").mkdir()
    write_manifest(checkpoint)
    with pytest.raises(ValueError, match=r"checkpoint-6 was saved under DeepSpeed.*zero\.load_zero"):
        run(tmp_path / "run", *METHODS[method], resume=True, **SAVING)


def test_one_manifest_is_written_after_what_a_second_attach_adds(tmp_path: Path) -> None:
    trainer = run(tmp_path, HiFTConfig(), TokenTune(ratio=0.5), stop=3, **SAVING)
    names = [type(each).__name__ for each in trainer.callback_handler.callbacks]
    assert names.count("KeepManifest") == 1
    assert names.index("KeepManifest") > names.index("KeepTokens") > names.index("KeepState")
    assert find_damage(tmp_path / "checkpoint-3") is None


CASES: dict[str, Any] = {"hift": HIFT, "sft": SFT}


def save_on_two(rank: int, world: int, folder: str) -> dict[str, Any]:
    found = {}
    for name, setting in CASES.items():
        with states("fsdp2"):
            saving = {"save_strategy": "steps", "save_steps": STOP}
            trainer, weights = train(Path(folder) / name, BATCH, "fsdp2", setting, **saving)
            found[name] = weights[-1]
            trainer.accelerator.free_memory()
    return found


@pytest.mark.slow
def test_one_process_takes_up_what_two_ranks_under_fsdp2_have_saved(tmp_path: Path) -> None:
    ranks = run_ranks(save_on_two, RANKS, str(tmp_path), timeout_s=300)
    for name, setting in CASES.items():
        checkpoint = tmp_path / name / f"checkpoint-{STOP}"
        assert (checkpoint / "pytorch_model_fsdp_0").is_dir() and not (checkpoint / "model.safetensors").exists()
        with states(None):
            resumed = partial(train, tmp_path / f"{name} alone", RANKS * BATCH, None, setting, resume=str(checkpoint))
            (trainer, found), (_, exact) = with_exact(resumed)
        assert trainer._load_from_checkpoint.__func__ is type(trainer)._load_from_checkpoint  # type: ignore[attr-defined]
        assert_near(ranks[0][name], found[-1], exact[-1])
