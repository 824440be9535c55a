"""The pretended device as `torch.cuda` shows it; imported before torch, whose own module runs over what it calls here.

What torch.cuda takes from its library of CUDA (`torch._C._cuda_*`, the runtime, streams and events) is replaced, and
nothing above it.
"""

import ctypes
import importlib
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from tests.pretended_cuda.library import load

MAX_DEVICES = 2
LIBRARY = load(MAX_DEVICES)

import torch  # noqa: E402 - the library comes first

_CUDA = 1  # of torch._C._autograd.DeviceType
NAME = "NVIDIA H100 80GB HBM3"

after_wait: list[Callable[[], None]] = []
"""Called after each wait of the host for a stream, an event or a device."""
before_unregistering: list[Callable[[], None]] = []
"""Called before host memory is unregistered, while it is still mapped."""
after_collective: list[Callable[[str, Any, Any, Any], None]] = []
"""Called after each collective with its name, its stream, and the tensors that it reads and writes."""

_registered: dict[int, int] = {}


def _waited() -> None:
    for told in after_wait:
        told()


class Stream(torch.Stream):
    """A stream, as torch.cuda.Stream."""

    def __new__(cls, device: Any = None, priority: int = 0, **existing: Any) -> Any:
        if existing:
            return super().__new__(cls, **existing)
        return super().__new__(cls, device=torch.device("cuda", _index(device)), priority=priority)

    @property
    def cuda_stream(self) -> int:
        """A number in place of the runtime's handle."""
        return int(self.stream_id)

    def record_event(self, event: Any = None) -> Any:
        """Record an event behind what has been queued so far."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Any) -> None:
        """Let later work wait for an event."""
        event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        """Let later work wait for what another stream has been given so far."""
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        """Let the host wait."""
        super().synchronize()
        _waited()

    def query(self) -> bool:
        """Say that all is done, as it is in a device that has caught up. The host then knows it."""
        return super().query()


class Event(torch.Event):
    """An event, as torch.cuda.Event."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **_: Any) -> Any:
        return super().__new__(cls, device="cuda", enable_timing=enable_timing, blocking=blocking)

    def record(self, stream: Any = None) -> None:
        """Record what has been queued on a stream so far."""
        self._recorded = time.perf_counter()
        super().record(torch.cuda.current_stream() if stream is None else stream)

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds by the clock of the host, for which operators of the device take no time of their own."""
        return float(1e3 * (end_event._recorded - self._recorded))

    def wait(self, stream: Any = None) -> None:
        """Let later work of a stream wait."""
        super().wait(torch.cuda.current_stream() if stream is None else stream)

    def synchronize(self) -> None:
        """Let the host wait."""
        super().synchronize()
        _waited()

    def query(self) -> bool:
        """Say that it has come. The host then knows it."""
        return super().query()


class _Success(int):
    success = 0

    def __call__(self, code: int) -> int:
        return code


class Runtime:
    """What the package and torch call of the CUDA runtime."""

    cudaError = _Success()  # noqa: N815 - the runtime's name

    def cudaGetErrorString(self, code: int) -> str:  # noqa: N802
        """Name an error."""
        names = {712: "part or all of the requested memory range is already mapped", 713: "memory is not registered"}
        return names.get(code, f"error {code}")

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        """Pin whole pages of the host."""
        if address % 4096 or num_bytes % 4096:
            return 1  # cudaErrorInvalidValue: a real runtime would pin what lies around, too
        error = int(LIBRARY.pretended_register(address, num_bytes))
        if not error:
            _registered[address] = num_bytes
        return error

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        """Unpin what was pinned from here on."""
        for told in before_unregistering:
            told()
        _registered.pop(address, None)
        return int(LIBRARY.pretended_unregister(address))

    def cudaMemGetInfo(self, index: int) -> tuple[int, int]:  # noqa: N802
        """Free and total bytes."""
        memory = memory_of(index)
        return memory.total - memory.reserved, memory.total


def registered_ranges() -> list[tuple[int, int]]:
    """First address and bytes of the host memory that the runtime has registered by now."""
    return list(_registered.items())


def use_devices(count: int) -> None:
    """Show only so many devices from now on."""
    if not 1 <= count <= MAX_DEVICES:
        raise ValueError(f"count={count} must be from 1 to {MAX_DEVICES}")
    LIBRARY.pretended_set_devices(count)
    torch.cuda.default_generators = _generators[:count]
    torch.cuda._cached_device_count = count


def memory_of(index: int) -> SimpleNamespace:
    """Bytes of a device: total, allowed, allocated, peak, reserved, reserved_peak."""
    found = (ctypes.c_int64 * 6)()
    LIBRARY.pretended_memory(index, found)
    names = ("total", "allowed", "allocated", "peak", "reserved", "reserved_peak")
    return SimpleNamespace(**dict(zip(names, found, strict=True)))


def _index(device: Any) -> int:
    if device is None:
        return int(LIBRARY.pretended_device())
    index = device if isinstance(device, int) else torch.device(device).index
    return int(LIBRARY.pretended_device()) if index is None or index < 0 else index


def _exchange(index: int) -> int:
    before = int(LIBRARY.pretended_device())
    if index >= 0:
        LIBRARY.pretended_set_device(index)
    return before


def _set_stream(stream_id: int, device_index: int, device_type: int) -> None:
    LIBRARY.pretended_set_device(device_index)
    LIBRARY.pretended_set_stream(device_index, stream_id)


def _synchronize() -> None:
    torch._C._accelerator_synchronizeDevice(LIBRARY.pretended_device())
    _waited()


def _memory_stats(index: int) -> dict[str, Any]:
    memory = memory_of(index)
    allocated = {"current": memory.allocated, "peak": memory.peak, "allocated": memory.allocated, "freed": 0}
    reserved = {"current": memory.reserved, "peak": memory.reserved_peak, "allocated": memory.reserved, "freed": 0}
    return {
        "allocated_bytes": {"all": allocated},
        "active_bytes": {"all": allocated},
        "reserved_bytes": {"all": reserved},
        "num_ooms": 0,
    }


def _set_fraction(fraction: float, index: int) -> None:
    total = memory_of(index).total
    LIBRARY.pretended_limit(index, total, int(total * fraction))


def _fraction(index: int) -> float:
    memory = memory_of(index)
    return float(memory.allowed / memory.total)


@cache
def _properties(index: int) -> SimpleNamespace:
    return SimpleNamespace(
        name=NAME,
        major=9,
        minor=0,
        total_memory=memory_of(index).total,
        multi_processor_count=132,
        warp_size=32,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=232448,
        L2_cache_size=50 * 2**20,
        gcnArchName="",
        is_integrated=0,
    )


def _install() -> None:
    """Let torch.cuda run over the pretended device. torch hashes these functions, which it can't with ctypes' own."""
    library_functions: dict[str, Callable[..., Any]] = {
        "getDeviceCount": lambda: LIBRARY.pretended_num_devices(),
        "getDevice": lambda: LIBRARY.pretended_device(),
        "setDevice": lambda index: LIBRARY.pretended_set_device(index),
        "exchangeDevice": _exchange,
        "maybeExchangeDevice": _exchange,
        "getCurrentStream": lambda index: (LIBRARY.pretended_stream(index), index, _CUDA),
        "getDefaultStream": lambda index: (0, index, _CUDA),
        "getCurrentRawStream": lambda index: LIBRARY.pretended_stream(index),
        "setStream": _set_stream,
        "synchronize": _synchronize,
        "memoryStats": _memory_stats,
        "resetPeakMemoryStats": lambda index: LIBRARY.pretended_reset_peak(index),
        "resetAccumulatedMemoryStats": lambda index: None,
        "emptyCache": lambda: LIBRARY.pretended_empty_cache(LIBRARY.pretended_device()),
        "setMemoryFraction": _set_fraction,
        "getMemoryFraction": _fraction,
        "canDeviceAccessPeer": lambda index, peer: True,
        "isInBadFork": lambda: False,
        "isCurrentStreamCapturing": lambda: False,
        "ipc_collect": lambda: None,
        "getArchFlags": lambda: "sm_90",
        "sleep": lambda cycles: None,
        "set_sync_debug_mode": lambda mode: None,
        "get_sync_debug_mode": lambda: 0,
        "clearCublasWorkspaces": lambda: None,
        "init": lambda: None,
    }
    for name, function in library_functions.items():
        setattr(torch._C, f"_cuda_{name}", function)
    cuda = torch.cuda
    torch.cuda.nvtx._nvtx = SimpleNamespace(rangePushA=lambda text: 0, rangePop=lambda: 0, markA=lambda text: None)
    for module in (cuda, cuda.streams):
        module.Stream = Stream  # type: ignore[assignment,misc]
        module.Event = Event  # type: ignore[assignment,misc]
    more = {
        "_cudart": Runtime(),
        "_initialized": True,
        "_exchange_device": _exchange,
        "_maybe_exchange_device": lambda index: _exchange(index),  # torch refuses one function under two names
        "_get_device_properties": _properties,
        "_is_in_bad_fork": lambda: False,
        "is_current_stream_capturing": lambda: False,
    }
    for name, value in more.items():
        setattr(cuda, name, value)
    _resize_on_cpu, _clone_on_cpu = torch.UntypedStorage.resize_, torch.UntypedStorage.clone

    def resize(self: torch.UntypedStorage, num_bytes: int) -> torch.UntypedStorage:
        if self.device.type != "cuda":
            return _resize_on_cpu(self, num_bytes)
        if LIBRARY.pretended_resize_storage(self._cdata, num_bytes):
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to resize a storage to {num_bytes} bytes")
        return self

    def clone(self: torch.UntypedStorage) -> torch.UntypedStorage:
        if self.device.type != "cuda":
            return _clone_on_cpu(self)
        with torch.no_grad():
            return torch.empty(0, dtype=torch.uint8, device=self.device).set_(self).clone().untyped_storage()

    def make(cls: Any, *args: Any, **kwargs: Any) -> Any:
        """What `torch.load` calls to put what it reads on a device; the CPU's build refuses others than its own."""
        if torch.device(kwargs.get("device") or "cpu").type != "cuda":
            return torch._C.StorageBase.__new__(cls, *args, **kwargs)
        return torch.empty(args[0], dtype=torch.uint8, device=kwargs["device"]).untyped_storage()

    torch.UntypedStorage.__new__ = make  # type: ignore[assignment]
    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
    torch.UntypedStorage.clone = clone  # type: ignore[method-assign]


def _import_bitsandbytes() -> None:
    """Let its operators have CPU kernels alone, which then serve the device, too."""
    with patch.object(torch.cuda, "is_available", lambda: False), suppress(ImportError):
        importlib.import_module("bitsandbytes")


_install()
# The first generators that are made are the devices' own.
_generators = tuple(torch.Generator(torch.device("cuda", index)) for index in range(MAX_DEVICES))
# Autograd has threads for as many devices as there are when it first runs.
torch.ones((), requires_grad=True).backward()
use_devices(int(os.environ.get("PRETENDED_CUDA_DEVICES", "1")))
_import_bitsandbytes()
