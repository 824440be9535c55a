"""Checkpoints of HiFT on DeepSpeed: the files of the ranks, what one process makes of them, and what is refused."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from slivertune.core.layout import Layout
from slivertune.core.manifest import DamagedCheckpointError, find_damage, write_manifest
from slivertune.parallel.zero.shares import fp32_weights, load_zero
from tests.helpers.models import differing
from tests.helpers.ranks import quick, ran_once, run_ranks
from tests.parallel.contract.hift import CYCLE, HiFTCase
from tests.parallel.contract.runs import ZERO, load, message_of, running, save
from tests.parallel.reference import whole_weights

BARE = HiFTCase(bare=True, dtype=torch.bfloat16, split_decay=True)
WAYS = {"engine": BARE, "accelerator": HiFTCase(split_decay=True)}
BEFORE = HiFTCase.cut
TAG = f"global_step{BEFORE}"
PLACES = {"engine": f"engine/{TAG}", "accelerator": "accelerator/pytorch_model"}
"""Where DeepSpeed's files lie."""
SAID = {
    "another grouping": ["has another grouping (layers_per_group, layers): 5 groups"],
    "no file of ours": ["was not saved by HiFT"],
    "one rank's file is gone": [
        f"{TAG} can't be loaded, and nothing of it was",
        "Use an older",
        "slivertune_hift_rank_1_of_2.pt is missing",
    ],
    "one rank's file is damaged": ["slivertune_hift_rank_1_of_2.pt has 11 bytes where"],
    "no manifest": ["has no slivertune_checkpoint.json, so its writing was cut short"],
    "a flipped bit of DeepSpeed's": ["mp_rank_00_model_states.pt holds other bytes"],
    "a beta of 2": ["_of_2.pt: the saved state is damaged: ", "does not take the hyperparameters of param group 0"],
    "nobody says which": ["has no file 'latest'"],
}
"""What is said to checkpoints that are refused."""
FROZEN = "model.layers.1.mlp.down_proj.weight"


@dataclass(frozen=True, kw_only=True)
class FrozenCase(HiFTCase):
    """One weight is not trained at all, and holds what no initialisation gives."""

    value: float = 0.25

    def build_model(self, seed: int = 0) -> nn.Module:
        model = super().build_model(seed)
        model.get_parameter(FROZEN).requires_grad_(False).data.fill_(self.value)
        return model


WITH_FROZEN = FrozenCase(bare=True, split_decay=True)


def save_by(rank: int, num_ranks: int, layout: Layout, way: str, folder: Path) -> dict[str, Any]:
    case = WAYS[way]
    with running(case, layout, rank) as run:
        save(run.train(0, BEFORE), folder / layout / way)
        return case.result(run)


def save_frozen(rank: int, num_ranks: int, folder: Path) -> dict[str, torch.Tensor]:
    with running(WITH_FROZEN, "zero3", rank) as run:
        run.train(0, 2).sliver.detach()  # as at the end of the Trainer's training
        save(run, folder)
        assert [name for name, each in run.plain.named_parameters() if not each.requires_grad] == [FROZEN]
        return whole_weights(run.model)


def weights_without_frozen(rank: int, num_ranks: int, layout: Layout, folder: Path) -> list[str]:
    """Names in a file of the weights in the second group's turn, without frozen ones."""
    with running(WITH_FROZEN, layout, rank) as run:
        run.train(0, 2).model.save_16bit_model(str(folder), "weights.bin", exclude_frozen_parameters=True)
        assert [name for name, each in run.plain.named_parameters() if each.requires_grad] == [
            weight.name for weight in run.sliver.weights_of(1)
        ]
        dist.barrier()
        return sorted(torch.load(folder / "weights.bin"))


def load_weights_alone(rank: int, num_ranks: int, layout: Layout, folder: Path) -> dict[str, Any]:
    """Weights and counters after a load in another turn than the saved one, and after a cycle from there."""
    with running(BARE, layout, rank, seed=7) as run:
        run.model.load_checkpoint(str(folder / layout / "engine"), load_module_only=True)
        loaded, updates = whole_weights(run.model), run.sliver.updates
        masters = BARE.result(run)["masters"]
        run.train(0, CYCLE)
        changed = differing(whole_weights(run.model), loaded)
        return {"weights": loaded, "masters": masters, "updates": (updates, run.sliver.updates), "changed": changed}


def load_frozen(rank: int, num_ranks: int, folder: Path) -> dict[str, torch.Tensor]:
    with running(replace(WITH_FROZEN, value=-1.0), "zero3", rank) as run:
        load(run, folder)
        return whole_weights(run.model)


