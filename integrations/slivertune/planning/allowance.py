"""What a GPU needs beyond the tensors of a plan.

These figures are allowances, not measurements: they depend on the card, the driver and the versions. Each has its
reason here, is shown on a line of its own, and is never part of a plan's peak.
"""

from dataclasses import dataclass
from typing import Any

CUDA_CONTEXT_BYTES = 512 * 2**20
"""The driver's context and the code of the kernels that a run loads, outside of torch's allocator. With lazy loading,
which torch sets, people report 274 MiB after one small tensor (pytorch/pytorch#86509), about 300 to 400 MB
(pytorch/pytorch#107667, #109888), and 426 MiB with CUDA 13 (unslothai/unsloth-zoo#1053); every further kernel adds its
own code."""
CUBLAS_WORKSPACE_BYTES = 64 * 2**20
"""Two workspaces of 32 MiB. torch gives every cuBLAS handle one, for each thread and stream: forward and backward run
in two threads. 32 MiB is what cuBLAS recommends for Hopper and newer (pytorch/pytorch#120925); older cards take 8.1 MiB
(`CUBLAS_WORKSPACE_CONFIG=:4096:2:16:8`). They come from torch's allocator, so `max_memory_allocated` shows them."""
COLLECTIVE_BYTES = 256 * 2**20
"""With several GPUs: NCCL's buffers, 4 MiB (`NCCL_BUFFSIZE`) for each direction of each of up to 32 channels."""
FRAGMENTATION_SHARE = 0.05
"""What lies idle between blocks, as a share of all that comes and goes. Weights are allocated once and stay, so only
activations, gradients and pieces of state leave gaps; torch's allocator takes memory in segments of 2 MiB or more, and
splits them. With PYTORCH_ALLOC_CONF=expandable_segments:True gaps of one size serve another, which this presumes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Allowance:
    """Bytes on one GPU beyond the plan's peak."""

    context: int
    """CUDA's context and kernels."""
    workspace: int
    """cuBLAS."""
    collectives: int
    """NCCL; 0 on one GPU."""
    fragmentation: int
    """Gaps between blocks."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.context + self.workspace + self.collectives + self.fragmentation

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "context_bytes": self.context,
            "workspace_bytes": self.workspace,
            "collectives_bytes": self.collectives,
            "fragmentation_bytes": self.fragmentation,
            "total_bytes": self.total,
        }


def make_allowance(*, moving_bytes: int, num_gpus: int) -> Allowance:
    """Allow for what no tensor shows.

    Args:
        moving_bytes: What at the peak comes and goes: all but resident weights.
        num_gpus: GPUs that speak with each other.
    """
    return Allowance(
        context=CUDA_CONTEXT_BYTES,
        workspace=CUBLAS_WORKSPACE_BYTES,
        collectives=COLLECTIVE_BYTES if num_gpus > 1 else 0,
        fragmentation=round(FRAGMENTATION_SHARE * moving_bytes),
    )
