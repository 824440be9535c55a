"""A checkpoint of HiFT on DeepSpeed that other numbers of ranks read, and its fp32 weights without any."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from slivertune.core.manifest import DamagedCheckpointError, write_manifest
from slivertune.parallel.zero.one_process import load_zero
from slivertune.parallel.zero.shares import fp32_weights
from tests.helpers.models import assert_same_tree
from tests.helpers.ranks import run_ranks
from tests.helpers.reference import naive_groups
from tests.helpers.tolerance import assert_step_close, with_exact
from tests.parallel.zero import runs as zero_runs
from tests.parallel.zero.runs import (
    LR,
    Case,
    Run,
    _mean_gradients,
    factor,
    largest_difference,
    make_batch,
    make_model,
    make_optimizer,
    options,
)

pytestmark = pytest.mark.slow

CPU = {"DS_ACCELERATOR": "cpu"}
STAGES = (1, 2, 3)
BEFORE = 8
"""Updates before the save, into the second cycle of six."""
TAG = f"global_step{BEFORE}"


def case_of(stage: int) -> Case:
    return Case(stage=stage, bare=True, split_decay=True)


def gathered(run: Run, key: str) -> dict[str, torch.Tensor]:
    """One kind of optimizer state of all parameters, put together from the ranks as `Run.masters` does it."""
    found = {}
    for group, child in run.group_schedule.children.items():
        for index, master in enumerate(run.group_schedule.mover(group).masters):
            if key not in child.optimizer.state[master]:
                continue
            flat = child.optimizer.state[master][key]
            if run.case.stage == 3:
                offset = 0
                for parameter in child.fp16_groups[index]:
                    size = parameter.partition_numel()
                    whole = run._gather(flat[offset : offset + size])[: parameter.ds_numel]
                    found[run.names[id(parameter)]] = whole.view(parameter.ds_shape).clone()
                    offset += size
                continue
            whole, offset = run._gather(flat), 0
            for parameter in child.round_robin_bit16_groups[index]:
                part = whole[offset : offset + parameter.numel()]
                found[run.names[id(parameter)]] = part.view(parameter.shape).clone()
                offset += parameter.numel()
    return found


def held(run: Run) -> dict[str, Any]:
    return {
        "masters": run.masters(),
        "weights": run.weights(),
        "exp_avg": gathered(run, "exp_avg"),
        "exp_avg_sq": gathered(run, "exp_avg_sq"),
        "steps": {
            group: sorted({float(state["step"]) for state in child.optimizer.state.values() if "step" in state})
            for group, child in run.group_schedule.children.items()
        },
        "turn": [run.hift.updates, run.group_schedule.active],
        "rates": [float(rate) for rate in run.hift.held_lr],
    }


IN_BF16 = Case(stage=2, bare=True, dtype=torch.bfloat16)
FROZEN = "model.layers.1.mlp.down_proj.weight"


def with_frozen(value: float) -> Callable[[Case], nn.Module]:
    """Models in which one weight is not trained at all, and holds what no initialisation gives."""

    def make(case: Case) -> nn.Module:
        model = make_model(case)
        model.get_parameter(FROZEN).requires_grad_(False).data.fill_(value)
        return model

    return make


def save(rank: int, num_ranks: int, folder: str) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    with mock.patch.object(zero_runs, "make_model", with_frozen(0.25)):
        run = Run(case_of(3), rank, num_ranks)
        run.train(2)
        run.engine.save_checkpoint(f"{folder}/frozen")
        found["frozen"] = run.weights()
        run.close()
    run = Run(IN_BF16, rank, num_ranks)
    run.train(BEFORE)
    run.engine.save_checkpoint(f"{folder}/bf16")
    found["bf16"] = held(run)
    run.close()
    for stage in STAGES:
        run = Run(case_of(stage), rank, num_ranks)
        run.train(BEFORE)
        run.engine.save_checkpoint(f"{folder}/{stage}")
        found[stage] = held(run)
        run.close()
    return found


def load(rank: int, num_ranks: int, folder: str) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    with mock.patch.object(zero_runs, "make_model", with_frozen(-1.0)):
        run = Run(case_of(3), rank, num_ranks)
        run.engine.load_checkpoint(f"{folder}/frozen")
        found["frozen"] = run.weights()
        run.close()
    for stage in STAGES:
        run = Run(case_of(stage), rank, num_ranks)
        run.train(1)  # so that what is not loaded shows
        loaded, _ = run.engine.load_checkpoint(f"{folder}/{stage}")
        assert loaded is not None
        at_load = held(run)
        run.train(1)
        found[stage] = {"at the load": at_load, "one update on": run.masters(), "losses": run.losses[-1:]}
        again = f"{folder}/{stage} by {num_ranks}"
        run.engine.save_checkpoint(again)
        run.engine.load_checkpoint(again)
        run.close()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shares")


@pytest.fixture(scope="module")
def saved(folder: Path) -> dict[Any, Any]:
    found: dict[Any, Any] = run_ranks(save, 2, str(folder), env=CPU, timeout_s=600)[0]
    return found


@pytest.fixture(scope="module", params=[1, 3])
def others(request: pytest.FixtureRequest, folder: Path, saved: dict[Any, Any]) -> tuple[int, list[dict[Any, Any]]]:
    return request.param, run_ranks(load, request.param, str(folder), env=CPU, timeout_s=600)


@pytest.mark.parametrize("stage", STAGES)
def test_another_number_of_ranks_has_all_groups_masters_and_state_to_the_bit(
    saved: dict[Any, Any], others: tuple[int, list[dict[Any, Any]]], stage: int
) -> None:
    wanted = saved[stage]
    assert len(wanted["masters"]) == len(dict(make_model(case_of(stage)).named_parameters()))
    assert any(bool(each.abs().sum()) for each in wanted["exp_avg"].values())
    for rank in others[1]:
        assert_same_tree(rank[stage]["at the load"], wanted)


def test_weights_that_are_not_trained_are_put_together_too(
    saved: dict[Any, Any], others: tuple[int, list[dict[Any, Any]]]
) -> None:
    assert bool((saved["frozen"][FROZEN] == 0.25).all())
    for rank in others[1]:
        assert_same_tree(rank["frozen"], saved["frozen"])


@pytest.mark.parametrize("stage", STAGES)
def test_the_next_update_is_adamws_on_that_state_and_all_ranks_rows(
    saved: dict[Any, Any], others: tuple[int, list[dict[Any, Any]]], stage: int
) -> None:
    num_ranks, ranks = others
    wanted, exact = with_exact(lambda: one_update_on(stage, saved[stage], num_ranks))
    for rank in ranks:
        # A doubled gradient would be 8e-3 off, and rows of a rank that are left out 4e-2.
        assert_step_close(rank[stage]["one update on"], wanted, exact, cap=5e-5)
        assert largest_difference(rank[stage]["one update on"], saved[stage]["masters"]) > 1e-4


def one_update_on(stage: int, before: dict[str, Any], num_ranks: int) -> dict[str, torch.Tensor]:
    """The masters after a plain AdamW's update from what was saved, on so many ranks' rows."""
    case = case_of(stage)
    model = make_model(case)
    model.load_state_dict(before["masters"], strict=False)
    names = naive_groups(model, 1)[BEFORE % 6]
    gradients, _ = _mean_gradients(case, model, names, BEFORE, num_ranks, 1.0)
    wanted = dict(before["masters"])
    for name in names:
        weight = nn.Parameter(before["masters"][name].clone())
        weight.grad = gradients[name]
        rate = LR * factor(6)  # held since the second cycle began
        plain = {**options(case), "lr": rate, "weight_decay": 0.1 if weight.ndim >= 2 else 0.0}
        optimizer = torch.optim.AdamW([weight], **plain)
        moments = {key: before[key][name].clone() for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[weight] = {"step": torch.tensor(before["steps"][BEFORE % 6][0]), **moments}
        optimizer.step()
        wanted[name] = weight.detach()
    return wanted


@pytest.mark.parametrize("stage", STAGES)
def test_the_fp32_weights_of_all_groups_are_found_without_ranks(
    saved: dict[Any, Any], folder: Path, stage: int, tmp_path: Path
) -> None:
    found = fp32_weights(folder / str(stage) / TAG)
    assert_same_tree(dict(sorted(found.items())), dict(sorted(saved[stage]["masters"].items())))
    shutil.copytree(folder / str(stage) / TAG, tmp_path / TAG)
    ours = tmp_path / TAG / "slivertune_hift_rank_1_of_2.pt"
    content = bytearray(ours.read_bytes())
    content[len(content) // 2] ^= 4
    ours.write_bytes(content)
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


@pytest.mark.parametrize("which", [*STAGES, "bf16"])
def test_one_process_without_deepspeed_goes_on(saved: dict[Any, Any], folder: Path, which: Any) -> None:
    case = IN_BF16 if which == "bf16" else case_of(which)
    model = make_model(case)
    model.requires_grad_(True)
    for parameter in model.parameters():
        parameter.data.add_(1.0)
    hift = make_optimizer(model, case)
    load_zero(hift, folder / str(which) / TAG)
    wanted = saved[which]
    assert [hift.updates, hift.active_group] == wanted["turn"]
    assert [float(rate) for rate in hift.held_lr] == wanted["rates"]
    assert_same_tree({name: each.detach() for name, each in model.named_parameters()}, wanted["weights"])
    state = hift.whole_state()["state"]
    for key in ("exp_avg", "exp_avg_sq", *(("masters",) if which == "bf16" else ())):
        found = {name: each[{"masters": "master"}.get(key, key)] for name, each in state.items()}
        assert_same_tree(dict(sorted(found.items())), dict(sorted(wanted[key].items())))
    model(**make_batch(BEFORE, 0, 0)).loss.backward()
    hift.step()
    assert hift.updates == BEFORE + 1
    other = make_optimizer(make_model(case), replace(case, order="top2down"))
    with pytest.raises(ValueError, match="has another order of turns"):
        load_zero(other, folder / str(which) / TAG)
