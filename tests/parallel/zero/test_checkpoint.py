"""Saving and resuming HiFT on DeepSpeed in mid-cycle, and the model in the end as any Hugging Face checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from slivertune.core.manifest import find_damage, write_manifest
from tests.helpers.models import differing
from tests.helpers.ranks import run_ranks
from tests.helpers.tolerance import distance, step_limit, with_exact
from tests.parallel.zero.runs import CAP, LOSS_CAP, Case, Run, largest_difference, make_model, reference

CPU = {"DS_ACCELERATOR": "cpu"}
STAGES = (1, 2, 3)
BEFORE, AFTER = 8, 5
"""Updates before and after the save: it falls into the second cycle of six, and the rest reaches the third."""


def case_of(stage: int, bare: bool) -> Case:
    return Case(
        stage=stage,
        bare=bare,
        dtype=torch.bfloat16 if bare else torch.float32,
        split_decay=True,
        config_schedule=bare,
        accumulation=1 if bare else 2,
        clip=0.0 if bare else 0.05,
    )


@dataclass
class Ended:
    """What a rank held at the end of a run."""

    masters: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]
    """Every tensor of every group's optimizer, this rank's share."""
    losses: list[float]
    held_lr: list[float]
    shown_lr: list[float]
    updates: int


def end(run: Run) -> Ended:
    return Ended(
        masters=run.masters(),
        weights=run.weights(),
        state={
            f"{group}.{index}.{key}": value.clone()
            for group, child in run.group_schedule.children.items()
            for index, master in enumerate(run.group_schedule.mover(group).masters)
            for key, value in child.optimizer.state[master].items()
        },
        losses=run.losses[-AFTER:],
        held_lr=[float(lr) for lr in run.hift.held_lr],
        shown_lr=[group["lr"] for group in run.hift.param_groups],
        updates=run.hift.updates,
    )


def scribble(run: Run) -> None:
    """Other weights than those the saved run began with, so that what is not loaded shows."""
    import deepspeed

    for parameter in run.model.parameters():
        if run.case.stage == 3:
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                parameter.data.add_(1.0)
        else:
            parameter.data.add_(1.0)


def save_and_resume(rank: int, num_ranks: int, stage: int, folder: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for way in ("engine", "accelerator"):
        case = case_of(stage, way == "engine")
        straight = Run(case, rank, num_ranks)
        straight.train(BEFORE)
        place = f"{folder}/{way}"
        if way == "engine":
            straight.engine.save_checkpoint(place)
        else:
            # As the Trainer does for PEFT models; groups that wait are frozen, but no one means them.
            straight.accelerator.save_state(place, exclude_frozen_parameters=True)
        straight.train(AFTER)
        results[f"{way}, straight"] = end(straight)
        results[f"{way}, exported"] = export(straight, f"{folder}/model")
        straight.close()

        resumed = Run(case, rank, num_ranks)
        scribble(resumed)
        if way == "engine":
            loaded, _ = resumed.engine.load_checkpoint(place)
            assert loaded is not None
        else:
            resumed.accelerator.load_state(place)
        results[f"{way}, at the save"] = resumed.hift.updates, resumed.group_schedule.active
        resumed.train(AFTER)
        results[f"{way}, resumed"] = end(resumed)
        resumed.close()
    results["refused"] = refusals(rank, num_ranks, stage, folder)
    return results


def export(run: Run, folder: str) -> dict[str, torch.Tensor]:
    """Save the model for everyone in the ways that people do; return its weights."""
    if run.accelerator is None:
        run.engine.save_16bit_model(f"{folder}-engine", "pytorch_model.bin")
        if run.rank == 0:
            run.model.config.save_pretrained(f"{folder}-engine")  # type: ignore[operator,union-attr]
    else:
        gathered = run.accelerator.get_state_dict(run.engine)
        model: Any = run.accelerator.unwrap_model(run.engine)
        model.save_pretrained(
            f"{folder}-accelerator", is_main_process=run.rank == 0, save_function=run.accelerator.save,
            state_dict=gathered,
        )  # fmt: skip
    dist.barrier()
    return run.weights()


def refusals(rank: int, num_ranks: int, stage: int, folder: str) -> dict[str, str]:
    messages = {}
    place = Path(folder) / "engine"
    other = Run(
        Case(stage=stage, bare=True, dtype=torch.bfloat16, split_decay=True, layers_per_group=2), rank, num_ranks
    )
    messages["another grouping"] = refusal(other, str(place))
    other.close()
    run = Run(case_of(stage, True), rank, num_ranks)
    messages["no file of ours"] = refusal(run, folder, tag="nothing")
    messages["no manifest"] = refusal(run, folder, tag="cut short", is_whole=False)
    messages["nobody says which"] = refusal(run, folder)
    model = place / f"global_step{BEFORE}" / f"{'zero_pp_rank_1_' if stage == 3 else ''}mp_rank_00_model_states.pt"
    if rank == 0:
        flip(model)
    dist.barrier()
    messages["a flipped bit of DeepSpeed's"] = refusal(run, str(place))
    dist.barrier()
    if rank == 0:
        flip(model)
    dist.barrier()
    own = place / f"global_step{BEFORE}" / "slivertune_hift_rank_1_of_2.pt"
    if rank == 0:
        own.rename(own.with_suffix(".away"))
    dist.barrier()
    messages["one rank's file is gone"] = refusal(run, str(place))
    dist.barrier()
    if rank == 0:
        own.with_suffix(".away").write_bytes(own.with_suffix(".away").read_bytes())
        own.write_bytes(b"half a file")
    dist.barrier()
    messages["one rank's file is damaged"] = refusal(run, str(place))
    dist.barrier()
    if rank == 0:
        own.with_suffix(".away").rename(own)
    dist.barrier()
    # Nothing was changed by what was refused.
    messages["state"] = f"{run.hift.updates} updates, group {run.group_schedule.active}"
    run.close()
    return messages


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


def refusal(run: Run, place: str, tag: str | None = None, *, is_whole: bool = True) -> str:
    if tag is not None and run.rank == 0:
        (Path(place) / tag).mkdir(exist_ok=True)
        if is_whole:
            write_manifest(Path(place) / tag)
    dist.barrier()
    try:
        run.engine.load_checkpoint(place, tag=tag)
    except ValueError as error:
        return str(error)
    return "was not refused"


@pytest.fixture(scope="module", params=STAGES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A stage, its folder, and what its two ranks came to."""
    folder = tmp_path_factory.mktemp(f"zero{request.param}")
    return request.param, folder, run_ranks(save_and_resume, 2, request.param, str(folder), env=CPU, timeout_s=600)


