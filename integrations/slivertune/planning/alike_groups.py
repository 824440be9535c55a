"""HiFT's groups of equal layers: sort them, and find the ones that may have the largest peak."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from slivertune.hift.rotation import Group
from slivertune.planning.request import PlanRequest


def alike(groups: Sequence[Group], model: nn.Module) -> list[list[Group]]:
    """Sort groups by the kinds of their layers, and by the shapes and dtypes of the parameters that train.

    Equal groups have equal updates. The lowest of them has the deepest backward: it passes through all blocks that the
    other backward passes reach, and more. Its peak is therefore the largest (for exceptions see `places_to_measure`).

    Args:
        groups: All groups, from the bottom up.
        model: Model that the groups divide.

    Returns:
        Lists of equal groups, each from the bottom up.
    """
    named = dict(model.named_parameters())
    found: dict[Any, list[Group]] = {}
    for group in groups:
        kinds = tuple(layer.kind for layer in group.layers)
        sizes = tuple((tuple(named[name].shape), named[name].dtype) for name in group.parameter_names)
        found.setdefault((kinds, sizes), []).append(group)
    return list(found.values())


def places_to_measure(members: Sequence[Group], request: PlanRequest) -> list[int]:
    """Return the places, among equal groups, of those that may have the largest peak, the lowest one last.

    The lowest group has the deepest backward, but two settings may give another group the larger peak. With
    `keep_activations`, it may be the first group whose blocks keep theirs: a trained block keeps more than a frozen
    one. With `token_ratio`, a block below all trained blocks has the largest forward: all its tokens run at once.

    Args:
        members: Equal groups, from the bottom up.
        request: Run, with its `keep_activations` and `token_ratio`.
    """
    places = {0} if request.token_ratio is None else {0, 1}
    if request.keep_activations:
        num_keeping = -(-request.keep_activations // len(members[0].layers))
        # With several layers per group, only some blocks of the lowest such group may keep their activations.
        places |= {len(members) - num_keeping, len(members) - num_keeping + 1}
    return [place for place in sorted(places, reverse=True) if 0 <= place < len(members)]
