"""The schedule of HiFT's steps, recorded from a run without data."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedConfig

from slivertune.core.copy_streams import streams_made_by
from slivertune.hift.rotation import Group
from slivertune.planning.alike_groups import alike
from slivertune.planning.cards import Rates
from slivertune.planning.fake import FakeOverrides
from slivertune.planning.hift_optimizer import hift_over, meet_gradients
from slivertune.planning.make import attached, built
from slivertune.planning.recorded_run import record_update
from slivertune.planning.request import PlanRequest
from slivertune.planning.schedule import Schedule
from slivertune.planning.schedule_player import StepTime, play
from slivertune.planning.schedule_recorder import ScheduleRecorder
from slivertune.planning.step import Forward

_NUM_BEFORE = 2
"""Steps that are played before the cycle that counts: write-backs of one run under the next, so that the first has its
neighbour's, and that one had what it loads ahead under a whole step. Where gradients do not stay on the device, it is a
whole cycle: pieces follow the order in which the last backward's gradients came."""


_MOST_UPDATES = 3
"""Of a turn that are run: the first, whose state came while the group before was stepped; the last, after which it
leaves; and one between, like which all others are."""


_FEWEST_TO_SKIP = 6
"""Neighbours alike of which some are not run: with fewer, all are among those that count or come before these."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HiFTSchedule(Schedule):
    """A cycle of HiFT's steps, and a few before it."""

    groups: tuple[str, ...]
    """The layers of each group, bottom of the model first."""

    def cycle(self, rates: Rates) -> list[StepTime]:
        """The steps that count, as long as they take on a card, by group.

        Args:
            rates: The card's.
        """
        counted = [step for step in play(self.entries, rates) if step.step in self.shares]
        return sorted(counted, key=lambda step: step.group)


def record_hift(request: PlanRequest, config: PreTrainedConfig, *, max_grad_norm: float | None = None) -> HiFTSchedule:
    """Record a cycle in which every group has met its batch before, so that all state waits off the device.

    What would be stored in files lies in host memory: reads and writes of files are not recorded.
    Costs two or three times the steps of a plan, and seconds for each further group. Of a turn one update is run.

    Args:
        request: The run: HiFT on one GPU. All its micro-batches are run.
        config: The model's configuration.
        max_grad_norm: As in `HiFTConfig`.

    Raises:
        ValueError: If the run is not HiFT's on one GPU, or the model can't be run without data.
    """
    if request.method != "hift" or request.layout != "single":
        raise ValueError(
            f"method={request.method!r} with layout={request.layout!r} has no schedule of copies that could be "
            "recorded; take method='hift' and layout='single'"
        )
    recorder = ScheduleRecorder()
    with built(request, config) as (model, forward):
        turns = _Turns(request, model, forward, recorder, max_grad_norm=max_grad_norm, most_updates=1)
        shares = turns.record({group.index: 1 / len(turns.groups) for group in turns.groups}, every_micro_batch=True)
    return HiFTSchedule(
        entries=recorder.entries,
        shares=shares,
        groups=tuple(", ".join(layer.name for layer in group.layers) for group in turns.groups),
    )


def record_sample(
    request: PlanRequest, model: nn.Module, forward: Forward, recorder: ScheduleRecorder
) -> Mapping[int, float]:
    """Record steps of a cycle from which its mean follows.

    Of neighbours alike the first two and the last count. From one to the next the backward is a group shorter and all
    else the same, so that between the second and the last a step's time is taken to fall evenly.

    Args:
        request: The run: HiFT on one GPU.
        model: The model, without data.
        forward: Its forward.
        recorder: Writes.

    Returns:
        Of each step that counts, by its number, the share of a cycle's steps that it stands for.
    """
    turns = _Turns(request, model, forward, recorder)
    number = {group.index: place for place, each in enumerate(alike(turns.groups, model)) for group in each}
    shares: dict[int, float] = {}
    for neighbours in _runs_of(turns.groups, number):
        if len(neighbours) < _FEWEST_TO_SKIP:
            shares |= dict.fromkeys(neighbours, 1.0)
        else:
            first, second, *_, last = neighbours
            shares |= {first: 1.0, second: (len(neighbours) - 1) / 2, last: (len(neighbours) - 1) / 2}
    return turns.record({index: share / len(turns.groups) for index, share in shares.items()})


