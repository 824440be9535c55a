"""Pooling of tokens into a sentence in models of sentence-transformers."""

from torch import nn

_READS_ALL = frozenset(("mean", "max", "mean_sqrt_len_tokens", "weightedmean"))
"""Pooling modes that read every token."""


def pools_single_tokens(model: nn.Module) -> bool:
    """Return whether sentences are pooled from single tokens, the first or the last.

    Args:
        model: A model of sentence-transformers, or any other.
    """
    modes = [getattr(each, "pooling_mode", None) for each in model.modules() if _is_of_sentence_transformers(each)]
    known = [(mode,) if isinstance(mode, str) else tuple(mode) for mode in modes if mode is not None]
    return any(not _READS_ALL.issuperset(each) for each in known)


def _is_of_sentence_transformers(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] == "sentence_transformers"
