"""Moves the masters and state of one group's ZeRO optimizer between the device and host memory.

DeepSpeed's own `offload_states` collects garbage and pins its buffers again at every call, 200 to 400 ms a switch; here
the host's buffers are allocated once, and only pointers change.
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from slivertune.core.copy_streams import copy_streams
from slivertune.core.ledger import claim, claimed_at_birth
from slivertune.hift.masters import refresh_master
from slivertune.hift.offload_buffer import OffloadBuffer, aligned, host_buffer
from slivertune.hift.piece import Weight
from slivertune.parallel.zero.deepspeed_internals import link_fragments, unlink_fragments

_Key = tuple[int, str]
"""Index of a master, and the name of a state of it; "" is the master itself."""


class StateMover:
    """Owns the waiting place of what one ZeRO optimizer keeps for its rank's share of a group.

    Copies are queued on the current stream, in order: the device never holds two groups' state, and memory that leaves
    is free for what comes. Nothing waits for them but `settle`.

    Args:
        optimizer: DeepSpeed's ZeRO optimizer of the group, any stage.
        stage: 1, 2 or 3.
        device: Where it steps.
    """

    def __init__(self, optimizer: Any, stage: int, device: torch.device) -> None:
        self._optimizer = optimizer
        self._stage = stage
        self._device = device
        self._buffer: OffloadBuffer = host_buffer(copy_streams(device))
        self._on_host: dict[_Key, torch.Tensor] = {}
        self.copy_seconds = 0.0
        """Time spent copying, or on CUDA queueing copies, since the mover was made."""

    @property
    def masters(self) -> list[torch.Tensor]:
        """This rank's flat parts of the group's fp32 masters, one a parameter group or subgroup."""
        if self._stage == 3:
            return list(self._optimizer.fp32_partitioned_groups_flat)
        return list(self._optimizer.single_partition_of_fp32_groups)

    def to_host(self) -> None:
        """Let masters and state wait in host memory; new ones get their place there."""
        moving = [(key, tensor) for key, tensor in self._tensors() if not self._waits(key, tensor)]
        if self._stage != 3:
            unlink_fragments(self._optimizer)
        sizes: Counter[torch.dtype] = Counter()
        for key, tensor in moving:
            if key not in self._on_host:
                sizes[tensor.dtype] += aligned(tensor.numel() * tensor.dtype.itemsize)
        if sizes:
            self._buffer.reserve(sizes)
        for key, tensor in moving:
            if key not in self._on_host:
                self._on_host[key] = self._buffer.empty_like(tensor.detach())
            tensor.data = self._copied(tensor.data, self._on_host[key])

    def to_device(self) -> None:
        """Bring masters and state back."""
        for key, tensor in self._tensors():
            if not self._waits(key, tensor):
                continue
            with claimed_at_birth("state"):
                target = torch.empty_like(tensor.data, device=self._device)
            tensor.data = self._copied(tensor.data, target)
        if self._stage != 3:
            link_fragments(self._optimizer)
        self.claim_device()

    def follow_weights(self) -> None:
        """Let masters follow weights that somebody else has written, wherever both lie; see `refresh_master`."""
        for master, weights in zip(self.masters, self._shares(), strict=True):
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

    def settle(self) -> None:
        """Wait until what was queued has arrived."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def device_bytes(self) -> int:
        """Bytes of masters and state that are not waiting."""
        return sum(tensor.untyped_storage().nbytes() for key, tensor in self._tensors() if not self._waits(key, tensor))

    def host_bytes(self) -> int:
        """Bytes of the places in host memory, which stay allocated while the group trains."""
        return sum(waiting.numel() * waiting.dtype.itemsize for waiting in self._on_host.values())

    def _tensors(self) -> Iterator[tuple[_Key, torch.Tensor]]:
        optimizer = self._optimizer
        flats = optimizer.fp16_partitioned_groups_flat if self._stage == 3 else optimizer.bit16_groups_flat
        weights = {flat.untyped_storage().data_ptr() for flat in flats}
        for index, master in enumerate(self.masters):
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

    def _copied(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        self.copy_seconds += time.perf_counter() - start
        return target

    def _flat_gradient(self) -> torch.Tensor | None:
        return self._optimizer.grad_partitions_flat_buffer if self._stage == 3 else None


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
