"""`attach` under a stock Trainer on ZeRO-1, 2, 3 and FSDP2: two ranks against one process on the whole batch."""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, Trainer

from slivertune import TokenTune
from slivertune.training.ranks.processes import save_whole_model
from tests.helpers.models import differing
from tests.helpers.ranks import run_ranks
from tests.helpers.tolerance import assert_step_close, distance, step_limit, with_exact
from tests.interop.trainer_runs import (
    BATCH,
    CAP,
    HIFT,
    RANKS,
    SAVING,
    SFT,
    STOP,
    UPDATES,
    ZERO,
    Steps,
    Weights,
    assert_ended_with_the_best,
    assert_near,
    counted,
    recorded_draws,
    states,
    steps_of,
    train,
    train_to_the_best,
    with_draws,
)

pytestmark = pytest.mark.slow

LAYOUTS = (*ZERO, "fsdp2")
SFT_LAYOUTS = ("zero2", "zero3", "fsdp2")
TOKENS = TokenTune(ratio=0.5, pattern="random", always=(-1,))
"""The last token of each row has no target; selected in each, it leaves both ranks the same number of targets."""
TAKEN_UP = {"zero2": "tokens", "zero3": "hift and tokens", "fsdp2": "tokens"}
"""The case that is also stopped and resumed, by layout on which tokens are selected."""
TOKEN_CASES: dict[str, tuple[Any, ...]] = {"tokens": (TOKENS,), "hift and tokens": (HIFT, TOKENS)}
Ranks = list[dict[str, Any]]
Alone = tuple[tuple[Trainer, Steps], tuple[Trainer, Steps]]
"""A run, and the same with exact sums."""


def weights_of(output: Path, layout: str, *settings: Any, **options: Any) -> Steps:
    with states(layout):
        return train(output, BATCH, layout, *settings, **options)[1]


def on_a_rank(rank: int, world: int, folder: str, layouts: tuple[str, ...]) -> dict[str, Any]:
    if "DS_ACCELERATOR" in os.environ:
        import deepspeed

        # DeepSpeed would first compile its shared-memory collectives for a minute; gloo does.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return {layout: on_a_layout(Path(folder) / layout, layout) for layout in layouts}


def on_a_layout(output: Path, layout: str) -> dict[str, Any]:
    with states(layout):
        trainer, cut = train(output, BATCH, layout, HIFT, **SAVING)
        found = {
            "world": trainer.args.world_size,
            "engine": type(trainer.model_wrapped).__name__,
            "stage": trainer.accelerator.state.deepspeed_plugin.zero_stage if layout in ZERO else None,
            "cut": cut,
            "logs": trainer.state.log_history[:-1],
        }
        trainer.accelerator.free_memory()
    with states(layout):
        trainer, found["again"] = train(output, BATCH, layout, HIFT, resume=True)
        found["loss"] = trainer.evaluate()["eval_loss"]
        save_whole_model(trainer, output / "final")
        trainer.accelerator.free_memory()
    found["whole"] = weights_of(output / "whole", layout, HIFT)
    if layout in SFT_LAYOUTS:
        weights_of(output / "sft", layout, SFT, **SAVING)
        found["sft again"] = weights_of(output / "sft", layout, SFT, resume=True)
        found["sft whole"] = weights_of(output / "sft whole", layout, SFT)
        with states(layout):
            best = train_to_the_best(output / "sft best", BATCH, layout)
            best.pop("trainer").accelerator.free_memory()
        found["sft best"] = best
    if layout in TAKEN_UP:
        found |= {name: train_on_tokens(output / name, layout, name) for name in TOKEN_CASES}
    return found


def train_on_tokens(output: Path, layout: str, name: str) -> dict[str, Any]:
    """The weights after each update and the selection of every forward, and the weights of a run that stopped once."""
    settings = TOKEN_CASES[name]
    with recorded_draws() as selections, states(layout):
        trainer, weights = train(output / "whole", BATCH, layout, *settings, whole_labels=True)
    found = {"engine": type(trainer.model_wrapped).__name__, "weights": weights, "selections": selections}
    if TAKEN_UP[layout] == name:
        weights_of(output / "cut", layout, *settings, whole_labels=True, **SAVING)
        found["again"] = weights_of(output / "cut", layout, *settings, whole_labels=True, resume=True)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Ranks:
    zero = run_ranks(on_a_rank, RANKS, str(folder), tuple(ZERO), env={"DS_ACCELERATOR": "cpu"}, timeout_s=420)
    fsdp2 = run_ranks(on_a_rank, RANKS, str(folder), ("fsdp2",), timeout_s=240)
    return [{**one, **other} for one, other in zip(zero, fsdp2, strict=True)]


@pytest.fixture(scope="module")
def alone(folder: Path) -> Alone:
    """One process on the whole batch."""
    with states(None):
        return with_exact(lambda: train(folder / "alone", RANKS * BATCH, None, HIFT))


# Sums over ranks, buckets and micro-batches are rounded in another order than sums over one batch.
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_makes_the_updates_of_one_process(layout: str, ranks: Ranks, alone: Alone) -> None:
    expected, exact = (steps_of(weights, trainer.state.log_history[:STOP]) for trainer, weights in alone)
    for rank in ranks:
        ours = rank[layout]
        engine = "DeepSpeedEngine" if layout in ZERO else "FSDPLlamaForCausalLM"
        assert (ours["world"], ours["engine"], ours["stage"]) == (RANKS, engine, ZERO.get(layout))
        assert_step_close(steps_of(ours["whole"], ours["logs"]), expected, exact, cap=CAP)
        assert counted(ours["logs"]) == counted(alone[0][0].state.log_history[:STOP])