def go_on_with_nan_in_new_memory(rank: int, num_ranks: int, folder: Path) -> dict[str, Any]:
    """New memory holds NaN, as it may anywhere, so whatever nobody has written does."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with running(BARE, "zero3", rank) as run:
            save(run.train(0, BEFORE), folder)
            wanted = BARE.result(run)
        with running(BARE, "zero3", rank) as run:
            load(run, folder)
            assert differing(BARE.result(run)["weights"], wanted["weights"]) == []
            movers = run.model.hift_schedule.movers.values()
            assert all(bool(master.isfinite().all()) for mover in movers for master in mover.masters)
            return BARE.result(run.train(BEFORE, BEFORE + 1))
    finally:
        torch.use_deterministic_algorithms(False)


def refusals(rank: int, num_ranks: int, layout: Layout, folder: Path) -> dict[str, str]:
    """What is said to checkpoints that don't fit, or of which a file is damaged or gone."""
    folder = folder / layout
    place = folder / "engine"
    messages = {}
    with running(replace(BARE, settings={"layers_per_group": 2}), layout, rank) as run:
        messages["another grouping"] = message_of(lambda: run.model.load_checkpoint(str(place)))
    if rank == 0:
        for tag in ("nothing", "cut short"):
            (folder / tag).mkdir()
        write_manifest(folder / "nothing")
    dist.barrier()
    shard = "zero_pp_rank_1_" if layout == "zero3" else ""
    model = place / TAG / f"{shard}mp_rank_00_model_states.pt"
    own = place / TAG / "slivertune_hift_rank_1_of_2.pt"
    with running(BARE, layout, rank) as run:

        def refusal(folder: Path = place, tag: str | None = None) -> str:
            return message_of(lambda: run.model.load_checkpoint(str(folder), tag=tag))

        messages["no file of ours"] = refusal(folder, "nothing")
        messages["no manifest"] = refusal(folder, "cut short")
        messages["nobody says which"] = refusal(folder)
        for what, path, change in (
            ("a flipped bit of DeepSpeed's", model, flip),
            ("one rank's file is gone", own, Path.unlink),
            ("one rank's file is damaged", own, lambda path: path.write_bytes(b"half a file")),
            ("a beta of 2", own, give_impossible_beta),
        ):
            kept = {each: each.read_bytes() for each in (*own.parent.glob("slivertune_*"), path)}
            dist.barrier()
            if rank == 0:
                change(path)
            dist.barrier()
            messages[what] = refusal()
            dist.barrier()
            if rank == 0:
                for each, content in kept.items():
                    each.write_bytes(content)
            dist.barrier()
        # Nothing was changed by what was refused.
        messages["state"] = f"{run.sliver.updates} updates, group {run.model.hift_schedule.active}"
    return messages


def give_impossible_beta(path: Path) -> None:
    for each in path.parent.glob("slivertune_hift_rank_*.pt"):
        saved = torch.load(each, weights_only=True)
        saved["param_groups"][0]["betas"] = (2.0, 0.999)
        torch.save(saved, each)
    write_manifest(path.parent)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("zero")


@pytest.fixture(scope="module")
def save_once(folder: Path) -> Callable[..., list[dict[str, Any]]]:
    """Saves under a layout in a way."""
    return ran_once(save_by, 2, folder)


Saved = tuple[Layout, Path, dict[str, list[dict[str, Any]]]]
"""A layout, where its ranks have saved, and what each had then, by way."""


@pytest.fixture(params=quick(ZERO, ["zero2", "zero3"]))
def saved(request: pytest.FixtureRequest, folder: Path, save_once: Callable[..., list[dict[str, Any]]]) -> Saved:
    layout: Layout = request.param
    return layout, folder / layout, {way: save_once(layout, way) for way in WAYS}


def test_a_checkpoint_has_a_file_of_each_rank_and_nothing_half_written(saved: Saved) -> None:
    _, folder, _ = saved
    for place in (folder / each for each in PLACES.values()):
        names = sorted(path.name for path in place.iterdir() if "hift" in path.name)
        assert names == ["slivertune_hift_rank_0_of_2.pt", "slivertune_hift_rank_1_of_2.pt"]
        assert find_damage(place) is None
    assert find_damage(folder / "accelerator") is None
    assert (folder / "engine" / "latest").read_text() == TAG


def test_a_rank_file_is_read_without_running_code(saved: Saved) -> None:
    _, folder, _ = saved
    path = folder / "engine" / TAG / "slivertune_hift_rank_0_of_2.pt"
    held = torch.load(path, weights_only=True)
    # All groups but one; DeepSpeed's own file has the active one.
    assert sorted(held["groups"]) == sorted(str(group) for group in range(CYCLE) if group != BEFORE % CYCLE)


