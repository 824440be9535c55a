"""What a method owes to a plan: its steps, measured, and what of it lies where on several GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from slivertune.core.layout import Layout
    from slivertune.planning.plan import GroupPlan
    from slivertune.planning.request import PlanRequest
    from slivertune.planning.step import Forward


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredSteps:
    """What a method's steps take, as they were run on one GPU."""

    groups: Sequence[GroupPlan]
    """The distinct steps, by index."""
    host_bytes: int = 0
    """What waits in host memory between steps."""
    disk_bytes: int = 0
    """What waits in files between steps."""
    own_parameters: Sequence[nn.Parameter] = ()
    """Parameters that the method has put on the model, and counts as its state."""
    notes: tuple[str, ...] = ()
    """What was not run but computed from sizes."""


class PlannedMethod:
    """How a method is planned; what a run of it needs follows from steps that are really made, without data."""

    settings: frozenset[str] = frozenset()
    """Fields of `PlanRequest` that this method reads, and not every other."""
    bf16_precision = "bf16"
    """The `precision` of `slivertune train --bf16`."""
    trains_in_groups = False
    """Whether each step trains another part of the model."""
    is_optimizer = False
    """Whether the method itself is the optimizer."""
    steps_itself = False
    """Whether every rank keeps all of the state and steps by itself, under ZeRO and FSDP2 as well."""
    averages_in_buckets = False
    """Whether gradients are averaged in buckets of a fixed size while they arrive (`BucketedAllReduce`)."""

    def waits_on_host(self, request: PlanRequest) -> bool:
        """Whether state is on the GPU in its own step alone."""
        return False

    def change_model(self, model: Any, request: PlanRequest) -> Any:
        """Put what the method trains into a model on the meta device.

        Raises:
            ImportError: If it needs a package that is not installed.
        """
        return model

    def measure(self, request: PlanRequest, model: nn.Module, forward: Forward, layout: Layout) -> MeasuredSteps:
        """Run the method's distinct steps on tensors without data.

        Args:
            request: The run, on one GPU.
            model: The model, and what stands in the step for the engine of the layout.
            forward: Its forward.
            layout: How the run is spread over GPUs; what engines share out is computed from sizes afterwards.

        Raises:
            ValueError: If the method does not fit the model.
        """
        raise NotImplementedError

    def train_arguments(self, request: PlanRequest) -> tuple[str, ...]:
        """The settings in `slivertune train`'s words."""
        return ()


_methods: dict[str, str | PlannedMethod] = {
    "dense": "slivertune.planning.dense_run",
    "hift": "slivertune.planning.hift_run",
    "sft": "slivertune.planning.sft_run",
    "lora": "slivertune.planning.lora_run",
}
"""By name; a module's `METHOD`, imported when it is asked for, since it needs the request, which asks for the names."""


def register_planned(name: str, method: PlannedMethod) -> None:
    """Let `slivertune plan` know a method of another package.

    Args:
        name: As `--method` and `PlanRequest.method` say it.
        method: How it is planned.
    """
    _methods[name] = method


def planned_methods() -> tuple[str, ...]:
    """The names of all methods."""
    return tuple(_methods)


def planned(name: str) -> PlannedMethod:
    """How a method is planned.

    Args:
        name: One of `planned_methods`.
    """
    method = _methods[name]
    if isinstance(method, str):
        method = _methods[name] = import_module(method).METHOD
    return method


def given_arguments(request: PlanRequest, names: Sequence[str]) -> list[str]:
    """Settings of the same name in `slivertune train`, but for those that have their defaults.

    Args:
        request: The run.
        names: Fields of it.
    """
    defaults = type(request)()
    return [
        argument
        for name in names
        if getattr(request, name) != getattr(defaults, name)
        for argument in (f"--{name}", str(getattr(request, name)))
    ]
