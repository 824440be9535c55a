"""Two and three ranks under every layout come to what one process does that sees the rows of all of them."""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from slivertune.core.layout import Layout
from slivertune.parallel.ddp import gradient_sync
from tests.helpers.models import BLOCKS, assert_same_tree, differing, weights
from tests.helpers.ranks import RankError, asked_for, quick, ran_once, run_ranks
from tests.parallel.contract.cases import HIFT, MA, QUICK_OF_HIFT, QUICK_OF_SFT, SFT
from tests.parallel.contract.hift import HiFTCase, active_group
from tests.parallel.contract.plain import load_all
from tests.parallel.contract.runs import LAYOUTS, ZERO, Case, Run, running
from tests.parallel.contract.sft import SFTCase

CASES: dict[tuple[str, Layout, str], Case] = {
    (method, layout, name): case
    for layout in LAYOUTS
    for method, cases in (("hift", HIFT), ("sft", SFT))
    for name, case in cases[layout].items()
}
QUICK = [
    (method, layout, name)
    for method, names in (("hift", QUICK_OF_HIFT), ("sft", QUICK_OF_SFT))
    for layout in LAYOUTS
    for name in names[layout]
]
EVALUATED = [("sft", "fsdp2", "Llama: AG"), ("sft", "fsdp2", "Llama: AG, evaluated in between")]
Trained = Callable[[str, Layout, str], list[dict[str, Any]]]
"""Gives what each rank has of a method's case under a layout, by its name."""
# Buckets of 3,000 bytes cut every weight of the tiny model, most of them in several parts.
IN_SMALL_BUCKETS = mock.patch.object(gradient_sync, "BUCKET_BYTES", 3_000)


def train(rank: int, num_ranks: int, method: str, layout: Layout, name: str, folder: Path) -> dict[str, Any]:
    """Train a case; the model lies in `folder/layout/method/name` then, as a Hugging Face checkpoint."""
    case = CASES[method, layout, name]
    with IN_SMALL_BUCKETS, running(case, layout, rank, seed=seed_of(case, layout, rank)) as run:
        watched = watch(run) if method == "hift" else {}
        began = time.perf_counter()
        run.train(0, case.updates)
        seconds = time.perf_counter() - began
        result = {**case.result(run), **watched, "seconds": seconds, "engine": type(run.model).__name__}
        if layout in ZERO and method == "hift":
            schedule = run.model.hift_schedule
            result["switches"] = schedule.num_switches
            result["overhead"] = schedule.switch_seconds - schedule.copy_seconds
        result["weights"] = case.merged(run)
        if isinstance(case, HiFTCase) or case.model == "llama":
            export(run, result["weights"], folder / layout / method / name)
        return result


def seed_of(case: Case, layout: Layout, rank: int) -> int:
    """The seed of a rank's weights: where rank 0's count, the others' are arbitrary."""
    return rank if (layout == "ddp" or case.plugin.get("cpu_ram_efficient_loading")) else 0


def watch(run: Run) -> dict[str, Any]:
    """What is seen in each micro-batch: the active group, and the blocks that backward went through."""
    reached: list[tuple[int, frozenset[int]]] = []
    blocks: set[int] = set()

    def note() -> None:
        reached.append((active_group(run), frozenset(blocks)))
        blocks.clear()

    run.on_micro = note
    for index, block in enumerate(run.plain.model.layers):
        block.register_full_backward_pre_hook(lambda *_, index=index: blocks.add(index))
    return {"reached": reached}


