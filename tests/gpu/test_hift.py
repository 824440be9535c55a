"""HiFT on CUDA: streams, pinned memory and the caching allocator must change no bit and leave nothing behind.

Skipped without a CUDA device; `tests/pretended_cuda` runs them on one that is pretended, where nothing takes time, with
smaller sizes. One file, however long, since all of it trains the same models among the same work of a device.
"""

import gc
import io
import os
import random
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from slivertune import HiFT, HiFTConfig
from slivertune.hift.offloaded_state import OffloadedState
from tests.helpers.models import (
    Batch,
    assert_all_moved,
    assert_same_bits,
    bits,
    seeded,
    tiny_llama,
    token_batches,
    twin,
    weights,
)
from tests.helpers.ranks import quick
from tests.hift.cases import BIG_VOCAB, OPTIMIZERS

# Read when the first matrix product runs; without it cuBLAS may choose another algorithm from run to run.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

DEVICE = torch.device("cuda", 0)
IS_PRETENDED = "tests.pretended_cuda.torch_cuda" in sys.modules
LARGE_VOCAB, LARGE_HIDDEN = (512, 64) if IS_PRETENDED else (8192, 512)
BUSY_SIZE = 16 if IS_PRETENDED else 4096
"""Of the matrices whose products keep the device behind the host."""
SPOILED_ELEMENTS = 2**14 if IS_PRETENDED else 8 * 2**20
ADAMW = {"lr": 1e-2, "weight_decay": 0.1}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": OPTIMIZERS["AdamW"],
    "AdamW fused": (torch.optim.AdamW, {**ADAMW, "fused": True}),
    "AdamW capturable": (torch.optim.AdamW, {**ADAMW, "capturable": True}),
    "AdamW one by one": (torch.optim.AdamW, {**ADAMW, "foreach": False}),
    "SGD momentum": OPTIMIZERS["SGD momentum"],
    "SGD": OPTIMIZERS["SGD"],
    "torch Adafactor": OPTIMIZERS["torch Adafactor"],
    "transformers Adafactor": OPTIMIZERS["transformers Adafactor"],
    "AdamW8bit": OPTIMIZERS["AdamW8bit"],
}
PIECES = [4096, 20_000, 65_536, 0]
CODE_BOOK_BYTES = 2 * 256 * 4
"""The two tables that each bitsandbytes 8-bit optimizer keeps on the device: 256 fp32 values for each moment."""


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Equal runs give equal bits; what is allocated without a value is filled with NaN, so that reading it shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def cuda_llama(dtype: torch.dtype, *, vocab: int = BIG_VOCAB) -> nn.Module:
    return plain_attention(tiny_llama(dtype, vocab=vocab)).to(DEVICE)


def larger_llama(dtype: torch.dtype, vocab: int = LARGE_VOCAB, hidden: int = LARGE_HIDDEN) -> nn.Module:
    """4M elements in the embedding: copies and kernels that take long enough to overtake each other."""
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=8,
        max_position_embeddings=64,
        use_cache=False,
    )
    return plain_attention(seeded(lambda: LlamaForCausalLM(config), 0)).to(dtype=dtype, device=DEVICE)


def plain_attention(model: Any) -> nn.Module:
    """Fused attention adds up its gradients in an order of its own."""
    model.set_attn_implementation("eager")
    return model


def cuda_batches(count: int, vocab: int = BIG_VOCAB) -> list[Batch]:
    return [{key: value.to(DEVICE) for key, value in batch.items()} for batch in token_batches(count, vocab=vocab)]


def run(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Batch]) -> None:
    """Train without ever waiting for the device."""
    for batch in batches:
        model(**batch).loss.backward()
        optimizer.step()


def hift_over(model: nn.Module, case: tuple[Any, dict[str, Any]] = (torch.optim.AdamW, ADAMW), **config: Any) -> HiFT:
    optimizer_class, options = case
    return HiFT(model, optimizer_class, config=HiFTConfig.paper(**config), **options)


