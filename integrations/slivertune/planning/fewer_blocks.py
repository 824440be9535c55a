"""Smaller models with the same blocks, from whose measurements those of the whole model follow (`extension`)."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import Literal

from torch import nn
from transformers import PreTrainedConfig

from slivertune.core.layers import find_blocks, find_layers
from slivertune.hift.rotation import count_per_group
from slivertune.planning.extension import Extension
from slivertune.planning.methods import MeasuredSteps, planned
from slivertune.planning.request import PlanRequest

_LEAST_BLOCKS = 3
"""Fewest blocks of a model: one below those that repeat, one of them, and one above."""
_MOST_SHARE = 0.7
"""Largest share of the model's blocks that three smaller models may have together."""
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, kw_only=True, slots=True)
class FewerBlocks:
    """Numbers of blocks of smaller models, a period apart."""

    first: int
    """Blocks of the smallest model."""
    period: int
    """Blocks from one model to the next."""
    whole: int
    """Blocks of the model that is planned."""
    num_others: int
    """Blocks below, of another part of the model, which all of them have (a vision tower)."""
    layers_per_group: float | Literal["all"]
    """Layers per group of the smaller models."""

    def later(self) -> "FewerBlocks | None":
        """Return the same with one period more, None if that is no longer faster than the whole model."""
        more = replace(self, first=self.first + self.period)
        return more if more._is_faster else None

    def extend(self, measure: Callable[[int], MeasuredSteps]) -> MeasuredSteps:
        """Measure three smaller models, and return what would be measured of the whole.

        Args:
            measure: Function that measures the model with a number of blocks.

        Raises:
            ExtensionError: If what they take does not grow evenly.
        """
        extension = Extension(
            num_blocks=self.num_others + self.first,
            period=self.period,
            num_periods=(self.whole - self.first) // self.period,
        )
        return extension.of(*(measure(self.first + at * self.period) for at in range(3)))

    @property
    def _is_faster(self) -> bool:
        return 3 * (self.first + self.period) <= _MOST_SHARE * self.whole


def fewer_blocks(request: PlanRequest, config: PreTrainedConfig, model: nn.Module) -> FewerBlocks | None:
    """Find the smaller models for a run, if what is measured of them can be extended.

    A setting that is a number of bytes or of weights, whatever the size of the model, can't: in a small model it holds
    everything, in a large one a part.

    Args:
        request: The run, on one GPU.
        config: The model's configuration.
        model: The model, on any device.

    Returns:
        Numbers of blocks. None if the whole model is as fast, or nothing can be extended.
    """
    whole = getattr(config.get_text_config(), "num_hidden_layers", None)
    blocks = [block for _, block in find_blocks(model, are_needed=False)]
    if not isinstance(whole, int) or len(blocks) < whole or not planned(request.method).grows_with_blocks(request):
        return None
    signatures = _signatures(blocks[len(blocks) - whole :], config)
    period, num_irregular = _period(signatures)
    layers_per_group = request.layers_per_group
    if planned(request.method).trains_in_groups:
        num_layers = len(find_layers(model))
        per_group = count_per_group(layers_per_group, num_layers)
        layers_per_group = "all" if per_group >= num_layers else per_group
        if per_group < num_layers:
            period = lcm(period, per_group)
    least = max(_LEAST_BLOCKS, num_irregular + 2, request.keep_activations + 2)
    least = max(least, 2 * period + 1 if period > 1 else 0)
    found = FewerBlocks(
        first=least + (whole - least) % period,
        period=period,
        whole=whole,
        num_others=len(blocks) - whole,
        layers_per_group=layers_per_group,
    )
    return found if found._is_faster else None


def shorter(config: PreTrainedConfig, num_blocks: int) -> PreTrainedConfig:
    """Return the configuration of the model with its lowest blocks only.

    Args:
        config: The model's configuration.
        num_blocks: Number of blocks of its text model.
    """
    config = copy.deepcopy(config)
    text = config.get_text_config()
    whole = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == whole:
            setattr(text, name, value[:num_blocks])
    text.num_hidden_layers = num_blocks
    return config


def _signatures(blocks: Sequence[nn.Module], config: PreTrainedConfig) -> list[str]:
    """Return what makes blocks alike: classes, sizes, and all plain attributes but the block's own index."""
    lists = [value for value in vars(config.get_text_config()).values() if isinstance(value, list)]
    plain = [
        {
            (path, name): value
            for path, module in block.named_modules()
            for name, value in vars(module).items()
            if isinstance(value, _PLAIN)
        }
        for block in blocks
    ]
    indices = {key for key in plain[0] if all(each.get(key) == index for index, each in enumerate(plain))}
    return [
        repr(
            (
                [(path, type(module)) for path, module in block.named_modules()],
                [(name, tuple(each.shape), each.dtype) for name, each in block.named_parameters()],
                [(key, value) for key, value in plain[index].items() if key not in indices],
                [each[index] for each in lists if len(each) == len(blocks)],
            )
        )
        for index, block in enumerate(blocks)
    ]


def _period(signatures: Sequence[str]) -> tuple[int, int]:
    """Return the smallest period of blocks, and the number of the lowest blocks that are not in it."""
    best = (len(signatures), 0)
    for period in range(1, len(signatures) // 3 + 1):
        differing = [at for at in range(len(signatures) - period) if signatures[at] != signatures[at + period]]
        num_irregular = differing[-1] + 1 if differing else 0
        if num_irregular + 2 * period < sum(best):
            best = (period, num_irregular)
    return best
