"""What only a real GPU can tell of the package's assumptions: one answer per question, written as each is known.

- `autograd`: whether hooks of gradients and the end of a backward run on the user's stream, and on which thread.
- `pinning`: GB/s at which host memory is pinned, with and without huge pages, and unpinned.
- `bus`: GB/s of copies to the device, from it, and both at once on two streams; seconds of the host to queue them.
- `failed pin`: whether memory that can't be pinned is a warning, and the next kernel runs.

    python benchmarks/gpu_probe.py --output probe.json
"""

import argparse
import gc
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from environment import record_environment
from gpu import refuse_without_cuda
from result_files import write_json

from slivertune.core import pinned_memory
from slivertune.core.copy_streams import CopyStreams
from slivertune.core.torch_internals import at_end_of_backward

DEVICE = torch.device("cuda", 0)
_REPEATS = 4


def autograd(num_bytes: int) -> dict[str, bool]:
    """Ask a backward on a stream of its own."""
    found: dict[str, bool] = {}
    weight, side = torch.nn.Parameter(torch.ones(4, device=DEVICE)), torch.cuda.Stream()

    def note(place: str) -> None:
        found[f"{place} is on the main thread"] = threading.current_thread() is threading.main_thread()
        found[f"{place} is on the user's stream"] = torch.cuda.current_stream() == side

    weight.register_post_accumulate_grad_hook(lambda _: note("a gradient's hook"))
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        loss = (weight * 2).sum()
        loss.register_hook(lambda _: at_end_of_backward(lambda: note("the end of the backward")))
        loss.backward()
    torch.cuda.synchronize()
    return found


def pinning(num_bytes: int) -> dict[str, Any]:
    """Pin and unpin one buffer, in huge pages and in small ones."""
    found: dict[str, Any] = {}
    usual = pinned_memory.HUGE_PAGES_FROM_BYTES
    for name, limit in (("huge pages", 0), ("small pages", 2**62)):
        pinned_memory.HUGE_PAGES_FROM_BYTES = limit
        try:
            start = time.perf_counter()
            memory = CopyStreams(DEVICE).host_memory(num_bytes)
            found[f"{name}, GB/s"] = num_bytes / 1e9 / (time.perf_counter() - start)
        finally:
            pinned_memory.HUGE_PAGES_FROM_BYTES = usual
        found[f"{name}, is_pinned"] = memory.is_pinned()
        start = time.perf_counter()
        del memory
        gc.collect()
        found[f"{name}, unpinned in seconds"] = time.perf_counter() - start
    return found


def bus(num_bytes: int) -> dict[str, float]:
    """Copy one way, the other way, and both ways at once."""
    host = [CopyStreams(DEVICE).host_memory(num_bytes) for _ in range(2)]
    device = [torch.empty(num_bytes, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def copy(ways: tuple[int, ...]) -> tuple[float, float]:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(_REPEATS):
            for way in ways:
                with torch.cuda.stream(streams[way]):
                    source, target = (host[0], device[0]) if way == 0 else (device[1], host[1])
                    target.copy_(source, non_blocking=True)
        queued = time.perf_counter() - start
        torch.cuda.synchronize()
        return _REPEATS * num_bytes / 1e9 / (time.perf_counter() - start), queued

    copy((0, 1))
    (inbound, _), (outbound, _), (both, queued) = copy((0,)), copy((1,)), copy((0, 1))
    return {"to the device": inbound, "from it": outbound, "each way at once": both, "seconds to queue": queued}


def failed_pin(num_bytes: int) -> dict[str, Any]:
    """Pin the same pages twice, which the runtime refuses."""
    memory = CopyStreams(DEVICE).host_memory(num_bytes)
    error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), num_bytes, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pinned_memory._forget_error(DEVICE)
    total = float((torch.ones(4, device=DEVICE) + 1).sum())
    return {"refused": int(error) != 0, "the next kernel is right": total == 8}


QUESTIONS: dict[str, Callable[[int], dict[str, Any]]] = {
    "autograd": autograd,
    "pinning": pinning,
    "bus": bus,
    "failed pin": failed_pin,
}


def main() -> None:
    """Ask each question; one that fails has its error as its answer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=4 * 2**30, help="of a buffer that is pinned or copied")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.device = "cuda"
    refuse_without_cuda(parser, arguments)
    answers: dict[str, Any] = {}
    for name, ask in QUESTIONS.items():
        try:
            answers[name] = ask(arguments.bytes)
        except Exception as error:
            answers[name] = {"failure": f"{type(error).__name__}: {error}"[:600]}
        print(name, answers[name], flush=True)
        write_json(arguments.output, {"environment": record_environment(), "bytes": arguments.bytes, **answers})


if __name__ == "__main__":
    main()
