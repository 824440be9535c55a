"""The schedule of a run's updates, recorded on tensors without data, whatever its method.

Of many micro-batches three are run, the first, one for all between, and the last; a method says which of its updates
are run, and how many of the run's each stands for.
"""

import torch
from transformers import PreTrainedConfig

from slivertune.core.copy_streams import streams_made_by
from slivertune.planning.fake import FakeOverrides
from slivertune.planning.make import built, on_one_gpu
from slivertune.planning.methods import planned
from slivertune.planning.request import PlanRequest
from slivertune.planning.schedule import Schedule
from slivertune.planning.schedule_recorder import ScheduleRecorder
from slivertune.planning.step import Forward, give_gradients, within_update


def record_schedule(request: PlanRequest, config: PreTrainedConfig) -> Schedule:
    """Record what one GPU does by itself in the updates of a run; what several owe each other is not part of it.

    Costs about as much as a plan; with HiFT seconds for each group that is not like its neighbours.

    Args:
        request: The run.
        config: The model's configuration.

    Raises:
        ValueError: If the method does not fit the model, or the model can't be run without data.
    """
    alone, recorder = on_one_gpu(request), ScheduleRecorder()
    with built(alone, config) as (model, forward), streams_made_by(recorder.streams):
        shares = planned(alone.method).record(alone, model, forward, recorder)
    return Schedule(entries=recorder.entries, shares=shares)


def record_update(
    recorder: ScheduleRecorder,
    optimizer: torch.optim.Optimizer,
    forward: Forward,
    *,
    num_backwards: int,
    group: int = 0,
    every_micro_batch: bool = False,
) -> None:
    """Record an update: its micro-batches, and the step.

    Args:
        recorder: Writes.
        optimizer: Holds the parameters that train.
        forward: The model's forward.
        num_backwards: Micro-batches.
        group: Whose turn it is.
        every_micro_batch: Run all of them; else what is like another is run once.
    """
    is_short = every_micro_batch or num_backwards <= 2
    times = [1] * num_backwards if is_short else [1, num_backwards - 2, 1]
    for index, count in enumerate(times):
        with recorder.recording("forward", group, times=count):
            loss = forward()
        is_last = index == len(times) - 1
        with (
            FakeOverrides(),
            recorder.recording("backward", group, times=count),
            within_update(optimizer, is_last=is_last),
        ):
            loss.backward()
        del loss
    with FakeOverrides(), recorder.recording("step", group):
        optimizer.step()
        optimizer.zero_grad()


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer make the state that its first update makes.

    Args:
        optimizer: Over parameters without data.
    """
    for group in optimizer.param_groups:
        give_gradients(group["params"])
    with FakeOverrides():
        optimizer.step()
        optimizer.zero_grad()
