"""`compile_blocks` on a model: what it leaves as it was, what it refuses, and what it does not compile."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from slivertune import compile_blocks, find_layers
from slivertune.core.layers import find_blocks
from tests.helpers.compilation import IGNORED, CountedBackend
from tests.helpers.models import BLOCKS, tiny_bert, tiny_llama, token_batches, twin

pytestmark = IGNORED


class Attention(nn.Module):
    """Only its name counts."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


class Broken(nn.Module):
    """A block that reads a value in the middle, where torch has to break its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(hidden)
        torch._dynamo.graph_break()
        return self.attention(self.linear(hidden))


class Stack(nn.Module):
    """Blocks one above the other."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def test_names_classes_weights_and_layers_are_as_before() -> None:
    model: Any = tiny_llama()
    before = [(name, type(each)) for name, each in model.named_modules()]
    state, layers = set(model.state_dict()), find_layers(model)
    handle = compile_blocks(model, backend="eager")
    assert [(name, type(each)) for name, each in model.named_modules()] == before
    assert set(model.state_dict()) == state and find_layers(model) == layers
    assert handle.paths == [f"model.layers.{number}" for number in range(BLOCKS)]


def test_after_remove_the_blocks_run_as_they_did() -> None:
    backend = CountedBackend()
    model: Any = tiny_llama()
    attributes = [set(vars(block)) for _, block in find_blocks(model)]
    (batch,) = token_batches(1)
    with compile_blocks(model, backend=backend) as handle:
        model(**batch)
    handle.remove()
    assert [set(vars(block)) for _, block in find_blocks(model)] == attributes
    model(**batch)
    backend.check(num_runs=BLOCKS)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_not_compiled_and_has_its_own_weights(duplicate: Any) -> None:
    backend = CountedBackend()
    model: Any = tiny_llama()
    handle = compile_blocks(model, backend=backend)
    other = duplicate(model)
    (batch,) = token_batches(1)
    expected = model(**batch).loss
    backend.check(num_runs=BLOCKS)
    assert torch.equal(other(**batch).loss, expected)
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight.zero_()
    assert not torch.equal(other(**batch).loss, expected) and torch.equal(model(**batch).loss, expected)
    backend.check(num_runs=2 * BLOCKS)
    with pytest.raises(TypeError, match="neither copied nor pickled"):
        duplicate(handle)


def test_encoders_are_compiled_too() -> None:
    backend = CountedBackend()
    model: Any = tiny_bert()
    plain = twin(model)
    compile_blocks(model, backend=backend)
    ids = torch.arange(8).view(1, 8)
    assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
    assert backend.num_graphs == 1 and backend.num_runs > 1


def test_generation_runs_uncompiled_and_says_the_same() -> None:
    backend = CountedBackend()
    model: Any = tiny_llama().eval()
    plain: Any = twin(model)
    compile_blocks(model, backend=backend)
    ids = torch.arange(5).view(1, 5)
    options: Any = {"max_new_tokens": 6, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))
    backend.check(num_runs=0)


def test_a_cache_in_training_is_refused() -> None:
    model: Any = tiny_llama()
    compile_blocks(model, backend="eager")
    with pytest.raises(ValueError, match=r"model\.layers\.0 is given a cache \(past_key_values\).*use_cache = False"):
        model(**token_batches(1)[0], use_cache=True)


def test_a_block_that_breaks_is_an_error_that_names_it_unless_it_may_break() -> None:
    CountedBackend()
    model, hidden = Stack(Broken(), Broken()), torch.ones(2, 4)
    expected = model(hidden)
    with compile_blocks(model, backend="eager"), pytest.raises(Exception, match="graph_break") as caught:
        model(hidden)
    assert type(caught.value).__module__.startswith("torch._dynamo")
    assert "blocks.0 (Broken)" in caught.value.__notes__[-1] and "fullgraph=False" in caught.value.__notes__[-1]
    with compile_blocks(model, fullgraph=False, backend="eager"):
        assert torch.equal(model(hidden), expected)


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda model: torch.compile(model, backend="eager"), "LlamaForCausalLM is compiled as a whole already"),
        (lambda model: _after(model, model.compile), "LlamaForCausalLM is compiled as a whole already"),
        (lambda model: _after(model, model.model.layers[1].compile), r"model\.layers\.1 is compiled already"),
        (lambda model: _after(model, lambda: compile_blocks(model)), r"model\.layers\.0 is compiled already\. Call"),
        (
            lambda model: _after(model, lambda: _offload(model.model.layers[2])),
            r"forward of model\.layers\.2 was repla",
        ),
    ],
)
def test_what_is_compiled_or_replaced_already_is_refused(prepare: Any, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        compile_blocks(prepare(tiny_llama()))


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Linear has no nn\.ModuleList.*can run block by block"):
        compile_blocks(nn.Linear(2, 2))


def _after(model: nn.Module, act: Any) -> nn.Module:
    act()
    return model


def _offload(block: Any) -> None:
    block.forward = block.forward
