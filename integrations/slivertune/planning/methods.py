"""What a method owes to a plan: its steps, measured, and what of it lies where on several GPUs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from slivertune.core.layout import Layout
    from slivertune.planning.plan import GroupPlan
    from slivertune.planning.request import PlanRequest
    from slivertune.planning.step import Forward
    from slivertune.planning.step_work import UpdateWork


Measurer = Callable[["PlanRequest", "Forward"], "MeasuredSteps"]
"""Measures a run, given its forward."""


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
    updates: Sequence[UpdateWork] = ()
    """What the kinds of updates compute and copy."""


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
        measure = self.measurer(request, model, layout)
        if measure is None:
            raise NotImplementedError
        return measure(request, forward)

    def measurer(self, request: PlanRequest, model: nn.Module, layout: Layout) -> Measurer | None:
        """What measures runs that differ in their batch or in `token_ratio`, and what no batch changes once for all.

        Args:
            request: One of the runs, on one GPU.
            model: The model, for as long as this is used.
            layout: As in `measure`.

        Returns:
            Takes each run and its forward; None where each is measured on a model of its own.
        """
        return None

    def train_arguments(self, request: PlanRequest) -> tuple[str, ...]:
        """The settings in `slivertune train`'s words."""
        return ()


_methods: dict[str, str | PlannedMethod] = {
    "dense": "dense_run.PlannedDense",
    "hift": "hift_run.PlannedHiFT",
    "sft": "sft_run.PlannedSFT",
    "lora": "dense_run.PlannedLora",
}
"""By name; a class is imported when it is asked for, since it needs the request, which asks for the names."""
_NOT_IN_4BIT = {
    "dense": "dense fine-tuning changes every weight, and 4-bit weights can't be changed by small steps",
    "hift": "HiFT changes every weight in its turn, and 4-bit weights can't be changed by small steps",
}


_OF_ANY_RUN = frozenset({"save_total_limit"})
"""The Trainer's options, which every run takes and only some methods' plans read."""


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
        module, _, kind = method.partition(".")
        method = _methods[name] = getattr(import_module(f"slivertune.planning.{module}"), kind)()
    return method


def check_options_are_read(
    methods: Collection[str], given: Collection[str], own: Mapping[str, Collection[str]]
) -> None:
    """Refuse options that no method of a run or a plan reads, in the words that planning and training share.

    Args:
        methods: The method; several where a plan sweeps over them.
        given: Names of the options that the user set.
        own: Options that belong to one method alone, by its name.

    Raises:
        ValueError: If an option would be ignored.
    """
    for other, names in own.items():
        unused = [f"--{name}" for name in names if name in given]
        if other not in methods and unused:
            raise ValueError(f"{', '.join(unused)}: only --method {other} reads this; leave it out or choose {other}")


def planned_options() -> dict[str, list[str]]:
    """Options of `slivertune plan` that one method alone reads, by its name."""
    return {name: sorted(planned(name).settings - _OF_ANY_RUN) for name in planned_methods()}


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
        for argument in (f"--{name}", *_words_of(getattr(request, name)))
    ]


def _words_of(value: Any) -> tuple[str, ...]:
    return value if isinstance(value, tuple) else (str(value),)


def clash_with_method(method: str) -> str | None:
    """Why a method can't train a model with 4-bit weights, in the words that planning and training share.

    Args:
        method: The method.

    Returns:
        The reason and the way out; None if it can.
    """
    if method not in _NOT_IN_4BIT:
        return None
    return (
        f"--load_in_4bit does not go with --method {method}: {_NOT_IN_4BIT[method]}; take --method lora or sft, which "
        "train adapters or deltas beside them, or leave out --load_in_4bit"
    )


def clash_with_zero3() -> str:
    """Why ZeRO-3 can't share 4-bit weights out, whatever the method, and the way out."""
    return (
        "--load_in_4bit does not go with ZeRO-3, which shares weights out without the scales that belong to 4-bit "
        "codes; take DDP, ZeRO-1 or ZeRO-2, or leave out --load_in_4bit"
    )
