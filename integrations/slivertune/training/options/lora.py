"""The settings of `slivertune train --method lora`."""

from __future__ import annotations

from dataclasses import dataclass, field

_ALL_LINEAR = "all-linear"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraArguments:
    """LoRA's settings, for PEFT; made for `transformers.HfArgumentParser`.

    Raises:
        ValueError: If a number is out of its range.
    """

    lora_rank: int = field(default=16, metadata={"help": "lora: rank r of an adapter's two matrices."})
    lora_alpha: int | None = field(
        default=None,
        metadata={"help": "lora: adapters are scaled by alpha / rank; twice the rank by default."},
    )
    lora_dropout: float = field(default=0.0, metadata={"help": "lora: dropout on an adapter's input, in [0, 1)."})
    lora_target_modules: list[str] | None = field(
        default=None,
        metadata={
            "help": "lora: names of the modules that get an adapter, e.g. q_proj v_proj; by default PEFT's all-linear, "
            "every linear layer but the head."
        },
    )

    def __post_init__(self) -> None:
        if self.lora_rank < 1:
            raise ValueError(f"lora_rank={self.lora_rank} must be at least 1")
        if self.lora_alpha is not None and self.lora_alpha < 1:
            raise ValueError(f"lora_alpha={self.lora_alpha} must be at least 1; leave it out for twice the rank")
        if not 0 <= self.lora_dropout < 1:
            raise ValueError(f"lora_dropout={self.lora_dropout} must lie in [0, 1); 0 drops nothing")

    @property
    def alpha(self) -> int:
        """`lora_alpha`, or twice the rank."""
        return 2 * self.lora_rank if self.lora_alpha is None else self.lora_alpha

    @property
    def target_modules(self) -> list[str] | str:
        """As PEFT takes them: names in a list, or its shorthand, which it knows as a string alone."""
        names = self.lora_target_modules
        return _ALL_LINEAR if names is None or names == [_ALL_LINEAR] else names
