"""SFT on DeepSpeed's ZeRO-1, 2 and 3: the same deltas on every rank, the updates of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open

from slivertune import SFT, Ledger, SFTConfig
from slivertune.core.layout import Layout
from slivertune.deltas import apply
from slivertune.parallel.initialize import initialize
from slivertune.parallel.zero.unsupported import check_sft_config
from tests.helpers.models import assert_same_tree, differing, tiny_llama, weights
from tests.helpers.ranks import run_ranks
from tests.helpers.slow import asked_for, quick
from tests.parallel.checkpoint.sft_checkpoints import (
    CUT,
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
from tests.parallel.sft.reference import assert_norms_are, assert_state_is
from tests.parallel.sft.runs import (
    BF16,
    EXACT,
    LLAMA,
    QUICK,
    Case,
    Run,
    accelerator_of,
    assert_equal_to_one_process,
    assert_equal_to_one_process_in_bf16,
    assert_near_one_process,
    engine_config,
    plain_state,
    prescribed_reference,
    quieten_deepspeed,
    state_of_one_process,
    train_all,
)

LAYOUTS: list[Layout] = ["zero1", "zero2", "zero3"]
CASES = {**EXACT, **{f"Llama: {name}": case for name, case in LLAMA.items() if case.tied or case.clip}}
IN_BF16 = {f"Llama in bf16: {name}": case for name, case in BF16.items()}
LLAMAS = {name: case for name, case in {**CASES, **IN_BF16}.items() if case.model == "llama"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("zero")


@pytest.fixture(scope="module")
def two_ranks(folder: Path, request: pytest.FixtureRequest) -> list[dict[Any, Any]]:
    asked = asked_for(request, "name")
    cases = {name: case for name, case in {**CASES, **IN_BF16}.items() if name in asked}
    return run_ranks(train_all, 2, LAYOUTS, cases, folder, env={"DS_ACCELERATOR": "cpu"}, timeout_s=600)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", quick(CASES, QUICK))
def test_two_ranks_equal_one_process_on_the_whole_batch(
    layout: Layout, name: str, two_ranks: list[dict[Any, Any]]
) -> None:
    assert_equal_to_one_process([found[layout, name] for found in two_ranks], CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", IN_BF16)
def test_two_ranks_equal_one_process_to_the_bit_in_bf16(
    layout: Layout, name: str, two_ranks: list[dict[Any, Any]]
) -> None:
    results = [found[layout, name] for found in two_ranks]
    assert_equal_to_one_process_in_bf16(results, IN_BF16[name], in_layers=layout == "zero3")


@pytest.fixture(scope="module")
def plain(folder: Path, two_ranks: list[dict[Any, Any]]) -> dict[str, dict[str, torch.Tensor]]:
    return load_without_the_library(folder)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", LLAMAS)
def test_the_merged_model_is_a_plain_checkpoint(
    layout: Layout, name: str, plain: dict[str, dict[str, torch.Tensor]], two_ranks: list[dict[Any, Any]]
) -> None:
    assert_is_plain(plain[f"{layout}/{name}"], two_ranks[0][layout, name]["weights"], LLAMAS[name])


# The other runs of AG are in the Trainer's own tests of layouts.
TRAINERS: list[tuple[Layout, str]] = [("zero1", "AG"), *((layout, "MA") for layout in LAYOUTS)]


def save_in_every_way(rank: int, num_ranks: int, folder: Path) -> dict[str, Any]:
    return {
        "accelerate": save_and_resume(rank, num_ranks, LAYOUTS, folder),
        "Trainer": resume_trainers(rank, num_ranks, TRAINERS, folder),
    }


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("saved")
    return folder, run_ranks(save_in_every_way, 2, folder, env={"DS_ACCELERATOR": "cpu"}, timeout_s=600)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", RESUMED)
def test_a_run_that_was_saved_on_its_way_continues_to_the_bit(
    layout: Layout, name: str, checkpoints: tuple[Path, list[dict[str, Any]]]
) -> None:
    results = [found["accelerate"][layout, name] for found in checkpoints[1]]
    assert_went_on(results)
    assert_equal_to_one_process([{**each["straight"], "weights": each["weights"]} for each in results], RESUMED[name])


def load_in_every_layout(rank: int, num_ranks: int, folder: Path) -> dict[str, Any]:
    return {layout: load_elsewhere(rank, num_ranks, layout, folder / layout) for layout in LAYOUTS}


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_another_number_of_ranks_continues(num_ranks: int, checkpoints: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, two = checkpoints
    results = run_ranks(load_in_every_layout, num_ranks, folder, env={"DS_ACCELERATOR": "cpu"}, timeout_s=600)
    for layout in LAYOUTS:
        saved = {name: two[0]["accelerate"][layout, name] for name in RESUMED}
        assert_continued([found[layout] for found in results], saved, before=2)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "name"), TRAINERS)
def test_a_trainers_run_that_was_saved_on_its_way_continues_to_the_bit(
    layout: Layout, name: str, checkpoints: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    assert_trainers_went_on([found["Trainer"][layout, name] for found in checkpoints[1]], name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", RESUMED)
def test_the_deltas_of_a_run_lead_from_the_plain_model_to_the_merged_one(
    layout: Layout, name: str, checkpoints: tuple[Path, list[dict[str, Any]]]
) -> None:
    folder, two = checkpoints
    model = RESUMED[name].build_model()
    apply(model, folder / layout / f"{name}-deltas")
    assert differing(weights(model), two[0]["accelerate"][layout, name]["weights"]) == []


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


@pytest.mark.slow
def test_whatever_the_engine_shares_out_a_ranks_state_is_that_of_one_process() -> None:
    alone, num_weights = state_of_one_process(SMALL, 11)
    assert min(alone) <= 22 * num_weights + 4, "fp32 weights: 22 bytes, and the witness"
    for found in run_ranks(count_state, 2, env={"DS_ACCELERATOR": "cpu"}, timeout_s=300):
        assert found == dict.fromkeys(SHARDING, alone)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "offload_optimizer": (
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
        "SFT steps its few deltas by itself",
    ),
    # DeepSpeed itself refuses float16 on a CPU, in other words.
    "fp16": ({"fp16": {"enabled": True}}, "whose range is too small for weights that are trained"),
    "nvme": (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/tmp"}}},
        "leaves no part of the weights in memory",
    ),
    "stage 0": ({"zero_optimization": {"stage": 0}}, "zero_optimization.stage is 0; SFT on DeepSpeed needs"),
}
"""Changes of a config, and what is said to them."""
SAID = {
    **{what: said for what, (_, said) in REFUSED.items()},
    "embeddings under ZeRO-3": "ZeRO-3 shares the weights out, so that layers have to add the deltas",
    "another model": "the SFT was built over another model than the one that was passed",
}


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
    return {"state": plain_state(sft), "norms": norms, "updates": sft.updates}


def resume_bare(rank: int, stage: int, case: Case, folder: Path) -> dict[str, Any]:
    """A bare engine's run that is saved on its way, and one that continues from there."""
    found: dict[str, Any] = {}
    model, sft = case.build()
    engine, optimizer, _, _ = initialize(model=model, optimizer=sft, config=engine_config(stage, case))
    found["is"] = (optimizer is sft, engine.zero_optimization_stage(), dist.get_world_size())
    norms = train_bare(engine, case, rank, 0, CUT)
    engine.save_checkpoint(str(folder))
    norms += train_bare(engine, case, rank, CUT, case.updates)
    found["straight"] = result_of(sft, norms)
    engine.destroy()
    model, sft = case.build()
    engine, _, _, _ = initialize(model=model, optimizer=sft, config=engine_config(stage, case))
    engine.load_checkpoint(str(folder))
    found["resumed"] = result_of(sft, norms[:CUT] + train_bare(engine, case, rank, CUT, case.updates))
    sft.detach()
    engine.destroy()
    return found


