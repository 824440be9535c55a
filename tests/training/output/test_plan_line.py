import json
import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from slivertune.cli import main
from slivertune.planning.make import make_plan
from slivertune.planning.request import PlanRequest
from slivertune.sft import SFT
from slivertune.training.device_peak import DevicePeak
from slivertune.training.embedded.base_model import BASE_RECIPE, save_base_model, train_base_model
from slivertune.training.output import plan_line, plan_process
from slivertune.training.output.plan_line import plan_run, request_of
from tests.helpers.plan_requests import paper_request
from tests.training.tiny_runs import Runs, train, write_classes, write_texts

TOLERANCE = 0.03
"""What a plan may be off: temporaries inside of a kernel are seen by no one."""


@pytest.fixture(scope="module")
def embedded_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded default's model by its sizes, hardly trained: bytes do not depend on what a weight is."""
    folder = tmp_path_factory.mktemp("embedded") / "base"
    model = train_base_model(replace(BASE_RECIPE, num_steps=1), ["a text of some length " * 20], lambda *args: None)
    save_base_model(model, BASE_RECIPE, folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("--method", "hift", "--layers_per_group", "4", "--steps_per_group", "1"),
        ("--method", "hift", "--steps_per_group", "1"),
        ("--method", "dense"),
        (
            *("--method", "hift", "--bf16", "--gradient_checkpointing", "true", "--stream_bytes", "262144"),
            *("--steps_per_group", "1"),
        ),
        (
            *("--method", "hift", "--bf16", "--gradient_checkpointing", "true", "--keep_activations", "4"),
            *("--steps_per_group", "1"),
        ),
        ("--method", "dense", "--gradient_checkpointing", "true", "--keep_activations", "3"),
        ("--method", "dense", "--gradient_accumulation_steps", "2"),
        ("--method", "sft", "--density", "0.05"),
        ("--method", "sft", "--density", "0.05", "--reselection_interval", "7"),
        ("--method", "sft", "--density", "0.05", "--reselection_interval", "0"),
        ("--method", "sft", "--num_weights", "90000", "--packed"),
        ("--method", "sft", "--equivalent_lora_rank", "8", "--redistribute", "--train_embeddings"),
        ("--method", "sft", "--density", "0.1", "--sft_target_modules", "q_proj", "down_proj"),
        ("--method", "sft", "--density", "0.1", "--selection", "momentum", "--sft_momentum", "0.9"),
        ("--method", "lora", "--lora_target_modules", "q_proj", "v_proj"),
        ("--method", "dense", "--attn_implementation", "eager"),
        ("--method", "hift", "--steps_per_group", "2", "--state", "discard"),
    ],
    ids=" ".join,
)
def test_the_planned_peak_of_the_embedded_default_is_the_measured_one_as_is_that_of_its_kept_run_file(
    words: tuple[str, ...], embedded_base: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # The sizes of the run without arguments (256 tokens, 4 rows, 4 layers a group), and two cycles of as many as 8
    # groups: in the first, masters and state are made, in the second they are met.
    more = ("--max_steps", "16", "--max_length", "256", "--packing", "--per_device_train_batch_size", "4")
    data = write_texts(tmp_path, count=400)
    results = train(embedded_base, data, tmp_path / "out", *more, "--sample_tokens", "0", *words)
    planned, measured = results["planned_peak_bytes"], results["measured_peak_bytes"]
    assert measured == results["peak_bytes"]["device"]
    assert planned == pytest.approx(measured, rel=TOLERANCE)
    capfd.readouterr()
    assert main(["plan", str(tmp_path / "out" / "slivertune_run.yaml"), "--kernels", "cpu", "--json"]) == 0
    kept = json.loads(capfd.readouterr().out)
    assert kept["peak_bytes"] == pytest.approx(measured, rel=TOLERANCE)


@pytest.mark.slow
def test_adapters_that_drop_inputs_are_planned_with_the_masks_of_the_device(
    embedded_base: Path, tmp_path: Path
) -> None:
    words = ("--max_steps", "2", "--max_length", "256", "--packing", "--sample_tokens", "0", "--lora_dropout", "0.1")
    data = write_texts(tmp_path, count=400)
    results = train(embedded_base, data, tmp_path / "out", *words, method="lora")
    # Each block's seven linear layers drop inputs of their own; a CPU's masks are fp32, those of a GPU take a byte.
    recipe = BASE_RECIPE
    num_dropped = 2 * 256 * recipe.num_layers * (6 * recipe.hidden_size + recipe.intermediate_size)
    planned = results["planned_peak_bytes"]
    assert planned == pytest.approx(results["measured_peak_bytes"], rel=TOLERANCE)
    assert 3 * num_dropped > 2 * TOLERANCE * planned, "masks of a byte would not be seen"


def test_a_run_says_what_is_planned_before_and_what_was_measured_after(runs: Runs) -> None:
    # All rows are equally long, so that what ran is what was planned.
    results = runs.train("out", "--packing", "--max_length", "32")
    planned, measured = results["planned_peak_bytes"], results["measured_peak_bytes"]
    assert results["planned_batch"] == results["largest_batch"] == {"num_rows": 2, "num_tokens": 32}
    start, _, end = runs.printed().partition("evaluation before")
    assert f"  memory  {planned / 1e6:,.1f} MB planned at the peak (weights " in start
    assert f"{measured / 1e6:,.1f} MB, planned {planned / 1e6:,.1f} MB ({planned / measured - 1:+.1%})" in end


def test_a_run_that_never_met_its_longest_row_says_how_long_those_were_that_it_met(runs: Runs, tmp_path: Path) -> None:
    # One row of forty has as many tokens as the plan is for; two of them are drawn.
    path = write_texts(tmp_path)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"text": "x" * 120}) + "\n")
    results = runs.train("out", "--max_steps", "1", "--eval_file", str(path), data=path)
    planned, ran = results["planned_batch"], results["largest_batch"]
    assert (planned, ran["num_rows"]) == ({"num_rows": 2, "num_tokens": 121}, 2)
    assert 50 < ran["num_tokens"] < 121
    line = f"for rows of 121 tokens; the longest that ran had {ran['num_tokens']}"
    assert line in " ".join(runs.printed().split())


