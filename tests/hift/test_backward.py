"""Backward must not run below the active group: graphs walked, operations counted; and under torch.compile."""

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from slivertune import HiFT, HiFTConfig
from slivertune.core.checkpointing import enable_checkpointing
from tests.helpers.models import (
    LAYERS,
    assert_all_moved,
    assert_same_bits,
    label_batches,
    tiny_bert,
    tiny_gpt2,
    tiny_llama,
    token_batches,
    twin,
    weights,
)
from tests.helpers.reference import naive_groups, train
from tests.hift.cases import DTYPES, hift_over
from tests.hift.test_skipped_turns import mean_of_tokens, plain_bert


class CountOperations(TorchDispatchMode):
    """Counts every dispatched operation by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def operations(loss: torch.Tensor) -> Counter[str]:
    """Run backward and count its operations."""
    with CountOperations() as mode:
        loss.backward()
    return mode.counts


def leaves(loss: torch.Tensor) -> set[int]:
    """Identities of the tensors that the graph of a loss accumulates gradients into."""
    found, seen, stack = set(), set(), [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        stack.extend(following for following, _ in node.next_functions)
    return found


def blocks_of(model: nn.Module) -> nn.ModuleList:
    return next(module for module in model.modules() if isinstance(module, nn.ModuleList))


MODELS = {
    "llama": (tiny_llama, token_batches),
    "tied llama": (lambda: tiny_llama(tied=True), token_batches),
    "gpt2": (tiny_gpt2, token_batches),
    "bert": (tiny_bert, label_batches),
}


@pytest.mark.parametrize("is_reentrant", [False, True], ids=["all kept", "reentrant"])
@pytest.mark.parametrize("architecture", MODELS)
def test_the_graph_holds_the_active_group_alone(architecture: str, is_reentrant: bool) -> None:
    build, make_batches = MODELS[architecture]
    model, hift = hift_over(build(), torch.optim.SGD, lr=0.1)
    if is_reentrant:
        enable_checkpointing(model, {"use_reentrant": True})
    outputs: dict[int, bool] = {}
    # A block's output is read where the next begins: older transformers run a block's hooks inside of its checkpoint.
    for index, block in enumerate(blocks_of(model)[1:]):

        def note(_module: nn.Module, inputs: Any, index: int = index) -> None:
            outputs[index] = inputs[0].requires_grad

        block.register_forward_pre_hook(note)
    for active, group in enumerate(naive_groups(model, 1)):
        loss = model(**make_batches(1)[0]).loss
        if not is_reentrant:  # whose graph does not show what its blocks train
            assert leaves(loss) == {id(model.get_parameter(name)) for name in group}
        # Block i is layer i + 1; below the active layer nothing is recorded.
        assert outputs == {index: index + 1 >= active for index in range(len(blocks_of(model)) - 1)}
        loss.backward()
        hift.step()


@pytest.mark.parametrize("layers_per_group", [1, 2])
def test_backward_runs_the_operations_of_a_model_frozen_by_hand(layers_per_group: int) -> None:
    hand, dense, batch = tiny_llama(), tiny_llama(), token_batches(1)[0]
    model, hift = hift_over(tiny_llama(), torch.optim.SGD, layers_per_group=layers_per_group, lr=0.0)
    full = operations(dense(**batch).loss).total()
    totals = []
    for group in naive_groups(hand, layers_per_group):
        for name, parameter in hand.named_parameters():
            parameter.requires_grad_(name in group)
        counted = operations(model(**batch).loss)
        assert counted == operations(hand(**batch).loss)
        totals.append(counted.total())
        hift.step()
        hand.zero_grad()
    # The embedding's own backward is small; from the lowest block upwards each turn saves a block.
    assert full > max(totals)
    assert all(lower > upper for lower, upper in itertools.pairwise(totals[1:]))


def enable(model: nn.Module) -> None:
    enable_checkpointing(model)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("architecture", MODELS)
def test_checkpointing_keeps_backward_above_the_active_group(architecture: str, when: str) -> None:
    build, make_batches = MODELS[architecture]
    model, batch = build(), make_batches(1)[0]
    hand = twin(model)
    enable(hand)
    hand.disable_input_require_grads()
    if when == "before":
        enable(model)
    hift = HiFT(model, torch.optim.SGD, config=HiFTConfig.paper(), lr=0.0)
    if when == "after":
        enable(model)
    totals = []
    for group in naive_groups(hand, 1):
        for name, parameter in hand.named_parameters():
            parameter.requires_grad_(name in group)
        loss = model(**batch).loss
        assert leaves(loss) == {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
        counted = operations(loss)
        assert counted == operations(hand(**batch).loss)
        totals.append(counted.total())
        hift.step()
        hand.zero_grad()
    # The lowest block is recomputed last; each turn higher up recomputes one block less.
    assert totals[1] > totals[2] > totals[3] > totals[4]


@pytest.mark.parametrize("when", ["before", "after"])
@DTYPES
def test_checkpointing_does_not_change_one_bit(dtype: torch.dtype, when: str) -> None:
    model = tiny_llama(dtype)
    other, before, batches = twin(model), weights(model), token_batches(10)
    if when == "before":
        enable(model)
    hift = HiFT(model, torch.optim.AdamW, config=HiFTConfig.paper(), lr=1e-2)
    if when == "after":
        enable(model)
    usual = HiFT(other, torch.optim.AdamW, config=HiFTConfig.paper(), lr=1e-2)
    assert train(model, hift, batches, 2 * LAYERS) == train(other, usual, batches, 2 * LAYERS)
    assert_same_bits(model, other)
    assert_all_moved(model, before)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore:.* is compiled as a whole")
@pytest.mark.parametrize("how", ["torch.compile", "model.compile"])
def test_a_compiled_model_trains_the_same_bits(how: str) -> None:
    (model, hift), (plain, other) = (
        hift_over(tiny_llama(), torch.optim.AdamW, order="top2down", lr=1e-2) for _ in range(2)
    )
    for each in (model, plain):
        # Compiled, sdpa gets a mask that it is spared otherwise, and another kernel of it may round otherwise.
        each.set_attn_implementation("eager")
    before = weights(model)
    torch._dynamo.reset()
    compiled: Any = model
    if how == "model.compile":
        model.compile(backend="eager")
    else:
        compiled = torch.compile(model, backend="eager")
    train(compiled, hift, token_batches(LAYERS + 1), LAYERS + 1)
    train(plain, other, token_batches(LAYERS + 1), LAYERS + 1)
    assert_same_bits(model, plain)
    assert_all_moved(model, before)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore:.* is compiled as a whole")
@pytest.mark.filterwarnings("ignore:no (gradient|batch)")
def test_a_compiled_model_passes_the_turn_of_a_group_that_is_not_reached() -> None:
    model, hift = hift_over(plain_bert(), torch.optim.AdamW, lr=1e-2)
    torch._dynamo.reset()
    compiled: Any = torch.compile(model, backend="eager")
    for step in range(2 * hift.num_groups):
        mean_of_tokens(compiled, step).backward()
        hift.step()
    assert hift.skipped_turns == {hift.num_groups - 1: 2} and hift.updates == 2 * (hift.num_groups - 1)