def save_around_an_evaluation(rank: int, folder: Path) -> int:
    """Save the deltas right after training, and after a forward that left weights behind on their way.

    Returns:
        How many weights were on their way.
    """
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    case = Case(model="llama", density=0.25, updates=3)
    model, sft = case.build()
    engine, _, _, _ = initialize(model=model, optimizer=sft, config=engine_config(3, case))

    def evaluate() -> None:
        engine.eval()
        with torch.no_grad():
            case.loss(engine, case.batch(0, 0, rank))
        engine.train()

    evaluate()  # what it gathers is what later evaluations gather ahead of time
    train_bare(engine, case, rank, 0, case.updates)
    sft.save_pretrained(folder / "before")
    evaluate()
    states = [parameter.ds_status for parameter in model.parameters()]  # type: ignore[attr-defined]
    sft.save_pretrained(folder / "after")
    engine.destroy()
    return states.count(ZeroParamStatus.INFLIGHT)


def run_bare(rank: int, num_ranks: int, folder: Path) -> dict[str, Any]:
    """`slivertune.initialize` under every stage, and engine.save_checkpoint; what is refused; a model born in parts."""
    quieten_deepspeed()
    import deepspeed

    found: dict[str, Any] = {}
    for stage in (1, 2, 3):
        for name, case in RESUMED.items():
            found[f"{stage} {name}"] = resume_bare(rank, stage, case, folder / str(stage) / name)

    case = RESUMED["AG"]
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
    found["in flight"] = save_around_an_evaluation(rank, folder)

    for name, (changes, _) in REFUSED.items():
        model, sft = case.build()
        try:
            initialize(model=model, optimizer=sft, config={**engine_config(2, case), **changes})
        except Exception as error:  # DeepSpeed may raise anything in our place; what is said decides
            found[name] = str(error)
    model = tiny_llama()
    sft = SFT(model, config=SFTConfig(density=0.1, embeddings=True), lr=1e-2, total_steps=40)
    try:
        initialize(model=model, optimizer=sft, config=engine_config(3, case))
    except ValueError as error:
        found["embeddings under ZeRO-3"] = str(error)
    try:
        initialize(model=tiny_llama(), optimizer=sft, config=engine_config(2, case))
    except ValueError as error:
        found["another model"] = str(error)
    return found


