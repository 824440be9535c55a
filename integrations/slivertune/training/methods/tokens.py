"""Token selection in a run: attached to the model, kept in every checkpoint, restored from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import Trainer

from slivertune.interop import attach
from slivertune.interop.checkpoints import TOKENS_NAME, load_tokens
from slivertune.tokentune.config import Pattern, TokenTune
from slivertune.tokentune.hook import TokenTuneHandle
from slivertune.training.options.arguments import TokenArguments

_NAMES: dict[Pattern, str] = {"random": "drawn one by one", "chunks": "chunks of {chunk_size}", "block": "one block"}


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSelection:
    """A selection that is attached to a run's model."""

    ratio: float
    """Share of each sequence that carries gradient, in (0, 1]."""
    handle: TokenTuneHandle
    """Takes it off again."""

    def line(self) -> str:
        """What to say of it before training."""
        name = _NAMES[self.handle.pattern].format(chunk_size=self.handle.settings.chunk_size)
        return f"  tokens  {self.ratio * 100:g} % of each sequence carry gradient ({name})"

    def settings(self) -> dict[str, Any]:
        """What decides the figures; plain JSON."""
        return {"token_ratio": self.ratio, "token_pattern": self.handle.pattern}


def attach_tokens(trainer: Trainer, arguments: TokenArguments, *, checkpoint: Path | None) -> TokenSelection | None:
    """Let only a share of each sequence carry gradient, from here on until the handle is removed.

    Args:
        trainer: Holds the model as it will be trained, adapters included.
        arguments: The share and its pattern.
        checkpoint: Where the run continues from.

    Returns:
        The selection, or None where all tokens are trained on.

    Raises:
        ValueError: If the model can't be trained so, or the checkpoint is of another seed.
    """
    if arguments.token_ratio is None:
        return None
    tune = TokenTune(ratio=arguments.token_ratio, pattern=arguments.token_pattern, seed=trainer.args.seed)
    attachment = attach(trainer, tune)
    assert attachment.tokens is not None
    if checkpoint is not None:
        # The Trainer's callback would do it too, but only after the first evaluation.
        try:
            load_tokens(attachment.tokens, checkpoint / TOKENS_NAME)
        except BaseException:
            attachment.detach()
            raise
    return TokenSelection(ratio=arguments.token_ratio, handle=attachment.tokens)
