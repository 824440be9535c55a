"""`plan --compare`: every way of training one model on one card, each with the largest micro-batch that fits."""

import gc
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_context
from typing import Any

import torch

from slivertune import __version__
from slivertune.hift.config import ALL_LAYERS, HiFTConfig
from slivertune.hift.rotation import count_per_group
from slivertune.planning.cards import DISK_BANDWIDTH, Card, Rates
from slivertune.planning.configs import ModelFigures
from slivertune.planning.largest import find_largest
from slivertune.planning.layers_per_group import count_layers
from slivertune.planning.limits import limits_json
from slivertune.planning.make import Planner
from slivertune.planning.methods import planned
from slivertune.planning.plan import Limits, MemoryRequirement, add_allowance
from slivertune.planning.planned_time import PlannedTime, plan_time, with_room_ahead
from slivertune.planning.quiet import quiet_libraries
from slivertune.planning.request import PlanRequest, precision_with_bf16

TOKEN_RATIO = 0.3
"""Share of the tokens that rows with TokenTune select, unless the user sets another."""
_MOST_PROCESSES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """Way of training a model."""

    title: str
    """Name of the method, as people call it."""
    settings: Mapping[str, Any]
    """Fields of `PlanRequest` that define it."""
    trains_all: bool
    """Whether it trains every weight of the model."""

    def request(self, given: Mapping[str, Any]) -> PlanRequest:
        """Return the run as `slivertune train --bf16` makes it, with gradient checkpointing by default.

        Args:
            given: Fields of `PlanRequest` that the user set for all rows.
        """
        method = self.settings["method"]
        shared = {name: value for name, value in given.items() if name != "master" or name in planned(method).settings}
        settings = {**shared, **self.settings}
        precision = precision_with_bf16(method, settings.get("master"))
        return PlanRequest(**{"gradient_checkpointing": True, **settings, "precision": precision})


def ways_of(model: ModelFigures, given: Mapping[str, Any]) -> list[Way]:
    """List all ways, the slowest to plan first.

    Args:
        model: Model; the number of its layers decides HiFT's rows.
        given: Fields of `PlanRequest` that the user set for all rows.
    """
    dense = Way(title="dense", settings={"method": "dense"}, trains_all=True)
    num_layers = count_layers(dense.request(given), model.config)
    quarter = count_per_group(HiFTConfig().layers_per_group, num_layers)
    # The paper's schedule and the default one, which alone is planned if both have one layer per group.
    schedules = {1: HiFTConfig.paper().steps_per_group, quarter: HiFTConfig().steps_per_group}
    return [
        Way(title="HiFT, all layers", settings={**_hift(num_layers, 1), "gradients": "host"}, trains_all=True),
        *(
            Way(title=f"HiFT, {number} of {num_layers} layers", settings=_hift(number, steps), trains_all=True)
            for number, steps in schedules.items()
            if number < num_layers
        ),
        Way(title="full", settings={"method": "hift", **ALL_LAYERS, "optimizer": "adafactor"}, trains_all=True),
        Way(title="SFT (AG)", settings={"method": "sft"}, trains_all=False),
        Way(title="SFT (MA)", settings={"method": "sft", "selection": "momentum"}, trains_all=False),
        Way(title="QLoRA", settings={"method": "lora", "load_in_4bit": True}, trains_all=False),
        Way(title="LoRA", settings={"method": "lora"}, trains_all=False),
        dense,
    ]


def _hift(layers_per_group: int, steps_per_group: int) -> dict[str, Any]:
    return {"method": "hift", "layers_per_group": layers_per_group, "steps_per_group": steps_per_group}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Planned way of training."""

    way: Way
    requirement: MemoryRequirement | None
    """Memory with the largest micro-batch that fits, or else with one sequence. None if the way can't be planned."""
    time: PlannedTime | None
    """Planned time of an update. None if the run does not fit."""
    reason: str | None = None
    """Reason why the way can't be planned. None if it can."""

    @property
    def token_ratio(self) -> float | None:
        """Share of the tokens that TokenTune selects (None without TokenTune)."""
        return None if self.requirement is None else self.requirement.plan.request.token_ratio

    @property
    def title(self) -> str:
        """Title of the way, with TokenTune if the row uses it."""
        return self.way.title if self.token_ratio is None else f"{self.way.title} + TokenTune"

    @property
    def speed(self) -> float:
        """Tokens/s, or 0 if the run does not fit."""
        return 0.0 if self.time is None else self.time.tokens_per_second

    @property
    def weight_speed(self) -> float:
        """Tokens/s that each trained weight learns from, or 0 if the run does not fit."""
        return 0.0 if self.time is None else self.time.weight_tokens_per_second

    def to_json(self) -> dict[str, Any]:
        """Return the row as plain JSON."""
        values: dict[str, Any] = {
            "title": self.title,
            "settings": dict(self.way.settings),
            "fits": self.time is not None,
        }
        if self.requirement is None:
            return {**values, "reason": self.reason}
        values |= {"trains_all": self.way.trains_all, **self.requirement.to_json()}
        if self.time is None:
            return values
        return {**values, "time": self.time.to_json(), "weight_tokens_per_second": self.weight_speed}


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """Settings that all rows share, in a form that other processes can receive."""

    model: ModelFigures
    given: Mapping[str, Any]
    """Fields of `PlanRequest` that the user set for all rows."""
    limits: Limits
    card: Card
    efficiency: float
    """Share of the card's peak that matrix products reach."""
    disk_bandwidth: float = DISK_BANDWIDTH
    """Bytes/s that the disk reads or writes."""

    def rates(self) -> Rates:
        """Return the rates of the card for bf16, in which all rows compute."""
        return self.card.rates(efficiency=self.efficiency, disk_bandwidth=self.disk_bandwidth)


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Plans of all ways of training a model."""

    question: Question
    rows: Sequence[Row]
    """Rows, the fastest first."""
    num_missing: int = 0
    """Ways that were not planned before Ctrl-C."""

    def advice(self) -> str:
        """Recommend a way and say why, in one line, among the ways that were planned."""
        text = advice(self.rows)
        return text if not self.num_missing else f"of the ways that were planned before Ctrl-C: {text}"

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON: the shared settings, the advice and an array of rows."""
        return {
            "model": self.question.model.name,
            "model_source": self.question.model.source,
            "slivertune": __version__,
            "gpu": self.question.card.name,
            "fit": limits_json(self.question.limits),
            "advice": self.advice(),
            "num_missing": self.num_missing,
            "rows": [row.to_json() for row in self.rows],
        }