@pytest.mark.parametrize("way", ["engine", "accelerator"])
def test_a_resumed_run_has_the_bits_of_one_that_did_not_stop(saved: Any, way: str) -> None:
    stage, _, ranks = saved
    pairs = [(results[f"{way}, straight"], results[f"{way}, resumed"]) for results in ranks]
    for straight, resumed in pairs:
        assert straight.updates == resumed.updates == BEFORE + AFTER
    if stage == 3:
        assert_near(pairs, case_of(stage, way == "engine"))
        return
    for straight, resumed in pairs:
        assert differing(resumed.masters, straight.masters) == []
        assert differing(resumed.weights, straight.weights) == []
        assert differing(resumed.state, straight.state) == []
        assert resumed.losses == straight.losses


def assert_near(pairs: list[tuple[Ended, Ended]], case: Case) -> None:
    """Stage 3 takes gradients and norms in pieces, whose order may be another in a resumed run."""
    case = replace(case, steps=BEFORE + AFTER)
    expected, exact = with_exact(lambda: reference(case, 2))
    of_masters = step_limit(expected.masters, exact.masters, CAP)
    of_losses = step_limit(expected.losses[-AFTER:], exact.losses[-AFTER:], LOSS_CAP)
    for straight, resumed in pairs:
        assert distance(resumed.masters, straight.masters) <= of_masters
        assert distance(resumed.losses, straight.losses) <= of_losses
        if case.dtype == torch.float32:
            assert distance(resumed.weights, straight.weights) <= of_masters
        else:
            assert differing(resumed.weights, straight.weights) == []
        for kind in {key.rsplit(".", 1)[1] for key in straight.state}:
            found, wanted = (
                {key: value for key, value in ended.state.items() if key.endswith(f".{kind}")}
                for ended in (resumed, straight)
            )
            if kind in expected.moments:
                assert distance(found, wanted) <= step_limit(expected.moments[kind], exact.moments[kind], CAP)
            else:
                assert differing(found, wanted) == []


