"""SFT under FSDP2: frozen weights in shards, the same deltas on every rank, the updates of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from slivertune.parallel.sparse_beside import FOLDER, load_sft
from slivertune.sft import apply
from tests.helpers.models import assert_same_tree, differing, tiny_llama, weights
from tests.helpers.ranks import run_ranks
from tests.parallel.sparse_runs import (
    CUT,
    EXACT,
    LLAMA,
    Case,
    Run,
    accelerator_of,
    assert_equal_to_one_process,
    count_bytes,
    load_elsewhere,
    save_and_resume,
    train_all,
)

CASES = {
    **EXACT,
    "AG, fp32 weights gathered in bf16": Case(mixed_precision="bf16", accumulation=2),
    **{f"Llama: {name}": case for name, case in LLAMA.items()},
}


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[Any, Any]]:
    return run_ranks(train_all, 2, ["fsdp2"], CASES)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_equal_one_process_on_the_whole_batch(name: str, two_ranks: list[dict[Any, Any]]) -> None:
    assert_equal_to_one_process([found["fsdp2", name] for found in two_ranks], CASES[name])


RESUMED = Case(accumulation=2, clip=2.0)
STATE_DICTS = ["SHARDED_STATE_DICT", "FULL_STATE_DICT"]


def resume_from_both(rank: int, num_ranks: int, folder: Path) -> dict[str, Any]:
    return {
        kind: save_and_resume(rank, num_ranks, ["fsdp2"], RESUMED, folder / kind, {"state_dict_type": kind})["fsdp2"]
        for kind in STATE_DICTS
    }


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("fsdp2")
    return folder, run_ranks(resume_from_both, 2, folder)


@pytest.mark.parametrize("kind", STATE_DICTS)
def test_a_run_that_was_saved_inside_a_phase_continues_to_the_bit(
    kind: str, checkpoints: tuple[Path, list[dict[str, Any]]]
) -> None:
    for found in checkpoints[1]:
        straight, resumed = found[kind]["straight"], found[kind]["resumed"]
        assert straight["norms"][CUT:] == resumed["norms"]
        assert_same_tree(straight["state"], resumed["state"])
    assert_equal_to_one_process(
        [{**found[kind]["straight"], "weights": found[kind]["weights"]} for found in checkpoints[1]], RESUMED
    )


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_another_number_of_ranks_continues(num_ranks: int, checkpoints: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, two = checkpoints
    checkpoint = folder / "SHARDED_STATE_DICT" / "fsdp2"
    for result in run_ranks(load_elsewhere, num_ranks, "fsdp2", RESUMED, checkpoint):
        assert_same_tree(result["loaded"]["state"], two[0]["SHARDED_STATE_DICT"]["saved"]["state"])
        assert result["continued"]["updates"] == CUT + 4


def test_one_process_without_fsdp_continues(checkpoints: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, two = checkpoints
    _, sft = RESUMED.build()
    load_sft(sft, folder / "FULL_STATE_DICT" / "fsdp2" / FOLDER)
    expected = two[0]["FULL_STATE_DICT"]["saved"]["state"]
    for name, state in sft.whole_state()["state"].items():
        assert_same_tree({key: state[key] for key in expected[name]}, expected[name])


def test_the_deltas_of_a_run_lead_from_the_plain_model_to_the_merged_one(
    checkpoints: tuple[Path, list[dict[str, Any]]],
) -> None:
    folder, two = checkpoints
    model = RESUMED.build_model()
    apply(model, folder / "FULL_STATE_DICT" / "fsdp2-deltas")
    assert differing(weights(model), two[0]["FULL_STATE_DICT"]["weights"]) == []


def prepare_otherwise(rank: int, num_ranks: int) -> dict[str, Any]:
    """What is refused, what a rank holds, and a card without its state."""
    found: dict[str, Any] = {}
    case = Case(model="llama", density=0.02)
    for name, changes in {"embeddings": {"embeddings": True}, "norms": {"targets": ["input_layernorm"]}}.items():
        with accelerator_of("fsdp2", case) as accelerator:
            try:
                Run(case, accelerator, rank, **changes)
            except ValueError as error:
                found[name] = str(error)
    with accelerator_of("fsdp2", case) as accelerator:
        run = Run(case, accelerator, rank)
        run.train(0, 2)
        card = run.optimizer.state_dict()
        found["card"] = [sorted(card), {key for each in card["state"].values() for key in each}]
        run.train(2, 3)
        run.sft.load_state_dict(card)
        try:
            run.train(3, 4)
        except RuntimeError as error:
            found["card alone"] = str(error)
    with accelerator_of("fsdp2", case) as accelerator:
        run = Run(case, accelerator, rank)
        held = {
            name: parameter.to_local().nbytes
            for name, parameter in run.model.named_parameters()
            if isinstance(parameter, DTensor)
        }
        found["held"] = held
        sent = count_bytes()
        run.train(0, 11)
        found["most sent"] = max(size for _, size in sent)
        found["num_weights"] = run.sft.num_weights
        with torch.no_grad():
            # An evaluation leaves some modules gathered.
            case.loss(run.model, case.batch(0, 0, 0))
        run.train(11, 16)
        found["after evaluation"] = run.result()
    with accelerator_of("fsdp2", case) as accelerator:
        run = Run(case, accelerator, rank)
        run.train(0, 16)
        found["without evaluation"] = run.result()
    return found


@pytest.fixture(scope="module")
def otherwise() -> list[dict[str, Any]]:
    return run_ranks(prepare_otherwise, 2)


@pytest.mark.parametrize("what", ["embeddings", "norms"])
def test_what_layers_cannot_add_is_refused_and_says_why(what: str, otherwise: list[dict[str, Any]]) -> None:
    for found in otherwise:
        assert "FSDP2 shares the weights out" in found[what] and 'form="layer"' in found[what]
        assert "or use DDP" in found[what]


def test_a_card_in_place_of_the_state_is_not_trained_from(otherwise: list[dict[str, Any]]) -> None:
    for found in otherwise:
        assert found["card"] == [["param_groups", "state"], {"sft_updates"}]
        assert "made after 2 updates, but SFT's own state" in found["card alone"]


def test_a_rank_holds_its_share_of_the_frozen_weights(otherwise: list[dict[str, Any]]) -> None:
    model = tiny_llama()
    expected = {name: parameter.nbytes for name, parameter in model.named_parameters()}
    for found in otherwise:
        assert found["held"].keys() == expected.keys()
        for name, size in found["held"].items():
            assert abs(size - expected[name] / 2) <= 4 * model.get_parameter(name)[0].numel(), name
        assert found["most sent"] <= 12 * found["num_weights"]


def test_an_evaluation_between_steps_changes_nothing(otherwise: list[dict[str, Any]]) -> None:
    for found in otherwise:
        assert_same_tree(found["after evaluation"]["state"], found["without evaluation"]["state"])
