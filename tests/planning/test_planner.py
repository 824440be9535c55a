"""Plans of one run after the other, which share a model and its updates, against the plan of each alone."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from slivertune.planning import make
from slivertune.planning.course import CourseLedger
from slivertune.planning.make import Planner, make_plan
from slivertune.planning.model import build_model
from slivertune.planning.request import PlanRequest
from tests.helpers.plan_requests import paper_request
from tests.helpers.ranks import quick
from tests.planning.made import narrow_llama, tiny_model
from tests.planning.test_extension import MIXTURE

RUNS: dict[str, dict[str, Any]] = {
    "hift": {"precision": "mixed_hi", "layers_per_group": 3, "stream_bytes": 16 * 1024},
    "hift, gradients on the host": {"layers_per_group": 2, "gradients": "host"},
    "hift, stepped": {"layers_per_group": 4, "gradients": "stepped"},
    "hift, on the device": {"state": "device"},
    "hift, discarded": {"state": "discard"},
    "hift, on disk": {"state": "disk", "steps_per_group": 3},
    "hift, int8": {"precision": "mixed_hi", "layers_per_group": 2, "waiting": "int8"},
    "hift, weights on the host": {"precision": "mixed_hi", "layers_per_group": 2, "weights": "host"},
    "hift, 8 bits": {"precision": "mixed_hi", "layers_per_group": 2, "optimizer": "adamw8bit"},
    "hift, Adafactor": {"precision": "bf16", "master": "stochastic", "optimizer": "adafactor"},
    "dense": {"method": "dense", "precision": "mixed"},
    "dense, 8 bits": {"method": "dense", "optimizer": "adamw8bit"},
    "lora": {"method": "lora", "precision": "bf16"},
    "lora, weights on the host": {"method": "lora", "precision": "bf16", "weights": "host"},
    "sft": {"method": "sft", "density": 0.1, "estimation_steps": 1, "reselection_interval": 2},
}
BATCHES: list[dict[str, Any]] = [
    {"batch_size": 3},
    {"batch_size": 2, "token_ratio": 0.3},
    {"batch_size": 4, "offload_activations": True},
    {"batch_size": 2},
    {"batch_size": 1, "seq_length": 96, "token_tile_size": 32},
    {"batch_size": 2, "gradient_accumulation_steps": 3},
    {"batch_size": 1, "gradient_accumulation_steps": 6},
]
"""With offloaded activations and without, and the larger one before the smaller one."""


@pytest.mark.parametrize("name", quick(RUNS, ["hift, 8 bits", "lora"]))
def test_plans_of_one_run_after_the_other_are_those_of_each_alone(name: str) -> None:
    # Of HiFT's groups one has two blocks, or a block and what is in no block.
    config = tiny_model(num_hidden_layers=2 if "hift" in name else 1).config
    given = {"gradient_checkpointing": True, "seq_length": 64, **RUNS[name]}
    planner = Planner(config)
    for batch in BATCHES:
        run = paper_request(**{**given, **batch})
        assert planner.plan(run) == make_plan(run, config), batch


ALIKE = {
    "HiFT": (narrow_llama(9), {"precision": "mixed_hi", "layers_per_group": 1}),
    "HiFT, the highest block keeps": (narrow_llama(9), {"layers_per_group": 1, "keep_activations": 1}),
    "HiFT, weights on the host": (narrow_llama(9), {"precision": "bf16", "layers_per_group": 1, "weights": "host"}),
    "a warning of each size": (MIXTURE, {"method": "lora", "precision": "bf16", "waiting": "int8"}),
}
"""Models of equal blocks, and settings."""


@pytest.mark.parametrize("name", quick(ALIKE, ["HiFT, the highest block keeps"]))
def test_smaller_models_are_shared_and_extended_as_for_one_plan(name: str, measured: list[int]) -> None:
    config, settings = ALIKE[name]
    warns = name == "a warning of each size"
    planner = Planner(config)
    with pytest.warns(UserWarning, match="stacks of experts") if warns else nullcontext():
        for batch in ({"batch_size": 3}, {"batch_size": 2, "offload_activations": True}):
            run = paper_request(**{"gradient_checkpointing": True, "seq_length": 64, **settings, **batch})
            plan = planner.plan(run)
            assert min(measured) < config.num_hidden_layers
            assert plan == make_plan(run, config), batch
            # A warning would name the sizes of a smaller model.
            assert any("were run" in note for note in plan.notes) is warns


@pytest.mark.parametrize(
    "settings",
    [
        {"layers": ["model.embed_tokens", "model.layers.*", "model.norm+lm_head"]},
        {"method": "lora", "lora_target_modules": ["q_proj"]},
    ],
    ids=["layers", "target modules"],
)
def test_names_may_be_in_a_list_as_scripts_give_them(settings: dict[str, Any]) -> None:
    named = {name: tuple(each) if isinstance(each, list) else each for name, each in settings.items()}
    config = tiny_model(num_hidden_layers=1).config
    found, expected = (make_plan(paper_request(seq_length=32, **each), config) for each in (settings, named))
    assert found.peak == expected.peak


def test_a_plan_that_fails_leaves_nothing_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends when the gradients of the group are complete, before its update."""

    class BrokenOffError(Exception):
        pass

    def break_off(*ignored: Any) -> None:
        raise BrokenOffError

    config = tiny_model(num_hidden_layers=2).config
    run = paper_request(precision="mixed_hi", layers_per_group=2, gradient_checkpointing=True, seq_length=64)
    planner = Planner(config)
    planner.plan(run)
    larger = replace(run, batch_size=2, token_tile_size=32)
    with monkeypatch.context() as patch:
        patch.setattr(CourseLedger, "current", break_off)  # called after the backward
        with pytest.raises(BrokenOffError):
            planner.plan(larger)
    assert planner.plan(larger) == make_plan(larger, config)


def test_models_are_kept_for_the_last_settings_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []

    def noted(request: PlanRequest, config: Any) -> Any:
        built.append(int(request.layers_per_group))
        return build_model(request, config)

    monkeypatch.setattr(make, "build_model", noted)
    monkeypatch.setattr(make, "_MOST_KEPT", 2)
    planner = Planner(tiny_model(num_hidden_layers=1).config)
    for m in (1, 2, 1, 3, 1, 2):
        planner.plan(paper_request(layers_per_group=m, seq_length=32))
    assert built == [1, 2, 3, 2]