def test_deepspeeds_own_script_finds_all_groups_in_a_checkpoint_of_stages_2_and_3(saved: Saved) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    layout, folder, _ = saved
    found = get_fp32_state_dict_from_zero_checkpoint(str(folder / "engine"))
    weights = {name: p.shape for name, p in BARE.build_model().named_parameters()}
    if layout == "zero1":
        # DeepSpeed keeps what is frozen apart from stage 2 on; its script then finds the active group alone.
        block = f"model.layers.{BEFORE % CYCLE - 1}."
        weights = {name: shape for name, shape in weights.items() if name.startswith(block)}
    assert {name: value.shape for name, value in found.items()} == weights


def test_what_does_not_belong_to_the_run_is_refused_on_every_rank(saved: Saved, folder: Path) -> None:
    for messages in run_ranks(refusals, 2, saved[0], folder):
        assert [what for what, said in SAID.items() if not all(each in messages[what] for each in said)] == []
        assert messages["state"] == "0 updates, group 0"


def test_the_padding_of_uneven_shares_holds_numbers(tmp_path: Path) -> None:
    # By 3 ranks, the sizes of this model's weights are not to be divided evenly.
    for result in run_ranks(go_on_with_nan_in_new_memory, 3, tmp_path):
        assert all(bool(weight.isfinite().all()) for weight in result["weights"].values())


@pytest.mark.parametrize("num_ranks", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_weights_that_are_not_trained_are_put_together_too(num_ranks: int, tmp_path: Path) -> None:
    wanted = run_ranks(save_frozen, 2, tmp_path)[0]
    assert bool((wanted[FROZEN] == 0.25).all())
    for found in run_ranks(load_frozen, num_ranks, tmp_path):
        assert differing(found, wanted) == []


def test_weights_are_loaded_alone_in_any_turn(saved: Saved, folder: Path) -> None:
    layout, _, ranks = saved
    wanted = ranks["engine"][0]["weights"]
    for found in run_ranks(load_weights_alone, 2, layout, folder):
        assert found["updates"] == (0, CYCLE)
        assert differing(found["weights"], wanted) == []
        rounded = {name: whole.to(torch.bfloat16) for name, (_, whole) in found["masters"].items()}
        assert differing(rounded, wanted) == []
        assert sorted(found["changed"]) == sorted(wanted)


@pytest.mark.parametrize("layout", quick(ZERO, ["zero3"]))
def test_weights_without_frozen_ones_have_all_groups(layout: Layout, tmp_path: Path) -> None:
    trained = sorted(name for name, each in WITH_FROZEN.build_model().named_parameters() if each.requires_grad)
    assert run_ranks(weights_without_frozen, 2, layout, tmp_path) == [trained, trained]


@pytest.mark.parametrize("way", WAYS)
def test_the_fp32_weights_of_all_groups_are_found_without_ranks(saved: Saved, way: str, tmp_path: Path) -> None:
    _, folder, ranks = saved
    assert differing(fp32_weights(folder / PLACES[way]), ranks[way][0]["whole state"]["master"]) == []
    shutil.copytree(folder / PLACES[way], tmp_path / TAG)
    ours = tmp_path / TAG / "slivertune_hift_rank_1_of_2.pt"
    flip(ours)
    with pytest.raises(DamagedCheckpointError, match=r"slivertune_hift_rank_1_of_2\.pt holds other bytes"):
        fp32_weights(tmp_path / TAG)
    ours.unlink()
    write_manifest(tmp_path / TAG)
    with pytest.raises(ValueError, match=r"slivertune_hift_rank_1_of_2\.pt is not there"):
        fp32_weights(tmp_path / TAG)
    (tmp_path / "nothing").mkdir()
    write_manifest(tmp_path / "nothing")
    with pytest.raises(ValueError, match="was not saved by HiFT on DeepSpeed"):
        fp32_weights(tmp_path / "nothing")


@pytest.mark.parametrize("way", WAYS)
def test_one_process_without_deepspeed_goes_on(saved: Saved, way: str) -> None:
    _, folder, ranks = saved
    case, wanted = WAYS[way], ranks[way][0]
    model = case.build_model(seed=7)
    hift = case.build_optimizer(model)
    load_zero(hift, folder / PLACES[way])
    assert (hift.updates, hift.active_group) == (wanted["updates"], wanted["active group"])
    assert [float(rate) for rate in hift.held_lr] == wanted["held"]
    assert differing(whole_weights(model), wanted["weights"]) == []
    state = hift.whole_state()["state"]
    for key in ("exp_avg", "exp_avg_sq", *(("master",) if case.dtype == torch.bfloat16 else ())):
        assert differing({name: each[key] for name, each in state.items()}, wanted["whole state"][key]) == []
    case.loss(model, case.batch(BEFORE, 0, 0)).backward()
    hift.step()
    assert hift.updates == BEFORE + 1
    other = case.build_optimizer(case.build_model(), order="top2down")
    with pytest.raises(ValueError, match="has another order of turns"):
        load_zero(other, folder / PLACES[way])
