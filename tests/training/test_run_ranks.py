"""`slivertune train --method dense` and `--method lora` on two ranks, under DDP and every stage of ZeRO."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from slivertune.core.manifest import find_damage
from slivertune.training.command_line.parse import parse_train_arguments
from tests.helpers.models import differing
from tests.helpers.tolerance import assert_step_close, assert_sums_close, distance, exact_sums, step_limit, with_exact
from tests.training.tiny_runs import (
    EVALUATED_TOKENS,
    TINY_RECIPE,
    Runs,
    final_weights,
    results_of,
    saved_weights,
    train,
)
from tests.training.train_runs import OF_METHOD, PROBE, STEPS, STOPPED, Case, RanksOf, on_two_ranks

pytest.importorskip("deepspeed")
peft = pytest.importorskip("peft")

RANKS = 2
BATCH = 2
UPDATES = 6
CAP = 1e-4
"""Of the largest weight: with a rate that is off by 1 % they are 7e-3 apart."""
LAYOUTS = ("ddp", "zero1", "zero2", "zero3")
PAIRS = {f"{method}-{layout}": Case(method=method, layout=layout) for method in OF_METHOD for layout in LAYOUTS}
RESUMED = {
    f"{name}-again": Case(method=PAIRS[name].method, layout=PAIRS[name].layout, resumes=name)
    for name in ("dense-zero2", "lora-zero3")
}
# As the presets of accelerate configure DeepSpeed, which run in bf16 and name no bucket.
PRESETS = {
    name: Case(method=method, layout=layout, more=("--bf16", *more), names_bucket=False, has_bf16=True)
    for name, method, layout, more in (
        ("preset-dense", "dense", "zero2", ("--gradient_accumulation_steps", "2")),
        ("preset-lora", "lora", "zero3", ()),
    )
}
REFUSED = {"refused-four-bit": Case(method="lora", layout="zero3", more=("--load_in_4bit",))}
CASES = {**PAIRS, **RESUMED, **PRESETS, **REFUSED}

# PEFT 0.21 asks by the name that transformers 5.23 retires.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(tiny_base: Path, texts: Path, folder: Path) -> RanksOf:
    return on_two_ranks(CASES, tiny_base, texts, folder)


@pytest.fixture(scope="module")
def alone(tiny_base: Path, texts: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """The results of one process on the whole batch, by method, which lie in the folder `alone-METHOD`.

    Those of the same with exact sums lie in `exact-METHOD`.
    """
    whole_batch = ("--per_device_train_batch_size", str(RANKS * BATCH))

    def of_all_methods(kind: str) -> dict[str, dict[str, Any]]:
        return {
            method: train(tiny_base, texts, folder / f"{kind}-{method}", *STEPS, *more, *whole_batch, method=method)
            for method, more in OF_METHOD.items()
        }

    with exact_sums():
        of_all_methods("exact")
    return of_all_methods("alone")


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_two_ranks_train_as_one_process_does_on_the_whole_batch(
    name: str, ranks: RanksOf, alone: dict[str, dict[str, Any]], folder: Path
) -> None:
    case = CASES[name]
    seen_by_ranks = ranks(name)
    # Sums over ranks are rounded in another order than sums over one batch.
    weights = (final_weights(folder / run) for run in (name, f"alone-{case.method}", f"exact-{case.method}"))
    assert_step_close(*weights, cap=CAP)
    ours, theirs = results_of(folder / name), alone[case.method]
    assert (ours["layout"], ours["world_size"], ours["method"]) == (case.layout, RANKS, case.method)
    assert ours["num_steps"] == theirs["num_steps"] == UPDATES
    losses = (torch.tensor([each[when]["eval_loss"] for when in ("before", "after")]) for each in (ours, theirs))
    assert_sums_close(*losses, EVALUATED_TOKENS)
    assert ours["after"]["eval_loss"] < ours["before"]["eval_loss"]
    assert ours["num_trained"] == theirs["num_trained"] and ours["num_parameters"] == theirs["num_parameters"]
    held = 4 * ours["num_parameters"] / (RANKS if case.layout == "zero3" else 1)
    assert ours["highest_bytes"]["parameters"] == pytest.approx(held, rel=0.01)  # and buffers
    for seen in seen_by_ranks:
        assert seen.code == 0, seen.printed
        engine = "DistributedDataParallel" if case.layout == "ddp" else "DeepSpeedEngine"
        assert (seen.world_size, seen.engine) == (RANKS, engine)
        assert seen.facts.get("stage") == (None if case.layout == "ddp" else int(case.layout[-1]))
        assert len(seen.losses) == UPDATES // 2 and all(map(math.isfinite, seen.losses))


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_the_ranks_see_other_data_and_end_with_the_same_weights(name: str, ranks: RanksOf) -> None:
    first, second = ranks(name)
    assert len(first.batches) == len(second.batches) == UPDATES
    rows = [{tuple(row.tolist()) for batch in seen.batches for row in batch} for seen in (first, second)]
    assert rows[0].isdisjoint(rows[1])
    assert first.weights and differing(first.weights, second.weights) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_what_is_saved_loads_without_this_library_as_what_was_trained(
    name: str, ranks: RanksOf, tiny_base: Path, folder: Path
) -> None:
    seen_by_ranks, saved = ranks(name), folder / name / "model"
    if CASES[name].method == "dense":
        model: Any = AutoModelForCausalLM.from_pretrained(saved)
    else:
        assert not (saved / "model.safetensors").exists()
        model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_base), saved)
    AutoTokenizer.from_pretrained(saved)
    with torch.no_grad():
        before = AutoModelForCausalLM.from_pretrained(tiny_base)(input_ids=PROBE).logits
        loaded, exact = with_exact(lambda: model.eval()(input_ids=PROBE).logits)
    assert (loaded - before).abs().max() > 1e-2, "trained"
    for seen in seen_by_ranks:
        # The same weights by the same operators, of which an engine may lay one out otherwise in memory.
        logits = seen.logits
        assert logits is not None
        assert_step_close(logits, loaded, exact, cap=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_ends_as_one_that_never_stopped(
    name: str, ranks: RanksOf, alone: dict[str, dict[str, Any]], folder: Path
) -> None:
    origin = CASES[name].resumes
    assert origin is not None
    pairs = list(zip(ranks(name), ranks(origin), strict=True))
    assert find_damage(folder / origin / f"checkpoint-{STOPPED}") is None
    reference, exact = (final_weights(folder / f"{kind}-{CASES[name].method}") for kind in ("alone", "exact"))
    limit = step_limit(reference, exact, cap=CAP)
    for again, whole in pairs:
        assert again.code == 0, again.printed
        assert len(again.batches) == UPDATES - STOPPED
        assert all(map(torch.equal, again.batches, whole.batches[STOPPED:]))
        assert distance(again.weights, whole.weights) <= limit
    assert distance(final_weights(folder / name), final_weights(folder / origin)) <= limit


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PAIRS, *PRESETS])
def test_the_first_rank_reports_once_and_the_other_not_at_all(name: str, ranks: RanksOf) -> None:
    first, second = (seen.printed for seen in ranks(name))
    assert second == ""
    for line in (
        f": {CASES[name].method} on ",
        f"on each of {RANKS} ranks ({CASES[name].layout})",
        "the memory ledger counts rank 0 only, of 2 ranks",
        "  memory  ",
        "evaluation before: loss ",
        "step    2/6  loss ",
        f"{CASES[name].method}: {UPDATES} updates of ",
        "peak on the device  ",
        "last checkpoint  ",
    ):
        assert first.count(line) == 1, line
    assert [word for word in ("warning", "deprecated", "mismatch") if word in first.lower()] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_of_deepspeed_trains_in_bf16_with_small_buckets(name: str, ranks: RanksOf, folder: Path) -> None:
    case = CASES[name]
    for seen in ranks(name):
        assert seen.code == 0, seen.printed
        bucket = TINY_RECIPE.hidden_size**2
        assert seen.facts == {"stage": int(case.layout[-1]), "bf16": True, "bucket": bucket}
        assert len(seen.losses) == UPDATES // 2 and all(map(math.isfinite, seen.losses))
    results = results_of(folder / name)
    assert results["after"]["eval_loss"] < results["before"]["eval_loss"]
    assert "keeps no fp32 masters" not in ranks(name)[0].printed, "DeepSpeed keeps them"
    assert ranks(f"{case.method}-{case.layout}")
    assert (
        saved_weights(folder / name / "model").keys()
        == saved_weights(folder / f"{case.method}-{case.layout}" / "model").keys()
    )


@pytest.mark.slow
def test_4_bit_weights_under_zero3_are_refused_before_anything_is_loaded(ranks: RanksOf, folder: Path) -> None:
    first, second = ranks("refused-four-bit")
    assert (first.code, second.code) == (2, 2)
    assert "error: --load_in_4bit does not go with ZeRO-3" in first.printed
    assert "Use DDP, ZeRO-1 or ZeRO-2" in first.printed
    assert "loaded" not in second.printed
    assert not (folder / "refused-four-bit").exists()


def test_bf16_under_deepspeed_without_gpus_names_the_way_out(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setattr("slivertune.training.ranks.processes.is_torch_bf16_gpu_available", lambda: False)
    arguments = runs.arguments("out", method="lora")
    with pytest.raises(ValueError, match="accelerate launch --mixed_precision no"):
        parse_train_arguments(arguments[1:])