def test_a_plan_that_draws_leaves_the_runs_random_state_as_it_was(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    def draw_and_plan(*args: Any) -> Any:
        torch.rand(3)
        return make_plan(*args)

    planner = Mock(side_effect=draw_and_plan)
    monkeypatch.setattr(plan_line, "make_plan", planner)
    with closing(runs.assembled("out")) as run:
        before = torch.get_rng_state()
        plan = plan_run(run)
    assert plan is not None and planner.call_count == 1
    assert torch.equal(torch.get_rng_state(), before)


def test_without_the_ledger_nothing_is_planned(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_line, "make_plan", None)
    results = runs.train("out", "--memory_ledger", "off")
    assert (results["planned_peak_bytes"], results["measured_peak_bytes"]) == (None, None)
    assert "planned" not in runs.printed()


def test_a_plan_that_fails_is_one_line_and_the_run_goes_on(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_line, "make_plan", Mock(side_effect=RuntimeError("an operator\nwithout sizes")))
    results = runs.train("out")
    assert results["planned_peak_bytes"] is None and results["measured_peak_bytes"] > 0
    assert "  memory  not planned: an operator without sizes\n" in runs.printed()


def die(*args: Any) -> None:
    os._exit(9)


@pytest.mark.slow
def test_on_ranks_a_plan_is_made_apart_and_may_die(
    tiny_base: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with closing(Runs(tiny_base, texts, tmp_path, capfd).assembled("out")) as run:
        planned = make_plan(request_of(run), run.source.config)
        capfd.readouterr()
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        assert plan_run(run) == planned
        monkeypatch.setattr(plan_process, "_plan", die)
        assert plan_run(run) is None
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("method", "words", "changes"),
    [
        ("hift", (), {"precision": "fp32"}),
        (
            "hift",
            ("--bf16", "--layers_per_group", "2", "--stream_bytes", "9", "--state", "discard"),
            {"precision": "mixed_hi", "layers_per_group": 2, "master": "fp32", "stream_bytes": 9, "state": "discard"},
        ),
        ("hift", ("--bf16", "--master", "none"), {"precision": "bf16"}),
        ("hift", ("--bf16", "--master", "stochastic"), {"precision": "bf16", "master": "stochastic"}),
        ("hift", ("--gradients", "stepped", "--max_grad_norm", "0"), {"gradients": "stepped"}),
        (
            "dense",
            ("--gradient_accumulation_steps", "3", "--gradient_checkpointing", "true", "--token_ratio", "0.5"),
            {"gradient_accumulation_steps": 3, "gradient_checkpointing": True, "token_ratio": 0.5},
        ),
        ("dense", ("--optim", "sgd", "--optim_args", "momentum=0.9"), {"optimizer": "sgd_momentum"}),
        ("dense", ("--optim", "sgd", "--chunked_cross_entropy", "false"),
         {"optimizer": "sgd", "chunked_cross_entropy": False}),
        ("dense", ("--weights_dtype", "bf16"), {"precision": "bf16"}),
        ("dense", ("--bf16", "--use_cpu"), {"precision": "mixed"}),
        ("lora", ("--lora_rank", "3"), {"lora_rank": 3}),
    ],
)  # fmt: skip
def test_a_run_is_planned_as_what_it_is(
    method: Any, words: tuple[str, ...], changes: dict[str, Any], runs: Runs
) -> None:
    with closing(runs.assembled("out", *words, method=method)) as run:
        request = request_of(run)
    longest = max(len(row["input_ids"]) for row in run.task.train_dataset)
    assert longest < 128, "the rows are shorter than --max_length, and padded to the longest at most"
    kernels = "gpu" if torch.cuda.is_available() and "--use_cpu" not in words else "cpu"
    settings = {"method": method, "kernels": kernels, "batch_size": 2, "seq_length": longest, **changes}
    assert request == (paper_request if method == "hift" else PlanRequest)(**settings)


def test_sft_is_planned_with_as_many_weights_as_it_trains(runs: Runs) -> None:
    words = ("--equivalent_lora_rank", "2", "--selection", "momentum", "--packed", "--sft_target_modules", "q_proj")
    with closing(runs.assembled("out", *words, method="sft")) as run:
        request, optimizer = request_of(run), run.trainer.optimizer
        planned = make_plan(request, run.source.config)
        assert isinstance(optimizer, SFT)
        assert planned.num_trainable_peak == optimizer.num_weights
    # Packed deltas are bf16, the weights are not.
    assert (request.precision, request.selection, request.packed) == ("fp32", "momentum", True)


def test_a_classifier_is_planned_with_its_classes(runs: Runs, tmp_path: Path) -> None:
    words = ("--task", "classification", "--chunked_cross_entropy", "false")
    with closing(runs.assembled("out", *words, data=write_classes(tmp_path))) as run:
        request = request_of(run)
    assert (request.task, request.num_labels) == ("classification", 2)


def test_what_a_plan_has_no_word_for_is_said_and_trained(runs: Runs) -> None:
    results = runs.train("out", "--optim", "rmsprop", method="dense")
    assert results["planned_peak_bytes"] is None
    assert "  memory  not planned: a plan does not know --optim rmsprop" in runs.printed()


def test_on_cuda_the_largest_allocation_of_an_update_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    reset = Mock()
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", Mock(side_effect=(7, 9, 8)))
    for device, num_bytes in (("cuda", 9), ("cpu", None)):
        peak: Any = DevicePeak()
        for _ in range(3):
            peak.on_step_begin(SimpleNamespace(device=torch.device(device)), None, None)
            peak.on_step_end(SimpleNamespace(device=torch.device(device)), None, None)
        assert (peak.num_bytes, reset.call_count) == (num_bytes, 3)
