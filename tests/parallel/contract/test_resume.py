"""A run that is saved on its way goes on under every layout: with its own bits, and with another number of ranks."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy

from slivertune import SFTConfig
from slivertune.core.layout import Layout
from slivertune.core.manifest import write_manifest
from slivertune.deltas import apply
from slivertune.parallel.checkpoint.sidecar import load_state
from tests.helpers.models import assert_same_tree, differing, weights
from tests.helpers.ranks import quick, ran_once, run_ranks
from tests.helpers.tolerance import distance, step_limit, with_exact
from tests.interop import trainer_runs as trainers
from tests.interop.trainer_runs import BATCH
from tests.parallel.contract import hift, sft
from tests.parallel.contract.hift import CYCLE, HiFTCase
from tests.parallel.contract.runs import ZERO, Case, load, quiet, running, save
from tests.parallel.contract.sft import SFTCase

Key = tuple[str, Layout, str]

HIFT = HiFTCase(updates=HiFTCase.cut + CYCLE)
IN_BF16 = replace(HIFT, dtype=torch.bfloat16)
ROUNDED = replace(IN_BF16, settings={"master": "stochastic"})
AG = SFTCase(accumulation=2, clip=2.0)
MA = SFTCase(selection="momentum", accumulation=2, clip=2.0, updates=16)
FULL, SHARDED = ({"state_dict_type": f"{kind}_STATE_DICT"} for kind in ("FULL", "SHARDED"))
CASES: dict[Key, Case] = {
    ("hift", "ddp", "fp32"): HIFT,
    ("hift", "ddp", "bf16"): IN_BF16,
    ("hift", "ddp", "rounded stochastically"): ROUNDED,
    ("hift", "fsdp2", "rounded stochastically"): ROUNDED,
    ("hift", "fsdp2", "fp32"): HIFT,
    ("hift", "fsdp2", "bf16"): IN_BF16,
    ("hift", "fsdp2", "bf16, in one file"): replace(IN_BF16, plugin=FULL),
    ("hift", "fsdp2", "mixed precision"): replace(HIFT, mixed_precision="bf16"),
    ("hift", "fsdp2", "weights on the host"): replace(HIFT, plugin={"cpu_offload": CPUOffloadPolicy(pin_memory=False)}),
    **{
        ("hift", layout, "bare, bf16, DeepSpeed's schedule"): replace(
            IN_BF16,
            bare=True,
            split_decay=True,
            config_schedule=True,
            eps=1e-4 if layout == "zero3" else 1e-8,
        )
        for layout in ZERO
    },
    **{
        ("hift", layout, "bare"): replace(HIFT, bare=True, split_decay=True, eps=1e-4 if layout == "zero3" else 1e-8)
        for layout in ZERO
    },
    **{
        ("hift", layout, "accumulated, clipped"): replace(HIFT, split_decay=True, accumulation=2, clip=0.05, eps=1e-4)
        for layout in ZERO
    },
    **{("sft", layout, name): case for layout in ("ddp", *ZERO) for name, case in (("AG", AG), ("MA", MA))},
    **{
        ("sft", "fsdp2", f"{name}, {kind}"): replace(case, plugin=plugin)
        for name, case in (("AG", AG), ("MA", MA))
        for kind, plugin in (("in one file", FULL), ("in shards", SHARDED))
    },
    **{
        ("sft", layout, f"{name}, bare"): replace(case, bare=True)
        for layout in ZERO
        for name, case in (("AG", AG), ("MA", MA))
    },
}
TRAINED: dict[str, SFTConfig] = {
    "AG": trainers.SFT,
    "MA": SFTConfig(density=0.1, reselection_interval=5, selection="momentum"),
}
"""Twelve updates, saved after seven: MA's weights are reselected after 5 and 10."""
TRAINERS: list[tuple[Layout, str]] = [(layout, "MA") for layout in ("ddp", "fsdp2", *ZERO)] + [("zero1", "AG")]
"""The other runs of AG are in the Trainer's own tests of layouts."""


