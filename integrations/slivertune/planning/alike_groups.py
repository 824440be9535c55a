"""HiFT's groups that are alike: which they are, which of them is to be run, and what of it counts."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from slivertune.hift.rotation import Group
from slivertune.planning.request import PlanRequest
from slivertune.planning.step import StepPeak, largest_of


def alike(groups: Sequence[Group], model: nn.Module) -> list[list[Group]]:
    """Sort groups by what they hold: kinds of layers, and shapes and dtypes of the parameters that train.

    Of groups alike, the lowest has the largest peak: its backward goes through all blocks that those of the others go
    through, and more, and their updates are the same.

    Args:
        groups: All groups, from the bottom up.
        model: The model.

    Returns:
        The groups in lists of those alike, each from the bottom up.
    """
    named = dict(model.named_parameters())
    found: dict[Any, list[Group]] = {}
    for group in groups:
        kinds = tuple(layer.kind for layer in group.layers)
        sizes = tuple((tuple(named[name].shape), named[name].dtype) for name in group.parameter_names)
        found.setdefault((kinds, sizes), []).append(group)
    return list(found.values())


def measure_alike(measure: Callable[[Group], StepPeak], members: Sequence[Group], request: PlanRequest) -> StepPeak:
    """The largest step of groups alike. The lowest is run last, so that what a run leaves is its own.

    The lowest group has the deepest backward. But a block that trains keeps more than a frozen one, so that where
    blocks keep their activations, the first group that keeps may take more. And under a selection of tokens the forward
    of a block below all that trains takes more than that of any other, since all its tokens go at once.

    Args:
        measure: Runs the steps of a group.
        members: The groups, from the bottom up.
        request: Says how many blocks keep, and how many layers a group has.
    """
    places = {0} if request.token_ratio is None else {0, 1}
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
        work=peaks[-1].work,
    )
