"""`--layers_per_group auto`: the most layers a step whose copies hide behind the computation, and whose bytes fit."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedConfig

from slivertune.core.layers import find_layers, layers_in
from slivertune.planning.byte_text import format_bytes
from slivertune.planning.cards import Card
from slivertune.planning.make import build_model, make_plan
from slivertune.planning.plan import Limits, MemoryRequirement, add_allowance
from slivertune.planning.planned_time import plan_time, room_ahead
from slivertune.planning.request import PlanRequest
from slivertune.planning.search import Tell

HIDDEN_SHARE = 0.05
"""Copies hide where computation stands still for them no longer than this share of a cycle's time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A number of layers a step that was looked at."""

    layers_per_group: int
    requirement: MemoryRequirement
    """What it takes, with nothing loaded ahead."""
    exposed_share: float | None
    """The part of a cycle in which computation stands still for copies; None of what does not fit."""
    seconds_per_step: float | None
    """Mean over the cycle; None of what does not fit."""

    def describe(self) -> str:
        """One line."""
        layers = f"{self.layers_per_group} layer{'s' if self.layers_per_group > 1 else ''} a step"
        if self.exposed_share is None or self.seconds_per_step is None:
            return f"{layers}: {format_bytes(self.requirement.device_bytes)} on the GPU, does not fit"
        return f"{layers}: {self.exposed_share:.1%} of {self.seconds_per_step:.3g} s stands still for copies"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayersChoice:
    """How a number of layers a step was chosen."""

    trials: tuple[Trial, ...]
    """What was looked at, the most layers first; the last is what was chosen."""
    card: Card
    """For which."""
    limits: Limits
    """What there is."""

    @property
    def chosen(self) -> Trial:
        """What was chosen."""
        return self.trials[-1]

    @property
    def reason(self) -> str:
        """Why."""
        chosen = self.chosen
        assert chosen.exposed_share is not None
        if chosen.exposed_share > HIDDEN_SHARE:
            return f"no number hides its copies ({HIDDEN_SHARE:.0%} at most), and this has the least to copy a step"
        if len(self.trials) == 1:
            return "all layers, as dense fine-tuning trains them, fit and hide their copies"
        too_many = self.trials[-2]
        what = "would not fit" if too_many.exposed_share is None else "would wait for copies"
        return f"the most of those tried that fits and hides its copies; {too_many.layers_per_group} {what}"

    def lines(self) -> list[str]:
        """What was chosen, for which card, why, and what was looked at."""
        rates = self.card.rates()
        card = f"{rates.flops / 1e12:.0f} TFLOP/s, {rates.bus_bandwidth / 1e9:.1f} GB/s each way"
        chosen = f"{self.chosen.layers_per_group} layers_per_group for a {self.card.name} ({card}): {self.reason}"
        return [f"chose {chosen}", *(f"  {trial.describe()}" for trial in self.trials)]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
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
    """Plan fewer and fewer layers a step, until their bytes fit and their copies hide.

    The number of groups doubles from one trial to the next.

    Args:
        request: The run: HiFT on one GPU; its `layers_per_group` is not read.
        config: The model's configuration.
        card: Whose rates decide.
        limits: The memory of the card that is to be used, and of the host.
        prefetch_bytes: What pieces of state may hold ahead of their step; None for what HiFT takes by itself, which is
            what the plan leaves of the limit, less HiFT's margin.
        tell: Told of each trial.

    Returns:
        The choice.

    Raises:
        ValueError: If not even one layer a step fits, or copies between host and GPU decide nothing.
    """
    check_has_copies(request)
    trials = []
    for layers_per_group in _halved(count_layers(request, config)):
        trial = _try(replace(request, layers_per_group=layers_per_group), config, card, limits, prefetch_bytes)
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
        ValueError: Naming the setting and the way out.
    """
    for name, value, known in (("method", request.method, "hift"), ("layout", request.layout, "single")):
        if value != known:
            raise ValueError(f"layers_per_group='auto' is chosen for {name}={known!r}, not {value!r}; give a number")
    if request.state != "host":
        raise ValueError(
            f"layers_per_group='auto' is chosen by the copies between host and GPU, and with state={request.state!r} "
            "others or none decide; give a number, or take state='host'"
        )


def count_layers(request: PlanRequest, config: PreTrainedConfig) -> int:
    """The layers that HiFT finds in a model, embedding and head included.

    Args:
        request: Names the model's head.
        config: The model's configuration.
    """
    return len(find_layers(build_model(request, config), layers_in(request.layers)))


def _halved(num_layers: int) -> Iterator[int]:
    """The layers of the largest group, of one group, two, four, ...; at last one layer."""
    num_groups = 1
    while num_groups < num_layers:
        yield -(-num_layers // num_groups)
        num_groups *= 2
    yield 1


def _try(
    request: PlanRequest, config: PreTrainedConfig, card: Card, limits: Limits, prefetch_bytes: int | None
) -> Trial:
    requirement = add_allowance(make_plan(request, config))
    share = seconds = None
    if requirement.fits(limits):
        if prefetch_bytes is None:
            prefetch_bytes = room_ahead(requirement, limits.device_bytes, card.memory_bytes)
        plan = replace(requirement.plan, request=replace(request, prefetch_bytes=prefetch_bytes))
        time = plan_time(plan, card.rates())
        share, seconds = sum(time.update.waiting.values()) / time.seconds, time.seconds
    return Trial(
        layers_per_group=request.layers_per_group,
        requirement=requirement,
        exposed_share=share,
        seconds_per_step=seconds,
    )


def _complaint(requirement: MemoryRequirement, limits: Limits) -> str:
    text = (
        f"one layer a step needs {format_bytes(requirement.device_bytes)} on the GPU and "
        f"{format_bytes(requirement.host_bytes)} of host memory, and there are {format_bytes(limits.device_bytes)}"
    )
    if limits.host_bytes is not None:
        text += f" and {format_bytes(limits.host_bytes)}"
    return f"{text}; slivertune plan --layers_per_group 1 --fit finds settings that fit"
