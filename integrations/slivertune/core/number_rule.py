"""Ranges of numbers that options take, for `slivertune train` and `slivertune plan`."""

import math
from dataclasses import dataclass

_LARGEST = 2**63 - 1
_LARGEST_OF_TRAINER = 2**31 - 1


@dataclass(frozen=True, slots=True)
class NumberRule:
    """A range of allowed numbers."""

    least: float = -_LARGEST
    most: float = _LARGEST
    excludes_least: bool = False
    excludes_most: bool = False
    instead: float | None = None
    """Number outside the range that switches the option off. None if there is none."""

    def allows(self, value: float) -> bool:
        """Return whether the rule allows a number. NaN is never allowed.

        Args:
            value: Number to check.
        """
        if value == self.instead:
            return True
        is_low = value < self.least or (self.excludes_least and value == self.least)
        is_high = value > self.most or (self.excludes_most and value == self.most)
        return math.isfinite(value) and not is_low and not is_high

    def describe(self) -> str:
        """Describe the rule, to follow `must be`."""
        low = f"{'more than' if self.excludes_least else 'at least'} {self.least:.10g}"
        high = f"{'less than' if self.excludes_most else 'at most'} {self.most:.10g}"
        parts = [low] * (self.least > -_LARGEST) + [high if self.most < _LARGEST else "of at most 64 bits"]
        off = "" if self.instead is None else f", or {self.instead:g} to leave it off"
        return (" and ".join(parts) if len(parts) > 1 else "a finite number of at most 64 bits") + off


ANY = NumberRule()
COUNT = NumberRule(1, _LARGEST_OF_TRAINER)
FROM_ZERO = NumberRule(0, _LARGEST_OF_TRAINER)
ABOVE_ZERO = NumberRule(0, _LARGEST_OF_TRAINER, excludes_least=True)
SHARE = NumberRule(0, 1, excludes_most=True)
_PART = NumberRule(0, 1, excludes_least=True)
_SIZE = NumberRule(0)
_SIZE_ABOVE_ZERO = NumberRule(0, excludes_least=True)
RULES = {
    **dict.fromkeys(("per_device_train_batch_size", "gradient_accumulation_steps", "max_length"), COUNT),
    **dict.fromkeys(("save_total_limit", "token_tile_size", "steps_per_group", "estimation_steps"), COUNT),
    **dict.fromkeys(("equivalent_lora_rank", "lora_rank"), COUNT),
    **dict.fromkeys(("image_size", "num_labels", "num_gpus", "min_seq_length"), COUNT),
    **dict.fromkeys(("images", "keep_activations", "reselection_interval"), FROM_ZERO),
    "num_train_epochs": ABOVE_ZERO,
    **dict.fromkeys(("sft_momentum", "lora_dropout"), SHARE),
    **dict.fromkeys(("token_ratio", "density", "efficiency"), _PART),
    "replacement_rate": NumberRule(0, 1),
    **dict.fromkeys(("num_weights", "tokens"), NumberRule(1)),
    **dict.fromkeys(("device_bytes", "stream_bytes", "state_ram_bytes", "prefetch_bytes", "resident_bytes"), _SIZE),
    **dict.fromkeys(("fit", "fit_host", "fit_disk", "disk_bandwidth"), _SIZE_ABOVE_ZERO),
}
"""Rules of the options of `slivertune plan`, which `slivertune train` also has for most of them, by name."""
