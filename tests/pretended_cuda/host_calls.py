"""Calls of the host that torch shows to no mode, told to the detector: threads, files, numpy, numbers made tensors."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from tests.pretended_cuda.accesses import span_of

if TYPE_CHECKING:
    from tests.pretended_cuda.detector import Detector


@contextmanager
def patched(detector: Detector) -> Iterator[None]:
    """Let the detector see what torch shows to no mode: threads, files, numpy, and numbers that become tensors."""
    originals = {
        (owner, name): getattr(owner, name)
        for owner, names in (
            (ThreadPoolExecutor, ("submit",)),
            (Future, ("result", "exception", "done")),
            (threading.Thread, ("start", "run", "join")),
            (os, ("preadv", "pwritev")),
            (torch, ("tensor", "as_tensor", "asarray")),
            (torch.Tensor, ("numpy", "new_tensor")),
        )
        for name in names
    }

    def submit(self: ThreadPoolExecutor, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        start, end = detector.record(), {}

        def task() -> Any:
            with detector.begins(start, threading.current_thread().name):
                try:
                    return function(*args, **kwargs)
                finally:
                    end.update(detector.record())

        future = originals[ThreadPoolExecutor, "submit"](self, task)
        future.detected_end = end
        return future

    def known(name: str) -> Callable[..., Any]:
        def ask(self: Future[Any], *args: Any, **kwargs: Any) -> Any:
            try:
                found = originals[Future, name](self, *args, **kwargs)
            finally:
                if self._state in ("FINISHED", "CANCELLED_AND_NOTIFIED"):
                    detector.wait(getattr(self, "detected_end", {}))
            return found

        return ask

    def start(self: threading.Thread) -> None:
        self.detected_start = detector.record()  # type: ignore[attr-defined]
        originals[threading.Thread, "start"](self)

    def run(self: threading.Thread) -> None:
        with detector.begins(getattr(self, "detected_start", {}), self.name):
            try:
                originals[threading.Thread, "run"](self)
            finally:
                self.detected_end = detector.record()  # type: ignore[attr-defined]

    def join(self: threading.Thread, timeout: float | None = None) -> None:
        originals[threading.Thread, "join"](self, timeout)
        if not self.is_alive():
            detector.wait(getattr(self, "detected_end", {}))

    def in_file(name: str, *, writes: bool) -> Callable[..., int]:
        def exchange(file: int, buffers: Any, *args: Any) -> int:
            for buffer in buffers:
                view = memoryview(buffer).cast("B")
                if len(view):
                    address = torch.frombuffer(view, dtype=torch.uint8).data_ptr()
                    detector.touch_bytes(address, len(view), writes=writes, what=f"os.{name}")
            return int(originals[os, name](file, buffers, *args))

        return exchange

    def numpy(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.device.type == "cpu" and self.numel():
            start, end = span_of(self)
            detector.touch_bytes(start, end - start, writes=False, what="Tensor.numpy")
        return originals[torch.Tensor, "numpy"](self, *args, **kwargs)

    def made(owner: Any, name: str) -> Callable[..., torch.Tensor]:
        def make(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            given = data if owner is torch else args[0]
            tensor: torch.Tensor = originals[owner, name](data, *args, **kwargs)
            if tensor.is_cuda and not isinstance(given, torch.Tensor):
                detector.uploaded(tensor.device.index)
            return tensor

        return make

    replacements = {
        (ThreadPoolExecutor, "submit"): submit,
        **{(Future, name): known(name) for name in ("result", "exception", "done")},
        (threading.Thread, "start"): start,
        (threading.Thread, "run"): run,
        (threading.Thread, "join"): join,
        (os, "preadv"): in_file("preadv", writes=True),
        (os, "pwritev"): in_file("pwritev", writes=False),
        (torch.Tensor, "numpy"): numpy,
        **{(torch, name): made(torch, name) for name in ("tensor", "as_tensor", "asarray")},
        (torch.Tensor, "new_tensor"): made(torch.Tensor, "new_tensor"),
    }
    for (owner, name), replacement in replacements.items():
        setattr(owner, name, replacement)
    try:
        yield
    finally:
        for (owner, name), original in originals.items():
            setattr(owner, name, original)
