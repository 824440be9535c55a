"""SFT on DeepSpeed's ZeRO-1, 2 and 3: the same deltas on every rank, the updates of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slivertune import SFT, Ledger, SFTConfig
from slivertune.parallel.initialize import initialize
from slivertune.parallel.layout import Layout
from slivertune.sft import apply
from tests.helpers.models import assert_same_tree, differing, tiny_llama, weights
from tests.helpers.ranks import run_ranks
from tests.parallel.sparse_reference import assert_state_is
from tests.parallel.sparse_runs import (
    CUT,
    EXACT,
    LLAMA,
    Case,
    Run,
    accelerator_of,
    assert_equal_to_one_process,
    engine_config,
    llama_reference,
    prescribed_reference,
    quieten_deepspeed,
    save_and_resume,
    train_all,
)

LAYOUTS: list[Layout] = ["zero1", "zero2", "zero3"]
CASES = {**EXACT, **{f"Llama: {name}": LLAMA[name] for name in ("AG, tied, reentrant checkpoints", "AG, checkpoints")}}


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[Any, Any]]:
    return run_ranks(train_all, 2, LAYOUTS, CASES, env={"DS_ACCELERATOR": "cpu"}, timeout_s=400)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_equal_one_process_on_the_whole_batch(
    layout: Layout, name: str, two_ranks: list[dict[Any, Any]]
) -> None:
    assert_equal_to_one_process([found[layout, name] for found in two_ranks], CASES[name])


RESUMED = Case(accumulation=2, clip=2.0)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("zero")
    environment = {"DS_ACCELERATOR": "cpu"}
    return folder, run_ranks(save_and_resume, 2, LAYOUTS, RESUMED, folder, env=environment, timeout_s=300)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_that_was_saved_inside_a_phase_continues_to_the_bit(
    layout: Layout, checkpoints: tuple[Path, list[dict[str, Any]]]
) -> None:
    for found in checkpoints[1]:
        straight, resumed = found[layout]["straight"], found[layout]["resumed"]
        assert straight["norms"][CUT:] == resumed["norms"]
        assert_same_tree(straight["state"], resumed["state"])
    assert_equal_to_one_process(
        [{**found[layout]["straight"], "weights": found[layout]["weights"]} for found in checkpoints[1]], RESUMED
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_deltas_of_a_run_lead_from_the_plain_model_to_the_merged_one(
    layout: Layout, checkpoints: tuple[Path, list[dict[str, Any]]]
) -> None:
    folder, two = checkpoints
    model = RESUMED.build_model()
    apply(model, folder / f"{layout}-deltas")
    assert differing(weights(model), two[0][layout]["weights"]) == []


SMALL = Case(model="llama", density=0.02)
SHARDING: list[Layout] = [*LAYOUTS, "fsdp2"]


def count_state(rank: int, num_ranks: int) -> dict[Layout, list[int]]:
    """Bytes of state on this rank after each update, under every layout that shares something out."""
    quieten_deepspeed()
    found = {}
    for layout in SHARDING:
        with accelerator_of(layout, SMALL) as accelerator, Ledger(tiny_llama()) as ledger:
            run = Run(SMALL, accelerator, rank)
            run.sft.claim_state()
            found[layout] = []
            for update in range(11):
                run.train(update, update + 1)
                found[layout].append(ledger.current().state)
    return found


def test_whatever_the_engine_shares_out_a_ranks_state_is_that_of_one_process() -> None:
    alone = []
    with Ledger(tiny_llama()) as ledger:
        model, sft = SMALL.build()
        sft.claim_state()
        for update in range(11):
            SMALL.loss(model, SMALL.batch(update, 0, 0)).backward()
            sft.step()
            alone.append(ledger.current().state)
    assert min(alone) <= 22 * sft.num_weights + 4, "fp32 weights: 22 bytes, and the witness"
    for found in run_ranks(count_state, 2, env={"DS_ACCELERATOR": "cpu"}, timeout_s=300):
        assert found == dict.fromkeys(SHARDING, alone)


def train_bare(engine: Any, case: Case, rank: int, first: int, last: int) -> list[float]:
    norms = []
    for update in range(first, last):
        for micro in range(case.accumulation):
            loss = case.loss(engine, case.batch(update, micro, rank))
            engine.backward(loss)
            engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    return norms


def result_of(sft: SFT, norms: list[float]) -> dict[str, Any]:
    state = sft.whole_state()["state"]
    tensors = {
        name: {key: value.clone() for key, value in each.items() if isinstance(value, torch.Tensor)}
        for name, each in state.items()
    }
    return {"state": tensors, "norms": norms, "updates": sft.updates}


def run_bare(rank: int, num_ranks: int, folder: Path) -> dict[str, Any]:
    """`slivertune.initialize` under every stage, and engine.save_checkpoint; what is refused; a model born in parts."""
    quieten_deepspeed()
    import deepspeed

    found: dict[str, Any] = {}
    case = RESUMED
    for stage in (1, 2, 3):
        model, sft = case.build()
        engine, optimizer, _, _ = initialize(model=model, optimizer=sft, config=engine_config(stage, case))
        found[f"{stage} is"] = (optimizer is sft, engine.zero_optimization_stage(), dist.get_world_size())
        norms = train_bare(engine, case, rank, 0, CUT)
        engine.save_checkpoint(str(folder / str(stage)))
        norms += train_bare(engine, case, rank, CUT, case.updates)
        found[f"{stage} straight"] = result_of(sft, norms)
        found[f"{stage} left"] = sum(
            tensor.numel() for tensor in vars(engine.optimizer).values() if isinstance(tensor, torch.Tensor)
        )
        engine.destroy()
        model, sft = case.build()
        engine, _, _, _ = initialize(model=model, optimizer=sft, config=engine_config(stage, case))
        engine.load_checkpoint(str(folder / str(stage)))
        found[f"{stage} resumed"] = result_of(sft, norms[:CUT] + train_bare(engine, case, rank, CUT, case.updates))
        sft.detach()
        engine.destroy()

    model, sft = case.build()
    schedule = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 0.5, "warmup_num_steps": 9}}
    config = {**engine_config(2, case), "scheduler": schedule}
    engine, _, _, _ = initialize(model=model, optimizer=sft, config=config)
    found["rates"] = []
    for update in range(3):
        train_bare(engine, case, rank, update, update + 1)
        found["rates"].append((sft.param_groups[0]["lr"], engine.get_lr()[0]))
    engine.destroy()

    born = Case(model="llama", density=0.25, updates=6)
    config = engine_config(3, born)
    with deepspeed.zero.Init(config_dict_or_path=config):
        parts = born.build_model()
    with deepspeed.zero.GatheredParameters(list(parts.parameters())):
        found["born"] = {name: value.detach().clone() for name, value in parts.named_parameters()}
    sft = SFT(parts, config=born.config(), total_steps=born.total, **born.options)
    engine, _, _, _ = initialize(model=parts, optimizer=sft, config=config)
    norms = train_bare(engine, born, rank, 0, born.updates)
    found["born result"] = result_of(sft, norms)
    engine.destroy()

    refusals: dict[str, dict[str, Any]] = {
        "offload_optimizer": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
        "fp16": {"fp16": {"enabled": True}},
        "nvme": {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/tmp"}}},
        "stage is 0": {"zero_optimization": {"stage": 0}},
    }
    for name, changes in refusals.items():
        model, sft = case.build()
        try:
            initialize(model=model, optimizer=sft, config={**engine_config(2, case), **changes})
        except ValueError as error:
            found[name] = str(error)
    model = tiny_llama()
    sft = SFT(model, config=SFTConfig(density=0.1, embeddings=True), lr=1e-2, total_steps=40)
    try:
        initialize(model=model, optimizer=sft, config=engine_config(3, case))
    except ValueError as error:
        found["ZeRO-3 shares the weights out"] = str(error)
    return found


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("bare")
    return run_ranks(run_bare, 2, folder, env={"DS_ACCELERATOR": "cpu"}, timeout_s=300)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_bare_engine_steps_sft_and_its_checkpoints_continue(stage: int, bare: list[dict[str, Any]]) -> None:
    naive, norms = prescribed_reference(RESUMED, 2)
    for found in bare:
        assert found[f"{stage} is"] == (True, stage, 2)
        straight, resumed = found[f"{stage} straight"], found[f"{stage} resumed"]
        assert_state_is(straight["state"], naive)
        assert straight["norms"] == pytest.approx(norms, rel=1e-5)
        assert straight["norms"] == resumed["norms"]
        assert_same_tree(straight["state"], resumed["state"])


def test_the_schedule_of_the_config_drives_the_rate(bare: list[dict[str, Any]]) -> None:
    for found in bare:
        own, told = zip(*found["rates"], strict=True)
        assert own == told and len(set(own)) == 3


def test_a_model_that_was_born_in_parts_is_trained_alike(bare: list[dict[str, Any]]) -> None:
    case = Case(model="llama", density=0.25, updates=6)
    naive, norms = llama_reference(case, 2, bare[0]["born"])
    for found in bare:
        assert_state_is(found["born result"]["state"], naive)
        assert found["born result"]["norms"] == pytest.approx(norms, rel=1e-4)


@pytest.mark.parametrize("what", ["offload_optimizer", "fp16", "nvme", "stage is 0", "ZeRO-3 shares the weights out"])
def test_what_does_not_go_together_is_refused_before_anything_is_built(what: str, bare: list[dict[str, Any]]) -> None:
    for found in bare:
        assert what in found[what]
