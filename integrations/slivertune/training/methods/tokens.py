"""Token selection in a run: attached to the model, kept in every checkpoint, restored from it."""

from pathlib import Path

from transformers import Trainer

from slivertune.interop import attach
from slivertune.interop.checkpoints import TOKENS_NAME, load_tokens
from slivertune.tokentune.config import Pattern, TokenTune
from slivertune.tokentune.hook import TokenTuneHandle
from slivertune.training.options.arguments import TokenArguments

_NAMES: dict[Pattern, str] = {"random": "drawn one by one", "chunks": "chunks of {chunk_size}", "block": "one block"}


def tokens_line(tokens: TokenTuneHandle) -> str:
    """What to say of a selection before training.

    Args:
        tokens: Attached to the run's model.
    """
    settings = tokens.settings
    name = _NAMES[tokens.pattern].format(chunk_size=settings.chunk_size)
    return f"  tokens  {(settings.ratio or 1) * 100:g} % of each sequence carry gradient ({name})"


def attach_tokens(trainer: Trainer, arguments: TokenArguments, *, checkpoint: Path | None) -> TokenTuneHandle | None:
    """Let only a share of each sequence carry gradient, from here on until the handle is removed.

    Args:
        trainer: Holds the model as it will be trained, adapters included.
        arguments: The share and its pattern.
        checkpoint: Where the run continues from.

    Returns:
        The selection, which `remove` takes off again, or None where all tokens are trained on.

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
    return attachment.tokens
