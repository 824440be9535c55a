"""Pinned memory, with the CUDA runtime pretended: what is registered, and when it is released."""

import contextlib
import faulthandler
import gc
import mmap
import os
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slivertune.core import pinned_memory as pinned
from slivertune.core.copy_streams import CopyStreams
from slivertune.core.pinned_memory import pinned_memory
from slivertune.hift.offload_buffer import host_buffer
from tests.helpers.mapped_pages import is_mapped

CUDA = torch.device("cuda", 1)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What was asked of the CUDA runtime; the third registration is refused."""
    made: list[tuple[Any, ...]] = []

    def register(address: int, num_bytes: int, flags: int) -> int:
        made.append(("register", address, num_bytes))
        return 2 if sum(call[0] == "register" for call in made) == 3 else 0

    def check_error(status: int) -> None:
        if status:
            raise RuntimeError(f"out of memory ({status})")

    @contextlib.contextmanager
    def on(device: torch.device) -> Any:
        made.append(("device", device))
        yield

    def unregister(address: int) -> None:
        made.append(("unregister" if is_mapped(address) else "unregister what is unmapped", address))

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", check_error)
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: made.append(("synchronize", device)))
    monkeypatch.setattr(pinned, "_forget_error", lambda device: made.append(("forget error", device)))
    return made


def test_registrations_are_whole_pages_of_their_own(calls: list[tuple[Any, ...]]) -> None:
    buffer = host_buffer(CopyStreams(CUDA))
    tensors = [
        buffer.empty_like(torch.empty(shape, dtype=dtype))
        for shape, dtype in ((100, torch.int8), (3000, torch.float32))
    ]
    assert ("device", CUDA) in calls
    ranges = [(address, address + size) for kind, address, *rest in calls if kind == "register" for size in rest]
    assert len(ranges) == 2 and all(edge % mmap.PAGESIZE == 0 for span in ranges for edge in span)
    (_, first_end), (second_start, _) = sorted(ranges)
    assert first_end <= second_start
    for tensor, (start, end) in zip(tensors, ranges, strict=True):
        assert start <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= end


def test_memory_is_unpinned_before_it_is_freed_and_after_all_copies(calls: list[tuple[Any, ...]]) -> None:
    buffer = host_buffer(CopyStreams(CUDA))
    buffer.reserve({torch.float32: 1000})
    part = buffer.empty_like(torch.empty(10))
    (address,) = [call[1] for call in calls if call[0] == "register"]
    del buffer
    gc.collect()
    assert calls[-1][0] == "register", "a tensor of it lives"
    del part
    gc.collect()
    assert calls[-2:] == [("synchronize", CUDA), ("unregister", address)]


def test_memory_that_cannot_be_pinned_is_used_unpinned_with_a_warning(calls: list[tuple[Any, ...]]) -> None:
    buffer = host_buffer(CopyStreams(CUDA))
    with pytest.warns(UserWarning, match=r"Pinning 4,096 bytes of host memory failed .* state='disk'"):
        buffer.reserve({torch.float32: 64, torch.int16: 64, torch.uint8: 4096})
    assert calls[-1] == ("forget error", CUDA), "the user's next kernel would raise it"
    buffer.empty_like(torch.empty(4096, dtype=torch.uint8)).fill_(3)
    del buffer
    gc.collect()
    assert sum(call[0] == "unregister" for call in calls) == 2, "only what was registered is unregistered"


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")  # Python 3.12
@pytest.mark.parametrize("is_inherited", [True, False])
def test_a_forked_child_reads_weights_alone_and_unpins_nothing(
    calls: list[tuple[Any, ...]], is_inherited: bool
) -> None:
    """State is missing in a child, since its fork would have to copy all of it; finalizers there leave it alone."""
    memory = pinned_memory(CUDA, 10_000, is_inherited=is_inherited).fill_(7)

    def as_child(act: Callable[[], bool]) -> int:
        child = os.fork()
        if child == 0:  # only _exit: no handlers of pytest's
            faulthandler.disable()
            os._exit(0 if act() else 1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def drop() -> bool:
        nonlocal memory
        del memory
        gc.collect()
        return not any(call[0] == "unregister" for call in calls)

    reads = as_child(lambda: bool(memory.min() == 7))
    assert reads == (0 if is_inherited else -signal.SIGSEGV)
    assert as_child(drop) == 0
    memory[0] = 8
    assert memory[0] == 8 and memory[1] == 7
