"""`attach` under a stock Trainer on ZeRO-1, 2, 3 and FSDP2: two ranks against one process on the whole batch."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, Trainer

from slivertune import TokenTune
from slivertune.training.ranks.processes import save_whole_model
from tests.helpers.models import differing
from tests.helpers.ranks import ran_once, run_ranks
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
from tests.parallel.contract.runs import quiet

pytestmark = pytest.mark.slow

LAYOUTS = (*ZERO, "fsdp2")
SFT_LAYOUTS = ("zero2", "zero3", "fsdp2")
TOKENS = TokenTune(ratio=0.5, pattern="random", always=(-1,))
"""The last token of each row has no target; selected in each, it leaves both ranks the same number of targets."""
TAKEN_UP = {"zero2": "tokens", "zero3": "hift and tokens", "fsdp2": "tokens"}
"""The case that is also stopped and resumed, by layout on which tokens are selected."""
TOKEN_CASES: dict[str, tuple[Any, ...]] = {"tokens": (TOKENS,), "hift and tokens": (HIFT, TOKENS)}
Alone = tuple[tuple[Trainer, Steps], tuple[Trainer, Steps]]
"""A run, and the same with exact sums."""


def weights_of(output: Path, layout: str, *settings: Any, **options: Any) -> Steps:
    with states(layout):
        return train(output, BATCH, layout, *settings, **options)[1]


Runs = Callable[..., list[Any]]
"""Gives what each rank has of a layout, and of a case there."""


def cut_and_again(rank: int, world: int, layout: str, folder: Path) -> dict[str, Any]:
    """HiFT's run that stops after a checkpoint, and the one that goes on from there, whose model is saved."""
    output = folder / layout
    quiet()
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
    return found


def of_sft(rank: int, world: int, layout: str, folder: Path) -> tuple[Steps, Steps]:
    """The deltas of a run that did not stop, and of one that was resumed."""
    quiet()
    whole = weights_of(folder / layout / "sft whole", layout, SFT)
    weights_of(folder / layout / "sft", layout, SFT, **SAVING)
    return whole, weights_of(folder / layout / "sft", layout, SFT, resume=True)


def of_the_best(rank: int, world: int, layout: str, folder: Path) -> dict[str, Any]:
    quiet()
    with states(layout):
        best = train_to_the_best(folder, BATCH, layout)
        best.pop("trainer").accelerator.free_memory()
    return best


def on_tokens_of(rank: int, world: int, layout: str, name: str, folder: Path) -> dict[str, Any]:
    """The weights after each update and the selection of every forward, and the weights of a run that stopped once."""
    quiet()
    output, settings = folder / layout / name, TOKEN_CASES[name]
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
def ranks(folder: Path) -> Runs:
    return ran_once(cut_and_again, RANKS, folder)


@pytest.fixture(scope="module")
def token_ranks(folder: Path) -> Runs:
    return ran_once(on_tokens_of, RANKS, folder)


@pytest.fixture(scope="module")
def alone(folder: Path) -> Alone:
    """One process on the whole batch."""
    with states(None):
        return with_exact(lambda: train(folder / "alone", RANKS * BATCH, None, HIFT))


# Sums over ranks, buckets and micro-batches are rounded in another order than sums over one batch.
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_makes_the_updates_of_one_process(layout: str, ranks: Runs, alone: Alone) -> None:
    expected, exact = (steps_of(weights, trainer.state.log_history[:STOP]) for trainer, weights in alone)
    for ours in ranks(layout):
        engine = "DeepSpeedEngine" if layout in ZERO else "FSDPLlamaForCausalLM"
        assert (ours["world"], ours["engine"], ours["stage"]) == (RANKS, engine, ZERO.get(layout))
        assert_step_close(steps_of(ours["whole"], ours["logs"]), expected, exact, cap=CAP)
        assert counted(ours["logs"]) == counted(alone[0][0].state.log_history[:STOP])


# DeepSpeed lets no engine of a process die, and whatever lives is counted: the first run of the ranks.
@pytest.mark.parametrize("layout", ["zero1", "fsdp2"])
def test_what_the_ranks_log_of_their_state_adds_up_to_all_of_it(layout: str, tmp_path: Path) -> None:
    ranks = run_ranks(cut_and_again, RANKS, layout, tmp_path, is_first=True)
    num_weights = sum(weight.numel() for weight in ranks[0]["whole"][-1].values())
    tiers = [f"memory/state_{tier}_bytes" for tier in ("device", "host", "disk")]
    num_bytes = sum(rank["logs"][-1][tier] for rank in ranks for tier in tiers)
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
def test_a_run_resumed_in_mid_cycle_goes_on_as_if_it_had_not_stopped(layout: str, ranks: Runs, alone: Alone) -> None:
    for ours in ranks(layout):
        assert len(ours["cut"]) == STOP and len(ours["again"]) == UPDATES - STOP
        assert_went_on(layout, ours["again"][-1], ours["whole"][-1], *(steps for _, steps in alone))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_model_is_saved_as_a_plain_checkpoint(layout: str, ranks: Runs, folder: Path) -> None:
    first, second = ranks(layout)
    saved = dict(LlamaForCausalLM.from_pretrained(folder / layout / "final").named_parameters())
    again = first["again"][-1]
    assert differing({name: saved[name] for name in again}, again) == []
    assert first["loss"] == second["loss"]


@pytest.fixture(scope="module")
def sft_alone(folder: Path) -> tuple[Weights, Weights]:
    with states(None):
        return with_exact(lambda: train(folder / "sft alone", RANKS * BATCH, None, SFT)[1][-1])


@pytest.mark.parametrize("layout", SFT_LAYOUTS)
def test_sft_makes_the_updates_of_one_process_and_resumes(
    layout: str, sft_alone: tuple[Weights, Weights], tmp_path: Path
) -> None:
    for (whole,), (again,) in run_ranks(of_sft, RANKS, layout, tmp_path):
        assert_near(whole, *sft_alone)
        assert differing(whole, again) == []


@pytest.mark.parametrize("layout", SFT_LAYOUTS)
def test_sft_ends_with_the_best_models_deltas(layout: str, tmp_path: Path) -> None:
    for best in run_ranks(of_the_best, RANKS, layout, tmp_path):
        assert_ended_with_the_best(best)


@pytest.fixture(scope="module")
def on_tokens(token_ranks: Runs, folder: Path) -> Callable[[str, str], tuple[Steps, Steps]]:
    """One process that selects what the ranks of a layout selected in a case, and the same with exact sums."""

    @functools.cache
    def compute(layout: str, name: str) -> tuple[Steps, Steps]:
        selections = [rank["selections"] for rank in token_ranks(layout, name)]
        drawn = [torch.cat(pair) for pair in zip(*selections, strict=True)]

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
    token_ranks: Runs,
    on_tokens: Callable[[str, str], tuple[Steps, Steps]],
    on_all_tokens: Callable[[str], Weights],
) -> None:
    ours = token_ranks(layout, name)
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
    layout: str, name: str, token_ranks: Runs, on_tokens: Callable[[str, str], tuple[Steps, Steps]]
) -> None:
    for ours in token_ranks(layout, name):
        assert len(ours["again"]) == UPDATES - STOP
        assert_went_on(layout, ours["again"][-1], ours["weights"][-1], *on_tokens(layout, name))
