"""Small programs with a race, and the same in the right order: what the detector is tested on.

Each takes whether it is `ordered`. It runs in a process whose device is pretended.
"""

import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook

from slivertune.core.pinned_memory import pinned_memory

DEVICE = torch.device("cuda", 0)
NUM = 1024


def host(value: float = 1.0) -> torch.Tensor:
    """Pinned memory of the package, filled."""
    return pinned_memory(DEVICE, 4 * NUM, is_inherited=False).view(torch.float32).fill_(value)


def registered() -> tuple[mmap.mmap, torch.Tensor]:
    """Pages that the runtime has pinned, and a tensor over them. Whoever asks for them unregisters and unmaps them."""
    pages = mmap.mmap(-1, 4 * NUM)
    memory = torch.frombuffer(pages, dtype=torch.float32)
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), 4 * NUM, 0))
    return pages, memory


@contextmanager
def planted() -> Iterator[None]:
    """The first output of a module is read on a stream that nothing orders behind it."""
    streams = []

    def read(module: Any, args: Any, output: Any) -> None:
        if not streams and isinstance(output, torch.Tensor) and output.is_cuda:
            streams.append(torch.cuda.Stream(output.device))
            with torch.no_grad(), torch.cuda.stream(streams[0]):
                output.clone()

    handle = register_module_forward_hook(read)
    try:
        yield
    finally:
        handle.remove()


def plain_operators(ordered: bool) -> None:
    side, weights = torch.cuda.Stream(), torch.ones(NUM, device=DEVICE)
    if ordered:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        weights.add_(1)


def reading_after_writing(ordered: bool) -> None:
    side, weights, target = torch.cuda.Stream(), torch.ones(NUM, device=DEVICE), torch.ones(NUM, device=DEVICE)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        target.copy_(weights)
        done = side.record_event()
    if ordered:
        torch.cuda.current_stream().wait_event(done)
    weights.add_(1)  # what the side stream may still be reading


class _Twin(torch.Tensor):
    """A tensor subclass that unwraps."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        twin = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        twin.inner = inner
        return twin

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func(*(each.inner if isinstance(each, cls) else each for each in args), **(kwargs or {}))
        return args[0]


def inside_a_subclass(ordered: bool) -> None:
    side, twin = torch.cuda.Stream(), _Twin(torch.ones(NUM, device=DEVICE))
    if ordered:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        twin.add_(1)


def a_python_thread(ordered: bool) -> None:
    side, target, weights = torch.cuda.Stream(), host(), torch.ones(NUM, device=DEVICE)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        target.copy_(weights, non_blocking=True)
        done = side.record_event()

    def work() -> None:
        if ordered:
            done.synchronize()
        target.add_(1)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def a_pool_of_threads(ordered: bool) -> None:
    """The thread is always first; a list that both look at orders nothing."""
    target, ended = host(), []

    def work() -> None:
        target.add_(1)
        ended.append(True)

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work)
        while not ended:
            time.sleep(0.001)
        if ordered:
            future.result()
        target.mul_(2)
        future.result()


def a_copy_by_a_pool_of_threads(ordered: bool) -> None:
    target, weights = host(), torch.ones(NUM, device=DEVICE)

    def work() -> torch.cuda.Event:
        target.copy_(weights, non_blocking=True)
        return torch.cuda.current_stream().record_event()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()  # its thread is there before
        done = pool.submit(work).result()
    if ordered:
        done.synchronize()
    target.add_(1)
    assert not ordered or bool((target == 2).all())


def from_device_to_device(ordered: bool) -> None:
    """Both streams wait for such a copy; a third one has to."""
    other = torch.device("cuda", 1)
    side, weights = torch.cuda.Stream(DEVICE), torch.ones(NUM, device=other)
    copy = weights.to(DEVICE)
    copy.add_(1)
    weights.add_(1)
    if ordered:
        side.wait_stream(torch.cuda.current_stream(DEVICE))
    with torch.cuda.stream(side):
        copy.add_(1)


def two_devices(ordered: bool) -> None:
    other = torch.device("cuda", 1)
    side, target, weights = torch.cuda.Stream(other), host(), torch.ones(NUM, device=other)
    side.wait_stream(torch.cuda.current_stream(other))
    with torch.cuda.stream(side):
        target.copy_(weights, non_blocking=True)
        done = side.record_event()
    if ordered:
        torch.cuda.current_stream(DEVICE).wait_event(done)
    torch.empty(NUM, device=DEVICE).copy_(target, non_blocking=True)


def forward_on_a_stream_of_the_user(ordered: bool) -> None:
    """Autograd orders the backward after it, and what follows after both, by events of the device's guard."""
    side, weights = torch.cuda.Stream(), torch.ones(NUM, device=DEVICE, requires_grad=True)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        loss = (weights * 2).sum()
    if not ordered:
        loss.detach().add_(1)
    loss.backward()
    assert weights.grad is not None
    weights.grad.add_(1)


