"""`torch_compile=True` in the arguments of a Trainer that something is attached to."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import DynamoBackend
from torch._dynamo.utils import counters

import slivertune
from slivertune import HiFTConfig, SFTConfig, TokenTune, compile_blocks
from slivertune.core.compiled_blocks import has_compiled_blocks
from slivertune.core.layers import find_blocks
from slivertune.interop import compilation
from slivertune.interop.compilation import BlockCompilation
from tests.helpers.accelerator import forgotten
from tests.helpers.compilation import IGNORED, CountedBackend
from tests.helpers.models import assert_same_bits, tiny_llama, twin
from tests.training.test_callbacks import make_trainer

pytestmark = IGNORED

COMPILED: dict[str, Any] = {"torch_compile": True, "torch_compile_backend": "eager"}


@pytest.fixture(autouse=True)
def own_state() -> Iterator[None]:
    """accelerate keeps the plugin of a process's first Trainer."""
    with forgotten():
        yield


def plugin_of(trainer: Any) -> Any:
    return trainer.accelerator.state.dynamo_plugin


@pytest.mark.parametrize(
    "settings",
    [
        (HiFTConfig.paper(), TokenTune(ratio=0.4)),
        pytest.param((HiFTConfig.paper(layers_per_group=2),), marks=pytest.mark.slow),
        pytest.param((TokenTune(ratio=0.4),), marks=pytest.mark.slow),
        pytest.param((SFTConfig(density=0.1, reselection_interval=6),), marks=pytest.mark.slow),
    ],
)
def test_blocks_are_compiled_while_it_trains_and_the_bits_are_the_same(settings: Any, tmp_path: Path) -> None:
    CountedBackend()
    model = tiny_llama(blocks=2)
    plain = twin(model)
    trainer = make_trainer(tmp_path, model=model, max_steps=8, **COMPILED)
    slivertune.attach(trainer, *settings)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*compiled as a whole")
        trainer.train()
    assert 1 <= counters["stats"]["unique_graphs"] <= 4 and not counters["graph_break"]
    assert not has_compiled_blocks(model) and plugin_of(trainer).backend == DynamoBackend.EAGER
    other = make_trainer(tmp_path, model=plain, max_steps=8)
    # accelerate's plugin is still the first Trainer's.
    plugin_of(other).backend = DynamoBackend.NO
    slivertune.attach(other, *settings)
    other.train()
    assert_same_bits(model, plain)


@pytest.mark.parametrize("settings", [{"waiting": "int8"}, {"weights": "host"}])
def test_what_does_not_go_with_compilation_is_refused_when_attached(settings: Any, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=1, **COMPILED)
    with pytest.raises(ValueError, match=r"does not go with torch_compile=True: .*\. Leave out one of the two"):
        slivertune.attach(trainer, HiFTConfig.paper(**settings))


def test_a_model_that_is_made_for_the_training_is_compiled(tmp_path: Path) -> None:
    CountedBackend()
    trainer = make_trainer(tmp_path, max_steps=3, **COMPILED)
    made = []

    def make() -> Any:
        made.append(tiny_llama(blocks=2))
        return made[-1]

    trainer.model_init = make
    slivertune.attach(trainer, HiFTConfig.paper())
    trainer.train()
    assert len(made) == 1 and 1 <= counters["stats"]["unique_graphs"] <= 3
    assert not has_compiled_blocks(made[0])


def test_what_is_compiled_by_block_already_stays_so(tmp_path: Path) -> None:
    backend = CountedBackend()
    model = tiny_llama(blocks=2)
    compile_blocks(model, backend=backend)
    trainer = make_trainer(tmp_path, model=model, max_steps=3, **COMPILED)
    slivertune.attach(trainer, HiFTConfig.paper())
    trainer.train()
    backend.check(num_runs=2 * 3)
    assert has_compiled_blocks(model)


def test_a_training_that_fails_gives_everything_back(tmp_path: Path) -> None:
    model = tiny_llama(blocks=2)
    trainer = make_trainer(tmp_path, model=model, max_steps=3, **COMPILED)
    slivertune.attach(trainer, HiFTConfig.paper())

    def fail(*args: Any) -> None:
        raise KeyError("in the first forward")

    model.register_forward_pre_hook(fail)
    with pytest.raises(KeyError):
        trainer.train()
    assert not has_compiled_blocks(model) and plugin_of(trainer).backend == DynamoBackend.EAGER


def test_what_is_not_asked_for_is_not_compiled(tmp_path: Path) -> None:
    CountedBackend()
    model = tiny_llama(blocks=2)
    trainer = make_trainer(tmp_path, model=model, max_steps=2)
    slivertune.attach(trainer, HiFTConfig.paper())
    trainer.train()
    assert not counters["stats"]


def test_the_accelerators_own_settings_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(compilation, "compile_blocks", lambda model, **options: asked.append(options))
    trainer = make_trainer(tmp_path)
    plugin = plugin_of(trainer)
    plugin.backend, plugin.mode, plugin.dynamic = DynamoBackend.INDUCTOR, "max-autotune", True
    blocks = BlockCompilation(trainer, fullgraph=True)
    blocks.begin()
    assert plugin.backend == DynamoBackend.NO
    options = {"backend": "inductor", "mode": "max-autotune", "dynamic": True, "options": None, "fullgraph": True}
    assert asked == [options]


@pytest.mark.parametrize("layout", ["fsdp2", "zero3"])
def test_layouts_whose_weights_come_by_hooks_are_refused(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilation, "layout_of", lambda accelerator: layout)
    trainer = make_trainer(tmp_path, **COMPILED)
    with pytest.raises(ValueError, match=rf"torch_compile does not go with {layout}: .*\. Leave it out"):
        BlockCompilation(trainer, fullgraph=True).begin()
    model: Any = trainer.model
    BlockCompilation(trainer, fullgraph=False).begin()
    assert plugin_of(trainer).backend == DynamoBackend.EAGER, "as before"
    assert all("forward" not in vars(block) for _, block in find_blocks(model))
    assert isinstance(model, torch.nn.Module)
