"""Base optimizers whose step is compiled: they are measured, stepped and resumed as any other."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters, disable_cache_limit

import slivertune
from slivertune import HiFT, HiFTConfig
from slivertune.core.ledger import Ledger
from tests.helpers.compilation import IGNORED
from tests.helpers.models import assert_same_bits, small_decoder, token_batches, twin, weights
from tests.helpers.reference import NaiveHiFT, naive_groups, train
from tests.hift.cases import hift_over, reloaded, said, with_reference
from tests.hift.test_nested_state import torchao
from tests.training.test_callbacks import make_trainer

pytestmark = IGNORED

BLOCKS = 8
"""With embedding and head ten groups, more than torch compiles a function for by itself."""
BATCHES = token_batches(6)


@pytest.fixture(autouse=True)
def traced(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compile by a backend that runs what was traced as it is."""
    torch._dynamo.reset()
    counters.clear()
    if "inductor" in request.node.name:
        yield
        return
    with torch.compiler.set_stance("default", force_backend="eager"):
        yield


def _update(parameter: torch.Tensor, gradient: torch.Tensor, moment: torch.Tensor, rate: float) -> None:
    moment.lerp_(gradient, 0.1)
    parameter.add_(moment, alpha=-rate)


class Momentum(torch.optim.Optimizer):
    """Momentum, written for one tensor after the other."""

    update = staticmethod(_update)

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state:
                        state["moment"] = torch.zeros_like(parameter)
                    self.update(parameter, parameter.grad, state["moment"], group["lr"])


class CompiledUpdate(Momentum):
    """Compiles what it does to one tensor, as torchao's do."""

    update = staticmethod(torch.compile(_update, fullgraph=True))


class CompiledStep(Momentum):
    """Compiles its whole step, which is another for each instance."""

    step = torch.compile(Momentum.step, fullgraph=True)


CONFIGS: dict[str, dict[str, Any]] = {
    "whole groups": {},
    "pieces": {"elementwise": True, "stream_bytes": 4096},
    "disk": {"state": "disk"},
    "stepped": {"elementwise": True, "gradients": "stepped"},
}


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (CompiledUpdate, "pieces"),
        pytest.param(CompiledUpdate, "disk", marks=pytest.mark.slow),
        pytest.param(CompiledStep, "whole groups", marks=pytest.mark.slow),
        pytest.param(CompiledStep, "pieces", marks=pytest.mark.slow),
        pytest.param(CompiledUpdate, "stepped", marks=pytest.mark.slow),
    ],
)
def test_ten_groups_are_ten_compiled_optimizers_rotated_by_hand(kind: Any, config: str, tmp_path: Path) -> None:
    settings = {**CONFIGS[config], **({"state_dir": str(tmp_path)} if config == "disk" else {})}
    model = small_decoder(blocks=BLOCKS)
    dense = twin(model)
    if kind is CompiledStep:  # whose compilation takes the longer the more weights it steps: a few of each block
        for name in weights(model):
            for each in (model, dense):
                each.get_parameter(name).requires_grad_("proj" not in name or "down_proj" in name)
    with said():
        _, hift = hift_over(model, kind, lr=1e-2, **settings)
    # What the backend runs are the operators that were traced: the bits of a step that is not compiled.
    naive = NaiveHiFT(dense, Momentum, groups=naive_groups(dense, 1), lr=1e-2)
    steps = 2 * hift.num_groups
    train(dense, naive, BATCHES, steps)
    train(model, hift, BATCHES, steps)
    assert_same_bits(model, dense)
    num_graphs = counters["stats"]["unique_graphs"]
    train(model, hift, BATCHES, hift.num_groups, start=steps)
    assert counters["stats"]["unique_graphs"] == num_graphs, "nothing is compiled after the second cycle"


