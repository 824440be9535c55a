"""Features that do not go together are refused where the second comes, whichever it is and whoever attaches it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import nn

import slivertune as st
from slivertune import HiFT, HiFTConfig
from slivertune.core import activation_room, kept_activations
from slivertune.core.refused_pairs import REFUSED_PAIRS, Feature, RefusedPair, refuse_together
from tests.helpers.compilation import IGNORED
from tests.helpers.models import tiny_llama, token_batches

pytestmark = IGNORED

(BATCH,) = token_batches(1)
COMPILE: dict[str, Any] = {"backend": "eager"}


def _model() -> Any:
    model: Any = tiny_llama()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def _hift(model: Any, **config: Any) -> None:
    model.kept = HiFT(model, torch.optim.SGD, config=HiFTConfig.paper(**config), lr=1e-2)


def _wrap(model: Any, **config: Any) -> None:
    model.kept = HiFT.wrap(torch.optim.SGD(model.parameters(), lr=1e-2), model, config=HiFTConfig.paper(**config))


def _compiled_whole(model: Any) -> Any:
    return torch.compile(model, **COMPILE)


def _compiled_function(model: Any) -> Any:
    return torch.compile(lambda **batch: model(**batch).loss, **COMPILE)


def _compiled_block(model: Any) -> None:
    model.model.layers[1] = torch.compile(model.model.layers[1], **COMPILE)


def _compiled_forward(model: Any) -> None:
    model.model.layers[1].forward = torch.compile(model.model.layers[1].forward, **COMPILE)


DOORS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "torch.compile": {
        "compile_blocks": lambda model: st.compile_blocks(model, **COMPILE),
        "model.compile": lambda model: model.compile(**COMPILE),
        "inner model.compile": lambda model: model.model.compile(**COMPILE),
        "block.compile": lambda model: model.model.layers[1].compile(**COMPILE),
        "block.compile, whole graph": lambda model: model.model.layers[0].compile(fullgraph=True, **COMPILE),
        "torch.compile(model)": _compiled_whole,
        "torch.compile(model), whole graph": lambda model: torch.compile(model, fullgraph=True, **COMPILE),
        "a compiled function": _compiled_function,
        "torch.compile(block)": _compiled_block,
        "torch.compile(block.forward)": _compiled_forward,
    },
    "tile_tokens": {"tile_tokens": lambda model: st.tile_tokens(model, 6)},
    "offload_activations": {"offload_activations": st.offload_activations},
    "keep_activations='auto'": {"keep_activations": lambda model: st.keep_activations(model, "auto")},
    "waiting": {
        "HiFT": lambda model: _hift(model, waiting="int8"),
        "HiFT.wrap": lambda model: _wrap(model, waiting="int8"),
        "quantize_layers": lambda model: st.quantize_layers(model, "int8"),
    },
    "weights='host'": {
        "HiFT": lambda model: _hift(model, weights="host"),
        "HiFT.wrap": lambda model: _wrap(model, weights="host"),
    },
}
AT_A_FORWARD = ("torch.compile(block)", "torch.compile(block.forward)")
"""Doors that put something into the model, as those that put a module around it: only a forward tells of them."""
CASES = [
    pytest.param(
        pair, first, second, id=f"{pair.first}, {first} then {pair.second}, {second}" + mirrored * "; mirrored"
    )
    for listed in REFUSED_PAIRS
    for mirrored, pair in enumerate((listed, RefusedPair(first=listed.second, second=listed.first, reason="")))
    for first in DOORS[pair.first]
    for second in DOORS[pair.second]
]


@pytest.fixture(autouse=True)
def measurable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU says nothing of its free memory; and nothing that was traced stays."""
    monkeypatch.setattr(activation_room, "check_can_measure", lambda *_: None)
    monkeypatch.setattr(kept_activations, "ActivationRoom", lambda *_: None)
    torch._dynamo.reset()


def _text_of(pair: RefusedPair) -> str:
    return str(next(each for each in REFUSED_PAIRS if {each.first, each.second} == {pair.first, pair.second}))


def _attach_and_call(model: Any, made: list[Any], feature: str, door: str) -> None:
    made.append(DOORS[feature][door](model))
    called = next((each for each in made if isinstance(each, (nn.Module, FunctionType))), model)
    assert called is not model or door in AT_A_FORWARD, "it was to be refused at once"
    called(**BATCH)


@pytest.mark.parametrize(("pair", "first", "second"), CASES)
def test_the_second_is_refused_where_it_comes(pair: RefusedPair, first: str, second: str) -> None:
    model = _model()
    made = [DOORS[pair.first][first](model)]
    with pytest.raises(RuntimeError) as refused:
        _attach_and_call(model, made, pair.second, second)
    assert type(refused.value) is RuntimeError and str(refused.value) == _text_of(pair)


def test_after_the_first_is_removed_the_second_comes() -> None:
    model = _model()
    before = [set(vars(each)) for each in model.modules()]
    with st.tile_tokens(model, 6), pytest.raises(RuntimeError):
        model.compile()
    assert [set(vars(each)) for each in model.modules()] == before
    assert not model._forward_pre_hooks
    model.model.layers[0].compile(**COMPILE)
    model(**BATCH)


@pytest.mark.parametrize("compiles_first", [False, True])
@pytest.mark.parametrize("feature", ["waiting", "weights='host'"])
def test_a_part_without_the_feature_may_be_compiled(feature: Feature, compiles_first: bool) -> None:
    model = _model()
    steps = [lambda: DOORS[feature]["HiFT"](model), lambda: model.lm_head.compile(**COMPILE)]
    for step in steps[::-1] if compiles_first else steps:
        step()
    model(**BATCH).loss.backward()
    model.kept.step()


def test_what_is_compiled_below_an_offloaded_block_is_left_alone() -> None:
    model = _model()
    for block in model.model.layers:
        block.mlp.compile(**COMPILE)
    with st.offload_activations(model):
        model(**BATCH).loss.backward()


def test_what_is_kept_from_compilation_is_not_compiled() -> None:
    model = _model()
    for block in model.model.layers:
        block.mlp.forward = torch.compiler.disable(block.mlp.forward)
    _hift(model, weights="host")
    model(**BATCH).loss.backward()
    model.kept.step()


def test_a_copy_of_the_model_may_be_compiled() -> None:
    model = _model()
    with st.tile_tokens(model, 6):
        other = copy.deepcopy(model)
        other.model.layers[0].compile(**COMPILE)
        other(**BATCH)


@pytest.mark.parametrize("pair", REFUSED_PAIRS, ids=str)
def test_settings_are_refused_in_the_words_of_the_user(pair: RefusedPair) -> None:
    refuse_together({pair.first: "--one", pair.second: None})
    with pytest.raises(ValueError, match=r"^--one does not go with --other: .*\. Leave out one of the two$"):
        refuse_together({pair.first: "--one", pair.second: "--other"})
