"""Suggest known words for a mistyped one."""

import difflib
from collections.abc import Iterable

_CUTOFF = 0.7
"""Smallest ratio of difflib at which two words count as spelled alike."""
_FEWEST_LETTERS = 4
_MOST_SHOWN = 3


def close_names(word: str, known: Iterable[str]) -> list[str]:
    """Find the names that a word may mean.

    Args:
        word: The word as typed.
        known: All names.

    Returns:
        The name that is spelled nearly so, ignoring case, hyphens and underscores. Otherwise, the first few names that
        have the word as a part, as `num_train_epochs` has `epochs`. Mostly none.
    """
    names, wanted = list(known), _plain(word)
    near = closest(word, names)
    if near is not None:
        return [near]
    parts = [name for name in names if f"_{wanted}_" in f"_{_plain(name)}_"]
    return parts[:_MOST_SHOWN] if len(wanted) >= _FEWEST_LETTERS else []


def closest(word: str, known: Iterable[str], cutoff: float = _CUTOFF) -> str | None:
    """Find the name that is spelled most like a word, ignoring case, hyphens and underscores.

    Args:
        word: The word as typed.
        known: All names.
        cutoff: Smallest ratio of difflib. 1 means the same spelling.

    Returns:
        The name, or None if none is spelled so.
    """
    spelled = {_plain(name): name for name in known}
    near = difflib.get_close_matches(_plain(word), spelled, n=1, cutoff=cutoff)
    return spelled[near[0]] if near else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Ask whether a known name was meant, at the end of an error.

    Args:
        word: The word as typed.
        known: All names.

    Returns:
        `; did you mean NAME?`, or an empty text if no name is close.
    """
    names = close_names(word, known)
    if not names:
        return ""
    listed = " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
    return f"; did you mean {listed}?"


def _plain(name: str) -> str:
    return name.strip("-").replace("-", "_").casefold()
