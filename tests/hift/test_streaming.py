"""Pieces, places of the state and forms of the master: choices of memory that must not change one bit."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from transformers.optimization import Adafactor as TransformersAdafactor

from tests.helpers.models import (
    LAYERS,
    assert_all_moved,
    assert_same_bits,
    differing,
    small_decoder,
    token_batches,
    twin,
    weights,
)
from tests.helpers.pairwise import rotated
from tests.helpers.reference import shapes_stepped, train
from tests.hift.cases import BIG_VOCAB, DTYPES, OPTIMIZERS, hift_over

PIECES = [4096, 20_000, 65_536, 0]


class SignMomentum(torch.optim.Optimizer):
    """An element-wise optimizer that no list can know."""

    def __init__(self, params: Any, lr: float = 1e-3, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["buffer"] = torch.zeros_like(parameter)
                state["buffer"].mul_(group["momentum"]).add_(parameter.grad)
                parameter.add_(state["buffer"].sign(), alpha=-group["lr"])


class OwnAdamW(torch.optim.AdamW):
    """A subclass may do anything, so it is no longer known to be element-wise."""


class OwnAdafactor(torch.optim.Adafactor):
    """A subclass that must see matrices."""


def trained(model: torch.nn.Module, optimizer: Any, *, steps: int = 7, **settings: Any) -> torch.nn.Module:
    """A twin of `model` after `steps` updates (a cycle of five groups, and two); the rest as `hift_over` takes it."""
    other, hift = hift_over(twin(model), optimizer, **settings)
    train(other, hift, token_batches(steps, vocab=other.config.vocab_size), steps)
    return other


def stepped_shapes(optimizer_class: type, model: torch.nn.Module, optimizer: Any, **settings: Any) -> list[torch.Size]:
    """Of all tensors that a run has stepped."""
    with shapes_stepped(optimizer_class) as shapes:
        trained(model, optimizer, **settings)
    return shapes


@rotated(
    name=["AdamW", "AdamW amsgrad", "SGD momentum", "Adagrad", "RMSprop", "AdamW8bit"],
    dtype=[torch.float32, torch.bfloat16],
)
def test_piece_size_does_not_change_one_bit(name: str, dtype: torch.dtype) -> None:
    model = small_decoder(dtype, vocab=BIG_VOCAB)
    expected = trained(model, name)
    assert_all_moved(expected, weights(model))
    for stream_bytes in PIECES:
        assert_same_bits(trained(model, name, stream_bytes=stream_bytes), expected)


@pytest.mark.parametrize("layers_per_group", [2, 5])
def test_pieces_of_groups_of_several_layers_do_not_change_one_bit(layers_per_group: int) -> None:
    model = small_decoder(torch.bfloat16)
    config = {"layers_per_group": layers_per_group, "steps": 2 * -(-LAYERS // layers_per_group) + 1}
    whole = trained(model, "AdamW", stream_bytes=0, **config)
    for stream_bytes in PIECES[:-1]:
        assert_same_bits(trained(model, "AdamW", stream_bytes=stream_bytes, **config), whole)


@pytest.mark.parametrize("name", ["AdamW", "SGD momentum", "AdamW8bit"])
def test_known_elementwise_optimizers_get_pieces(name: str) -> None:
    optimizer_class, model = OPTIMIZERS[name][0], small_decoder(vocab=BIG_VOCAB)
    sizes = [parameter.numel() for parameter in model.parameters()]
    shapes = stepped_shapes(optimizer_class, model, name, steps=5, stream_bytes=4096)
    pieces = [shape.numel() for shape in shapes]
    assert max(pieces) < max(sizes) and sum(pieces) == sum(sizes)
    shapes = stepped_shapes(optimizer_class, model, name, steps=5, stream_bytes=0)
    assert max(shape.numel() for shape in shapes) == max(sizes)


def test_8bit_pieces_keep_whole_quantisation_blocks_and_the_kind_of_state() -> None:
    model, adamw8bit = small_decoder(vocab=BIG_VOCAB), bitsandbytes.optim.AdamW8bit
    shapes = stepped_shapes(adamw8bit, model, "AdamW8bit", steps=1, stream_bytes=4096)
    sizes = [shape.numel() for shape in shapes]
    assert len(sizes) > 1 and sum(sizes) == BIG_VOCAB * 32
    assert all(size % 256 == 0 for size in sizes[:-1])
    assert all(size >= 4096 for size in sizes), "a piece under 4,096 elements would hold 32-bit state"


@rotated(
    optimizer_class=[torch.optim.Adafactor, OwnAdafactor, TransformersAdafactor, OwnAdamW],
    dtype=[torch.float32, torch.bfloat16],
)
def test_other_optimizers_get_whole_tensors_in_their_own_shape(optimizer_class: Any, dtype: torch.dtype) -> None:
    options = {"lr": 1e-2} if optimizer_class is not TransformersAdafactor else {}
    model = small_decoder(dtype)
    with shapes_stepped(optimizer_class) as shapes:
        piecewise = trained(model, optimizer_class, steps=10, stream_bytes=4096, **options)
    assert sorted(map(tuple, shapes)) == sorted(2 * [tuple(parameter.shape) for parameter in model.parameters()])
    assert_same_bits(piecewise, trained(model, optimizer_class, steps=10, stream_bytes=0, **options))


def test_elementwise_declares_an_unknown_class() -> None:
    model = small_decoder(torch.bfloat16)
    shapes_of: dict[Any, list[tuple[int, ...]]] = {}
    runs = []
    for elementwise in (None, True, False):
        with shapes_stepped(SignMomentum) as shapes:
            runs.append(trained(model, SignMomentum, steps=10, stream_bytes=4096, elementwise=elementwise))
        shapes_of[elementwise] = sorted(map(tuple, shapes))
    assert shapes_of[None] == shapes_of[False] == sorted(2 * [tuple(each.shape) for each in model.parameters()])
    assert max(map(math.prod, shapes_of[True])) < max(parameter.numel() for parameter in model.parameters())
    for run in runs[1:]:
        assert_same_bits(run, runs[0])


def test_elementwise_false_gives_a_known_class_whole_tensors() -> None:
    model = small_decoder()
    shapes = stepped_shapes(torch.optim.AdamW, model, "AdamW", steps=5, stream_bytes=4096, elementwise=False)
    assert sorted(map(tuple, shapes)) == sorted(tuple(parameter.shape) for parameter in model.parameters())


@pytest.mark.slow
@DTYPES
@pytest.mark.parametrize("stream_bytes", [4096, 0])
@pytest.mark.parametrize("name", ["AdamW", "SGD", "torch Adafactor", "transformers Adafactor", "AdamW8bit"])
def test_place_of_the_state_does_not_change_one_bit(
    name: str, stream_bytes: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = small_decoder(dtype, vocab=BIG_VOCAB)
    common = {"stream_bytes": stream_bytes, "layers_per_group": 2, "steps_per_group": 2, "steps": 18}
    expected = trained(model, name, state="device", **common)
    assert_all_moved(expected, weights(model))
    assert_same_bits(trained(model, name, state="host", **common), expected)
    assert_same_bits(trained(model, name, state="disk", state_dir=str(tmp_path), **common), expected)


def awkward_masters(count: int) -> torch.Tensor:
    """fp32 bit patterns that lie halfway between two of bf16 first, then finite ones at random."""
    generator = torch.Generator().manual_seed(3)
    high = torch.randint(-(2**15), 2**15, (count,), generator=generator, dtype=torch.int64)
    # Exponents at the top round to infinity or are not numbers; bring them down.
    high = torch.where((high & 0x7FFF) >= 0x7F00, high & 0x3FFF, high)
    low = torch.randint(0, 2**16, (count,), generator=generator, dtype=torch.int64)
    low[: count // 2] = 0x8000
    patterns = ((high & 0xFFFF) << 16) | low
    patterns[:4] = torch.tensor([0x3F808000, 0x3F7F8000, 0xBF808000, 0xBF7F8000])
    patterns[4:8] = torch.tensor([0x00000000, 0x80000000, 0x00008000, 0x80008000])
    return torch.where(patterns >= 2**31, patterns - 2**32, patterns).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("stream_bytes", [4096, 134_217_728])
def test_masters_halfway_between_two_bf16_values_survive(stream_bytes: int) -> None:
    model, hift = hift_over(small_decoder(torch.bfloat16), torch.optim.SGD, stream_bytes=stream_bytes, lr=0.0)
    train(model, hift, token_batches(5), 5)
    saved = hift.state_dict()
    planted = {}
    for name, parameter in model.named_parameters():
        planted[name] = awkward_masters(parameter.numel()).reshape(parameter.shape)
        saved["state"][name]["master"] = planted[name].clone()
        # The weights that belong to these masters; a checkpoint holds both.
        parameter.data.copy_(planted[name].to(torch.bfloat16))
    hift.load_state_dict(saved)
    before = weights(model)

    def masters_kept() -> None:
        state = hift.state_dict()["state"]
        assert differing({name: state[name]["master"] for name in planted}, planted) == []

    masters_kept()
    # Awkward weights make no finite loss; an update needs a gradient alone, and lr=0 times any finite one is zero.
    for _ in range(2 * hift.num_groups):
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.ones_like(parameter)
        hift.step()
        masters_kept()
    assert differing(weights(model), before) == []


def test_8bit_state_is_8bit_in_pieces() -> None:
    model, hift = hift_over(small_decoder(vocab=BIG_VOCAB), bitsandbytes.optim.AdamW8bit, stream_bytes=4096, lr=1e-3)
    train(model, hift, token_batches(5, vocab=BIG_VOCAB), 5)
    state = hift.state_dict()["state"]
    large, small = (
        {value.dtype for value in state[name].values() if isinstance(value, torch.Tensor)}
        for name in ("lm_head.weight", "model.norm.weight")
    )
    assert torch.uint8 in large
    assert torch.uint8 not in small
