"""HiFT's groups alike, where some blocks keep their activations: which of them is to be run, and what of it counts."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from slivertune.hift.rotation import Group
from slivertune.planning.request import PlanRequest
from slivertune.planning.step import StepPeak, largest_of


def measure_alike(measure: Callable[[Group], StepPeak], members: Sequence[Group], request: PlanRequest) -> StepPeak:
    """The largest step of groups alike. The lowest is run last, so that what a run leaves is its own.

    The lowest group has the deepest backward. But a block that trains keeps more than a frozen one, so that where
    blocks keep their activations, the first group that keeps may take more.

    Args:
        measure: Runs the steps of a group.
        members: The groups, from the bottom up.
        request: Says how many blocks keep, and how many layers a group has.
    """
    places = {0}
    if request.keep_activations:
        num_keeping = -(-request.keep_activations // request.layers_per_group)
        # Of groups of several layers the lowest that keeps may do so in part.
        places |= {len(members) - num_keeping, len(members) - num_keeping + 1}
    peaks = [measure(members[place]) for place in sorted(places, reverse=True) if 0 <= place < len(members)]
    return replace(
        largest_of(peaks),
        before_step=max((peak.before_step for peak in peaks), key=lambda census: census.device),
        activations=max(peak.activations for peak in peaks),
        after=peaks[-1].after,
    )