def trained(model: nn.Module, case: tuple[Any, dict[str, Any]], steps: int, **config: Any) -> nn.Module:
    other = twin(model)
    vocab = int(model.config.vocab_size)  # type: ignore[union-attr, arg-type]
    run(other, hift_over(other, case, **config), cuda_batches(steps, vocab))
    return other


def allocated() -> int:
    """Bytes that tensors hold on the device, without the workspaces of cuBLAS, which come from the same allocator."""
    gc.collect()
    torch.cuda.synchronize(DEVICE)
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated(DEVICE)


def allocated_beside_the_weights(model: nn.Module, batch: Batch) -> int:
    """What is allocated when a first backward pass has run, whose kernels keep some memory."""
    model(**batch).loss.backward()
    model.zero_grad()
    return allocated()


def streamed_groups(hift: HiFT) -> list[OffloadedState]:
    groups = hift.turns.states
    assert all(isinstance(group, OffloadedState) for group in groups)
    return groups  # type: ignore[return-value]


STREAMED: list[tuple[str, torch.dtype, dict[str, Any]]] = [
    *((name, dtype, {}) for name in CASES for dtype in (torch.float32, torch.bfloat16)),
    *((name, torch.bfloat16, {"master": "none"}) for name in ("AdamW", "AdamW fused", "AdamW8bit", "torch Adafactor")),
    *((name, torch.bfloat16, {"master": "stochastic"}) for name in ("AdamW fused", "torch Adafactor")),
    *(("AdamW", torch.bfloat16, {"layers_per_group": count, "steps_per_group": 2}) for count in (2, 5)),
]


@pytest.mark.parametrize(("name", "dtype", "config"), quick(STREAMED, [("AdamW fused", torch.bfloat16, {})]))
def test_streamed_state_equals_resident_state_to_the_bit(name: str, dtype: torch.dtype, config: dict[str, Any]) -> None:
    """For every optimizer, form of the master, and number of layers and steps of a group."""
    model, steps = cuda_llama(dtype), 18 if "steps_per_group" in config else 15
    expected = trained(model, CASES[name], steps, state="device", **config)
    assert_all_moved(expected, weights(model))
    for stream_bytes in PIECES:
        assert_same_bits(trained(model, CASES[name], steps, stream_bytes=stream_bytes, **config), expected)


def test_state_on_disk_equals_resident_state_to_the_bit(tmp_path: Any) -> None:
    model = cuda_llama(torch.bfloat16)
    assert_same_bits(
        trained(model, CASES["AdamW"], 15, state="disk", state_dir=tmp_path, stream_bytes=20_000),
        trained(model, CASES["AdamW"], 15, state="device"),
    )


def test_a_model_moved_to_the_device_after_the_optimizer_was_built_trains_there() -> None:
    model = plain_attention(tiny_llama(torch.bfloat16, vocab=BIG_VOCAB))
    expected = trained(twin(model).to(DEVICE), CASES["AdamW"], 10, state="device")
    hift = hift_over(model, stream_bytes=20_000)
    run(model.to(DEVICE), hift, cuda_batches(10))
    assert_same_bits(model, expected)


def test_waiting_state_is_pinned() -> None:
    model = cuda_llama(torch.bfloat16)
    hift = hift_over(model)
    run(model, hift, cuda_batches(5))
    state = hift.state_dict()["state"]
    tensors = [value for values in state.values() for value in values.values() if value.dim()]
    assert len(tensors) == 3 * len(state)
    assert all(tensor.device.type == "cpu" and tensor.is_pinned() for tensor in tensors)


def test_state_loaded_before_the_model_moved_is_pinned_as_well() -> None:
    model = plain_attention(tiny_llama(torch.bfloat16, vocab=BIG_VOCAB))
    hift = hift_over(model)
    for batch in token_batches(5, vocab=BIG_VOCAB):
        model(**batch).loss.backward()
        hift.step()
    moved = twin(model)
    other = hift_over(moved)
    other.load_state_dict(hift.state_dict())
    run(moved.to(DEVICE), other, cuda_batches(5))
    assert all(
        value.is_pinned() for values in other.state_dict()["state"].values() for value in values.values() if value.dim()
    )