def compare(question: Question, *, num_processes: int | None = None) -> Iterator[Sequence[Row]]:
    """Plan all ways with and without TokenTune.

    Args:
        question: Settings that all rows share.
        num_processes: Number of processes that plan in parallel; 1 for this process alone. The default is one per
            CPU, at most 4.

    Yields:
        The rows of a way, as soon as they are ready.
    """
    ways = ways_of(question.model, question.given)
    num_processes = num_processes or min(os.cpu_count() or 1, _MOST_PROCESSES)
    if num_processes == 1:
        for way in ways:
            yield rows_of(way, question)
        return
    pool = ProcessPoolExecutor(num_processes, mp_context=get_context("spawn"), initializer=_begin_process)
    try:
        for done in as_completed([pool.submit(_rows_in_process, way, question) for way in ways]):
            yield done.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _begin_process() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # only the parent process reports Ctrl-C
    torch.set_num_threads(1)
    gc.freeze()  # as in `slivertune plan`


def _rows_in_process(way: Way, question: Question) -> list[Row]:
    with quiet_libraries():
        return rows_of(way, question)


def rows_of(way: Way, question: Question) -> list[Row]:
    """Plan one way, without TokenTune and with it.

    Args:
        way: Way to plan.
        question: Settings that all rows share.
    """
    ratio = question.given.get("token_ratio", TOKEN_RATIO)
    rows: list[Row] = []
    try:
        first = way.request({**question.given, "token_ratio": None, "batch_size": 1})
        planner = Planner(question.model.config)

        @cache  # the smallest batch is planned twice
        def estimate(request: PlanRequest) -> MemoryRequirement:
            return add_allowance(planner.plan(request))

        plain = _largest(first, question, estimate)
        rows.append(Row(way=way, requirement=plain, time=_time(plain, question)))
        selecting = _largest(
            replace(first, token_ratio=ratio, batch_size=plain.plan.request.batch_size), question, estimate
        )
        rows.append(Row(way=way, requirement=selecting, time=_time(selecting, question)))
    except (ValueError, ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        rows.append(Row(way=way, requirement=None, time=None, reason=f"with TokenTune: {reason}" if rows else reason))
    return rows


def _largest(
    request: PlanRequest, question: Question, estimate: Callable[[PlanRequest], MemoryRequirement]
) -> MemoryRequirement:
    """Plan the run with as many sequences as fit, or with one if none fits. The request's own number is tried first."""
    if not estimate(request).fits(question.limits):
        smallest = estimate(replace(request, batch_size=1))
        if not smallest.fits(question.limits):
            return smallest
    first = request.batch_size
    return find_largest(request, "batch_size", question.limits, estimate, first=first).requirement


def _time(requirement: MemoryRequirement, question: Question) -> PlannedTime | None:
    if not requirement.fits(question.limits):
        return None
    plan = with_room_ahead(requirement, question.limits.device_bytes)
    return plan_time(plan, question.rates())


def in_order(rows: Sequence[Row]) -> list[Row]:
    """Sort rows: the fastest first, then rows that do not fit, the smallest first, then rows that can't be planned."""

    def key(row: Row) -> tuple[float, float]:
        return (-row.speed, float("inf") if row.requirement is None else row.requirement.device_bytes)

    return sorted(rows, key=key)


def advice(rows: Sequence[Row]) -> str:
    """Recommend a way and say why, in one line.

    A pass over one of k groups is cheaper than a pass over all of them, but a weight learns only from the tokens on
    which it is trained. The advice is the way that trains all weights on all tokens with the most tokens/s per weight,
    or the fastest way if none of them fits.

    Args:
        rows: All rows.
    """
    ready = [row for row in in_order(rows) if row.time is not None]
    if not ready:
        return "nothing fits. Use a larger card, a shorter --seq_length or a smaller model"
    fastest = ready[0]
    whole = [row for row in ready if row.way.trains_all and row.token_ratio is None]
    if not whole:
        return f"use {fastest.title}, the fastest that fits: nothing that trains all weights fits"
    best = max(whole, key=lambda row: row.weight_speed)
    text = (
        f"use {best.title}: it trains all weights on all tokens, and each weight on the most tokens/s, "
        f"{best.weight_speed:,.0f}"
    )
    if best is fastest:
        return f"{text}, and nothing reads more"
    return f"{text}; {fastest.title} reads {fastest.speed / best.speed:.1f} x as many, and trains {_sliver(fastest)}"


def _sliver(row: Row) -> str:
    assert row.requirement is not None
    plan = row.requirement.plan
    what = (
        "all weights" if row.way.trains_all else f"{plan.num_trainable_peak / plan.num_parameters:.1%} as many values"
    )
    what += f", each in one of {plan.num_groups} updates" if plan.num_groups > 1 else ""
    return what if row.token_ratio is None else f"{what}, on {row.token_ratio:.0%} of the tokens"
