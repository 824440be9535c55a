"""A plan: what lives at the peak of a step, in all and by group."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from slivertune.planning.request import PlanRequest

Phase = Literal["forward", "backward", "step"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """Bytes alive on one GPU at the moment of the largest total."""

    group: int
    """Index of the group that is trained then; 0 where there are no groups."""
    phase: Phase
    """What the step does then."""
    parameters: int
    """Parameters and buffers. What autocast casts of them is residual."""
    gradients: int
    """`.grad` tensors."""
    state: int
    """Optimizer state and masters."""
    residual: int
    """All else: activations, temporaries, casts."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.state + self.residual

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
    master_bytes: int
    """fp32 masters of all that trains, wherever and in whatever form they wait."""
    peak: Moment
    """The peak of its step."""
    activation_bytes: int = 0
    """The most that forward and backward take beside parameters, gradients and state."""
    before_step: Moment | None = None
    """The peak of its forwards and backwards alone, where it was run."""

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
    """What waits in host memory, of all groups together."""
    disk_bytes: int
    """What waits in files, of all groups together."""
    notes: tuple[str, ...] = ()
    """What was not run but computed from sizes, and other limits of this plan."""

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
