"""Plans: the memory at the peak of a step, in total and by group, and the memory that a machine must have."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from slivertune.core.ledger import Census
from slivertune.planning.methods import planned
from slivertune.planning.request import PlanRequest
from slivertune.planning.step_work import UpdateWork

Phase = Literal["forward", "backward", "step"]
LimitName = Literal["host_bytes", "disk_bytes"]
"""Names of the limits that may be left open."""

CUDA_CONTEXT_BYTES = 512 * 2**20
"""Bytes of the driver's context and of the kernels' code that a run loads, outside of torch's allocator. With lazy
loading, which torch sets, people report 274 MiB after one small tensor (pytorch/pytorch#86509), about 300 to 400 MB
(pytorch/pytorch#107667, #109888), and 426 MiB with CUDA 13 (unslothai/unsloth-zoo#1053). Each further kernel adds its
code."""
CUBLAS_WORKSPACE_BYTES = 64 * 2**20
"""Bytes of two workspaces of 32 MiB. torch gives each cuBLAS handle one per thread and stream, and forward and backward
run in two threads. cuBLAS recommends 32 MiB for Hopper and newer (pytorch/pytorch#120925). Older GPUs take 8.1 MiB
(`CUBLAS_WORKSPACE_CONFIG=:4096:2:16:8`). They come from torch's allocator, so `max_memory_allocated` shows them."""
COLLECTIVE_BYTES = 256 * 2**20
"""Bytes of NCCL's buffers with several GPUs: 4 MiB (`NCCL_BUFFSIZE`) per channel and direction, up to 32 channels."""
FRAGMENTATION_SHARE = 0.05
"""Share of temporary memory that lies idle between blocks. Weights are allocated once and stay, so only activations,
gradients and chunks of state leave gaps. torch's allocator takes memory in segments of 2 MiB or more, and splits them.
The share assumes PYTORCH_ALLOC_CONF=expandable_segments:True, with which gaps of one size serve another."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment(Census):
    """Bytes alive on one GPU at the moment of the largest total. Autocast's copies of parameters count as residual."""

    group: int
    """Index of the group that trains at that moment, or 0 without groups."""
    phase: Phase
    """Phase of the step at that moment."""

    @property
    def total(self) -> int:
        """Total bytes on the GPU."""
        return self.device

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON."""
        return {
            "group": self.group,
            "phase": self.phase,
            "parameter_bytes": self.parameters,
            "gradient_bytes": self.gradients,
            "state_bytes": self.state,
            "residual_bytes": self.residual,
            "total_bytes": self.total,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupPlan:
    """Step of one group, or of one of several groups with the same shapes."""

    index: int
    """Index of the measured group: the lowest of the groups alike, whose backward is the deepest."""
    indices: tuple[int, ...]
    """Indices of all groups alike, the measured one first."""
    name: str
    """Names of its layers, "all" without groups, or SFT's kind of update."""
    num_parameters: int
    """Number of elements that train."""
    gradient_bytes: int
    """Bytes of the gradients of all that trains."""
    state_bytes: int
    """Bytes of optimizer state of all that trains, without masters, wherever it is stored between steps."""
    master_bytes: int = 0
    """Bytes of the fp32 masters of all that trains, wherever and in whatever form they are stored."""
    largest_gradient_bytes: int = 0
    """Bytes of the gradient of the largest tensor that trains, if updates train different groups."""
    peak: Moment
    """Peak of its step."""
    activation_bytes: int = 0
    """Largest bytes that forward and backward take besides parameters, gradients and state."""
    host_activation_bytes: int = 0
    """Bytes of host memory for activations that are offloaded from its forwards to their backwards."""
    before_step: Moment | None = None
    """Peak of its forwards and backwards alone, if they were run."""

    @property
    def state_and_master_bytes(self) -> int:
        """Bytes of optimizer state and masters of all that trains."""
        return self.state_bytes + self.master_bytes

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON."""
        return {
            "index": self.index,
            "indices": list(self.indices),
            "name": self.name,
            "num_parameters": self.num_parameters,
            "gradient_bytes": self.gradient_bytes,
            "state_bytes": self.state_bytes,
            "master_bytes": self.master_bytes,
            "activation_bytes": self.activation_bytes,
            "peak_bytes": self.peak.total,
            "peak": self.peak.to_json(),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Memory that a run needs on each GPU and on its host, in bytes and without any allowance."""

    request: PlanRequest
    """Run that was planned."""
    peak: Moment
    """Largest of the groups' peaks, which must fit."""
    groups: tuple[GroupPlan, ...]
    """Distinct groups, by index: HiFT's (one trains per step), SFT's inside and outside of phases, or one group."""
    num_parameters: int
    """Number of the model's weights, with adapters. Tied weights count once, 4-bit weights one by one."""
    num_trainable_peak: int
    """Number of elements that train in the group with the most (the HiFT paper's #Trainable)."""
    parameter_bytes: int
    """Bytes of all parameters, without buffers, in the dtype of the precision (#Para). `mixed` counts 4 bytes and a
    2-byte copy of each. `mixed_hi` counts 2 bytes, and the fp32 masters of the group with the most parameters."""
    gradient_bytes: int
    """Bytes of the unsharded gradients of the group with the most parameters (#Gra)."""
    state_bytes: int
    """Bytes of the unsharded optimizer state of the group with the most parameters, without masters (#Sta)."""
    residual_bytes: int
    """Bytes at the peak that are neither parameters, gradients nor state."""
    host_bytes: int
    """Bytes offloaded to host memory: state of all groups together, and activations of the group with the most."""
    disk_bytes: int
    """Bytes offloaded to files, for all groups together."""
    notes: tuple[str, ...] = ()
    """Notes on the parts that were computed from sizes, not run, and on other limits of this plan."""
    updates: tuple[UpdateWork, ...] = ()
    """Kinds of the run's updates as one GPU alone makes them, with the operators and copies of each."""

    @property
    def peak_bytes(self) -> int:
        """Bytes alive on the device at the peak."""
        return self.peak.total

    @property
    def num_groups(self) -> int:
        """Updates until each trained weight has been trained once: 1 unless groups take turns."""
        if not planned(self.request.method).trains_in_groups:
            return 1
        return sum(len(group.indices) for group in self.groups)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON with the field names that the command line promises."""
        return {
            "peak_bytes": self.peak_bytes,
            "parameter_bytes": self.parameter_bytes,
            "gradient_bytes": self.gradient_bytes,
            "state_bytes": self.state_bytes,
            "residual_bytes": self.residual_bytes,
            "host_bytes": self.host_bytes,
            "disk_bytes": self.disk_bytes,
            "num_parameters": self.num_parameters,
            "num_trainable_peak": self.num_trainable_peak,
            "peak": self.peak.to_json(),
            "groups": [group.to_json() for group in self.groups],
            "notes": list(self.notes),
            "request": asdict(self.request),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Allowance:
    """Bytes on one GPU beyond the plan's peak.

    These figures are allowances, not measurements: they depend on the GPU, the driver and the versions. Each has its
    reason at its constant, is shown on its own line, and is never part of a plan's peak.
    """

    context: int
    """Bytes of CUDA's context and kernels."""
    workspace: int
    """Bytes of cuBLAS's workspaces."""
    collectives: int
    """Bytes of NCCL's buffers, or 0 on one GPU."""
    fragmentation: int
    """Bytes of gaps between blocks."""

    @property
    def total(self) -> int:
        """Total bytes of the allowance."""
        return sum(asdict(self).values())

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON."""
        return {f"{name}_bytes": size for name, size in asdict(self).items()} | {"total_bytes": self.total}


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Memory of a machine that a run may fill."""

    device_bytes: int
    """Bytes of one GPU's memory."""
    host_bytes: int | None = None
    """Bytes of host memory that one process may fill, or None if it was not given."""
    disk_bytes: int | None = None
    """Bytes of disk space that one process may fill, or None if it was not given."""
    assumed: frozenset[LimitName] = frozenset()
    """Limits that were not given, and are the free memory of this machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRequirement:
    """Plan with its allowance."""

    plan: Plan
    """Memory that the tensors take."""
    allowance: Allowance
    """Memory that a GPU needs in addition."""

    @property
    def device_bytes(self) -> int:
        """Bytes that one GPU must have."""
        return self.plan.peak_bytes + self.allowance.total

    @property
    def host_bytes(self) -> int:
        """Bytes offloaded to host memory."""
        return self.plan.host_bytes

    @property
    def disk_bytes(self) -> int:
        """Bytes offloaded to files."""
        return self.plan.disk_bytes

    def missing_device_bytes(self, limits: Limits) -> int:
        """Return the bytes that the GPU lacks, or 0 if it is large enough."""
        return max(0, self.device_bytes - limits.device_bytes)

    def missing_host_bytes(self, limits: Limits) -> int:
        """Return the bytes that the host lacks, or 0 if it is large enough or has no limit."""
        return 0 if limits.host_bytes is None else max(0, self.host_bytes - limits.host_bytes)

    def missing_disk_bytes(self, limits: Limits) -> int:
        """Return the bytes that the disk lacks, or 0 if it is large enough or has no limit."""
        return 0 if limits.disk_bytes is None else max(0, self.disk_bytes - limits.disk_bytes)

    def missing_bytes(self, limits: Limits) -> int:
        """Return the sum of the bytes that GPU, host and disk lack."""
        return self.missing_device_bytes(limits) + self.missing_host_bytes(limits) + self.missing_disk_bytes(limits)

    def fits(self, limits: Limits) -> bool:
        """Return whether no bytes are lacking."""
        return not self.missing_bytes(limits)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON: the plan's own fields, the allowance and the sum."""
        return {**self.plan.to_json(), "allowance": self.allowance.to_json(), "need_bytes": self.device_bytes}


def add_allowance(plan: Plan) -> MemoryRequirement:
    """Add the allowance to a plan: CUDA context, cuBLAS, fragmentation and, with several GPUs, NCCL.

    Args:
        plan: Plan to complete.
    """
    # Streamed weights are temporary memory, too.
    on_gpu = plan.request.kernels == "gpu"
    moving = plan.peak_bytes - (0 if plan.request.offload_parameters else plan.peak.parameters)
    allowance = Allowance(
        context=CUDA_CONTEXT_BYTES if on_gpu else 0,
        workspace=CUBLAS_WORKSPACE_BYTES if on_gpu else 0,
        collectives=COLLECTIVE_BYTES if on_gpu and plan.request.num_gpus > 1 else 0,
        fragmentation=round(FRAGMENTATION_SHARE * moving),
    )
    return MemoryRequirement(plan=plan, allowance=allowance)
