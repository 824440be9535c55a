"""Offloading of one group's masters and ZeRO optimizer state to host memory, and their return to the device.

DeepSpeed's own `offload_states` collects garbage and pins its buffers at every call, 200 to 400 ms per switch. Here the
host's buffers are allocated once, and only pointers change. Copies overlap with the computation:

    outbound:    group 0 leaves
    inbound:                     group 1 comes
    computing:   forward ...         backward ...     | step of group 1

Only readers of masters or state wait for the copies (`StateMover.wait`), and so do users of the freed memory.
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from slivertune.core.copy_streams import CopyStreams, Event
from slivertune.core.host_tensors import aligned
from slivertune.core.ledger import claim, claimed_at_birth
from slivertune.hift.chunk import Weight, refresh_master
from slivertune.hift.offload_buffer import OffloadBuffer, host_buffer
from slivertune.parallel.zero.deepspeed_internals import call_before_reading, link_fragments, unlink_fragments

_Key = tuple[int, str]
"""Index of a master, and the name of a state of it. The name "" is the master itself."""


class StateMover:
    """Owns the host copy of a ZeRO optimizer's masters and state for its rank's share of a group.

    Args:
        optimizer: DeepSpeed's ZeRO optimizer of the group, any stage. Its methods that read masters or state are
            overridden on this instance, and wait for copies.
        stage: Stage of ZeRO: 1, 2 or 3.
        streams: Copy streams of the optimizer's device; shared by all groups' movers.
    """

    def __init__(self, optimizer: Any, stage: int, streams: CopyStreams) -> None:
        self._optimizer = optimizer
        self._stage = stage
        self._streams = streams
        self._buffer: OffloadBuffer = host_buffer(streams)
        self._on_host: dict[_Key, torch.Tensor] = {}
        self._leaving: list[torch.Tensor] = []
        """Device memory that has been copied once the event `_left` is reached."""
        self._left: Event = None
        """Event of the copies to the host. None if the host knows that they are complete."""
        self._arrived: Event = None
        """Event of the copies to the device."""
        self.copy_seconds = 0.0
        """Seconds spent copying, or on CUDA queueing copies, since the mover was made."""
        call_before_reading(optimizer, stage, self.wait)

    @property
    def masters(self) -> list[torch.Tensor]:
        """This rank's flat parts of the group's fp32 masters, one per param group or subgroup, ready to read."""
        self.wait()
        return self._masters

    @property
    def _masters(self) -> list[torch.Tensor]:
        if self._stage == 3:
            return list(self._optimizer.fp32_partitioned_groups_flat)
        return list(self._optimizer.single_partition_of_fp32_groups)

    def to_host(self) -> None:
        """Offload masters and state to host memory. New ones get a buffer there.

        Their device memory stays allocated until `release`.
        """
        moving = [(key, tensor) for key, tensor in self._tensors() if not self._waits(key, tensor)]
        if self._stage != 3:
            unlink_fragments(self._optimizer)
        if not moving:
            return
        sizes: Counter[torch.dtype] = Counter()
        for key, tensor in moving:
            if key not in self._on_host:
                sizes[tensor.dtype] += aligned(tensor.numel() * tensor.dtype.itemsize)
        if sizes:
            self._buffer.reserve(sizes)
        for key, tensor in moving:
            if key not in self._on_host:
                self._on_host[key] = self._buffer.empty_like(tensor.detach())
        start = time.perf_counter()
        with self._streams.on("outbound", self._streams.record(), self._arrived):
            for key, tensor in moving:
                self._on_host[key].copy_(tensor.data, non_blocking=True)
            self._left = self._streams.record("outbound")
        self.copy_seconds += time.perf_counter() - start
        for key, tensor in moving:
            self._leaving.append(tensor.data)
            tensor.data = self._on_host[key]
        self._arrived = None

    def release(self) -> None:
        """Free the device memory of offloaded masters and state. Later computation waits for their copies."""
        if self._leaving:
            self._streams.compute_after(self._left)
            self._leaving = []

    def to_device(self, leaving: "StateMover | None" = None) -> None:
        """Copy masters and state back to the device.

        Args:
            leaving: Mover whose freed device memory is reused if it has the right form; the rest is freed before any
                allocation. None allocates all memory in addition.

        Raises:
            torch.OutOfMemoryError: If the device has no memory left; nothing was moved then.
        """
        self.release()
        moving = [(key, tensor) for key, tensor in self._tensors() if self._waits(key, tensor)]
        if moving:
            spare, spare_left = leaving._hand_over(moving) if leaving is not None else ({}, None)
            try:
                with claimed_at_birth("state"):
                    targets = [
                        spare[key]
                        if key in spare
                        else torch.empty_strided(*_form(tensor)[:2], dtype=tensor.dtype, device=self._streams.device)
                        for key, tensor in moving
                    ]
            except torch.OutOfMemoryError:
                self._streams.compute_after(spare_left)  # what was handed over is the computation's next
                raise
            start = time.perf_counter()
            # After the computation that uses the memory, and the copies out of it. The computation, or this stream when
            # the memory was handed over, has waited for the copies to the host.
            with self._streams.on("inbound", self._streams.record(), spare_left):
                for (_, tensor), target in zip(moving, targets, strict=True):
                    target.copy_(tensor.data, non_blocking=True)
                self._arrived = self._streams.record("inbound")
            self.copy_seconds += time.perf_counter() - start
            for (_, tensor), target in zip(moving, targets, strict=True):
                tensor.data = target
            self._left = None
        if self._stage != 3:
            link_fragments(self._optimizer, self.wait)
        self.claim_device()

    def _hand_over(self, coming: list[tuple[_Key, torch.Tensor]]) -> tuple[dict[_Key, torch.Tensor], Event]:
        """Hand over the device memory of offloaded masters and state, and free the rest.

        Args:
            coming: Tensors that need memory.

        Returns:
            By key, memory in a tensor's form; and the event from which it may be written.
        """
        # Tensors that share a storage can't be handed over one by one.
        whole = {tensor.untyped_storage().data_ptr(): tensor for tensor in self._leaving}
        spare: dict[Any, list[torch.Tensor]] = {}
        for tensor in whole.values():
            if tensor.untyped_storage().nbytes() == tensor.nbytes:
                spare.setdefault(_form(tensor), []).append(tensor)
        found = {key: spare[_form(tensor)].pop() for key, tensor in coming if spare.get(_form(tensor))}
        if len(found) == len(self._leaving):
            self._leaving = []  # nothing goes back to the allocator, so no computation has to wait
        self.release()
        return found, self._left

    def wait(self) -> None:
        """Make later reads and writes of masters or state wait for the copies in flight, on host or device."""
        self._streams.compute_after(self._arrived)
        self._arrived = None
        if self._left is not None:
            self._streams.synchronize()  # the host reads them
            self._left, self._leaving = None, []

    def follow_weights(self) -> None:
        """Update masters from weights that were written by others, on host or device. See `refresh_master`."""
        self.wait()
        for master, weights in zip(self._masters, self._shares(), strict=True):
            if master.untyped_storage().data_ptr() != weights.untyped_storage().data_ptr():
                refresh_master(master.data, weights.detach().to(master.device))

    def drop_gradients(self) -> None:
        """Free the memory of stage 3's flat gradient. Its many views stay valid."""
        flat = self._flat_gradient()
        if flat is not None:
            flat.untyped_storage().resize_(0)
            claim(flat, "residual")

    def take_gradients(self) -> None:
        """Allocate stage 3's flat gradient as zeros: padding is never written, but counts in the norm."""
        flat = self._flat_gradient()
        if flat is not None and flat.untyped_storage().nbytes() == 0:
            flat.untyped_storage().resize_(flat.numel() * flat.dtype.itemsize)
            claim(flat.zero_(), "gradients")

    def claim_device(self) -> None:
        """Register this group's masters and state on the device with the ledger."""
        for _, tensor in self._tensors():
            claim(tensor.data, "state")

    def device_bytes(self) -> int:
        """Return the bytes of masters and state that are resident on the device."""
        return sum(tensor.untyped_storage().nbytes() for key, tensor in self._tensors() if not self._waits(key, tensor))

    def offloaded_bytes(self) -> int:
        """Return the bytes of masters and state that are offloaded."""
        return sum(tensor.nbytes for key, tensor in self._tensors() if self._waits(key, tensor))

    def leaving_bytes(self) -> int:
        """Return the bytes of device memory that offloaded masters and state still occupy."""
        return sum(tensor.nbytes for tensor in self._leaving)

    def host_bytes(self) -> int:
        """Return the bytes of the host buffers, which stay allocated while the group trains."""
        return sum(waiting.numel() * waiting.dtype.itemsize for waiting in self._on_host.values())

    def _tensors(self) -> Iterator[tuple[_Key, torch.Tensor]]:
        optimizer = self._optimizer
        flats = optimizer.fp16_partitioned_groups_flat if self._stage == 3 else optimizer.bit16_groups_flat
        weights = {flat.untyped_storage().data_ptr() for flat in flats}
        for index, master in enumerate(self._masters):
            # Under torch.autocast, stage 3 trains the fp32 weights themselves.
            if master.untyped_storage().data_ptr() not in weights:
                yield (index, ""), master
            for name, value in optimizer.optimizer.state.get(master, {}).items():
                if isinstance(value, torch.Tensor) and value.dim():
                    yield (index, name), value

    def _shares(self) -> list[torch.Tensor]:
        """Return this rank's flat parts of the weights, one per master."""
        if self._stage == 3:
            return list(self._optimizer.fp16_partitioned_groups_flat)
        return [
            parts[dist.get_rank(ranks)]
            for parts, ranks in zip(
                self._optimizer.parallel_partitioned_bit16_groups, self._optimizer.real_dp_process_group, strict=True
            )
        ]

    def _waits(self, key: _Key, tensor: torch.Tensor) -> bool:
        waiting = self._on_host.get(key)
        return waiting is not None and waiting.data_ptr() == tensor.data_ptr()

    def _flat_gradient(self) -> torch.Tensor | None:
        return self._optimizer.grad_partitions_flat_buffer if self._stage == 3 else None


def _form(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def check_flat_memory(optimizers: Iterable[Any], weights: Iterable[Weight]) -> None:
    """Refuse weights outside the flat memory in which DeepSpeed has placed them. Stages 1 and 2.

    Args:
        optimizers: DeepSpeed's ZeRO optimizers of all groups.
        weights: Weights that they step.

    Raises:
        RuntimeError: If there is such a weight; names it, the usual causes, and the way out.
    """
    addresses = {flat.untyped_storage().data_ptr() for each in optimizers for flat in each.bit16_groups_flat}
    for weight in weights:
        if weight.parameter.untyped_storage().data_ptr() not in addresses:
            raise RuntimeError(
                f"{weight.name} is no longer in the memory that DeepSpeed gave it (model.to, or an assignment to its "
                ".data), and would never be trained. Do that before slivertune.prepare or initialize, or copy the "
                "values: with torch.no_grad(): parameter.copy_(values)"
            )
