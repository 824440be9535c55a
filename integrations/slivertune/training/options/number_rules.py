"""Which numbers the options of `slivertune train` take; checked where they are read, before anything is loaded."""

import math
from dataclasses import dataclass
from typing import Any

from transformers import TrainingArguments

from slivertune.training.options.table import Option

_LARGEST = 2**63 - 1
_LARGEST_OF_TRAINER = 2**31 - 1


@dataclass(frozen=True, slots=True)
class NumberRule:
    """A range of numbers."""

    least: float = -_LARGEST
    most: float = _LARGEST
    excludes_least: bool = False
    excludes_most: bool = False
    instead: float | None = None
    """A number outside the range that means that the option is off."""

    def allows(self, value: float) -> bool:
        """Tell whether a number keeps the rule; NaN keeps none.

        Args:
            value: The number.
        """
        if value == self.instead:
            return True
        is_low = value < self.least or (self.excludes_least and value == self.least)
        is_high = value > self.most or (self.excludes_most and value == self.most)
        return math.isfinite(value) and not is_low and not is_high

    def describe(self) -> str:
        """Say the rule, after `must be`."""
        low = f"{'more than' if self.excludes_least else 'at least'} {self.least:.10g}"
        high = f"{'less than' if self.excludes_most else 'at most'} {self.most:.10g}"
        parts = [low] * (self.least > -_LARGEST) + [high] * (self.most < _LARGEST)
        off = "" if self.instead is None else f", or {self.instead:g} to leave it off"
        return (" and ".join(parts) or "a finite number of at most 64 bits") + off


_COUNT = NumberRule(1, _LARGEST_OF_TRAINER)
_FROM_ZERO = NumberRule(0, _LARGEST_OF_TRAINER)
_ABOVE_ZERO = NumberRule(0, _LARGEST_OF_TRAINER, excludes_least=True)
_SHARE = NumberRule(0, 1, excludes_most=True)
_SEED = NumberRule(0, 2**32 - 1)
_RULES = {
    **dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), _COUNT),
    **dict.fromkeys(("gradient_accumulation_steps", "eval_accumulation_steps", "torch_empty_cache_steps"), _COUNT),
    **dict.fromkeys(("dataloader_prefetch_factor", "ddp_bucket_cap_mb", "ddp_timeout", "save_total_limit"), _COUNT),
    **dict.fromkeys(("warmup_steps", "max_grad_norm", "neftune_noise_alpha", "eval_delay"), _FROM_ZERO),
    "dataloader_num_workers": _FROM_ZERO,
    **dict.fromkeys(("num_train_epochs", "logging_steps", "eval_steps", "save_steps", "dataset_weights"), _ABOVE_ZERO),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "label_smoothing_factor"), _SHARE),
    **dict.fromkeys(("seed", "data_seed"), _SEED),
    "max_steps": NumberRule(1, _LARGEST_OF_TRAINER, instead=-1),
    "local_rank": NumberRule(0, _LARGEST_OF_TRAINER, instead=-1),
    "max_length": _COUNT,
    # A rate of SGD may be above 1; no optimizer stands one of hundreds.
    "learning_rate": NumberRule(0, 100),
    "weight_decay": NumberRule(0, 100),
    "adam_epsilon": NumberRule(0, 1),
}
"""Of the Trainer's arguments, and of those of ours that are otherwise checked when the data are there."""


def number_rule(option: Option) -> NumberRule | None:
    """Find the rule of an option.

    Args:
        option: Of `slivertune train`.

    Returns:
        The rule; None where its values are no numbers.
    """
    kinds = (*option.kinds, option.item_kind)
    if option.is_switch or str in option.kinds or not {int, float}.intersection(kinds):
        return None
    return _RULES.get(option.name, _FROM_ZERO if option.owner is TrainingArguments else NumberRule())


def check_number(option: Option, value: Any) -> None:
    """Refuse a number that an option does not take.

    Args:
        option: Of `slivertune train`.
        value: As it was read: a number, a list of numbers, or anything else where the option takes that.

    Raises:
        ValueError: Naming the option, the value and the rule.
    """
    rule = number_rule(option)
    for each in value if isinstance(value, list) else [value]:
        if rule is not None and isinstance(each, int | float) and not rule.allows(each):
            raise ValueError(f"--{option.name} {each} must be {rule.describe()}")