def released_memory(ordered: bool) -> None:
    side, weights = torch.cuda.Stream(), torch.ones(NUM, device=DEVICE)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.empty(NUM, device=DEVICE).copy_(weights)
    if ordered:
        weights.record_stream(side)
    del weights
    torch.ones(NUM, device=DEVICE)


def a_resized_storage(ordered: bool) -> None:
    side, weights = torch.cuda.Stream(), torch.ones(NUM, device=DEVICE)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.empty(NUM, device=DEVICE).copy_(weights)
    if ordered:
        torch.cuda.current_stream().wait_stream(side)
    weights.untyped_storage().resize_(0)
    torch.ones(NUM, device=DEVICE)


def unregistered_memory(ordered: bool) -> None:
    _, target = registered()
    target.copy_(torch.ones(NUM, device=DEVICE), non_blocking=True)
    if ordered:
        torch.cuda.synchronize()
    torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(target.data_ptr()))


def unmapped_memory(ordered: bool) -> None:
    pages, target = registered()
    address = target.data_ptr()
    target.copy_(torch.ones(NUM, device=DEVICE), non_blocking=True)
    torch.cuda.synchronize()
    if ordered:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))
    del target
    pages.close()


def written_to_a_file(ordered: bool) -> None:
    target = host()
    target.copy_(torch.zeros(NUM, device=DEVICE), non_blocking=True)
    if ordered:
        torch.cuda.synchronize()
    with tempfile.TemporaryFile() as file:
        os.pwritev(file.fileno(), [memoryview(target.numpy())], 0)


def written_by_numpy(ordered: bool) -> None:
    """The array is there before the copy: only the bytes show who was first."""
    source = host()
    array = source.numpy()
    torch.empty(NUM, device=DEVICE).copy_(source, non_blocking=True)
    if ordered:
        torch.cuda.synchronize()
    array[3] = 7


def written_through_a_mapping(ordered: bool) -> None:
    pages, source = registered()
    torch.empty(NUM, device=DEVICE).copy_(source, non_blocking=True)
    if ordered:
        torch.cuda.synchronize()
    pages[8:12] = b"abcd"
    torch.cuda.synchronize()
    torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(source.data_ptr()))


PROGRAMS: dict[str, tuple[Callable[[bool], None], str]] = {
    program.__name__: (program, words)
    for program, words in (
        (plain_operators, "writes memory that stream 0 of cuda:0 wrote"),
        (reading_after_writing, "on stream 0 of cuda:0 writes memory that stream"),
        (inside_a_subclass, "writes memory that stream 0 of cuda:0 wrote"),
        (a_python_thread, "writes pinned memory that stream"),
        (a_pool_of_threads, "mul_.Tensor on the host writes pinned memory that thread"),
        (a_copy_by_a_pool_of_threads, "on the host writes pinned memory that stream 0"),
        (from_device_to_device, "writes memory that stream 0 of cuda:0 wrote"),
        (two_devices, "reads pinned memory that stream"),
        (forward_on_a_stream_of_the_user, "on stream 0 of cuda:0 writes memory that stream"),
        (released_memory, "memory of stream 0 of cuda:0 is used again while stream"),
        (a_resized_storage, "memory of stream 0 of cuda:0 is used again while stream"),
        (unregistered_memory, "host memory is unregistered while stream 0"),
        (unmapped_memory, "host memory is unmapped while it is registered"),
        (written_to_a_file, "reads pinned memory that stream 0 of cuda:0 wrote"),
        (written_by_numpy, "host memory was written while stream 0 of cuda:0 leaves it"),
        (written_through_a_mapping, "host memory was written while stream 0 of cuda:0 leaves it"),
    )
}
"""A program, and what is reported of it where it is not in order."""
