"""Small runs that bring into force what orders the package's copies, beside the table of HiFT and the programs."""

import copy
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import slivertune as st
from slivertune import HiFT, HiFTConfig
from slivertune.core.copy_streams import CopyStreams
from slivertune.core.waiting_activations import WaitingActivations
from slivertune.hift.prefetch import Prefetcher
from slivertune.parallel.consistency.heartbeat import Heartbeat
from slivertune.parallel.ddp.gradient_sync import BucketedAllReduce
from slivertune.parallel.zero.state_mover import StateMover
from tests.helpers.hift_parts import part_of
from tests.helpers.models import small_decoder
from tests.hift.cases import Stumbling
from tests.parallel.zero.test_state_mover import zero_optimizer
from tests.pretended_cuda.collectives import group_of_devices
from tests.pretended_cuda.programs import PROGRAMS, batches, checkpointed, trained

DEVICE = torch.device("cuda", 0)


def hift_on(model: Any, optimizer: Any = torch.optim.AdamW, **settings: Any) -> HiFT:
    """HiFT by the paper's schedule, in small chunks."""
    return HiFT(model, optimizer, lr=1e-2, config=HiFTConfig.paper(**{"stream_bytes": 20_000, **settings}))


def model_on(*, weights: str = "device", **options: Any) -> Any:
    """A small model in bfloat16, its blocks checkpointed."""
    return checkpointed(small_decoder(torch.bfloat16, **options).to("cpu" if weights == "host" else "cuda"), False)


def reused() -> list[torch.Tensor]:
    """Memory of many sizes, of which some was another's before."""
    return [torch.zeros(2**power, device="cuda") for power in range(4, 20)]


def an_activation_is_loaded_before_its_copy_is_waited_for() -> None:
    waiting = WaitingActivations(DEVICE)
    record = waiting.store(torch.ones(1000, device="cuda"), 0)
    waiting.load(record).sum().item()
    waiting.settle()


def a_backward_ends_early() -> None:
    model = model_on()
    with st.offload_activations(model):
        loss = model(**next(batches("cuda"))).loss
        torch.autograd.grad(loss, [*model.model.layers[-1].parameters()])
        del loss
        reused()


def a_step_fails_in_a_turn() -> None:
    """The memory of its chunks is given up then."""
    model = model_on()
    optimizer = hift_on(model, Stumbling, elementwise=True, prefetch_bytes=10**9, steps_per_group=3, gradients="host")
    done = optimizer.cycle_length + 1
    trained(model, optimizer, "cuda", done)
    with mock.patch.object(Stumbling, "countdown", 2), pytest.raises(RuntimeError, match="stumbled"):
        trained(model, optimizer, "cuda", done + 1, done)
    part_of(optimizer, Prefetcher).slots_of(DEVICE).shrink(0)
    reused()
    optimizer.detach()


def stepped() -> tuple[Any, HiFT, dict[str, Any]]:
    """A model and its optimizer right after a step, and the state, into which copies still write."""
    model = model_on()
    optimizer = hift_on(model)
    trained(model, optimizer, "cuda", 6)
    saved = optimizer.state_dict()
    trained(model, optimizer, "cuda", 7, 6)
    return model, optimizer, saved


def the_optimizer_is_dropped() -> None:
    _model, optimizer, _saved = stepped()  # both are kept
    del optimizer
    reused()


def its_own_state_is_loaded() -> None:
    _model, optimizer, saved = stepped()
    optimizer.load_state_dict(saved)
    optimizer.detach()


def ranks_write_gradients() -> None:
    model = model_on()
    optimizer = hift_on(model, gradients="host")
    for batch in batches("cuda"):
        model(**batch).loss.backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.write(0, parameter.numel(), parameter.grad.clone().flatten())
        optimizer.step()
        optimizer.zero_grad()
    optimizer.detach()


