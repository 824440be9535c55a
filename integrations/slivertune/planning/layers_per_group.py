"""`--layers_per_group auto`: the most layers per step that fit in memory and whose copies overlap with computation."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedConfig

from slivertune.core.byte_text import format_bytes
from slivertune.core.layers import find_layers
from slivertune.planning.cards import Card
from slivertune.planning.make import Planner
from slivertune.planning.model import build_model
from slivertune.planning.plan import Limits, MemoryRequirement, add_allowance
from slivertune.planning.planned_time import plan_time, room_ahead
from slivertune.planning.request import PlanRequest
from slivertune.planning.search import Tell

HIDDEN_SHARE = 0.05
"""Largest share of a cycle's time for which computation may stall if its copies are to count as overlapped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """Trial of a number of layers per step."""

    layers_per_group: int
    requirement: MemoryRequirement
    """Memory that the run requires without prefetching."""
    exposed_share: float | None
    """Share of a cycle in which computation stalls for copies, or None if the run does not fit."""
    seconds_per_step: float | None
    """Mean seconds per step over the cycle, or None if the run does not fit."""

    def describe(self) -> str:
        """Describe the trial in one line."""
        layers = f"{self.layers_per_group} layer{'s' if self.layers_per_group > 1 else ''} per step"
        if self.exposed_share is None or self.seconds_per_step is None:
            return f"{layers}: {format_bytes(self.requirement.device_bytes)} on the GPU, does not fit"
        return f"{layers}: {self.exposed_share:.1%} of {self.seconds_per_step:.3g} s is stalled by copies"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayersChoice:
    """Choice of a number of layers per step."""

    trials: tuple[Trial, ...]
    """Trials, the most layers first. The last trial is chosen."""
    card: Card
    """GPU whose rates decided."""
    limits: Limits
    """Memory that the run may fill."""

    @property
    def chosen(self) -> Trial:
        """The chosen trial."""
        return self.trials[-1]

    @property
    def reason(self) -> str:
        """Reason for the choice."""
        chosen = self.chosen
        assert chosen.exposed_share is not None
        if chosen.exposed_share > HIDDEN_SHARE:
            return f"no number overlaps its copies (at most {HIDDEN_SHARE:.0%} stalled), and this copies least per step"
        if len(self.trials) == 1:
            return "all layers, as in dense fine-tuning, fit and overlap their copies"
        too_many = self.trials[-2]
        what = "would not fit" if too_many.exposed_share is None else "would stall for copies"
        return f"the largest number tried that fits and overlaps its copies; {too_many.layers_per_group} {what}"

    def lines(self) -> list[str]:
        """Return the choice with its GPU and its reason, and the trials, one line each."""
        rates = self.card.rates()
        card = f"{rates.flops / 1e12:.0f} TFLOP/s, {rates.bus_bandwidth / 1e9:.1f} GB/s each way"
        chosen = f"{self.chosen.layers_per_group} layers_per_group for a {self.card.name} ({card}): {self.reason}"
        return [f"chose {chosen}", *(f"  {trial.describe()}" for trial in self.trials)]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON."""
        return {
            "layers_per_group": self.chosen.layers_per_group,
            "reason": self.reason,
            "card": self.card.name,
            "device_limit_bytes": self.limits.device_bytes,
            "trials": [
                {
                    "layers_per_group": trial.layers_per_group,
                    "need_bytes": trial.requirement.device_bytes,
                    "host_bytes": trial.requirement.host_bytes,
                    "exposed_share": trial.exposed_share,
                    "seconds_per_step": trial.seconds_per_step,
                }
                for trial in self.trials
            ],
        }


def choose_layers_per_group(
    request: PlanRequest,
    config: PreTrainedConfig,
    card: Card,
    limits: Limits,
    *,
    prefetch_bytes: int | None = None,
    tell: Tell = lambda line: None,
) -> LayersChoice:
    """Plan fewer and fewer layers per step until the run fits and its copies overlap with computation.

    The number of groups doubles from one trial to the next.

    Args:
        request: Run of HiFT on one GPU; its `layers_per_group` is not read.
        config: The model's configuration.
        card: GPU whose rates decide.
        limits: Memory of the GPU and of the host that the run may fill.
        prefetch_bytes: GPU memory that may hold prefetched optimizer state, in bytes; None for HiFT's own choice, which
            is the part of the limit that the plan leaves free, less HiFT's margin.
        tell: Function that takes a line per trial.

    Returns:
        The choice.

    Raises:
        ValueError: If even one layer per step does not fit, or copies between host and GPU decide nothing.
    """
    check_has_copies(request)
    trials, planner = [], Planner(config)
    for layers_per_group in _halved(count_layers(request, config)):
        trial = _try(replace(request, layers_per_group=layers_per_group), planner, card, limits, prefetch_bytes)
        trials.append(trial)
        tell(trial.describe())
        if trial.exposed_share is not None and trial.exposed_share <= HIDDEN_SHARE:
            break
    if trials[-1].exposed_share is None:
        raise ValueError(_complaint(trials[-1].requirement, limits))
    return LayersChoice(trials=tuple(trials), card=card, limits=limits)


def check_has_copies(request: PlanRequest) -> None:
    """Refuse runs in which copies between host and GPU decide nothing.

    Raises:
        ValueError: If a setting rules such copies out; names the setting and the way out.
    """
    for name, value, known in (("method", request.method, "hift"), ("layout", request.layout, "single")):
        if value != known:
            raise ValueError(f"layers_per_group='auto' is chosen for {name}={known!r}, not {value!r}. Give a number")
    if request.state != "host":
        raise ValueError(
            f"layers_per_group='auto' is chosen by the copies between host and GPU, and with state={request.state!r} "
            "others or none decide. Give a number, or use state='host'"
        )


def count_layers(request: PlanRequest, config: PreTrainedConfig) -> int:
    """Count the layers that HiFT finds in a model, embedding and head included.

    Args:
        request: Run that names the model's head, and the layers if they are given.
        config: The model's configuration.
    """
    return len(find_layers(build_model(request, config), request.layers))


def _halved(num_layers: int) -> Iterator[int]:
    """Yield the number of layers in the largest of 1, 2, 4, ... groups, and at last 1."""
    num_groups = 1
    while num_groups < num_layers:
        yield -(-num_layers // num_groups)
        num_groups *= 2
    yield 1


def _try(request: PlanRequest, planner: Planner, card: Card, limits: Limits, prefetch_bytes: int | None) -> Trial:
    requirement = add_allowance(planner.plan(request))
    share = seconds = None
    if requirement.fits(limits):
        if prefetch_bytes is None and request.device_bytes is None:
            prefetch_bytes = room_ahead(requirement, limits.device_bytes, card.memory_bytes)
        plan = requirement.plan
        if prefetch_bytes is not None:
            plan = replace(plan, request=replace(request, prefetch_bytes=prefetch_bytes))
        time = plan_time(plan, card.rates())
        share, seconds = sum(time.update.waiting.values()) / time.seconds, time.seconds
    return Trial(
        layers_per_group=int(request.layers_per_group),
        requirement=requirement,
        exposed_share=share,
        seconds_per_step=seconds,
    )


def _complaint(requirement: MemoryRequirement, limits: Limits) -> str:
    text = (
        f"one layer per step needs {format_bytes(requirement.device_bytes)} on the GPU and "
        f"{format_bytes(requirement.host_bytes)} of host memory, and there are {format_bytes(limits.device_bytes)}"
    )
    if limits.host_bytes is not None:
        text += f" and {format_bytes(limits.host_bytes)}"
    return f"{text}. Run slivertune plan --layers_per_group 1 --fit to find settings that fit"
