"""`attach` on two ranks against one process with the whole batch, under DDP."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from slivertune import HiFTConfig, SFTConfig, TokenTune
from tests.helpers.models import differing, tiny_llama
from tests.helpers.ranks import quick, ran_once, run_ranks
from tests.helpers.tolerance import assert_step_close, with_exact
from tests.interop.trainer_runs import (
    BATCH,
    CAP,
    HIFT,
    RANKS,
    SAVING,
    SFT,
    STOP,
    UPDATES,
    Weights,
    assert_ended_with_the_best,
    counted,
    recorded_draws,
    run,
    steps_of,
    train_to_the_best,
    with_draws,
)

CASES: dict[str, dict[str, Any]] = {
    "hift": {"settings": (HIFT,)},
    "hift in turns of two, accumulated, clipped": {
        "settings": (HiFTConfig.paper(order="random", steps_per_group=2),),
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.1,
    },
    "sft": {"settings": (SFT,)},
    "sft by momentum": {
        "settings": (SFTConfig(density=0.1, reselection_interval=4, selection="momentum"),),
        "learning_rate": 0.1,
    },
    # The last token of each row has no target; selected in each, it leaves both ranks the same number of targets, whose
    # means therefore average to the mean over the whole batch.
    "hift and tokens": {
        "settings": (HIFT, TokenTune(ratio=0.5, pattern="random", always=(-1,))),
        "whole_labels": True,
    },
    "tokens": {"settings": (TokenTune(ratio=0.5, pattern="random", always=(-1,)),), "whole_labels": True},
}
QUICK = ["hift in turns of two, accumulated, clipped", "tokens"]
WRAPPERS = {name: "DistributedDataParallel" if name == "tokens" else "LlamaForCausalLM" for name in CASES}
"""What is around the model: the stock Trainer's for all weights, and nothing for a sliver."""
RESUMED = ("hift", "hift and tokens", "sft")


def train(rank: int, world: int, name: str, folder: Path) -> dict[str, Any]:
    with recorded_draws() as selections:
        trainer, weights, attachment = run(folder / name, BATCH, **CASES[name])
    found = {
        "world": trainer.args.world_size,
        "layout": str(trainer.accelerator.distributed_type),
        "wrapper": type(trainer.model_wrapped).__name__,
        "weights": weights,
        "logs": trainer.state.log_history[:-1],
        "selections": selections,
        "deltas": places_of(attachment) if "sft" in name else {},
    }
    attachment.detach()
    return found


def places_of(attachment: Any) -> Weights:
    """Where SFT's deltas are."""
    return {key: each.indices for key, each in attachment.optimizer.deltas().items()}


def resume(rank: int, world: int, name: str, folder: Path) -> tuple[Weights, Weights]:
    """The last weights of a run that never stopped, and of one that was taken up after seven updates."""
    found = {}
    for part, options in (("whole", {**SAVING, "stop": UPDATES}), ("cut", SAVING), ("again", {"resume": True})):
        place = folder / f"resumed {name}" / part.replace("again", "cut")
        _, found[part], attachment = run(place, BATCH, **options, **CASES[name])
        attachment.detach()
    assert len(found["again"]) == UPDATES - STOP
    return found["whole"][-1], found["again"][-1]


def end_with_the_best(rank: int, world: int, folder: Path) -> dict[str, Any]:
    best = train_to_the_best(folder, BATCH, None)
    del best["trainer"]
    return best


def continue_alone(rank: int, world: int, folder: Path) -> list[Weights]:
    """The weights of a run that one process began."""
    _, weights, attachment = run(folder, BATCH, resume=True, **CASES["hift"])
    attachment.detach()
    return weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


Trained = Callable[[str], list[Any]]


@pytest.fixture(scope="module")
def trained(folder: Path) -> Trained:
    return ran_once(train, RANKS, folder)


@pytest.fixture(scope="module")
def resumed(folder: Path) -> Trained:
    return ran_once(resume, RANKS, folder)