@pytest.mark.parametrize("map_location", quick(["cpu", "cuda"], ["cuda"]))
@pytest.mark.parametrize("state", quick(["host", "device"], ["host"]))
@pytest.mark.parametrize(
    "name", quick(["AdamW", "AdamW fused", "SGD momentum", "transformers Adafactor", "AdamW8bit"], ["AdamW fused"])
)
def test_a_saved_run_continues_with_the_same_bits(name: str, state: Any, map_location: str) -> None:
    config = {"state": state, "stream_bytes": 20_000}
    model, batches = cuda_llama(torch.bfloat16), cuda_batches(17)
    hift = hift_over(model, CASES[name], **config)
    run(model, hift, batches[:7])  # in the middle of the second cycle of five
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": hift.state_dict()}, file)
    run(model, hift, batches[7:])

    file.seek(0)
    saved = torch.load(file, weights_only=True, map_location=map_location)
    resumed = cuda_llama(torch.bfloat16)
    resumed.load_state_dict(saved["model"])
    other = hift_over(resumed, CASES[name], **config)
    other.load_state_dict(saved["optimizer"])
    del saved
    run(resumed, other, batches[7:])
    assert_same_bits(resumed, model)


@pytest.mark.parametrize("name", quick(CASES, ["AdamW fused", "AdamW8bit"]))
def test_after_a_step_the_device_holds_the_weights_and_nothing_else(name: str) -> None:
    model, batches = cuda_llama(torch.bfloat16), cuda_batches(15)
    before = allocated_beside_the_weights(model, batches[0])
    hift = hift_over(model, CASES[name], stream_bytes=20_000, prefetch_bytes=0)
    left = []
    for batch in batches:
        run(model, hift, [batch])
        left.append(allocated() - before)
    if name == "AdamW8bit":
        assert max(left) <= sum(len(group.chunks) for group in streamed_groups(hift)) * CODE_BOOK_BYTES
        assert left[-5:] == [left[-1]] * 5, "it grows from step to step"
    else:
        assert left == [0] * 15


@pytest.mark.parametrize("name", quick(["AdamW", "AdamW fused"], ["AdamW fused"]))
def test_a_step_needs_two_pieces_beside_weights_and_gradients(name: str) -> None:
    stream_bytes = 4 * 2**20
    model, batches = larger_llama(torch.bfloat16, 8192, 512), cuda_batches(8, vocab=8192)
    before = allocated_beside_the_weights(model, batches[0])
    hift = hift_over(model, CASES[name], stream_bytes=stream_bytes, prefetch_bytes=0)
    run(model, hift, batches[:4])
    for batch in batches[4:]:
        size = sum(model.get_parameter(weight).numel() for weight in hift.groups[hift.active_group].parameter_names)
        model(**batch).loss.backward()
        torch.cuda.synchronize(DEVICE)
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.reset_peak_memory_stats(DEVICE)
        hift.step()
        extra_bytes = torch.cuda.max_memory_allocated(DEVICE) - before - 2 * size
        # The allocator rounds up to 512 bytes: a few tensors a slice, and of the loss before them.
        assert extra_bytes <= 2 * stream_bytes + 64 * 1024
        assert 2 * stream_bytes < 12 * size, "the group is too small for this test to mean anything"


