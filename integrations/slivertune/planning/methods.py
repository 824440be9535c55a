"""Interface of a method to a plan: its measured steps, and the place of its state on several GPUs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from slivertune.planning.plan import GroupPlan
    from slivertune.planning.request import PlanRequest, PrecisionName
    from slivertune.planning.step import Forward, MeasuredGroup
    from slivertune.planning.step_work import UpdateWork


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredSteps:
    """Steps of a method, as they were run on one GPU, with the sizes that follow from them."""

    groups: tuple[MeasuredGroup, ...]
    """Distinct steps, by index."""
    num_weights: int
    """Number of the model's weights, adapters included."""
    weight_bytes: int
    """Bytes of the model's parameters."""
    host_bytes: int = 0
    """Bytes offloaded to host memory between steps, except masters and state of groups that take turns."""
    notes: tuple[str, ...] = ()
    """Notes on the parts that were computed from sizes, not run."""
    updates: tuple[UpdateWork, ...] = ()
    """Kinds of updates, with the operators and copies of each, except of groups that take turns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedSteps:
    """Memory and work of a method's steps."""

    groups: Sequence[GroupPlan]
    """Distinct steps, by index."""
    host_bytes: int
    """Bytes offloaded to host memory between steps."""
    disk_bytes: int = 0
    """Bytes offloaded to files between steps."""
    notes: tuple[str, ...]
    """Notes on the parts that were computed from sizes, not run."""
    updates: Sequence[UpdateWork]
    """Kinds of updates, with the operators and copies of each."""


class Measurer(ABC):
    """Measures runs of a method on one model that differ in their batches and in what becomes of the activations."""

    measures_again = True
    """Whether it measures more than one run. Otherwise each run has its own model."""

    @abstractmethod
    def measure(self, request: PlanRequest, forward: Forward) -> MeasuredSteps:
        """Run the distinct steps on fake tensors.

        Args:
            request: The run, on one GPU.
            forward: Forward of the model on its batch.

        Raises:
            ValueError: If the method does not fit the model.
        """

    def planned(self, request: PlanRequest, steps: MeasuredSteps) -> PlannedSteps:
        """Return the memory and the work of all steps.

        Args:
            request: The run, on one GPU.
            steps: Its distinct steps, measured on this model or extended to its size.
        """
        groups = [group.plan(index) for index, group in enumerate(steps.groups)]
        return PlannedSteps(groups=groups, host_bytes=steps.host_bytes, notes=steps.notes, updates=steps.updates)


class PlannedMethod:
    """Planner of a method. It measures real steps on fake tensors."""

    settings: frozenset[str] = frozenset()
    """Fields of `PlanRequest` that this method reads but some other method does not."""
    bf16_precision: PrecisionName = "bf16"
    """Precision that `slivertune train --bf16` means with this method."""
    trains_in_groups = False
    """Whether steps train different parts of the model in turn."""
    is_optimizer = False
    """Whether the method itself is the optimizer."""
    steps_itself = False
    """Whether every rank keeps the whole state and steps by itself, also under ZeRO and FSDP2."""
    averages_in_buckets = False
    """Whether gradients are averaged in buckets of a fixed size as they arrive (`BucketedAllReduce`)."""

    def grows_with_blocks(self, request: PlanRequest, *, are_all_alike: bool) -> bool:
        """Return whether all that a run takes grows evenly with the number of blocks, however many there are.

        Args:
            request: The run, without budgets of bytes.
            are_all_alike: Whether the lowest blocks repeat like all others.
        """
        return False

    def waits_on_host(self, request: PlanRequest) -> bool:
        """Return whether state is on the GPU only during its own step."""
        return False

    def change_model(self, model: Any, request: PlanRequest) -> Any:
        """Add the method's own parameters to a model on the meta device.

        Raises:
            ImportError: If the method needs a package that is not installed.
        """
        return model

    def measurer(self, request: PlanRequest, model: nn.Module, shared: PlanRequest) -> Measurer:
        """Return what measures runs with different batches, and their common parts once.

        Args:
            request: One of the runs, on one GPU.
            model: The model, with the stand-in of the layout's engine attached. It must exist as long as the result.
            shared: The run with its layout over GPUs; sharding by engines is computed from sizes afterwards.

        Raises:
            ValueError: If the method does not fit the model.
        """
        raise NotImplementedError

    def train_arguments(self, request: PlanRequest) -> tuple[str, ...]:
        """Return the method's settings as arguments of `slivertune train`."""
        return ()


_methods: dict[str, str | PlannedMethod] = {
    "dense": "dense_run.PlannedDense",
    "hift": "hift_run.PlannedHiFT",
    "sft": "sft_run.PlannedSFT",
    "lora": "dense_run.PlannedLora",
}
"""Planners by name. A class is imported on first use: it needs the request, which needs the names."""
_NOT_IN_4BIT = {
    "dense": "dense fine-tuning changes every weight, and 4-bit weights can't be changed by small steps",
    "hift": "HiFT changes every weight in its turn, and 4-bit weights can't be changed by small steps",
}


def register_planned(name: str, method: PlannedMethod) -> None:
    """Register a method of another package with `slivertune plan`.

    Args:
        name: Value of `--method` and `PlanRequest.method`.
        method: Planner of the method.
    """
    _methods[name] = method


def planned_methods() -> tuple[str, ...]:
    """Return the names of all methods."""
    return tuple(_methods)


def planned(name: str) -> PlannedMethod:
    """Return the planner of a method.

    Args:
        name: One of `planned_methods`.
    """
    method = _methods[name]
    if isinstance(method, str):
        module, _, kind = method.partition(".")
        method = _methods[name] = getattr(import_module(f"slivertune.planning.{module}"), kind)()
    return method


def check_options_are_read(
    methods: Collection[str], given: Collection[str], own: Mapping[str, Collection[str]]
) -> None:
    """Refuse options that no method of a run or a plan reads, with the message that planning and training share.

    Args:
        methods: Name of the method; several names if a plan sweeps over them.
        given: Names of the options that the user set.
        own: Options that only one method reads, by its name.

    Raises:
        ValueError: If an option would be ignored.
    """
    for other, names in own.items():
        unused = [f"--{name}" for name in names if name in given]
        if other not in methods and unused:
            raise ValueError(f"{', '.join(unused)}: only --method {other} reads this. Leave it out or choose {other}")


def given_arguments(request: PlanRequest, names: Sequence[str]) -> list[str]:
    """Return settings that are not at their defaults as arguments of `slivertune train`.

    Args:
        request: The run.
        names: Fields that have the same name in `slivertune train`.
    """
    defaults = type(request)()
    return [
        argument
        for name in names
        if getattr(request, name) != getattr(defaults, name)
        for argument in (f"--{name}", *_words_of(getattr(request, name)))
    ]


def _words_of(value: Any) -> tuple[str, ...]:
    return value if isinstance(value, tuple) else (str(value),)


def clash_with_method(method: str) -> str | None:
    """Return why a method can't train a model with 4-bit weights, as planning and training both say it.

    Args:
        method: Name of the method.

    Returns:
        The reason and the way out; None if it can.
    """
    if method not in _NOT_IN_4BIT:
        return None
    return (
        f"--load_in_4bit does not go with --method {method}: {_NOT_IN_4BIT[method]}. Use --method lora or sft, which "
        "train adapters or deltas beside them, or leave out --load_in_4bit"
    )
