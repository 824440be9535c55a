"""Moves the masters and state of one group's ZeRO optimizer between the device and host memory.

DeepSpeed's own `offload_states` collects garbage and pins its buffers again at every call, 200 to 400 ms a switch; here
the host's buffers are allocated once, and only pointers change. Copies run beside the computation:

    outbound:    group 0 leaves
    inbound:                     group 1 comes
    computing:   forward ...         backward ...     | step of group 1

Only who reads the masters or state waits for them (`StateMover.wait`), and who gets the memory that they have left.
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
from slivertune.hift.masters import refresh_master
from slivertune.hift.offload_buffer import OffloadBuffer, host_buffer
from slivertune.hift.piece import Weight
from slivertune.parallel.zero.deepspeed_internals import call_before_reading, link_fragments, unlink_fragments

_Key = tuple[int, str]
"""Index of a master, and the name of a state of it; "" is the master itself."""


class StateMover:
    """Owns the waiting place of what one ZeRO optimizer keeps for its rank's share of a group.

    Args:
        optimizer: DeepSpeed's ZeRO optimizer of the group, any stage; methods of it that read masters or state are
            overridden, on this instance, and wait.
        stage: 1, 2 or 3.
        streams: Of the device where it steps; all groups' movers have the same.
    """

    def __init__(self, optimizer: Any, stage: int, streams: CopyStreams) -> None:
        self._optimizer = optimizer
        self._stage = stage
        self._streams = streams
        self._buffer: OffloadBuffer = host_buffer(streams)
        self._on_host: dict[_Key, torch.Tensor] = {}
        self._leaving: list[torch.Tensor] = []
        """Memory of the device that has been copied once `_left` has come."""
        self._left: Event = None
        """When what waits has reached the host; None where the host knows that it has."""
        self._arrived: Event = None
        """When what is on the device has arrived there."""
        self.copy_seconds = 0.0
        """Time spent copying, or on CUDA queueing copies, since the mover was made."""
        call_before_reading(optimizer, stage, self.wait)

    @property
    def masters(self) -> list[torch.Tensor]:
        """This rank's flat parts of the group's fp32 masters, one a parameter group or subgroup, to be read."""
        self.wait()
        return self._masters

    @property
    def _masters(self) -> list[torch.Tensor]:
        if self._stage == 3:
            return list(self._optimizer.fp32_partitioned_groups_flat)
        return list(self._optimizer.single_partition_of_fp32_groups)

    def to_host(self) -> None:
        """Let masters and state wait in host memory; new ones get their place there.

        Their memory on the device stays allocated until `release`.
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
        """Give up the memory that masters and state have left; what is computed next waits for their copies."""
        if self._leaving:
            self._streams.compute_after(self._left)
            self._leaving = []

    def to_device(self, leaving: "StateMover | None" = None) -> None:
        """Bring masters and state back.

        Args:
            leaving: Whose memory on the device is used again, where it has the form that is needed, and given up else,
                before any is allocated. None allocates all beside it.

        Raises:
            torch.OutOfMemoryError: If the device has none; nothing was moved then.
        """
        self.release()
        moving = [(key, tensor) for key, tensor in self._tensors() if self._waits(key, tensor)]
        if moving:
            spare, spare_left = leaving._hand_over(moving) if leaving is not None else ({}, None)
            with claimed_at_birth("state"):
                targets = [
                    spare[key]
                    if key in spare
                    else torch.empty_strided(*_form(tensor)[:2], dtype=tensor.dtype, device=self._streams.device)
                    for key, tensor in moving
                ]
            start = time.perf_counter()
            # Not before the computation is done with what lay in the memory, nor the copies out of it or to the host.
            with self._streams.on("inbound", self._streams.record(), self._left, spare_left):
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
        """Let others have the memory that masters and state have left, and give up the rest of it.

        Args:
            coming: What is to lie there.

        Returns:
            By key, memory in a tensor's form; and the moment from which it may be written.
        """
        # What shares its memory with others can't be handed out one by one.
        whole = {tensor.untyped_storage().data_ptr(): tensor for tensor in self._leaving}
        spare: dict[Any, list[torch.Tensor]] = {}
        for tensor in whole.values():
            if tensor.untyped_storage().nbytes() == tensor.nbytes:
                spare.setdefault(_form(tensor), []).append(tensor)
        found = {key: spare[_form(tensor)].pop() for key, tensor in coming if spare.get(_form(tensor))}
        if len(found) == len(self._leaving):
            self._leaving = []  # nothing goes back to the allocator, so that no computation has to wait
        self.release()
        return found, self._left

    def wait(self) -> None:
        """Let whoever reads or writes masters or state from now on find them whole, wherever they lie."""
        self._streams.compute_after(self._arrived)
        self._arrived = None
        if self._left is not None:
            self._streams.synchronize()  # it is the host that reads them
            self._left, self._leaving = None, []

    def follow_weights(self) -> None:
        """Let masters follow weights that somebody else has written, wherever both lie; see `refresh_master`."""
        self.wait()
        for master, weights in zip(self._masters, self._shares(), strict=True):
            if master.untyped_storage().data_ptr() != weights.untyped_storage().data_ptr():
                refresh_master(master.data, weights.detach().to(master.device))

    def drop_gradients(self) -> None:
        """Give up the memory of stage 3's flat gradient; its many views stay what they are."""
        flat = self._flat_gradient()
        if flat is not None:
            flat.untyped_storage().resize_(0)
            claim(flat, "residual")

    def take_gradients(self) -> None:
        """Take memory for stage 3's flat gradient, zeros: padding is never written, but counts in the norm."""
        flat = self._flat_gradient()
        if flat is not None and flat.untyped_storage().nbytes() == 0:
            flat.untyped_storage().resize_(flat.numel() * flat.dtype.itemsize)
            claim(flat.zero_(), "gradients")

    def claim_device(self) -> None:
        """Say to the ledger what on the device is this group's state."""
        for _, tensor in self._tensors():
            claim(tensor.data, "state")

    def device_bytes(self) -> int:
        """Bytes of masters and state that are not waiting."""
        return sum(tensor.untyped_storage().nbytes() for key, tensor in self._tensors() if not self._waits(key, tensor))

    def waiting_bytes(self) -> int:
        """Bytes of masters and state that are waiting."""
        return sum(tensor.nbytes for key, tensor in self._tensors() if self._waits(key, tensor))

    def leaving_bytes(self) -> int:
        """Bytes of the device that masters and state have left, and that are still allocated."""
        return sum(tensor.nbytes for tensor in self._leaving)

    def host_bytes(self) -> int:
        """Bytes of the places in host memory, which stay allocated while the group trains."""
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
        """This rank's flat parts of the weights, one a master."""
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
    """Refuse weights that lie elsewhere than in the flat memory that DeepSpeed has laid them in. Stages 1 and 2.

    Args:
        optimizers: DeepSpeed's ZeRO optimizers, of all groups.
        weights: What they step.

    Raises:
        RuntimeError: Naming one, the usual causes, and the way out.
    """
    addresses = {flat.untyped_storage().data_ptr() for each in optimizers for flat in each.bit16_groups_flat}
    for weight in weights:
        if weight.parameter.untyped_storage().data_ptr() not in addresses:
            raise RuntimeError(
                f"{weight.name} lies in other memory than DeepSpeed has laid it in (model.to, or an assignment to "
                "its .data), and would never be trained; do that before slivertune.prepare or initialize, or copy "
                "the values: with torch.no_grad(): parameter.copy_(values)"
            )