class _Pause(torch.autograd.Function):
    """Keeps the device busy in the middle of backward."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(2_000_000_000)  # about a second
        return gradient


class _TwoHalves(nn.Module):
    """One group whose upper half has its gradient a second before the lower one."""

    def __init__(self) -> None:
        super().__init__()
        self.lower = nn.Linear(512, 512)
        self.upper = nn.Linear(512, 512)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.upper(_Pause.apply(self.lower(hidden))).square().mean()


@pytest.mark.skipif(IS_PRETENDED, reason="nothing takes time on a pretended device")
def test_the_first_pieces_arrive_while_backward_still_runs() -> None:
    torch.manual_seed(0)
    model = _TwoHalves().to(DEVICE)
    hift = hift_over(model, layers=[["lower", "upper"]], stream_bytes=2**20, prefetch_bytes=0)
    hidden = torch.randn(8, 512, device=DEVICE)
    model(hidden).backward()
    hift.step()  # makes the state
    torch.cuda.synchronize(DEVICE)

    model(hidden).backward()
    end_of_backward = torch.cuda.current_stream(DEVICE).record_event()
    (group,) = streamed_groups(hift)
    loaded = [index for index, chunk in enumerate(group.chunks) if chunk.where == "arriving"]
    assert loaded == [0, 1], "the first two pieces were not asked for during backward"
    for index in loaded:
        group.chunks[index].event.synchronize()
    assert not end_of_backward.query(), "the copies came only after backward"
    hift.step()
    torch.cuda.synchronize(DEVICE)


@pytest.mark.parametrize("gradients", quick(["device", "host", "stepped"], ["host"]))
@pytest.mark.parametrize("prefetch_bytes", quick([0, 60_000, 2**30, "auto"], ["auto"]))
@pytest.mark.parametrize("steps_per_group", quick([1, 3], [3]))
def test_prefetch_and_the_place_of_gradients_change_no_bit(
    steps_per_group: int, gradients: Any, prefetch_bytes: Any
) -> None:
    batches, made = cuda_batches(20), []
    for config in ({}, {"gradients": gradients, "prefetch_bytes": prefetch_bytes}):
        model = cuda_llama(torch.bfloat16)
        hift = hift_over(model, stream_bytes=20_000, layers_per_group=2, steps_per_group=steps_per_group, **config)
        run(model, hift, batches)
        made.append(model)
    assert_same_bits(*made)


@pytest.mark.parametrize("dtype", quick([torch.float32, torch.bfloat16], [torch.bfloat16]), ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", quick(["AdamW", "AdamW fused", "AdamW capturable", "SGD momentum"], ["AdamW fused"]))
def test_a_step_never_waits_for_the_device(name: str, dtype: torch.dtype) -> None:
    model, batches = cuda_llama(dtype), cuda_batches(15)
    hift = hift_over(model, CASES[name], stream_bytes=20_000)
    run(model, hift, batches[:5])
    groups = streamed_groups(hift)
    for batch in batches[5:]:
        loss = model(**batch).loss
        torch.cuda.set_sync_debug_mode("error")
        try:
            groups[hift.active_group].prefetch(in_backward=True)  # what backward calls
        finally:
            torch.cuda.set_sync_debug_mode("default")
        loss.backward()
        torch.cuda.set_sync_debug_mode("error")
        try:
            hift.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def spoil_free_memory(choose: random.Random) -> None:
    """Write NaN over memory that the allocator thinks is free, as an ordinary user of it would."""
    for _ in range(choose.randint(1, 6)):
        torch.full((choose.randint(1, SPOILED_ELEMENTS),), float("nan"), device=DEVICE)


@pytest.mark.parametrize("master", quick(["fp32", "none", "stochastic"], ["fp32"]))
@pytest.mark.parametrize("name", quick(["AdamW", "AdamW fused", "AdamW8bit", "torch Adafactor"], ["AdamW fused"]))
def test_many_steps_among_other_work_keep_every_bit(name: str, master: Any) -> None:
    """A copy that runs too early or too late, or memory handed on too soon, ends in other bits."""
    choose = random.Random(f"{name} {master}")
    model = larger_llama(torch.bfloat16)
    expected = trained(model, CASES[name], 24, state="device", master=master)
    batches = cuda_batches(24, vocab=LARGE_VOCAB)
    factor = torch.randn(BUSY_SIZE, BUSY_SIZE, device=DEVICE)
    for _ in range(4):
        stream_bytes = choose.choice([0, choose.randint(64 * 1024, 64 * 2**20)])
        other = twin(model)
        hift = hift_over(other, CASES[name], stream_bytes=stream_bytes, master=master)
        for batch in batches:
            other(**batch).loss.backward()
            spoil_free_memory(choose)
            for _ in range(choose.randint(0, 8)):
                torch.mm(factor, factor)  # keeps the device behind the host
            hift.step()
            spoil_free_memory(choose)
        assert_same_bits(other, expected)


@pytest.mark.parametrize("resident_bytes", quick([0, "auto"], [0]))
@pytest.mark.parametrize("waiting", quick([None, "int8", "nf4"], ["int8"]))
def test_blocks_on_the_host_train_and_evaluate_on_the_device_also_after_detach(
    waiting: Any, resident_bytes: Any
) -> None:
    model, batches = plain_attention(tiny_llama(torch.bfloat16, vocab=BIG_VOCAB)), cuda_batches(12)
    expected = trained(twin(model).to(DEVICE), CASES["AdamW"], 12, waiting=waiting, stream_bytes=20_000)
    hift = hift_over(model, weights="host", waiting=waiting, resident_bytes=resident_bytes, stream_bytes=20_000)
    run(model, hift, batches)
    hift.detach(for_inference=True)
    assert_same_bits(twin(model).to(DEVICE), expected)
    with torch.no_grad():
        assert torch.equal(model(**batches[0]).logits, expected(**batches[0]).logits)
    with pytest.raises(RuntimeError, match="leaves the blocks in host memory"):
        model(**batches[0])
    hift.detach()
    assert_same_bits(model.to(DEVICE), expected)


@pytest.mark.parametrize("name", quick(["AdamW", "AdamW fused"], ["AdamW fused"]))
def test_a_users_own_stream_is_the_computing_stream(name: str) -> None:
    model = larger_llama(torch.bfloat16)
    expected = trained(model, CASES[name], 12, state="device")
    own = torch.cuda.Stream(DEVICE)
    own.wait_stream(torch.cuda.current_stream(DEVICE))
    choose = random.Random(0)
    other, batches = twin(model), cuda_batches(12, vocab=LARGE_VOCAB)
    torch.cuda.synchronize(DEVICE)
    with torch.cuda.stream(own):
        hift = hift_over(other, (torch.optim.AdamW, CASES[name][1]), stream_bytes=2**20)
        for batch in batches:
            run(other, hift, [batch])
            spoil_free_memory(choose)
    own.synchronize()
    assert_same_bits(other, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_model_on_another_than_the_current_device_trains_there() -> None:
    model = cuda_llama(torch.bfloat16)
    expected = trained(model, CASES["AdamW"], 10, state="device")
    other = twin(model).to("cuda:1")
    run(
        other,
        hift_over(other, stream_bytes=20_000),
        [{key: value.to("cuda:1") for key, value in batch.items()} for batch in cuda_batches(10)],
    )
    assert_same_bits(other.cpu(), expected.cpu())


def test_saved_state_is_whole_while_copies_are_under_way() -> None:
    """`state_dict` right after a step, without a wait in between, has what a wait would have shown."""
    model = larger_llama(torch.bfloat16)
    hift = hift_over(model, stream_bytes=2**20)
    factor = torch.randn(2 * BUSY_SIZE, 2 * BUSY_SIZE, device=DEVICE)
    for batch in cuda_batches(8, vocab=LARGE_VOCAB):
        torch.mm(factor, factor)  # keeps the device behind the host
        run(model, hift, [batch])
        early = {
            (name, key): value.clone()
            for name, values in hift.state_dict()["state"].items()
            for key, value in values.items()
        }
        torch.cuda.synchronize(DEVICE)
        for (name, key), value in early.items():
            assert torch.equal(bits(value), bits(hift.state_dict()["state"][name][key])), (name, key)
