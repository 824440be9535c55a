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
from slivertune.planning.extension import Extension, ExtensionError
from slivertune.planning.methods import MeasuredSteps, planned
from slivertune.planning.request import PlanRequest

_LEAST_BLOCKS = 3
"""Fewest blocks of a model: one below those that repeat, one of them, and one above."""
_LEAST_GROUPS = 3
"""Fewest groups of several blocks: one that trains, one below, and one above."""
_MOST_SHARE = 0.5
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
    layers_per_group: float | Literal["all"]
    """Layers per group of the smaller models."""
    signatures: tuple[str, ...]
    """Signatures of the whole model's blocks."""
    is_last: bool = False
    """Whether the whole model is measured if these can't be extended."""

    def one_later(self) -> "FewerBlocks | None":
        """Return the same with one period more. None if that is slower than the whole model, or was returned before."""
        more = replace(self, first=self.first + self.period, is_last=True)
        return more if more._is_faster and not self.is_last else None

    def check(self, model: nn.Module, config: PreTrainedConfig) -> None:
        """Check that a smaller model has the lowest blocks of the whole model.

        Args:
            model: The smaller model.
            config: Its configuration.

        Raises:
            ExtensionError: If it has others.
        """
        own = _signatures(text_blocks(model, config), config)
        if len(own) >= self.whole or tuple(own) != self.signatures[: len(own)]:
            raise ExtensionError(f"{len(own)} blocks are not the lowest of the whole model")

    def extend(self, measure: Callable[[int], MeasuredSteps]) -> MeasuredSteps:
        """Measure three smaller models, and return what would be measured of the whole.

        Args:
            measure: Function that measures the model with a number of blocks.

        Raises:
            ExtensionError: If what they take does not grow evenly.
        """
        extension = Extension(period=self.period, num_periods=(self.whole - self.first) // self.period)
        return extension.of(*(measure(self.first + at * self.period) for at in range(3)))

    @property
    def _is_faster(self) -> bool:
        largest = self.first + 2 * self.period
        return largest < self.whole and 3 * (self.first + self.period) <= _MOST_SHARE * self.whole


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
    blocks = text_blocks(model, config)
    budgets = (request.device_bytes, request.prefetch_bytes, request.resident_bytes)
    if not blocks or any(budgets):
        return None
    whole, signatures = len(blocks), _signatures(blocks, config)
    period, num_irregular = _period(signatures)
    if not planned(request.method).grows_with_blocks(request, are_all_alike=not num_irregular):
        return None
    least = max(_LEAST_BLOCKS, num_irregular + period + 2, request.keep_activations + 2)
    # Beside each block there may be one on its way, or one below all trained blocks, which runs all tokens.
    least += request.weights == "host" or request.token_ratio is not None
    layers_per_group = request.layers_per_group
    if planned(request.method).trains_in_groups:
        num_layers = len(find_layers(model))
        per_group = count_per_group(layers_per_group, num_layers)
        if per_group < num_layers:
            layers_per_group, period = per_group, lcm(period, per_group)
            if per_group > 1:
                others = request.keep_activations + per_group * (request.token_ratio is not None)
                least = max(least, _LEAST_GROUPS * per_group + 1 + others)
        elif request.gradients == "stepped" or _is_cut_alone(blocks[-1], request):
            layers_per_group = "all"
        else:
            return None
    found = FewerBlocks(
        first=least + (whole - least) % period,
        period=period,
        whole=whole,
        layers_per_group=layers_per_group,
        signatures=tuple(signatures),
    )
    return found if found._is_faster else None


def _is_cut_alone(block: nn.Module, request: PlanRequest) -> bool:
    """Return whether no chunk of state holds weights of two blocks, since each has more state than a chunk."""
    in_fp32 = request.precision in ("fp32", "mixed") and request.optimizer in ("adamw", "sgd_momentum", "adagrad")
    if request.precision != "mixed_hi" and not in_fp32:
        return False  # there may be less than one tensor in fp32
    return 0 < request.stream_bytes < 4 * sum(parameter.numel() for parameter in block.parameters())


def text_blocks(model: nn.Module, config: PreTrainedConfig) -> list[nn.Module]:
    """Return the blocks that a model's configuration counts, the highest of all: below them may be those of a tower.

    Args:
        model: The model, on any device.
        config: Its configuration.

    Returns:
        The blocks; none of a model with an encoder and a decoder, whose numbers of blocks are two.
    """
    blocks = [block for _, block in find_blocks(model, are_needed=False)]
    number = getattr(config.get_text_config(), "num_hidden_layers", 0)
    is_one_stack = not getattr(config, "is_encoder_decoder", False)
    return blocks[len(blocks) - number :] if is_one_stack and 0 < number <= len(blocks) else []


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