@pytest.fixture(scope="module")
def bare_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bare")


@pytest.fixture(scope="module")
def bare(bare_folder: Path) -> list[dict[str, Any]]:
    return run_ranks(run_bare, 2, bare_folder, env={"DS_ACCELERATOR": "cpu"}, timeout_s=300)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", RESUMED)
def test_a_bare_engine_steps_sft_and_its_checkpoints_continue(
    stage: int, name: str, bare: list[dict[str, Any]]
) -> None:
    naive, norms = prescribed_reference(RESUMED[name], 2)
    for found in (each[f"{stage} {name}"] for each in bare):
        assert found["is"] == (True, stage, 2)
        straight, resumed = found["straight"], found["resumed"]
        assert_state_is(straight["state"], naive)
        assert_norms_are(straight["norms"], norms, naive, RESUMED[name].accumulation)
        assert straight["norms"] == resumed["norms"]
        assert_same_tree(straight["state"], resumed["state"])


@pytest.mark.slow
def test_the_schedule_of_the_config_drives_the_rate(bare: list[dict[str, Any]]) -> None:
    for found in bare:
        own, scheduled = zip(*found["rates"], strict=True)
        assert own == scheduled and len(set(own)) == 3


@pytest.mark.slow
def test_a_model_that_was_born_in_parts_is_trained_alike(bare: list[dict[str, Any]]) -> None:
    case = Case(model="llama", density=0.25, updates=6)
    assert_near_one_process([found["born result"] for found in bare], case, bare[0]["born"])


@pytest.mark.slow
def test_deltas_are_saved_after_an_evaluation_as_before_it(bare: list[dict[str, Any]], bare_folder: Path) -> None:
    assert all(found["in flight"] for found in bare)
    with (
        safe_open(bare_folder / "before" / "sft_delta.safetensors", "pt") as before,
        safe_open(bare_folder / "after" / "sft_delta.safetensors", "pt") as after,
    ):
        # safetensors writes metadata in any order, so that the bytes of two files, and the hash of them, may differ.
        texts = [{**each.metadata(), "file_sha256": None} for each in (before, after)]
        assert texts[0] == texts[1], "hashes of the base included"
        assert before.keys() == after.keys()
        assert all(torch.equal(before.get_tensor(name), after.get_tensor(name)) for name in before.keys())  # noqa: SIM118


@pytest.mark.slow
@pytest.mark.parametrize("what", SAID)
def test_what_does_not_go_together_is_refused_before_anything_is_built(what: str, bare: list[dict[str, Any]]) -> None:
    for found in bare:
        assert SAID[what] in found[what]


@pytest.mark.parametrize(
    ("section", "settings"),
    [
        ("zero_optimization", {"stage": 2, "zenflow": {"topk_ratio": 0.1}}),
        ("zero_optimization", {"stage": 3, "zero_quantized_nontrainable_weights": True}),
        ("zero_optimization", {"stage": 3, "zero_quantized_weights": True}),
        ("checkpoint", {"load_universal": True}),
    ],
)
def test_settings_that_sft_cannot_keep_are_refused_by_name(section: str, settings: dict[str, Any]) -> None:
    name = f"{section}.{list(settings)[-1]}"
    with pytest.raises(ValueError, match=rf"{name}=.* does not go together with SFT"):
        check_sft_config({"zero_optimization": {"stage": 2}, section: settings})
