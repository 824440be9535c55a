"""Collectives of pretended devices as NCCL's are: of contiguous tensors of a rank's device, on a stream of their own.

The bytes go over gloo at once; the detector notes who uses a result without waiting for it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import reduce
from pathlib import Path
from typing import Any

import tests.pretended_cuda.torch_cuda as torch_cuda  # isort: skip  # before torch
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    BarrierOptions,
    BroadcastOptions,
    ReduceScatterOptions,
    _create_work_from_future,
)
from torch.utils._python_dispatch import _disable_current_modes

from slivertune.parallel.consistency import heartbeat

NAME = "pretended"
Combine = Callable[[list[list[torch.Tensor]]], Sequence[torch.Tensor]]
"""Makes the results from what each rank has given."""


class CollectiveError(RuntimeError):
    """NCCL would refuse it, or hang."""


class Group(dist.ProcessGroup):
    """A process group of pretended devices.

    Args:
        store: Of the group.
        rank: This rank.
        num_ranks: Ranks.
        timeout: Of one collective.
    """

    def __init__(self, store: Any, rank: int, num_ranks: int, timeout: timedelta) -> None:
        super().__init__(rank, num_ranks)
        self._gloo = dist.ProcessGroupGloo(store, rank, num_ranks, timeout)
        self._rank, self._num_ranks = rank, num_ranks
        self._stream: Any = None

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return NAME

    @property
    def group_name(self) -> str:
        """Torch's, by which compiled and functional collectives find it."""
        return str(dist.distributed_c10d._world.pg_names[self])

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        reduced = _by((opts or AllreduceOptions()).reduceOp)
        return self._run(
            "all_reduce", tensors, tensors, lambda given: [reduced(each) for each in zip(*given, strict=True)]
        )

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        root = (opts or BroadcastOptions()).rootRank
        return self._run("broadcast", tensors, tensors, lambda given: given[root])

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        reduced = _by(opts.reduceOp)

        def combine(given: list[list[torch.Tensor]]) -> Sequence[torch.Tensor]:
            if self._rank != opts.rootRank:
                return given[self._rank]
            return [reduced(each) for each in zip(*given, strict=True)]

        return self._run("reduce", tensors, tensors, combine)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Any:
        def combine(given: list[list[torch.Tensor]]) -> Sequence[torch.Tensor]:
            return [each[at] for at in range(len(inputs)) for each in given]

        return self._run("all_gather", inputs, [tensor for each in outputs for tensor in each], combine)

    def all_gather_single(self, output: torch.Tensor, own: torch.Tensor, opts: Any = None) -> Any:
        def combine(given: list[list[torch.Tensor]]) -> Sequence[torch.Tensor]:
            return [torch.cat([each[0].flatten() for each in given])]

        return self._run("all_gather_single", [own], [output], combine)

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None) -> Any:
        reduced = _by((opts or ReduceScatterOptions()).reduceOp)

        def combine(given: list[list[torch.Tensor]]) -> Sequence[torch.Tensor]:
            places = [at * self._num_ranks + self._rank for at in range(len(outputs))]
            return [reduced([each[place] for each in given]) for place in places]

        return self._run("reduce_scatter", [tensor for each in inputs for tensor in each], outputs, combine)

    def reduce_scatter_single(self, output: torch.Tensor, own: torch.Tensor, opts: Any = None) -> Any:
        reduced = _by((opts or ReduceScatterOptions()).reduceOp)

        def combine(given: list[list[torch.Tensor]]) -> Sequence[torch.Tensor]:
            return [reduced([each[0].flatten().chunk(self._num_ranks)[self._rank] for each in given])]

        return self._run("reduce_scatter_single", [own], [output], combine)

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        return [self.all_gather_single(*pair) for pair in zip(outputs, inputs, strict=True)][-1]

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        return [self.reduce_scatter_single(*pair, opts) for pair in zip(outputs, inputs, strict=True)][-1]

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> Any:
        own = inputs[0] if self._rank == opts.rootRank else outputs * self._num_ranks  # of the same form, and not used
        return self._run("scatter", own, outputs, lambda given: [given[opts.rootRank][self._rank]])

    # Their names before torch 2.13.
    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def barrier(self, opts: Any = None) -> Any:
        return self._gloo.barrier(opts or BarrierOptions())

    def _run(self, name: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], combine: Combine) -> Any:
        """Exchange all ranks' inputs, and queue the results on the group's stream."""
        device = _check(name, [*inputs, *outputs])
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with _disable_current_modes(), torch.no_grad():
            results = combine(self._gathered([_bytes_of(each) for each in inputs]))
            for output, result in zip(outputs, results, strict=True):
                _bytes_of(output).view(-1).copy_(result.view(-1).to(output.dtype))
        for told in torch_cuda.after_collective:
            told(name, self._stream, inputs, outputs)
        with torch.cuda.stream(self._stream):
            for tensor in {id(each): each for each in [*inputs, *outputs]}.values():
                tensor.record_stream(self._stream)
            future = torch.futures.Future(devices=[device])
            future.set_result([*outputs])
        return _create_work_from_future(future)

    def _gathered(self, given: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        flat = torch.cat([each.view(-1).view(torch.uint8) for each in given])
        everything = [torch.empty_like(flat) for _ in range(self._num_ranks)]
        self._gloo.allgather([everything], [flat], AllgatherOptions()).wait()
        sizes = [each.nbytes for each in given]
        return [
            [part.view(own.dtype).view(own.shape) for part, own in zip(one.split(sizes), given, strict=True)]
            for one in everything
        ]


def _check(name: str, tensors: Sequence[torch.Tensor]) -> torch.device:
    current = torch.device("cuda", torch.cuda.current_device())
    for tensor in tensors:
        if tensor.device != current:
            raise CollectiveError(f"{name} of a tensor on {tensor.device} while {current} is this rank's device")
        if not tensor.is_contiguous():
            raise CollectiveError(f"{name} of a tensor of strides {tensor.stride()} and shape {tuple(tensor.shape)}")
    return current


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the CPU in the same memory, which a pretended device has on the host."""
    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)


def _by(op: Any) -> Callable[[Sequence[torch.Tensor]], torch.Tensor]:
    """Adds and so on in the order of the ranks."""
    if op == dist.ReduceOp.AVG:
        return lambda each: reduce(torch.add, each) / len(each)
    binary: Any = {
        dist.ReduceOp.SUM: torch.add,
        dist.ReduceOp.PRODUCT: torch.mul,
        dist.ReduceOp.MIN: torch.minimum,
        dist.ReduceOp.MAX: torch.maximum,
        dist.ReduceOp.BOR: torch.bitwise_or,
        dist.ReduceOp.BAND: torch.bitwise_and,
    }
    chosen = next((function for known, function in binary.items() if op == known), None)
    if chosen is None:
        raise CollectiveError(f"{op} is not pretended")
    return lambda each: reduce(chosen, each)


dist.Backend.register_backend(NAME, Group, devices=["cuda"])


@contextmanager
def group_of_devices(store: Path, rank: int, num_ranks: int) -> Iterator[None]:
    """The default group inside is one of pretended devices, as many as ranks. Nobody has set this rank's device.

    Args:
        store: A new file, the same on every rank.
        rank: This rank.
        num_ranks: Ranks.
    """
    torch_cuda.use_devices(num_ranks)
    torch.cuda.set_device(0)  # as in a new process
    if dist.is_initialized():
        dist.barrier()  # a rank that is still connecting must not find that the other has left
        dist.destroy_process_group()
    dist.init_process_group(NAME, store=dist.FileStore(str(store), num_ranks), rank=rank, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
        heartbeat._gloo_group.clear()  # or the next case would need new processes