def gradients_are_added() -> None:
    """They are added to those on the host, while many are on their way."""
    model = model_on()
    optimizer = hift_on(model, gradients="host", stream_bytes=10**6)
    for first, second in zip(batches("cuda"), batches("cuda"), strict=True):
        for batch in (first, second):
            model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.detach()


def weights_come(blocks: int = 3, **settings: Any) -> None:
    """They come from the host or from codes, and are read there."""
    model = model_on(blocks=blocks, weights=settings.get("weights", "device"))
    optimizer = hift_on(model, **settings)
    last = optimizer.cycle_length + 4
    trained(model, optimizer, "cuda", last)
    model.state_dict()
    trained(model, optimizer, "cuda", last + 2, last)
    model(**next(batches("cuda")))
    reused()
    optimizer.detach()


def weights_are_read_on_the_host() -> None:
    model = model_on(weights="host")
    optimizer = hift_on(model, weights="host")
    for update in range(9):
        trained(model, optimizer, "cuda", update + 1, update)
        model(**next(batches("cuda")))
        for block in model.model.layers:
            block.mlp.up_proj.weight.detach().sum()
    optimizer.detach()


def a_forward_fails_at_once() -> None:
    """The first blocks are on their way then, and their memory is given up."""
    model = model_on(weights="host", blocks=8)
    optimizer = hift_on(model, weights="host", resident_bytes=0)
    trained(model, optimizer, "cuda", 2)
    fail_at_once(model)
    optimizer.detach()
    reused()


def fail_at_once(model: Any) -> None:
    """Begin a forward that ends with an error in its first layer."""
    handle = model.model.embed_tokens.register_forward_pre_hook(mock.Mock(side_effect=RuntimeError("failed")))
    with pytest.raises(RuntimeError, match="failed"):
        model(**next(batches("cuda")))
    handle.remove()


def the_optimizer_is_dropped_off_its_stream() -> None:
    """Weights are on their way then, into memory of the stream on which it was trained."""
    model = model_on(weights="host", blocks=8)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        optimizer = hift_on(model, weights="host", resident_bytes=0)
        trained(model, optimizer, "cuda", 2)
        saved = optimizer.state_dict()  # the end of its memory would wait, too
        fail_at_once(model)
    torch.cuda.current_stream().wait_stream(side)
    del optimizer
    with torch.cuda.stream(side):
        reused()
    del saved


def a_handle_is_removed_after_a_step() -> None:
    """The handle holds the same weights as HiFT, and their copies to the host have just begun."""
    model = model_on()
    handle = st.park_for_hift(model, st.HiFTConfig(waiting="int8"))
    with tempfile.TemporaryDirectory() as folder:
        optimizer = hift_on(model, waiting="int8", master="none", state="disk", state_dir=folder)
        trained(model, optimizer, "cuda", 8)
        handle.remove()