# DeepSpeed lets no engine of a process die, and whatever lives is counted: of ZeRO, the first layout that ran.
@pytest.mark.parametrize("layout", ["zero1", "fsdp2"])
def test_what_the_ranks_log_of_their_state_adds_up_to_all_of_it(layout: str, ranks: Ranks) -> None:
    num_weights = sum(weight.numel() for weight in ranks[0][layout]["whole"][-1].values())
    tiers = [f"memory/state_{tier}_bytes" for tier in ("device", "host", "disk")]
    num_bytes = sum(rank[layout]["logs"][-1][tier] for rank in ranks for tier in tiers)
    # Every group had its turn. Adam has two moments, ZeRO also masters; shares of small tensors are filled up.
    each = 12 if layout in ZERO else 8
    assert each * num_weights <= num_bytes <= 1.3 * each * num_weights


def assert_went_on(layout: str, again: Weights, whole: Weights, expected: Steps, exact: Steps) -> None:
    """The last weights of a resumed run are those of one that did not stop; on ZeRO-3 but for the order of sums."""
    if layout == "zero3":
        assert distance(again, whole) <= step_limit(expected[-1], exact[-1], CAP)
    else:
        assert differing(again, whole) == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_resumed_in_mid_cycle_goes_on_as_if_it_had_not_stopped(layout: str, ranks: Ranks, alone: Alone) -> None:
    for rank in ranks:
        ours = rank[layout]
        assert len(ours["cut"]) == STOP and len(ours["again"]) == UPDATES - STOP
        assert_went_on(layout, ours["again"][-1], ours["whole"][-1], *(steps for _, steps in alone))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_model_is_saved_as_a_plain_checkpoint(layout: str, ranks: Ranks, folder: Path) -> None:
    saved = dict(LlamaForCausalLM.from_pretrained(folder / layout / "final").named_parameters())
    again = ranks[0][layout]["again"][-1]
    assert differing({name: saved[name] for name in again}, again) == []
    assert ranks[0][layout]["loss"] == ranks[1][layout]["loss"]


@pytest.fixture(scope="module")
def sft_alone(folder: Path) -> tuple[Weights, Weights]:
    with states(None):
        return with_exact(lambda: train(folder / "sft alone", RANKS * BATCH, None, SFT)[1][-1])


@pytest.mark.parametrize("layout", SFT_LAYOUTS)
def test_sft_makes_the_updates_of_one_process_and_resumes(
    layout: str, ranks: Ranks, sft_alone: tuple[Weights, Weights]
) -> None:
    for rank in ranks:
        (whole,), (again,) = rank[layout]["sft whole"], rank[layout]["sft again"]
        assert_near(whole, *sft_alone)
        assert differing(whole, again) == []


@pytest.mark.parametrize("layout", SFT_LAYOUTS)
def test_sft_ends_with_the_best_models_deltas(layout: str, ranks: Ranks) -> None:
    for rank in ranks:
        assert_ended_with_the_best(rank[layout]["sft best"])


@pytest.fixture(scope="module")
def on_tokens(ranks: Ranks, folder: Path) -> Callable[[str, str], tuple[Steps, Steps]]:
    """One process that selects what the ranks of a layout selected in a case, and the same with exact sums."""

    @functools.cache
    def compute(layout: str, name: str) -> tuple[Steps, Steps]:
        drawn = [torch.cat(pair) for pair in zip(*(rank[layout][name]["selections"] for rank in ranks), strict=True)]

        def alone() -> Steps:
            with states(None):
                return train(folder / "tokens", RANKS * BATCH, None, *TOKEN_CASES[name], whole_labels=True)[1]

        return with_exact(lambda: with_draws(drawn, alone))

    return compute


@pytest.fixture(scope="module")
def on_all_tokens(folder: Path) -> Callable[[str], Weights]:
    """The last weights of a case without its selection."""

    @functools.cache
    def compute(name: str) -> Weights:
        with states(None):
            return train(folder / "all", RANKS * BATCH, None, *TOKEN_CASES[name][:-1], whole_labels=True)[1][-1]

    return compute


@pytest.mark.parametrize("name", TOKEN_CASES)
@pytest.mark.parametrize("layout", TAKEN_UP)
def test_ranks_that_select_tokens_make_the_updates_of_one_process_that_selects_the_same(
    layout: str,
    name: str,
    ranks: Ranks,
    on_tokens: Callable[[str, str], tuple[Steps, Steps]],
    on_all_tokens: Callable[[str], Weights],
) -> None:
    ours = [rank[layout][name] for rank in ranks]
    first, second = (each["selections"] for each in ours)
    assert len(first) == len(second) == UPDATES * 2
    assert not any(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    expected, exact = map(steps_of, on_tokens(layout, name))
    without = on_all_tokens(name)
    for each in ours:
        assert each["engine"] == ("DeepSpeedEngine" if layout in ZERO else "FSDPLlamaForCausalLM")
        assert_step_close(steps_of(each["weights"]), expected, exact, cap=CAP)
        difference = max(float((value - without[key]).abs().max()) for key, value in each["weights"][-1].items())
        assert difference > 1e-2, "the selection made no difference"
    assert differing(*(each["weights"][-1] for each in ours)) == []


@pytest.mark.parametrize(("layout", "name"), TAKEN_UP.items())
def test_a_resumed_run_continues_the_draws(
    layout: str, name: str, ranks: Ranks, on_tokens: Callable[[str, str], tuple[Steps, Steps]]
) -> None:
    for rank in ranks:
        ours = rank[layout][name]
        assert len(ours["again"]) == UPDATES - STOP
        assert_went_on(layout, ours["again"][-1], ours["weights"][-1], *on_tokens(layout, name))