@pytest.mark.slow
def test_a_compiled_step_resumes_with_the_same_bits() -> None:
    runs = [hift_over(small_decoder(seed=seed), CompiledStep, lr=1e-2) for seed in (0, 5)]
    (model, first), (other, second) = runs
    train(model, first, BATCHES, 4)
    states = reloaded([model.state_dict(), first.state_dict()], weights_only=True)
    other.load_state_dict(states[0])
    second.load_state_dict(states[1])
    for run in runs:
        train(*run, BATCHES, 5, start=4)
    assert_same_bits(model, other)


def test_a_compiled_step_runs_in_a_ledger() -> None:
    dense = small_decoder()
    model, hift = hift_over(twin(dense), CompiledUpdate, layers_per_group=5, lr=1e-2)
    train(dense, CompiledUpdate(dense.parameters(), lr=1e-2), BATCHES, 2)
    with Ledger(model) as ledger:
        train(model, hift, BATCHES, 2)
        assert ledger.current().host > 0
    assert_same_bits(model, dense)


@pytest.mark.slow
def test_a_trainer_trains_with_an_optimizer_whose_step_is_compiled(tmp_path: Path) -> None:
    models = []
    for config in (None, HiFTConfig.paper(layers_per_group=5)):
        model = small_decoder()
        trainer = make_trainer(tmp_path, model=model, max_steps=3, max_grad_norm=0.0)
        trainer.optimizer_cls_and_kwargs = (CompiledStep, {"lr": 1e-2})
        if config is not None:
            slivertune.attach(trainer, config)
        trainer.train()
        models.append(model)
    assert_same_bits(*models)


def test_a_step_that_was_compiled_on_an_instance_is_told() -> None:
    model = small_decoder()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step = torch.compile(optimizer.step)
    with pytest.warns(UserWarning, match=r"step of this SGD was compiled.*class that compiles its own step"):
        hift = HiFT.wrap(optimizer, model, config=HiFTConfig.paper(layers_per_group=5))
    dense = twin(small_decoder())
    train(dense, torch.optim.SGD(dense.parameters(), lr=0.1), BATCHES, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, hift, BATCHES, 2)
    assert_same_bits(model, dense)


INDUCTOR = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler"),
]


@pytest.mark.parametrize(
    ("name", "layers_per_group"),
    [
        pytest.param(name, layers_per_group, marks=INDUCTOR)
        for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8")
        for layers_per_group in (1, 3)
    ],
)
def test_with_inductor_it_is_the_bare_optimizer_rotated_by_hand_also_after_a_resume(
    name: str, layers_per_group: int
) -> None:
    kind, batches = torchao(name), token_batches(3, vocab=384)
    settings = {"layers_per_group": layers_per_group, "lr": 1e-2}
    model, hift, dense, naive = with_reference(small_decoder(vocab=384, blocks=1), kind, **settings)
    with disable_cache_limit():
        train(dense, naive, batches, 4)
    train(model, hift, batches, 3)
    weights, state = reloaded([model.state_dict(), hift.state_dict()])
    other, second = hift_over(small_decoder(vocab=384, blocks=1, seed=5), kind, **settings)
    other.load_state_dict(weights)
    second.load_state_dict(state)
    train(other, second, batches, 1, start=3)
    assert_same_bits(other, dense)


@pytest.mark.parametrize("name", [pytest.param("AdamW8bit", marks=INDUCTOR), pytest.param("AdamWFp8", marks=INDUCTOR)])
def test_with_inductor_a_trainer_trains_what_the_bare_optimizer_trains(name: str, tmp_path: Path) -> None:
    models = []
    for config in (None, HiFTConfig.paper(layers_per_group=5)):
        model = small_decoder()
        trainer = make_trainer(tmp_path, model=model, max_steps=2, max_grad_norm=0.0)
        trainer.optimizer_cls_and_kwargs = (torchao(name), {"lr": 1e-2})
        if config is not None:
            slivertune.attach(trainer, config)
        trainer.train()
        models.append(model)
    assert_same_bits(*models)