@pytest.mark.parametrize("name", quick(CASES, QUICK))
def test_two_ranks_make_the_updates_of_one_process_on_the_whole_batch(
    name: str, trained: Trained, tmp_path: Path
) -> None:
    case, ranks = CASES[name], trained(name)
    selections = [torch.cat(pair) for pair in zip(*(rank["selections"] for rank in ranks), strict=True)]
    on_the_whole_batch: Callable[[], Any] = partial(run, tmp_path, RANKS * BATCH, **case)
    (trainer, weights, attachment), (exact_trainer, exact_weights, _) = with_exact(
        lambda: with_draws(selections, on_the_whole_batch)
    )
    expected = steps_of(weights, trainer.state.log_history[:-1])
    exact = steps_of(exact_weights, exact_trainer.state.log_history[:-1])
    for ours in ranks:
        assert (ours["world"], ours["wrapper"]) == (RANKS, WRAPPERS[name])
        assert "MULTI_CPU" in ours["layout"]
        assert len(ours["weights"]) == len(weights) == case.get("max_steps", UPDATES)
        # Sums over the ranks are rounded in another order than sums over one batch.
        assert_step_close(steps_of(ours["weights"], ours["logs"]), expected, exact, cap=CAP)
        assert counted(ours["logs"]) == counted(trainer.state.log_history[:-1])
        if "sft" in name:
            assert differing(ours["deltas"], places_of(attachment)) == []
    if "sft" not in name:
        start = dict(tiny_llama().named_parameters())
        assert len(differing(weights[-1], start)) == len(start), "every layer had its turn"


def test_each_rank_logs_the_bytes_of_its_whole_state(tmp_path: Path) -> None:
    # The first run of the process, as what older runs have left counts too.
    ranks = run_ranks(train, RANKS, "hift", tmp_path, is_first=True)
    num_weights = sum(weight.numel() for weight in ranks[0]["weights"][-1].values())
    for rank in ranks:
        last = rank["logs"][-1]
        # Adam's moments, small ones padded.
        assert 8 * num_weights <= last["memory/state_host_bytes"] <= 1.25 * 8 * num_weights


def test_sft_ends_with_the_best_models_deltas(tmp_path: Path) -> None:
    for best in run_ranks(end_with_the_best, RANKS, tmp_path):
        assert_ended_with_the_best(best)


@pytest.mark.parametrize("name", quick(CASES, QUICK))
def test_the_ranks_have_the_same_bits(name: str, trained: Trained) -> None:
    assert differing(*(rank["weights"][-1] for rank in trained(name))) == []


@pytest.mark.parametrize("name", quick(["hift and tokens", "tokens"], ["tokens"]))
def test_each_rank_selects_other_tokens(name: str, trained: Trained) -> None:
    first, second = (rank["selections"] for rank in trained(name))
    assert len(first) == len(second) == UPDATES
    assert sum(not torch.equal(one, other) for one, other in zip(first, second, strict=True)) >= UPDATES - 2


@pytest.mark.parametrize("name", quick(RESUMED, ["hift and tokens"]))
def test_a_run_resumed_in_mid_cycle_has_the_bits_of_one_that_never_stopped(name: str, resumed: Trained) -> None:
    assert [differing(*rank) for rank in resumed(name)] == [[], []]


def test_two_ranks_continue_what_one_process_began_and_one_what_two_began(
    resumed: Trained, folder: Path, tmp_path: Path
) -> None:
    whole, exact = with_exact(lambda: run(tmp_path, RANKS * BATCH, **CASES["hift"])[1][-1])
    run(tmp_path / "alone", RANKS * BATCH, **SAVING, **CASES["hift"])
    from_one_process = run_ranks(continue_alone, RANKS, tmp_path / "alone")
    resumed("hift")
    _, alone, _ = run(folder / "resumed hift" / "cut", RANKS * BATCH, resume=True, **CASES["hift"])
    for weights in (alone, *from_one_process):
        assert len(weights) == UPDATES - STOP
        assert_step_close(weights[-1], whole, exact, cap=CAP)