def resume_trainer(
    rank: int, num_ranks: int, layout: Layout, name: str, folder: Path
) -> dict[str, dict[str, torch.Tensor]]:
    """The deltas of a run that saved a checkpoint and went on, and of one that was taken up there."""
    quiet()
    output = folder / "trainer" / layout / name
    options: dict[str, dict[str, Any]] = {
        "straight": {"save_strategy": "steps", "save_steps": trainers.STOP},
        "resumed": {"resume": str(output / f"checkpoint-{trainers.STOP}")},
    }
    deltas = {}
    for kind, each in options.items():
        with trainers.states(layout):
            trainer, (deltas[kind],) = trainers.train(output, BATCH, layout, TRAINED[name], **each)
            trainer.accelerator.free_memory()
    return deltas


QUICK: list[Key] = [
    ("hift", "ddp", "bf16"),
    ("sft", "ddp", "MA"),
    *(("hift", "fsdp2", name) for name in ("bf16", "bf16, in one file", "rounded stochastically")),
    ("hift", "zero1", "bare, bf16, DeepSpeed's schedule"),
    *(("hift", "zero2", name) for name in ("bare", "accumulated, clipped")),
    ("hift", "zero3", "bare"),
]
Saved = Callable[[str, Layout, str], list[dict[str, Any]]]
"""Gives what each rank has of a method's case under a layout, by its name."""


def save_and_resume(rank: int, num_ranks: int, method: str, layout: Layout, name: str, folder: Path) -> dict[str, Any]:
    """A run that is saved on its way, and one that goes on from there and began with other weights.

    Returns:
        What the first had when it was saved and at the end, what the other had when it was loaded and at the end, and
        its weights; `folder/layout/method/name` holds the checkpoint, and, of SFT, `... deltas` the deltas at the end.
    """
    case, place = CASES[method, layout, name], folder / layout / method / name
    found: dict[str, Any] = {}
    with running(case, layout, rank) as run:
        run.train(0, case.cut)
        save(run, place)
        found["saved"] = case.result(run)
        run.train(case.cut, case.updates)
        found["straight"] = case.result(run)
        if method == "sft":
            run.sliver.save_pretrained(place.with_name(f"{name} deltas"))
    with running(case, layout, rank, seed=7) as run:
        load(run, place)
        found["loaded"] = case.result(run)
        run.train(case.cut, case.updates)
        found["resumed"] = case.result(run)
        if not case.bare:
            found["weights"] = case.merged(run)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def saved(folder: Path) -> Saved:
    return ran_once(save_and_resume, 2, folder)


@pytest.mark.parametrize(("method", "layout", "name"), quick(CASES, QUICK))
def test_a_run_that_is_resumed_has_the_bits_of_one_that_went_on(
    method: str, layout: Layout, name: str, saved: Saved
) -> None:
    case, results = CASES[method, layout, name], saved(method, layout, name)
    for each in results:
        case.assert_resumed(each["saved"], each["loaded"])
        straight, resumed = each["straight"], each["resumed"]
        # What a run goes through is not saved; the later part is the same.
        straight = {**straight, **{key: straight[key][-len(resumed[key]) :] for key in ("losses", "norms")}}
        assert straight["updates"] == case.updates and len(resumed["losses"]) < len(each["straight"]["losses"])
        if (method, layout) == ("hift", "zero3"):
            assert_near(straight, resumed, case)
        else:
            assert_same_tree(resumed, straight)


def assert_near(straight: dict[str, Any], resumed: dict[str, Any], case: HiFTCase) -> None:
    """Stage 3 takes gradients and norms in pieces, whose order may be another in a resumed run."""
    expected, exact = (hift.reference(case, "zero3", exact=exact) for exact in (False, True))
    masters, exact_masters = ({n: m.detach() for n, m in each.masters.items()} for each in (expected, exact))
    within = step_limit(masters, exact_masters, hift.CAP)
    found, wanted = ({n: rows for n, (_, rows) in each["masters"].items()} for each in (resumed, straight))
    assert distance(found, wanted) <= within
    count = len(resumed["losses"]) // case.accumulation
    assert distance(resumed["losses"], straight["losses"]) <= step_limit(
        expected.losses[-count:], exact.losses[-count:], hift.LOSS_CAP
    )
    if case.dtype == torch.float32:
        assert distance(resumed["weights"], straight["weights"]) <= within
    else:
        assert differing(resumed["weights"], straight["weights"]) == []
    moments, exact_moments = (hift.moments_of(each) for each in (expected, exact))
    for kind in {key.rsplit("/", 1)[1] for key in straight["state"]}:
        found, wanted = (
            {key: value for key, value in each["state"].items() if key.endswith(f"/{kind}")}
            for each in (resumed, straight)
        )
        if kind in moments:
            assert distance(found, wanted) <= step_limit(moments[kind], exact_moments[kind], hift.CAP)
        else:
            assert differing(found, wanted) == []
    assert all(resumed[key] == straight[key] for key in ("updates", "held", "shown", "active group"))


