"""Token selection in a run: attached to the model, saved in every checkpoint, restored from it."""

from pathlib import Path

from transformers import Trainer

from slivertune.interop import attach
from slivertune.interop.checkpoints import TOKENS_NAME, load_tokens
from slivertune.tokentune.config import Pattern, TokenTune
from slivertune.tokentune.hook import TokenTuneHandle
from slivertune.training.options.arguments import TokenArguments

_NAMES: dict[Pattern, str] = {"random": "drawn one by one", "chunks": "chunks of {chunk_size}", "block": "one block"}


def tokens_line(tokens: TokenTuneHandle) -> str:
    """Describe a token selection in a line, shown before training.

    Args:
        tokens: Handle of TokenTune on the run's model.
    """
    settings = tokens.settings
    name = _NAMES[tokens.pattern].format(chunk_size=settings.chunk_size)
    return f"  tokens  {(settings.ratio or 1) * 100:g} % of each sequence carry gradient ({name})"


def attach_tokens(trainer: Trainer, arguments: TokenArguments, *, checkpoint: Path | None) -> TokenTuneHandle | None:
    """Restrict the gradient to a share of each sequence until the handle is removed.

    Args:
        trainer: Trainer with the model as it will be trained, adapters included.
        arguments: Share of the tokens, and its pattern.
        checkpoint: Checkpoint that the run continues from; None for a new run.

    Returns:
        The handle, whose `remove` detaches the selection; None if all tokens carry gradient.

    Raises:
        ValueError: If the model does not support token selection, or the checkpoint has another seed.
    """
    if arguments.token_ratio is None:
        return None
    tune = TokenTune(ratio=arguments.token_ratio, pattern=arguments.token_pattern, seed=trainer.args.seed)
    attachment = attach(trainer, tune)
    assert attachment.tokens is not None
    if checkpoint is not None:
        # The Trainer's callback would load it, too, but only after the first evaluation.
        try:
            load_tokens(attachment.tokens, checkpoint / TOKENS_NAME)
        except BaseException:
            attachment.detach()
            raise
    return attachment.tokens
