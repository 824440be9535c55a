"""The memory that a run requires in all, and the limits it has to fit."""

from dataclasses import dataclass

from slivertune.planning.allowance import Allowance, make_allowance
from slivertune.planning.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a machine has."""

    device_bytes: int
    """Memory of one GPU."""
    host_bytes: int | None = None
    """Memory of the host that may be filled; None for any."""


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

    def missing_device_bytes(self, limits: Limits) -> int:
        """What the GPU lacks; 0 if it is large enough."""
        return max(0, self.device_bytes - limits.device_bytes)

    def missing_host_bytes(self, limits: Limits) -> int:
        """What the host lacks; 0 if it is large enough or has no limit."""
        return 0 if limits.host_bytes is None else max(0, self.host_bytes - limits.host_bytes)

    def fits(self, limits: Limits) -> bool:
        """Whether nothing lacks."""
        return not self.missing_device_bytes(limits) and not self.missing_host_bytes(limits)


def add_allowance(plan: Plan) -> MemoryRequirement:
    """Add the allowance to a plan.

    Args:
        plan: The plan.
    """
    # Weights that are streamed come and go like everything else.
    resident = 0 if plan.request.offload_parameters else plan.peak.parameters
    moving = plan.peak_bytes - resident
    return MemoryRequirement(plan=plan, allowance=make_allowance(moving_bytes=moving, num_gpus=plan.request.num_gpus))
