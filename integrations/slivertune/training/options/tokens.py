"""The settings of token selection in `slivertune train`, for every method."""

from __future__ import annotations

from dataclasses import dataclass, field

from slivertune.tokentune.config import Pattern


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenArguments:
    """What share of each sequence carries gradient (TokenTune); made for `transformers.HfArgumentParser`.

    Raises:
        ValueError: If the share is out of its range, or a pattern is given without a share.
    """

    token_ratio: float | None = field(
        default=None,
        metadata={
            "help": "Share of each sequence's positions that carry gradient, in (0, 1]; the others are only read "
            "(TokenTune, with any method). Off by default."
        },
    )
    token_pattern: Pattern | None = field(
        default=None,
        metadata={
            "help": "Which positions: drawn one by one, in chunks, or one block; by default chunks for causal language "
            "models and random for others."
        },
    )

    def __post_init__(self) -> None:
        if self.token_ratio is None and self.token_pattern is not None:
            raise ValueError(
                f"--token_pattern {self.token_pattern} is read with --token_ratio alone; give a ratio, or leave it out"
            )
        if self.token_ratio is not None and not 0 < self.token_ratio <= 1:
            raise ValueError(f"token_ratio={self.token_ratio} must lie in (0, 1]; leave it out to train on all tokens")