def _runs_of(groups: Sequence[Group], number: Mapping[int, int]) -> list[list[int]]:
    """Indices of groups, cut where the kind changes."""
    runs: list[list[int]] = []
    for group in groups:
        if runs and number[runs[-1][-1]] == number[group.index]:
            runs[-1].append(group.index)
        else:
            runs.append([group.index])
    return runs


class _Turns:
    """HiFT over a model without data, whose turns are recorded, or made without computing.

    Args:
        request: HiFT's settings and the base optimizer.
        model: The model.
        forward: Its forward.
        recorder: Writes.
        max_grad_norm: As in `HiFTConfig`.
        most_updates: Of a turn that are run; it has as many as the run's.
    """

    def __init__(
        self,
        request: PlanRequest,
        model: nn.Module,
        forward: Forward,
        recorder: ScheduleRecorder,
        *,
        max_grad_norm: float | None = None,
        most_updates: int = _MOST_UPDATES,
    ) -> None:
        self._request, self._model, self._forward, self._recorder = request, model, forward, recorder
        with self._recorded():
            self._num_updates = min(request.steps_per_group, most_updates)
            self._optimizer = hift_over(model, request, updates_a_turn=self._num_updates, max_grad_norm=max_grad_norm)
        self.groups: Sequence[Group] = self._optimizer.groups
        """All groups, bottom of the model first."""

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        """Let the recorder see the copy streams that are made inside."""
        with streams_made_by(self._recorder.streams):
            yield

    def record(self, shares: Mapping[int, float], *, every_micro_batch: bool = False) -> dict[int, float]:
        """Record the turns of some groups and of those before them.

        Args:
            shares: By index of a group that counts: the share of steps that its turn stands for.
            every_micro_batch: As in `record_update`.

        Returns:
            The shares by number of the step that was recorded.
        """
        num_groups = len(self.groups)
        num_before = _NUM_BEFORE if self._request.gradients == "device" else num_groups
        # Turns go from the bottom up.
        needed = {(index - before) % num_groups for index in shares for before in range(_NUM_BEFORE + 1)}
        by_step: dict[int, float] = {}
        with attached(self._request, self._model), self._recorded():
            for _ in range(num_groups * self._num_updates):
                self._update_without_computing()
            for place in range((num_before + num_groups) * self._num_updates):
                turn, update = divmod(place, self._num_updates)
                group = self._optimizer.active_group
                if group not in needed:
                    self._update_without_computing()
                    continue
                if turn >= num_before and group in shares:
                    by_step[self._recorder.num_steps] = shares[group] * self._share_of_turn(update)
                record_update(
                    self._recorder,
                    self._optimizer,
                    self._forward,
                    num_backwards=self._request.gradient_accumulation_steps,
                    group=group,
                    every_micro_batch=every_micro_batch,
                )
        if self._optimizer.skipped_turns:
            raise RuntimeError(f"groups {sorted(self._optimizer.skipped_turns)} lost a turn: no gradient reached them")
        return by_step

    def _share_of_turn(self, update: int) -> float:
        """Of the updates of a turn, those that are like one that is run."""
        is_between = 0 < update < self._num_updates - 1
        num_alike = self._request.steps_per_group - 2 if is_between else 1
        return num_alike / (self._request.steps_per_group if self._num_updates > 1 else 1)

    def _update_without_computing(self) -> None:
        """An update that leaves what any leaves."""
        meet_gradients(self._optimizer, self._model, self._forward)
        with FakeOverrides():
            self._optimizer.step()
            self._optimizer.zero_grad()
