"""Checkpoints of a stock Trainer with something attached: damage is named first, and one process reads many ranks'."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from slivertune import HiFTConfig, TokenTune
from slivertune.core.manifest import MANIFEST_NAME, DamagedCheckpointError, find_damage, read_entries, write_manifest
from tests.helpers.ranks import run_ranks
from tests.helpers.tolerance import with_exact
from tests.interop.test_trainer import run, sft_config
from tests.interop.trainer_runs import BATCH, HIFT, RANKS, SFT, STOP, assert_near, states, train

SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3}
METHODS: dict[str, Any] = {"hift": (HiFTConfig.paper(),), "sft": (sft_config(),), "tokens": (TokenTune(ratio=0.5),)}


@pytest.fixture(scope="module", params=METHODS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A method, and the folder of its run with whole checkpoints after 3 and 6 updates."""
    folder = tmp_path_factory.mktemp(request.param)
    run(folder, *METHODS[request.param], stop=6, **SAVING)
    return request.param, folder


@pytest.fixture
def copied(saved: tuple[str, Path], tmp_path: Path) -> tuple[tuple[Any, ...], Path]:
    """The method's settings, and the checkpoint after 6 updates in a copy of its run."""
    method, source = saved
    shutil.copytree(source, tmp_path / "run")
    return METHODS[method], tmp_path / "run" / "checkpoint-6"


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
    copied: tuple[tuple[Any, ...], Path], name: str, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, checkpoint = copied
    path = checkpoint / name
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(content[:-100])
    else:
        place = len(content) // 2
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    opened = Mock(side_effect=AssertionError("a file of the checkpoint was opened"))
    monkeypatch.setattr(torch, "load", opened)
    monkeypatch.setattr("safetensors.torch.load_file", opened)
    words = {"gone": "is missing", "cut": "bytes where", "flipped": "holds other bytes"}[damage]
    with pytest.raises(DamagedCheckpointError) as caught:
        run(checkpoint.parent, *settings, resume=True, **SAVING)
    text = str(caught.value)
    assert f"{checkpoint} can't be loaded" in text and name in text and words in text
    assert text.endswith(f". Use an older checkpoint, such as {checkpoint.parent / 'checkpoint-3'}")


def test_a_checkpoint_that_was_cut_short_is_refused_where_a_method_needs_its_state(
    copied: tuple[tuple[Any, ...], Path],
) -> None:
    settings, checkpoint = copied
    (checkpoint / MANIFEST_NAME).unlink()
    if settings == METHODS["tokens"]:  # any Trainer's checkpoint will do
        assert run(checkpoint.parent, *settings, resume=True, **SAVING).state.global_step == 8
        return
    empty = checkpoint.with_name("checkpoint-7")
    for asked, folder in ((True, checkpoint), (str(empty), empty)):
        with pytest.raises(DamagedCheckpointError, match=rf"{folder.name} can't be loaded.*its writing was cut short"):
            run(checkpoint.parent, *settings, resume=asked, **SAVING)
        empty.mkdir(exist_ok=True)


def test_a_run_that_had_made_all_its_updates_makes_no_other(copied: tuple[tuple[Any, ...], Path]) -> None:
    settings, checkpoint = copied
    whole = load_file(checkpoint / "model.safetensors")
    again: Any = run(checkpoint.parent, *settings, resume=True, max_steps=6, **SAVING)
    assert again.state.global_step == 6
    assert all(torch.equal(value, again.model.state_dict()[name]) for name, value in whole.items())


def test_weights_whose_state_only_deepspeed_reads_are_refused_elsewhere(
    copied: tuple[tuple[Any, ...], Path],
) -> None:
    settings, checkpoint = copied
    if settings == METHODS["tokens"]:
        return
    (checkpoint / "optimizer.pt").unlink()
    (checkpoint / "global_step6").mkdir()
    write_manifest(checkpoint)
    with pytest.raises(ValueError, match=r"checkpoint-6 was saved under DeepSpeed.*zero\.load_zero"):
        run(checkpoint.parent, *settings, resume=True, **SAVING)


def test_one_manifest_is_written_after_what_a_second_attach_adds(tmp_path: Path) -> None:
    trainer = run(tmp_path, HiFTConfig.paper(), TokenTune(ratio=0.5), stop=3, **SAVING)
    names = [type(each).__name__ for each in trainer.callback_handler.callbacks]
    assert names.count("KeepManifest") == 1
    assert names.index("KeepManifest") > names.index("KeepTokens") > names.index("KeepState")
    assert find_damage(tmp_path / "checkpoint-3") is None


CASES: dict[str, Any] = {"hift": HIFT, "sft": SFT}


def save_on_two(rank: int, world: int, name: str, folder: Path) -> dict[str, torch.Tensor]:
    with states("fsdp2"):
        trainer, (*_, last) = train(folder, BATCH, "fsdp2", CASES[name], save_strategy="steps", save_steps=STOP)
        trainer.accelerator.free_memory()
    return last


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_one_process_takes_up_what_two_ranks_under_fsdp2_have_saved(name: str, tmp_path: Path) -> None:
    ranks = run_ranks(save_on_two, RANKS, name, tmp_path / "two")
    checkpoint = tmp_path / "two" / f"checkpoint-{STOP}"
    assert (checkpoint / "pytorch_model_fsdp_0").is_dir() and not (checkpoint / "model.safetensors").exists()
    with states(None):
        resumed = partial(train, tmp_path / "alone", RANKS * BATCH, None, CASES[name], resume=str(checkpoint))
        (trainer, found), (_, exact) = with_exact(resumed)
    assert trainer._load_from_checkpoint.__func__ is type(trainer)._load_from_checkpoint  # type: ignore[attr-defined]
    assert_near(ranks[0], found[-1], exact[-1])