@pytest.mark.parametrize("way", ["engine", "accelerator"])
def test_the_turn_and_the_learning_rates_are_resumed(saved: Any, way: str) -> None:
    _, _, ranks = saved
    for results in ranks:
        straight, resumed = results[f"{way}, straight"], results[f"{way}, resumed"]
        assert results[f"{way}, at the save"] == (BEFORE, BEFORE % 6)
        assert resumed.held_lr == straight.held_lr
        assert resumed.shown_lr == straight.shown_lr
        assert straight.held_lr != straight.shown_lr


def test_a_checkpoint_has_a_file_of_each_rank_and_nothing_half_written(saved: Any) -> None:
    _, folder, _ = saved
    for place in (folder / "engine" / f"global_step{BEFORE}", folder / "accelerator" / "pytorch_model"):
        names = sorted(path.name for path in place.iterdir() if "hift" in path.name)
        assert names == ["slivertune_hift_rank_0_of_2.pt", "slivertune_hift_rank_1_of_2.pt"]
        assert find_damage(place) is None
    assert find_damage(folder / "accelerator") is None
    assert (folder / "engine" / "latest").read_text() == f"global_step{BEFORE}"


def test_a_rank_file_is_read_without_running_code(saved: Any) -> None:
    _, folder, _ = saved
    path = folder / "engine" / f"global_step{BEFORE}" / "slivertune_hift_rank_0_of_2.pt"
    held = torch.load(path, weights_only=True)
    # Five of six groups; DeepSpeed's own file has the active one.
    assert sorted(held["groups"]) == sorted(str(group) for group in range(6) if group != BEFORE % 6)


@pytest.mark.parametrize("way", ["engine", "accelerator"])
def test_the_final_model_loads_without_this_library(saved: Any, way: str) -> None:
    stage, folder, ranks = saved
    dtype = case_of(stage, way == "engine").dtype
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/model-{way}", dtype=dtype)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    assert largest_difference(weights, ranks[0][f"{way}, exported"]) == 0


def test_deepspeeds_own_script_finds_all_groups_in_a_checkpoint_of_stages_2_and_3(saved: Any) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    stage, folder, _ = saved
    found = get_fp32_state_dict_from_zero_checkpoint(str(folder / "engine"))
    weights = {name: p.shape for name, p in make_model(case_of(stage, True)).named_parameters()}
    if stage == 1:
        # DeepSpeed keeps what is frozen apart from stage 2 on; its script then finds the active group alone.
        block = f"model.layers.{BEFORE % 6 - 1}."
        weights = {name: shape for name, shape in weights.items() if name.startswith(block)}
    assert {name: value.shape for name, value in found.items()} == weights


def test_what_does_not_belong_to_the_run_is_refused_on_every_rank(saved: Any) -> None:
    _, _, ranks = saved
    for results in ranks:
        messages = results["refused"]
        assert "has another grouping (layers_per_group, layers): 6 groups" in messages["another grouping"]
        assert "was not saved by HiFT" in messages["no file of ours"]
        gone, damaged = messages["one rank's file is gone"], messages["one rank's file is damaged"]
        assert f"global_step{BEFORE} can't be loaded, and nothing of it was" in gone and "use an older" in gone
        assert "slivertune_hift_rank_1_of_2.pt is missing" in gone
        assert "slivertune_hift_rank_1_of_2.pt has 11 bytes where" in damaged
        assert "has no slivertune_checkpoint.json, so its writing was cut short" in messages["no manifest"]
        assert "mp_rank_00_model_states.pt holds other bytes" in messages["a flipped bit of DeepSpeed's"]
        assert "has no file 'latest'" in messages["nobody says which"]
        assert messages["state"] == "0 updates, group 0"
