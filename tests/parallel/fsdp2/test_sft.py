"""SFT under FSDP2: frozen weights in shards, the same deltas on every rank, the updates of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from slivertune.core.layout import Layout
from slivertune.core.manifest import write_manifest
from slivertune.deltas import apply
from slivertune.parallel.checkpoint.sidecar import load_state
from tests.helpers.models import assert_same_tree, differing, tiny_llama, weights
from tests.helpers.ranks import run_ranks
from tests.helpers.slow import asked_for, quick
from tests.parallel.checkpoint.sft_checkpoints import (
    RESUMED,
    assert_continued,
    assert_is_plain,
    assert_trainers_went_on,
    assert_went_on,
    load_elsewhere,
    load_without_the_library,
    resume_trainers,
    save_and_resume,
)
from tests.parallel.sft.runs import (
    BF16,
    EXACT,
    LLAMA,
    MA,
    QUICK,
    Case,
    Run,
    accelerator_of,
    assert_equal_to_one_process,
    assert_equal_to_one_process_in_bf16,
    count_bytes,
    train_all,
)

CASES = {
    **EXACT,
    "AG, fp32 weights gathered in bf16": Case(mixed_precision="bf16", accumulation=2),
    "MA, fp32 weights gathered in bf16": Case(selection=MA, mixed_precision="bf16", accumulation=2),
    **{f"Llama: {name}": case for name, case in LLAMA.items()},
}
IN_BF16 = {f"Llama in bf16: {name}": case for name, case in BF16.items()}
LLAMAS = {name: case for name, case in {**CASES, **IN_BF16}.items() if case.model == "llama"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fsdp2")


@pytest.fixture(scope="module")
def two_ranks(folder: Path, request: pytest.FixtureRequest) -> list[dict[Any, Any]]:
    asked = asked_for(request, "name")
    cases = {name: case for name, case in {**CASES, **IN_BF16}.items() if name in asked}
    return run_ranks(train_all, 2, ["fsdp2"], cases, folder)


@pytest.mark.parametrize("name", quick(CASES, QUICK))
def test_two_ranks_equal_one_process_on_the_whole_batch(name: str, two_ranks: list[dict[Any, Any]]) -> None:
    assert_equal_to_one_process([found["fsdp2", name] for found in two_ranks], CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_BF16)
def test_two_ranks_equal_one_process_to_the_bit_in_bf16(name: str, two_ranks: list[dict[Any, Any]]) -> None:
    results = [found["fsdp2", name] for found in two_ranks]
    assert_equal_to_one_process_in_bf16(results, IN_BF16[name], in_layers=True)


@pytest.fixture(scope="module")
def plain(folder: Path, two_ranks: list[dict[Any, Any]]) -> dict[str, dict[str, torch.Tensor]]:
    return load_without_the_library(folder)


@pytest.mark.parametrize("name", quick(LLAMAS, QUICK[2:]))
def test_the_merged_model_is_a_plain_checkpoint(
    name: str, plain: dict[str, dict[str, torch.Tensor]], two_ranks: list[dict[Any, Any]]
) -> None:
    assert_is_plain(plain[f"fsdp2/{name}"], two_ranks[0]["fsdp2", name]["weights"], LLAMAS[name])


STATE_DICTS = ["SHARDED_STATE_DICT", "FULL_STATE_DICT"]
TRAINERS: list[tuple[Layout, str]] = [("fsdp2", "MA")]


def save_in_every_way(rank: int, num_ranks: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {
        kind: save_and_resume(rank, num_ranks, ["fsdp2"], folder / kind, {"state_dict_type": kind})
        for kind in STATE_DICTS
    }
    return {**found, "Trainer": resume_trainers(rank, num_ranks, TRAINERS, folder)}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("saved")
    return folder, run_ranks(save_in_every_way, 2, folder)


@pytest.mark.slow
@pytest.mark.parametrize("kind", STATE_DICTS)
@pytest.mark.parametrize("name", RESUMED)
def test_a_run_that_was_saved_on_its_way_continues_to_the_bit(
    kind: str, name: str, checkpoints: tuple[Path, list[dict[str, Any]]]
) -> None:
    results = [found[kind]["fsdp2", name] for found in checkpoints[1]]
    assert_went_on(results)
    assert_equal_to_one_process([{**each["straight"], "weights": each["weights"]} for each in results], RESUMED[name])


@pytest.mark.slow
def test_a_trainers_run_that_was_saved_on_its_way_continues_to_the_bit(
    checkpoints: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    assert_trainers_went_on([found["Trainer"]["fsdp2", "MA"] for found in checkpoints[1]], "MA", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_another_number_of_ranks_continues(num_ranks: int, checkpoints: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, two = checkpoints
    saved = {name: two[0]["SHARDED_STATE_DICT"]["fsdp2", name] for name in RESUMED}
    results = run_ranks(load_elsewhere, num_ranks, "fsdp2", folder / "SHARDED_STATE_DICT" / "fsdp2")
    assert_continued(results, saved, before=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMED)
def test_one_process_without_fsdp_continues(name: str, checkpoints: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, two = checkpoints
    _, sft = RESUMED[name].build()
    load_state(sft, folder / "FULL_STATE_DICT" / "fsdp2" / name / "sft")
    expected = two[0]["FULL_STATE_DICT"]["fsdp2", name]["saved"]["state"]
    for key, state in sft.whole_state()["state"].items():
        assert_same_tree({each: state[each] for each in expected[key]}, expected[key])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_load_state_of_one_process_takes_weights_and_state(
    kind: str, checkpoints: tuple[Path, list[dict[str, Any]]]
) -> None:
    folder, two = checkpoints
    saved = {name: two[0][kind]["fsdp2", name] for name in RESUMED}
    assert_continued([load_elsewhere(0, 1, "single", folder / kind / "fsdp2")], saved, before=2)


def test_a_folder_without_the_state_is_refused_by_its_name(tmp_path: Path) -> None:
    _, sft = RESUMED["AG"].build()
    with pytest.raises(ValueError, match=r"has no slivertune_checkpoint\.json, so its writing was cut short"):
        load_state(sft, tmp_path)
    write_manifest(tmp_path)
    with pytest.raises(ValueError, match=r"state\.pt is not there; the checkpoint must be whole"):
        load_state(sft, tmp_path)
    assert sft.updates == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMED)
def test_the_deltas_of_a_run_lead_from_the_plain_model_to_the_merged_one(
    name: str, checkpoints: tuple[Path, list[dict[str, Any]]]
) -> None:
    folder, two = checkpoints
    model = RESUMED[name].build_model()
    apply(model, folder / "FULL_STATE_DICT" / "fsdp2" / f"{name}-deltas")
    assert differing(weights(model), two[0]["FULL_STATE_DICT"]["fsdp2", name]["weights"]) == []


def prepare_otherwise(rank: int, num_ranks: int) -> dict[str, Any]:
    """What is refused, what a rank holds, and a placeholder without its state."""
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
        placeholder = run.optimizer.state_dict()
        found["placeholder"] = [sorted(placeholder), {key for each in placeholder["state"].values() for key in each}]
        run.train(2, 3)
        run.sft.load_state_dict(placeholder)
        try:
            run.train(3, 4)
        except RuntimeError as error:
            found["placeholder alone"] = str(error)
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


@pytest.mark.slow
@pytest.mark.parametrize("what", ["embeddings", "norms"])
def test_what_layers_cannot_add_is_refused_and_says_why(what: str, otherwise: list[dict[str, Any]]) -> None:
    for found in otherwise:
        assert "FSDP2 shares the weights out" in found[what] and 'form="layer"' in found[what]
        assert "or use DDP" in found[what]


@pytest.mark.slow
def test_a_placeholder_is_not_trained_from(otherwise: list[dict[str, Any]]) -> None:
    for found in otherwise:
        assert found["placeholder"] == [["param_groups", "state"], {"sft_updates"}]
        assert "made after 2 updates, but SFT's own state" in found["placeholder alone"]


@pytest.mark.slow
def test_a_rank_holds_its_share_of_the_frozen_weights(otherwise: list[dict[str, Any]]) -> None:
    model = tiny_llama()
    expected = {name: parameter.nbytes for name, parameter in model.named_parameters()}
    for found in otherwise:
        assert found["held"].keys() == expected.keys()
        for name, size in found["held"].items():
            assert abs(size - expected[name] / 2) <= 4 * model.get_parameter(name)[0].numel(), name
        assert found["most sent"] <= 12 * found["num_weights"]


@pytest.mark.slow
def test_an_evaluation_between_steps_changes_nothing(otherwise: list[dict[str, Any]]) -> None:
    for found in otherwise:
        assert_same_tree(found["after evaluation"]["state"], found["without evaluation"]["state"])
