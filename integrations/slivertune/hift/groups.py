"""Layers to groups, and the order in which the groups take their turn (HiFT, section 3 and Algorithm 1). Pure."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from slivertune.core.layers import Layer
from slivertune.hift.config import Order


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Layers that train together."""

    index: int
    """Position from the bottom of the model, in [0, k)."""
    layers: tuple[Layer, ...]
    """The layers, bottom first."""
    parameter_names: tuple[str, ...]
    """Names of the parameters that train, as in `model.named_parameters()`."""


def cut_groups(layers: Sequence[Layer], layers_per_group: int, trainable: frozenset[str]) -> tuple[Group, ...]:
    """Cut n layers into k = ceil(n / m) groups, from the bottom; the last may be smaller.

    Args:
        layers: The model's layers, bottom first.
        layers_per_group: m, in [1, n].
        trainable: Names of the parameters that may train; a layer with none of them takes no part.

    Returns:
        The groups, bottom first; their membership never changes.

    Raises:
        ValueError: If no parameter trains, or m is larger than the number of layers that train.
    """
    training = [layer for layer in layers if not trainable.isdisjoint(layer.parameter_names)]
    if not training:
        raise ValueError("no parameter of the model requires a gradient; set requires_grad on what is to train")
    if layers_per_group > len(training):
        raise ValueError(
            f"layers_per_group={layers_per_group} must be in [1, {len(training)}], the layers that train; "
            f"{len(training)} trains the whole model in every step"
        )
    groups = []
    for index, start in enumerate(range(0, len(training), layers_per_group)):
        members = tuple(training[start : start + layers_per_group])
        names = tuple(name for layer in members for name in layer.parameter_names if name in trainable)
        groups.append(Group(index=index, layers=members, parameter_names=names))
    return tuple(groups)


def turn_order(num_groups: int, order: Order, seed: int) -> tuple[int, ...]:
    """The groups' indices in the order of their turns, the same in every cycle.

    Args:
        num_groups: k.
        order: `bottom2up`, `top2down`, or `random`, which is shuffled once.
        seed: Seed of the shuffle.
    """
    indices = list(range(num_groups))
    if order == "top2down":
        indices.reverse()
    elif order == "random":
        random.Random(seed).shuffle(indices)
    return tuple(indices)