def of_hift(keys: Iterable[Key]) -> list[tuple[Layout, str]]:
    return [(layout, name) for method, layout, name in keys if method == "hift"]


@pytest.mark.parametrize(("layout", "name"), quick(of_hift(CASES), of_hift(QUICK)))
def test_a_cycle_is_resumed_with_the_rate_that_it_holds(layout: Layout, name: str, saved: Saved) -> None:
    case = CASES["hift", layout, name]
    # Read when the cycle began.
    rate = hift.LR * hift.rate_after(CYCLE, is_warmup=case.config_schedule, ticks=1 if case.bare else 2)
    for each in saved("hift", layout, name):
        assert each["loaded"]["held"] == pytest.approx([rate] * len(each["loaded"]["held"]), rel=1e-12)
        assert each["straight"]["held"] == each["resumed"]["held"] != each["loaded"]["held"]
        assert each["straight"]["held"] != each["straight"]["shown"]


@pytest.mark.parametrize("name", quick([name for layout, name in of_hift(CASES) if layout == "ddp"], ["bf16"]))
def test_what_accelerate_and_the_trainer_move_to_the_device_has_one_element(
    name: str, saved: Saved, folder: Path
) -> None:
    assert saved("hift", "ddp", name)
    state = torch.load(folder / "ddp" / "hift" / name / "optimizer.bin")["state"]
    assert {value.numel() for values in state.values() for value in values.values()} == {1}


SFT = [key for key in CASES if key[0] == "sft"]


@pytest.mark.parametrize(("method", "layout", "name"), quick(SFT, [key for key in SFT if key in QUICK]))
def test_a_resumed_run_of_sft_equals_one_process(method: str, layout: Layout, name: str, saved: Saved) -> None:
    case, results = CASES[method, layout, name], saved(method, layout, name)
    if case.bare:
        sft.assert_prescribed([each["straight"] for each in results], case)
    else:
        case.assert_equals_one_process([{**each["straight"], "weights": each["weights"]} for each in results], layout)


MERGED = [key for key in SFT if not CASES[key].bare]


@pytest.mark.parametrize(("method", "layout", "name"), quick(MERGED, [key for key in MERGED if key in QUICK]))
def test_the_deltas_of_a_run_lead_from_the_plain_model_to_the_merged_one(
    method: str, layout: Layout, name: str, saved: Saved, folder: Path
) -> None:
    expected = saved(method, layout, name)[0]["weights"]
    model = CASES[method, layout, name].build_model()
    apply(model, folder / layout / method / f"{name} deltas")
    assert differing(weights(model), expected) == []


@pytest.mark.parametrize(("layout", "trainer"), quick(TRAINERS, []))
def test_a_trainers_run_that_was_saved_on_its_way_continues_to_the_bit(
    layout: Layout, trainer: str, tmp_path: Path
) -> None:
    """Both runs of every rank have the same bits, and about those of one process on the whole batch."""
    results = run_ranks(resume_trainer, 2, layout, trainer, tmp_path)
    with trainers.states(None):
        ((_, (expected,)), (_, (exact,))) = with_exact(
            functools.partial(trainers.train, tmp_path, len(results) * BATCH, None, TRAINED[trainer])
        )
    for each in results:
        assert differing(each["straight"], each["resumed"]) == []
        trainers.assert_near(each["straight"], expected, exact)