def zero_state_has_no_room() -> None:
    """Memory was handed over already then."""
    streams = CopyStreams(DEVICE)
    with torch.device("cuda"):
        first, second = zero_optimizer(64, 2.0), zero_optimizer(64, 4.0)
        for state in second.optimizer.state.values():
            state["exp_avg_sq"] = state["exp_avg"].clone()
    one, other = StateMover(first, 3, streams), StateMover(second, 3, streams)
    other.to_host()
    other.release()
    one.to_host()

    def full(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    with mock.patch.object(torch, "empty_strided", full), suppress(torch.OutOfMemoryError):
        other.to_device(one)
    reused()
    first.step()


def many_blocks_come_from_the_host() -> None:
    """Each slot holds several of them in a forward."""
    model = model_on(weights="host", blocks=8)
    optimizer = hift_on(model, weights="host", resident_bytes=0)
    trained(model, optimizer, "cuda", 5)
    optimizer.detach()


def waiting_weights_are_replaced() -> None:
    model = model_on()
    optimizer = hift_on(model, waiting="int8", master="none")
    trained(model, optimizer, "cuda", 7)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    trained(model, optimizer, "cuda", 9, 7)
    model.load_state_dict(saved)
    trained(model, optimizer, "cuda", 12, 9)
    for held in optimizer.turns.parked.quantized._by_parameter.values():
        held.write(torch.ones(held.parameter.shape, dtype=torch.bfloat16, device="cuda"))
    optimizer.detach()


def a_turn_is_broken_off() -> None:
    """Another state breaks it off, after the script has changed the active weights."""
    with tempfile.TemporaryDirectory() as folder:
        model = model_on()
        optimizer = hift_on(
            model, waiting="int8", master="none", steps_per_group=2, prefetch_bytes=0, state="disk", state_dir=folder
        )
        trained(model, optimizer, "cuda", 8)
        saved = copy.deepcopy(optimizer.state_dict())
        trained(model, optimizer, "cuda", 13, 8)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.requires_grad:
                    weight.mul_(0.5)
        optimizer.load_state_dict(saved)
        trained(model, optimizer, "cuda", 16, 13)
        optimizer.detach()


def zero_state_moves() -> None:
    """The masters and state of two of ZeRO's optimizers, one after the other."""
    streams = CopyStreams(DEVICE)

    def made() -> tuple[Any, StateMover]:
        with torch.device("cuda"):
            optimizer = zero_optimizer(64, 2.0)
        return optimizer, StateMover(optimizer, 3, streams)

    (first, one), (second, other) = made(), made()
    for mover in (one, other):
        mover.to_host()
        mover.release()
    for _ in range(2):
        one.to_device()
        first.step()
        one.to_host()
        other.to_device(one)
        second.step()
        other.to_host()
        other.release()
        reused()
        one.to_device()
        one.to_host()
        one.release()
        reused()
    one.masters[0].sum()
    one.to_device()
    one.to_host()
    one.to_device()
    one.masters[0].add_(1)
    one.to_host()
    one.masters[0].add_(1)


def gradients_are_averaged() -> None:
    """Over one rank, whose collectives have a stream of their own, as all have."""
    with tempfile.TemporaryDirectory() as folder, group_of_devices(Path(folder) / "store", 0, 1):
        model = model_on()
        BucketedAllReduce(model, model.parameters(), Heartbeat("averaging"))
        model(**next(batches("cuda"))).loss.backward()


CASES: dict[str, Callable[[], Any]] = {
    "an activation is loaded before its copy is waited for": an_activation_is_loaded_before_its_copy_is_waited_for,
    "a backward ends early": a_backward_ends_early,
    "a step fails in a turn": a_step_fails_in_a_turn,
    "the optimizer is dropped": the_optimizer_is_dropped,
    "its own state is loaded": its_own_state_is_loaded,
    "the optimizer is dropped off its stream": the_optimizer_is_dropped_off_its_stream,
    "a handle is removed after a step": a_handle_is_removed_after_a_step,
    "ZeRO's state has no room": zero_state_has_no_room,
    "gradients leave": partial(weights_come, gradients="host", stream_bytes=4_000),
    "gradients are added": gradients_are_added,
    "ranks write gradients": ranks_write_gradients,
    "weights are read on the host": weights_are_read_on_the_host,
    "a forward fails at once": a_forward_fails_at_once,
    "many blocks come from the host": many_blocks_come_from_the_host,
    "weights come from the host": partial(weights_come, weights="host", resident_bytes=0),
    "weights come from codes": partial(weights_come, waiting="int8", master="none"),
    "weights come from masters": partial(weights_come, waiting="int8"),
    "waiting weights are replaced": waiting_weights_are_replaced,
    "a turn is broken off": a_turn_is_broken_off,
    "ZeRO's state moves": zero_state_moves,
    "gradients are averaged": gradients_are_averaged,
    "state on disk": partial(PROGRAMS["HiFT with state on disk, resumed"][0], "cuda"),
}