def export(run: Run, whole: dict[str, torch.Tensor], folder: Path) -> None:
    """Save the model for everyone in the way that people do."""
    if run.case.bare:
        run.model.save_16bit_model(str(folder), "pytorch_model.bin")
        if run.rank == 0:
            run.plain.config.save_pretrained(folder)
        return
    run.accelerator.unwrap_model(run.model).save_pretrained(
        folder,
        is_main_process=run.rank == 0,
        state_dict=run.accelerator.get_state_dict(run.model) if isinstance(run.case, HiFTCase) else dict(whole),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def trained(folder: Path) -> Trained:
    return ran_once(train, 2, folder)


@pytest.mark.parametrize(("method", "layout", "name"), quick(CASES, QUICK))
def test_two_ranks_equal_one_process_on_the_whole_batch(
    method: str, layout: Layout, name: str, trained: Trained
) -> None:
    CASES[method, layout, name].assert_equals_one_process(trained(method, layout, name), layout)


of_each_run_of_hift = pytest.mark.parametrize(
    ("layout", "name"),
    quick(*([(layout, name) for method, layout, name in keys if method == "hift"] for keys in (CASES, QUICK))),
)


@of_each_run_of_hift
def test_a_model_is_that_of_its_layout(layout: Layout, name: str, trained: Trained) -> None:
    engine = {"ddp": "LlamaForCausalLM", "fsdp2": "FSDPLlamaForCausalLM"}.get(layout, "DeepSpeedEngine")
    assert [result["engine"] for result in trained("hift", layout, name)] == [engine] * 2


@of_each_run_of_hift
def test_backward_stops_at_the_active_group(layout: Layout, name: str, trained: Trained) -> None:
    case = HIFT[layout][name]
    for group, blocks in trained("hift", layout, name)[0]["reached"]:
        lowest = max(0, group * case.settings.get("layers_per_group", 1) - 1)
        assert blocks == frozenset(range(lowest, BLOCKS)), group


@of_each_run_of_hift
def test_the_turn_changes_every_steps_per_group_updates(layout: Layout, name: str, trained: Trained) -> None:
    case, result = HIFT[layout][name], trained("hift", layout, name)[0]
    steps_per_group = case.settings.get("steps_per_group", 1)
    groups = [group for group, _ in result["reached"][:: case.accumulation]]
    num_groups = -(-(BLOCKS + 2) // case.settings.get("layers_per_group", 1))
    turns = groups[::steps_per_group]
    assert groups == [turns[update // steps_per_group] for update in range(case.updates)]
    assert sorted(turns[:num_groups]) == list(range(num_groups))
    assert turns == [turns[index % num_groups] for index in range(len(turns))]
    assert (turns[:num_groups] == list(range(num_groups))) == ("order" not in case.settings)
    assert result.get("switches", len(turns) - 1) == len(turns) - 1


@of_each_run_of_hift
def test_param_groups_show_the_schedule_and_held_lr_what_is_applied(
    layout: Layout, name: str, trained: Trained
) -> None:
    result = trained("hift", layout, name)[0]
    shown, held = result["shown"], result["held"]
    assert len(set(shown)) == 1 and shown[0] != held[0]


@pytest.mark.parametrize("layout", ZERO)
def test_switches_take_a_small_part_of_a_run_beyond_the_copies(layout: Layout, trained: Trained) -> None:
    # `benchmarks/ranks.py` measures the milliseconds; here it is their share of the same run, whatever else the machine
    # does: a hundredth or two, in steps of a tiny model that are short themselves.
    shares = {
        name: min(result["overhead"] / result["seconds"] for result in trained("hift", layout, name))
        for name in QUICK_OF_HIFT[layout]
    }
    print(f"{layout}:", {name: f"{share:.3f}" for name, share in shares.items()})
    assert min(shares.values()) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize(("method", "layout", "name"), EVALUATED)
def test_evaluations_between_steps_change_no_bit(method: str, layout: Layout, name: str, trained: Trained) -> None:
    for first, second in zip(trained(method, layout, name), trained(*EVALUATED[0]), strict=True):
        assert_same_tree(first["state"], second["state"])


LLAMAS = [key for key, case in CASES.items() if isinstance(case, HiFTCase) or case.model == "llama"]


@pytest.fixture(scope="module")
def loaded(request: pytest.FixtureRequest, folder: Path, trained: Trained) -> dict[str, dict[str, torch.Tensor]]:
    """The parameters of the checkpoints that the tests of this run ask for, read in one process, by their folders."""
    for key in asked_for(request, "method", "layout", "name") & set(LLAMAS):
        with suppress(RankError):  # which the test of this case raises
            trained(*key)
    return run_ranks(load_all, 1, folder, is_first=True)[0]


@pytest.mark.parametrize(("method", "layout", "name"), quick(LLAMAS, [key for key in LLAMAS if key in QUICK]))
def test_the_trained_model_is_a_plain_checkpoint(
    method: str, layout: Layout, name: str, trained: Trained, loaded: dict[str, dict[str, torch.Tensor]]
) -> None:
    case, whole = CASES[method, layout, name], trained(method, layout, name)[0]["weights"]
    found, before = loaded[f"{layout}/{method}/{name}"], weights(Case(dtype=case.dtype, tied=case.tied).build_model())
    assert found.keys() == before.keys()
    assert differing(found, {name: whole[name] for name in before}) == []
    assert differing(found, before) == [name for name in sorted(before) if method == "hift" or "proj" in name]


THREE: dict[tuple[str, Layout, str], Case] = {
    ("hift", "zero2", "decay split"): HiFTCase(split_decay=True, eps=1e-4),
    **{("sft", layout, "AG"): SFTCase(accumulation=2) for layout in ("ddp", "fsdp2")},
    **{("sft", layout, "MA"): SFTCase(selection=MA, clip=2.0) for layout in ("ddp", "fsdp2")},
}


def train_on_three(rank: int, num_ranks: int, method: str, layout: Layout, name: str) -> dict[str, Any]:
    case = THREE[method, layout, name]
    with running(case, layout, rank) as run:
        run.train(0, case.updates)
        return {**case.result(run), "weights": case.merged(run)}


@pytest.mark.slow
@pytest.mark.parametrize(("method", "layout", "name"), THREE)
def test_three_ranks_equal_one_process_as_well(method: str, layout: Layout, name: str) -> None:
    THREE[method, layout, name].assert_equals_one_process(run_ranks(train_on_three, 3, method, layout, name), layout)