ELSEWHERE: list[tuple[int, str, Layout, Layout, str]] = [
    (3, "hift", "ddp", "ddp", "fp32"),
    (3, "hift", "fsdp2", "fsdp2", "fp32"),
    (1, "hift", "ddp", "single", "bf16"),
    (1, "hift", "fsdp2", "fsdp2", "bf16"),
    (1, "hift", "fsdp2", "single", "bf16"),
    (1, "hift", "fsdp2", "fsdp2", "rounded stochastically"),
    *((1, "hift", layout, "single", "rounded stochastically") for layout in ("ddp", "fsdp2")),
    (2, "hift", "fsdp2", "ddp", "bf16"),
    *((num_ranks, "hift", layout, layout, "bare") for num_ranks in (1, 3) for layout in ZERO),
    *(
        (num_ranks, "sft", layout, layout, name)
        for num_ranks in (1, 3)
        for layout in ("ddp", *ZERO)
        for name in ("AG", "MA")
    ),
    *((num_ranks, "sft", "fsdp2", "fsdp2", f"{name}, in shards") for num_ranks in (1, 3) for name in ("AG", "MA")),
    *(
        (1, "sft", "fsdp2", "single", f"{name}, {kind}")
        for name in ("AG", "MA")
        for kind in ("in one file", "in shards")
    ),
]
"""Number of ranks, method, layout of the two that have saved, that of these, and case."""
QUICK_ELSEWHERE = [
    *(
        (1, "hift", layout, "single", name)
        for layout in ("ddp", "fsdp2")
        for name in ("bf16", "rounded stochastically")
    ),
    (1, "hift", "zero2", "zero2", "bare"),
]


def go_on(
    rank: int, num_ranks: int, method: str, source: Layout, layout: Layout, name: str, folder: Path
) -> dict[str, Any]:
    """Load what two ranks have saved, and train on."""
    case = CASES[method, source, name]
    with running(case, layout, rank, seed=5) as run:
        load(run, folder / source / method / name)
        loaded = case.result(run)
        run.train(case.cut, case.cut + case.more)
        found = {"loaded": loaded, "continued": case.result(run)}
        again = folder / source / method / f"{name} by {num_ranks}"
        save(run, again)
        load(run, again)
        return {**found, "loaded again": case.result(run)}


@pytest.mark.parametrize(
    ("num_ranks", "method", "layout", "target", "name"),
    quick(ELSEWHERE, QUICK_ELSEWHERE),
)
def test_another_number_of_ranks_goes_on(
    num_ranks: int, method: str, layout: Layout, target: Layout, name: str, saved: Saved, folder: Path
) -> None:
    case, two = CASES[method, layout, name], saved(method, layout, name)
    what = method, layout, target, name, folder
    results = [go_on(0, 1, *what)] if target == "single" else run_ranks(go_on, num_ranks, *what)
    for result in results:
        case.assert_resumed(two[0]["saved"], result["loaded"])
        assert_same_tree(result["loaded again"]["state"], result["continued"]["state"])
    case.assert_continued([result["continued"] for result in results], before=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "layout", "name"), [("sft", "fsdp2", f"{name}, in one file") for name in ("AG", "MA")]
)
def test_one_process_without_fsdp_reads_the_folder(
    method: str, layout: Layout, name: str, saved: Saved, folder: Path
) -> None:
    expected = saved(method, layout, name)[0]["saved"]["state"]
    _, optimizer = CASES[method, layout, name].build()
    load_state(optimizer, folder / layout / method / name / "sft")
    for key, state in optimizer.whole_state()["state"].items():
        assert_same_tree({each: state[each] for each in expected[key]}, expected[key])


def test_a_folder_without_the_state_is_refused_by_its_name(tmp_path: Path) -> None:
    _, optimizer = AG.build()
    with pytest.raises(ValueError, match=r"has no slivertune_checkpoint\.json, so its writing was cut short"):
        load_state(optimizer, tmp_path)
    write_manifest(tmp_path)
    with pytest.raises(ValueError, match=r"state\.pt is not there\. Name a whole checkpoint"):
        load_state(optimizer, tmp_path)
    assert optimizer.updates == 0
