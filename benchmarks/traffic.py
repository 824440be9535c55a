"""Bytes that a rank sends, counted at the collectives themselves."""

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Traffic(TorchDispatchMode):
    """Counts what this rank sends while entered, by collective.

    Each collective is counted as a ring does it, which is what NCCL and gloo do with large tensors: of n ranks, an
    all-reduce of B bytes sends 2 B (n - 1) / n, a reduce-scatter of B bytes and an all-gather into B bytes send
    B (n - 1) / n, a broadcast or a reduce of B bytes B (n - 1) / n on average over the ranks.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent_bytes: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func._schema.name.partition("::")[2].strip("_"), args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: tuple[Any, ...]) -> None:
        if name in ("barrier", "monitored_barrier", "wait_tensor"):
            return
        if name not in _SHARE_OF:
            raise RuntimeError(f"{name} is a collective that this count does not know")
        position, factor = _SHARE_OF[name]
        num_ranks = dist.get_world_size()
        num_bytes = sum(each.nbytes for each in tree_iter(args[position]) if isinstance(each, torch.Tensor))
        self.sent_bytes[name] += round(num_bytes * factor * (num_ranks - 1) / num_ranks)

    @property
    def total(self) -> int:
        """Bytes sent by all collectives."""
        return sum(self.sent_bytes.values())


# Where the operator has the tensor of the whole size, and how often the ring sends it.
_SHARE_OF: dict[str, tuple[int, int]] = {
    "allreduce": (0, 2),
    "allreduce_coalesced": (0, 2),
    "allgather": (0, 1),
    "allgather_base": (0, 1),
    "allgather_coalesced": (0, 1),
    "allgather_into_tensor_coalesced": (0, 1),
    "reduce_scatter": (1, 1),
    "reduce_scatter_base": (1, 1),
    "reduce_scatter_tensor_coalesced": (1, 1),
    "broadcast": (0, 1),
    "reduce": (0, 1),
    "alltoall_base": (1, 1),
    "alltoall": (1, 1),
}
