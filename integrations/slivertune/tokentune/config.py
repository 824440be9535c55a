"""Settings of TokenTune, which choose the tokens of a sequence that keep their gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from slivertune.core.setting_checks import check_flag, check_integer, check_number

if TYPE_CHECKING:
    from torch import nn

    from slivertune.tokentune.hook import TokenTuneHandle

Pattern = Literal["random", "chunks", "block"]
_PATTERNS = ("random", "chunks", "block")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenTune:
    """Train on all tokens, but keep activations and gradients for some of them (arXiv 2501.18824, section 3).

    Each training forward draws the same number k of positions in every sequence of the batch. All positions are
    computed as usual, so selected tokens attend to all others. The other tokens are constants for the backward: at each
    layer's input and output, and as keys and values. Saved activations shrink from all n rows to k rows and the keys
    and values of all n. The backward shrinks to k rows.

    Real tokens are drawn before padding. In causal models position i is scored on token i + 1, and the loss is the mean
    over the selected positions that have a label.

    Raises:
        ValueError: If not exactly one of `ratio` and `num_tokens` is given, or a setting is out of its range.

    Example:
        >>> with TokenTune(ratio=0.3).attach(model):
        ...     model(**batch).loss.backward()
    """

    ratio: float | None = None
    """Selected share of the padded length n, in (0, 1]: k = max(1, round(ratio x n)), and at least one position per
    entry of `always`. The paper recommends 0.2 to 0.3."""
    num_tokens: int | None = None
    """Number k of selected positions per sequence, in place of `ratio`."""
    pattern: Pattern | None = None
    """Pattern of the selected positions. "random" (the paper) draws each by itself. "chunks" draws runs of `chunk_size`
    positions, which keep the paths between near tokens. "block" draws one run. None: "chunks" for causal language
    models, else "random"."""
    chunk_size: int = 16
    """Positions in a chunk. The first cut is drawn for each sequence, and a packed segment starts a chunk."""
    always: tuple[int, ...] | None = None
    """Positions that every draw contains, counted in real tokens: 0 is the first, -1 the last. None: (0, -1) for
    classification, since the head reads one of them, and for sentence-transformers models that pool one of them, else
    ()."""
    prefer_labels: bool = False
    """Whether positions with a label are drawn before all others, for prompts whose tokens are not scored."""
    checkpoint_mlp: bool = False
    """Whether the feed-forward parts save only their inputs and are recomputed in the backward, on selected rows only:
    less memory, more time."""
    seed: int = 0
    """Seed of the draws, together with the number of the draw and the rank of the process."""

    def __post_init__(self) -> None:
        ratio, num_tokens, always = self.ratio, self.num_tokens, self.always
        if ratio is not None:
            check_number("ratio", ratio)
        if num_tokens is not None:
            check_integer("num_tokens", num_tokens, 1)
        check_integer("chunk_size", self.chunk_size, 1)
        check_integer("seed", self.seed)
        check_flag("prefer_labels", self.prefer_labels)
        check_flag("checkpoint_mlp", self.checkpoint_mlp)
        for position in always or ():
            check_integer("a position of always", position)
        rules = (
            (
                (ratio is None) != (num_tokens is None),
                f"ratio={ratio} and num_tokens={num_tokens}. Give exactly one of them, such as ratio=0.3",
            ),
            (ratio is None or 0 < ratio <= 1, f"ratio={ratio} must be in (0, 1]. 0.3 keeps 30 % of the tokens"),
            (
                self.pattern is None or self.pattern in _PATTERNS,
                f"pattern={self.pattern!r} must be one of {', '.join(_PATTERNS)}, or None",
            ),
            (
                always is None or len(set(always)) == len(always),
                f"always={always} names a position twice. Name it once",
            ),
        )
        for holds, text in rules:
            if not holds:
                raise ValueError(text)

    def attach(self, model: nn.Module) -> TokenTuneHandle:
        """Attach to a model, which stays the same object with the same parameters and the same state_dict.

        Args:
            model: A transformers model with attention blocks, or a PEFT model around one. Apply PEFT and load 4-bit
                weights first, so that its modules are final.

        Returns:
            Handle that removes the hook: by `remove()`, or as a context manager.

        Raises:
            RuntimeError: If the model is hooked already.
            ValueError: If the model can't be hooked; the text says why.

        Example:
            >>> handle = TokenTune(ratio=0.3, pattern="chunks").attach(model)
            >>> train(model)
            >>> handle.remove()
        """
        from slivertune.tokentune.hook import TokenTuneHandle

        return TokenTuneHandle(self, model)
