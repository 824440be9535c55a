"""Features that do not go together are refused where the second comes, whichever it is and whoever attaches it."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FunctionType
from typing import Any, get_args
from unittest.mock import Mock, patch

import pytest
import torch
from torch import nn

import slivertune as st
from slivertune import HiFT, HiFTConfig, TokenTune
from slivertune.core import activation_room, kept_activations
from slivertune.core.refused_pairs import REFUSED_PAIRS, Feature, Member, RefusedPair, refuse_together
from slivertune.interop import compilation
from slivertune.interop.compilation import BlockCompilation
from slivertune.training import assemble
from slivertune.training.command_line.parse import parse_train_arguments
from slivertune.training.ranks.processes import check_processes
from tests.helpers.compilation import IGNORED
from tests.helpers.models import tiny_llama, token_batches
from tests.helpers.plan_requests import paper_request
from tests.training.test_callbacks import make_trainer

pytestmark = IGNORED

(BATCH,) = token_batches(1)
COMPILE: dict[str, Any] = {"backend": "eager"}


def _model() -> Any:
    model: Any = tiny_llama()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def _parked(model: Any, **settings: Any) -> None:
    model.model.layers.requires_grad_(False)
    st.park_layers(model, **settings)


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


def _loaded(model: Any) -> Any:
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = st.load_quantized(type(model), folder, "int8", dtype=torch.float32).train()
    loaded.gradient_checkpointing_enable({"use_reentrant": False})
    return loaded


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
    "quantised layers": {
        "HiFT": lambda model: _hift(model, waiting="int8"),
        "HiFT.wrap": lambda model: _wrap(model, waiting="int8"),
        "park_for_hift": lambda model: st.park_for_hift(model, HiFTConfig(waiting="int8")),
        "load_quantized": _loaded,
        "park_layers": lambda model: _parked(model, form="int8", place="device"),
    },
    "blocks on the host": {
        "HiFT": lambda model: _hift(model, weights="host"),
        "HiFT.wrap": lambda model: _wrap(model, weights="host"),
        "park_layers": lambda model: _parked(model, place="host"),
    },
}
AT_A_FORWARD = ("torch.compile(block)", "torch.compile(block.forward)")
"""Doors that put something into the model, as those that put a module around it: only a forward tells of them."""
MAKES_ITS_MODEL = "load_quantized"
"""Door that returns another model, on which nothing else can have been attached before."""


def cases_of(pair: RefusedPair, suffix: str) -> Iterator[Any]:
    """Each door of the first with each of the second; in `make test` each door with one or a few."""
    firsts, seconds = DOORS[pair.first], [door for door in DOORS[pair.second] if door != MAKES_ITS_MODEL]
    few = min(len(firsts), len(seconds))
    for (one, first), (other, second) in itertools.product(enumerate(firsts), enumerate(seconds)):
        name = f"{pair.first}, {first} then {pair.second}, {second}{suffix}"
        marks = () if one % few == other % few else pytest.mark.slow
        yield pytest.param(pair, first, second, id=name, marks=marks)


CASES = [
    case
    for listed in REFUSED_PAIRS
    if {listed.first, listed.second} <= DOORS.keys()
    for pair, suffix in (
        (listed, ""),
        (RefusedPair(first=listed.second, second=listed.first, reason=""), "; mirrored"),
    )
    for case in cases_of(pair, suffix)
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
    if first == MAKES_ITS_MODEL:
        model = made.pop()
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
@pytest.mark.parametrize("feature", ["quantised layers", "blocks on the host"])
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


def _attach_to_trainer(*settings: Any, aux_loss_enabled: bool = False, **options: Any) -> None:
    trainer: Any = make_trainer(Path("trainer"), **options)
    trainer.aux_loss_enabled = aux_loss_enabled
    st.attach(trainer, *settings)


def _compile_under(layout: str) -> None:
    trainer = make_trainer(Path("trainer"), torch_compile=True, torch_compile_backend="eager")
    with patch.object(compilation, "layout_of", return_value=layout):
        BlockCompilation(trainer, fullgraph=True).begin()


def _run_tiles_of_shards() -> None:
    model = _model()
    for each in model.parameters():
        each.ds_id = 0
    with st.tile_tokens(model, 6):
        model(**BATCH)


def _train(*words: str) -> Callable[[], Any]:
    return partial(parse_train_arguments, list(words))


def _attach(*settings: Any, **options: Any) -> Callable[[], Any]:
    return partial(_attach_to_trainer, *settings, **options)


STEPPED, OFFLOADED = (HiFTConfig.paper(gradients=each) for each in ("stepped", "host"))
SHARDED: dict[str, Any] = {"layout": "zero3", "num_gpus": 2}
UNCLIPPED: dict[str, Any] = {"max_grad_norm": 0.0, "fp16": True}
PROMPTS = ("--task", "prompt_classification", "--template", "{text} It was {mask}", "--label_words", "bad,good")
SETTING_DOORS: dict[tuple[Member, Member], dict[str, Callable[[], Any]]] = {
    ("tile_tokens", "use_liger_kernel"): {"train": _train("--token_tile_size", "64", "--use_liger_kernel")},
    ("tile_tokens", "zero3"): {
        "plan": partial(paper_request, token_tile_size=512, **SHARDED),
        "train": lambda: assemble._attach_tiles(_model(), 6, "zero3"),
        "forward": _run_tiles_of_shards,
    },
    ("quantised layers", "load_in_4bit"): {
        "train": _train("--method", "lora", "--waiting", "int8", "--load_in_4bit"),
        "plan": partial(paper_request, method="lora", waiting="int8", load_in_4bit=True),
    },
    ("blocks on the host", "load_in_4bit"): {
        "train": _train("--method", "lora", "--weights", "host", "--load_in_4bit"),
        "plan": partial(paper_request, method="sft", weights="host", load_in_4bit=True),
    },
    ("load_in_4bit", "zero3"): {
        "plan": partial(paper_request, method="lora", load_in_4bit=True, **SHARDED),
        "train": lambda: check_processes(Mock(world_size=1, deepspeed_plugin=Mock(zero_stage=3)), 1, four_bit=True),
    },
    ("torch.compile", "fsdp2"): {"attach": lambda: _compile_under("fsdp2")},
    ("torch.compile", "zero3"): {"attach": lambda: _compile_under("zero3")},
    ("gradients='stepped'", "max_grad_norm"): {
        "train": _train("--gradients", "stepped"),
        "attach": _attach(STEPPED),
    },
    ("gradients='stepped'", "fp16"): {
        "train": _train("--gradients", "stepped", "--max_grad_norm", "0", "--fp16"),
        "attach": _attach(STEPPED, **UNCLIPPED),
    },
    ("gradients='host'", "fp16"): {
        "train": _train("--gradients", "host", "--fp16"),
        "attach": _attach(OFFLOADED, **UNCLIPPED),
    },
    ("TokenTune", "label_smoothing_factor"): {
        "train": _train("--token_ratio", "0.3", "--label_smoothing_factor", "0.1"),
        "attach": _attach(TokenTune(ratio=0.3), label_smoothing_factor=0.1),
    },
    ("TokenTune", "compute_loss_func"): {"attach": _attach(TokenTune(ratio=0.3), loss=lambda *_, **__: None)},
    ("TokenTune", "router_aux_loss_coef"): {"attach": _attach(TokenTune(ratio=0.3), aux_loss_enabled=True)},
    ("TokenTune", "use_liger_kernel"): {
        "train": _train("--token_ratio", "0.3", "--use_liger_kernel"),
        "attach": _attach(TokenTune(ratio=0.3), use_liger_kernel=True),
    },
    ("TokenTune", "task='prompt_classification'"): {
        "train": _train("--dataset", "d.csv", *PROMPTS, "--token_ratio", "0.3")
    },
}
"""By pair with a setting that leaves no trace on a module: the ways in which a user can ask for both."""


def test_every_pair_has_doors_of_its_own() -> None:
    on_modules = [pair for pair in REFUSED_PAIRS if {pair.first, pair.second} <= DOORS.keys()]
    assert {(pair.first, pair.second) for pair in REFUSED_PAIRS if pair not in on_modules} == SETTING_DOORS.keys()
    assert set(get_args(Feature)) == DOORS.keys() == {each for pair in on_modules for each in (pair.first, pair.second)}


@pytest.mark.parametrize(
    ("pair", "door"),
    [
        pytest.param(pair, door, id=f"{pair.first} with {pair.second}, {door}")
        for pair in REFUSED_PAIRS
        if not {pair.first, pair.second} <= DOORS.keys()
        for door in SETTING_DOORS[pair.first, pair.second]
    ],
)
def test_a_setting_is_refused_where_it_is_read(
    pair: RefusedPair, door: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((RuntimeError, ValueError)) as refused:
        SETTING_DOORS[pair.first, pair.second][door]()
    assert " does not go with " in str(refused.value)
    assert str(refused.value).endswith(f": {pair.reason}. {pair.way_out}")


@pytest.mark.parametrize("pair", REFUSED_PAIRS, ids=str)
def test_settings_are_refused_in_the_words_of_the_user(pair: RefusedPair) -> None:
    refuse_together({pair.first: "--one", pair.second: None})
    message = f"--one does not go with --other: {pair.reason}. {pair.way_out}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        refuse_together({pair.first: "--one", pair.second: "--other"})
