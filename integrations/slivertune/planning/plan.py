"""A plan: what lives at the peak of a step, in all and by group; and what a machine must have for it."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from slivertune.core.ledger import Census
from slivertune.planning.request import PlanRequest
from slivertune.planning.step_work import UpdateWork

Phase = Literal["forward", "backward", "step"]
LimitName = Literal["host_bytes", "disk_bytes"]
"""Limits that may be left open."""

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
class Moment(Census):
    """Bytes alive on one GPU at the moment of the largest total. What autocast casts of parameters is residual."""

    group: int
    """Index of the group that is trained then; 0 where there are no groups."""
    phase: Phase
    """What the step does then."""

    @property
    def total(self) -> int:
        """All of it on the GPU."""
        return self.device

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
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
    """A step of one group, or of one of several groups of the same shapes."""

    index: int
    """Index of the group that was run: of groups alike the lowest, whose backward is the deepest."""
    indices: tuple[int, ...]
    """Indices of all groups alike, this one first."""
    name: str
    """Its layers, "all" where there are no groups."""
    num_parameters: int
    """Elements that train."""
    gradient_bytes: int
    """Gradients of all that trains, together."""
    state_bytes: int
    """Optimizer state of all that trains, without masters, wherever it lies between steps."""
    master_bytes: int = 0
    """fp32 masters of all that trains, wherever and in whatever form they wait."""
    largest_gradient_bytes: int = 0
    """Gradient of the largest tensor that trains, where another group trains in each update."""
    peak: Moment
    """The peak of its step."""
    activation_bytes: int = 0
    """The most that forward and backward take beside parameters, gradients and state."""
    host_activation_bytes: int = 0
    """Host memory in which activations wait from its forwards to their backwards."""
    before_step: Moment | None = None
    """The peak of its forwards and backwards alone, where it was run."""

    @property
    def state_and_master_bytes(self) -> int:
        """Optimizer state and masters of all that trains."""
        return self.state_bytes + self.master_bytes

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
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
    """What a run needs on each GPU and in the memory of its host. Bytes, without any allowance."""

    request: PlanRequest
    """The run."""
    peak: Moment
    """The largest of the groups' peaks: what must fit."""
    groups: tuple[GroupPlan, ...]
    """The distinct groups, by index. One of HiFT's groups trains in a step; every other method has one group."""
    num_parameters: int
    """Weights of the model, tied ones once, those in 4 bits one by one; with a method's own (adapters)."""
    num_trainable_peak: int
    """Elements that train in the group with the most (the HiFT paper's #Trainable)."""
    parameter_bytes: int
    """All parameters, no buffers, in the dtype of the precision (#Para): `mixed` counts 4 bytes and a 2-byte copy of
    each, `mixed_hi` 2 and the fp32 master of the group with the most parameters."""
    gradient_bytes: int
    """Gradients of the group with the most parameters, whole (#Gra)."""
    state_bytes: int
    """Optimizer state of the group with the most parameters, whole and without masters (#Sta)."""
    residual_bytes: int
    """What is neither parameter, gradient nor state at the peak."""
    host_bytes: int
    """What waits in host memory: state of all groups together, and activations of the group with the most."""
    disk_bytes: int
    """What waits in files, of all groups together."""
    notes: tuple[str, ...] = ()
    """What was not run but computed from sizes, and other limits of this plan."""
    updates: tuple[UpdateWork, ...] = ()
    """The kinds of the run's updates as one GPU alone makes them, and what each computes and copies."""

    @property
    def peak_bytes(self) -> int:
        """All bytes alive on the device at the peak."""
        return self.peak.total

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, with the field names that the command line promises."""
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

    These figures are allowances, not measurements: they depend on the card, the driver and the versions. Each has its
    reason beside its constant, is shown on a line of its own, and is never part of a plan's peak.
    """

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
        return sum(asdict(self).values())

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return {f"{name}_bytes": size for name, size in asdict(self).items()} | {"total_bytes": self.total}


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a machine has."""

    device_bytes: int
    """Memory of one GPU."""
    host_bytes: int | None = None
    """Memory of the host that one process may fill; None where nothing was said of it."""
    disk_bytes: int | None = None
    """Disk that one process may fill; None where nothing was said of it."""
    assumed: frozenset[LimitName] = frozenset()
    """Those that were not given, but are what this machine has free."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRequirement:
    """A plan with its allowance."""

    plan: Plan
    """What its tensors take."""
    allowance: Allowance
    """What comes on top of it on a GPU."""

    @property
    def device_bytes(self) -> int:
        """What one GPU must have."""
        return self.plan.peak_bytes + self.allowance.total

    @property
    def host_bytes(self) -> int:
        """What waits in host memory."""
        return self.plan.host_bytes

    @property
    def disk_bytes(self) -> int:
        """What waits in files."""
        return self.plan.disk_bytes

    def missing_device_bytes(self, limits: Limits) -> int:
        """What the GPU lacks; 0 if it is large enough."""
        return max(0, self.device_bytes - limits.device_bytes)

    def missing_host_bytes(self, limits: Limits) -> int:
        """What the host lacks; 0 if it is large enough or has no limit."""
        return 0 if limits.host_bytes is None else max(0, self.host_bytes - limits.host_bytes)

    def missing_disk_bytes(self, limits: Limits) -> int:
        """What the disk lacks; 0 if it is large enough or has no limit."""
        return 0 if limits.disk_bytes is None else max(0, self.disk_bytes - limits.disk_bytes)

    def missing_bytes(self, limits: Limits) -> int:
        """What lacks everywhere, together."""
        return self.missing_device_bytes(limits) + self.missing_host_bytes(limits) + self.missing_disk_bytes(limits)

    def fits(self, limits: Limits) -> bool:
        """Whether nothing lacks."""
        return not self.missing_bytes(limits)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON: the plan's own fields, and beside them the allowance and the sum."""
        return {**self.plan.to_json(), "allowance": self.allowance.to_json(), "need_bytes": self.device_bytes}


def add_allowance(plan: Plan) -> MemoryRequirement:
    """Add the allowance to a plan: for what no tensor shows, of all that comes and goes, and of GPUs that speak.

    Args:
        plan: The plan.
    """
    # Weights that are streamed come and go like everything else.
    on_gpu = plan.request.kernels == "gpu"
    moving = plan.peak_bytes - (0 if plan.request.offload_parameters else plan.peak.parameters)
    allowance = Allowance(
        context=CUDA_CONTEXT_BYTES if on_gpu else 0,
        workspace=CUBLAS_WORKSPACE_BYTES if on_gpu else 0,
        collectives=COLLECTIVE_BYTES if on_gpu and plan.request.num_gpus > 1 else 0,
        fragmentation=round(FRAGMENTATION_SHARE * moving),
    )
    return MemoryRequirement(plan=plan, allowance=allowance)
