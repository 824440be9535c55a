"""What of a sequence keeps its gradient: the settings of TokenTune."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch import nn

from slivertune.core.setting_checks import check_integer, check_number

if TYPE_CHECKING:
    from slivertune.tokentune.hook import TokenTuneHandle

Pattern = Literal["random", "chunks", "block"]
_PATTERNS = ("random", "chunks", "block")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenTune:
    """Train on all tokens, and keep activations and gradients for some of them only (TokenTune, section 3).

    Each training forward draws the same number k of positions in every sequence of the batch. All positions are
    computed as ever, so that selected tokens attend to all others; but what is not selected is a constant for the
    backward: at each layer's input and output, and as a key and a value. Saved activations shrink from all n rows to k
    rows and the keys and values of all n; the backward shrinks to k rows.

    Real tokens are drawn before pads. Of causal models position i is scored on token i + 1, and the loss is the mean
    over the selected positions that have a label.

    Raises:
        ValueError: If not exactly one of `ratio` and `num_tokens` is given, or a setting is out of its range.
    """

    ratio: float | None = None
    """Selected share of the padded length n, in (0, 1]: k = max(1, round(ratio x n)), and at least one position for
    each entry of `always`. The paper recommends 0.2 to 0.3."""
    num_tokens: int | None = None
    """k itself, in place of `ratio`."""
    pattern: Pattern | None = None
    """Which positions go together. "random" is the paper: each for itself. "chunks" takes runs of `chunk_size`
    positions, which keep the paths between near tokens; "block" one run. None: "chunks" for causal language models,
    else "random"."""
    chunk_size: int = 16
    """Positions in a chunk. Where the first one is cut is drawn for each sequence; a packed segment starts one."""
    always: tuple[int, ...] | None = None
    """Positions that every draw contains, counted in real tokens: 0 is the first, -1 the last. None: (0, -1) for
    classification, since the head reads one of them, and for sentences of sentence-transformers that are one of them;
    else ()."""
    prefer_labels: bool = False
    """Whether positions with a label are drawn before all others: for prompts whose tokens are not scored."""
    checkpoint_mlp: bool = False
    """Whether the feed-forward parts keep only their inputs and are computed again in the backward, on selected rows
    alone: less memory, more time."""
    seed: int = 0
    """Decides the draws, together with the number of the draw and the rank of the process."""

    def __post_init__(self) -> None:
        ratio, num_tokens, always = self.ratio, self.num_tokens, self.always
        if ratio is not None:
            check_number("ratio", ratio)
        if num_tokens is not None:
            check_integer("num_tokens", num_tokens, 1)
        check_integer("chunk_size", self.chunk_size, 1)
        check_integer("seed", self.seed)
        for position in always or ():
            check_integer("a position of always", position)
        rules = (
            (
                (ratio is None) != (num_tokens is None),
                f"ratio={ratio} and num_tokens={num_tokens}: give exactly one of them, such as ratio=0.3",
            ),
            (ratio is None or 0 < ratio <= 1, f"ratio={ratio} must be in (0, 1]; 0.3 keeps 30 % of the tokens"),
            (
                self.pattern is None or self.pattern in _PATTERNS,
                f"pattern={self.pattern!r} must be one of {', '.join(_PATTERNS)}, or None",
            ),
            (
                always is None or len(set(always)) == len(always),
                f"always={always} names a position twice; leave it out once",
            ),
        )
        for holds, text in rules:
            if not holds:
                raise ValueError(text)

    def attach(self, model: nn.Module) -> TokenTuneHandle:
        """Hook a model; it stays the same object, with the same parameters and the same state_dict.

        Args:
            model: A transformers model with attention blocks, or a PEFT model around one, with its final modules: apply
                PEFT and load 4-bit weights before.

        Returns:
            What takes the hook off again: by `remove()`, or as a context manager.

        Raises:
            RuntimeError: If the model is hooked already.
            ValueError: If the model can't be hooked; the text says why.
        """
        from slivertune.tokentune.hook import TokenTuneHandle

        return TokenTuneHandle(self, model)
