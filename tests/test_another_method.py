"""A method that another package brings: a folder of its own and one registration each for ranks, plans and training."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from slivertune.chunked_loss import attach_chunked_cross_entropy
from slivertune.cli import main
from slivertune.core.layout import Layout
from slivertune.core.ledger import Ledger
from slivertune.interop import methods as interop
from slivertune.parallel import adapters
from slivertune.parallel.consistency.heartbeat import Heartbeat
from slivertune.parallel.ddp.gradient_sync import BucketedAllReduce
from slivertune.planning import methods as planned
from slivertune.training.methods.registry import TRAIN_METHODS, register_method
from slivertune.training.options.methods import METHOD_OPTIONS
from tests.helpers.models import Batch, differing, tiny_llama, token_batches, twin, weights
from tests.helpers.ranks import quick, run_ranks
from tests.helpers.tolerance import assert_step_close, with_exact
from tests.parallel.contract.runs import Case, load, running, save
from tests.planning.real import LLAMA
from tests.random_layers.optimizer import RandomLayers, RandomLayersConfig
from tests.random_layers.train import RandomLayersMethod
from tests.training.tiny_runs import UNMEASURED, Runs, saved_weights

OPTIONS: dict[str, Any] = {"lr": 1e-2, "eps": 1e-4}
CAP = 1e-4
"""Seven updates of another block apart, results differ by more than 1e-2."""


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module, name in ((adapters, "_adapters"), (planned, "_methods"), (interop, "_methods")):
        monkeypatch.setattr(module, name, dict(getattr(module, name)))
    register_method(RandomLayersMethod)
    yield
    del TRAIN_METHODS["random_layers"], METHOD_OPTIONS["random_layers"]


@dataclass(frozen=True, kw_only=True)
class RandomCase(Case):
    updates: int = 7

    def build_optimizer(self, model: nn.Module, **changes: Any) -> RandomLayers:
        return RandomLayers(model, **OPTIONS)

    def batch(self, update: int, micro: int, rank: int) -> Batch:
        return token_batches(1, seed=10 * update + rank)[0]


CASE = RandomCase()


def naive(model: nn.Module, num_ranks: int) -> dict[str, torch.Tensor]:
    """AdamW over everything, with the gradients of all but the drawn blocks thrown away."""
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
    drawn = RandomLayers(twin(model), config=RandomLayersConfig(), **OPTIONS)
    for update in range(CASE.updates):
        drawn._updates = update
        for rank in range(num_ranks):
            (CASE.loss(model, CASE.batch(update, 0, rank)) / num_ranks).backward()
        for name, parameter in model.named_parameters():
            if name not in drawn.active:
                parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def test_it_trains_on_one_device_as_its_naive_form_and_resumes(tmp_path: Path) -> None:
    with running(CASE, "single", 0) as run:
        save(run.train(0, 4), tmp_path / "state")
    with running(CASE, "single", 0) as run:
        load(run, tmp_path / "state")
        found = weights(run.train(4, CASE.updates).plain)
    assert differing(found, naive(tiny_llama(), 1)) == []


def train_on_rank(rank: int, num_ranks: int, layouts: list[Layout]) -> dict[str, dict[str, torch.Tensor]]:
    register_method(RandomLayersMethod)
    found = {}
    for layout in layouts:
        with running(CASE, layout, rank) as run:
            found[layout] = weights(run.train(0, CASE.updates).plain)
    return found


def test_it_trains_on_several_ranks_as_on_one() -> None:
    pytest.importorskip("deepspeed")
    layouts: list[Layout] = ["ddp", "zero2"]
    ranks = run_ranks(train_on_rank, 2, layouts, is_first=True)  # what it registers stays
    expected, exact = with_exact(lambda: naive(tiny_llama(), 2))
    for layout in layouts:
        for found in ranks:
            assert_step_close(found[layout], expected, exact, cap=CAP)


def test_a_layout_that_it_does_not_know_is_refused_in_its_own_words_or_ours() -> None:
    model = tiny_llama()
    optimizer = CASE.build_optimizer(model)
    with pytest.raises(ValueError, match="needs whole weights; take DDP in place of zero3"):
        adapters.check_before(optimizer, model, "zero3")
    with pytest.raises(ValueError, match=r"does not train under fsdp2\. Train on one device or under ddp, zero$"):
        adapters.adapter_of(optimizer, "fsdp2")


@pytest.mark.parametrize("layout", quick(["single", "ddp", "zero2"], ["single"]))
def test_its_plan_is_what_a_real_run_takes(layout: Layout, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    LLAMA.save_pretrained(tmp_path)
    words = ["plan", "--model", str(tmp_path), "--method", "random_layers", "--batch_size", "2", "--seq_length", "64"]
    words += ["--json", "--layout", layout, *([] if layout == "single" else ["--num_gpus", "2"])]
    assert main(words) == 0
    planned_bytes = json.loads(capsys.readouterr().out)["peak_bytes"]
    torch.manual_seed(0)
    model = LlamaForCausalLM(LLAMA)
    optimizer = RandomLayers(model, lr=1e-3, fused=True)
    ids = torch.randint(2, LLAMA.vocab_size, (2, 64))
    if layout != "single":
        BucketedAllReduce(model, model.parameters(), Heartbeat("alone"), start_mean=lambda flat: Mock())
    with attach_chunked_cross_entropy(model), Ledger(model) as ledger:
        for _ in range(12):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
    assert planned_bytes == pytest.approx(ledger.peak.device, rel=0.03)


def test_the_command_line_trains_it_and_its_checkpoint_resumes_to_the_bit(runs: Runs) -> None:
    words = ("--max_steps", "5", "--save_steps", "3", "--num_random_blocks", "1")
    results = runs.train("out", *words, method="random_layers")
    assert (results["method"], results["num_steps"]) == ("random_layers", 5)
    assert "random_layers on " in runs.printed()
    resume = ("--resume_from_checkpoint", str(runs["out"] / "checkpoint-3"))
    runs.train("again", *words, *resume, *UNMEASURED, method="random_layers")
    before, once, again = (saved_weights(each) for each in (runs.base, runs["out/model"], runs["again/model"]))
    assert differing(once, again) == []
    assert 0 < len(differing(once, before)) == len(before), "each of two blocks was drawn in five updates"
