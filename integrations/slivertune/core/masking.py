"""The one place that hides secrets in whatever of a command is kept, shown or published.

Secrets are the values of options such as `--hub_token`, of environment variables such as `WANDB_API_KEY`, and the
credentials of URLs. `learn` finds them when a command is read. `masked` replaces them in texts, lists and mappings, and
`Secret` in pickles.
"""

import itertools
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

MASK = "<hidden>"
"""Takes the place of a secret."""

_Value = TypeVar("_Value")

_NAME = r"(?:token|secret|passw(?:or)?d|passphrase|(?:api|access|secret)_?key)"
_IS_SECRET = re.compile(rf"(?:^|_){_NAME}$", re.IGNORECASE)
_OF_TOKENIZER = r"(?:pad|eos|bos|mask|unk|sep|cls|image)_token"
_IN_TEXT = (
    (
        re.compile(rf"(--(?:[\w-]*[_-])?{_NAME}(?:\s+|=))(?!'?{MASK})('[^']*'|\"[^\"]*\"|[^\s'\"-]\S*)", re.I),
        rf"\1{MASK}",
    ),
    (re.compile(r"(\w://)[^/\s'\"]+@"), rf"\1{MASK}@"),
    (re.compile(rf"([?&](?:[\w-]*[_-])?(?:{_NAME}|sig|signature|key)=)[^&\s'\"#]+", re.IGNORECASE), rf"\1{MASK}"),
    (re.compile(rf"([\"'](?!{_OF_TOKENIZER})(?:[\w-]*[_-])?{_NAME}[\"']\s*:\s*[\"'])[^\"']+", re.I), rf"\1{MASK}"),
    (re.compile(r"\bhf_[A-Za-z0-9]{30,}\b"), MASK),
)
"""An option, a URL's user and parameter, a key in JSON, a token of the hub: what is replaced in any text, by what."""
_FEWEST_LETTERS = 6
"""Letters of a secret that is looked for in texts; a shorter one would hide common words."""
_FEWEST_OF_ENVIRONMENT = 12
"""The same for a variable, whose value may be no secret in spite of its name."""
_known: set[str] = set()


class Secret(str):
    """A text that a program can use, and that no copy on a disk has: its pickle and its repr are the mask."""

    __slots__ = ()

    def __repr__(self) -> str:
        return repr(MASK)

    def __reduce_ex__(self, protocol: Any) -> tuple[type[str], tuple[str]]:
        return str, (MASK,)

    def __copy__(self) -> "Secret":
        return self

    def __deepcopy__(self, memo: Any) -> "Secret":
        return self


def is_secret(name: str) -> bool:
    """Tell by its name whether an option, a key or a variable holds a secret.

    Args:
        name: With hyphens or underscores.
    """
    plain = name.strip("-").replace("-", "_")
    return _IS_SECRET.search(plain) is not None and re.fullmatch(_OF_TOKENIZER, plain) is None


def learn(words: Sequence[str] = (), values: Mapping[str, Any] | None = None) -> None:
    """Remember the secrets of a command and of this process's environment, so that `masked` finds them anywhere.

    Args:
        words: A command line.
        values: Options by name, as those of a file.
    """
    variables = (value for name, value in os.environ.items() if is_secret(name))
    _known.update(value for value in variables if len(value) >= _FEWEST_OF_ENVIRONMENT)
    of_words = [word for before, word in itertools.pairwise(words) if _is_option(before)]
    of_words += [word.partition("=")[2] for word in words if "=" in word and _is_option(word.partition("=")[0])]
    _known.update(word for word in (*of_words, *_secrets_in(values or {})) if len(word) >= _FEWEST_LETTERS)


def masked(value: _Value) -> _Value:
    """Replace every secret in a text, and in the texts of lists, tuples and mappings.

    Args:
        value: A text, or containers of texts and numbers; a list may be a command line.

    Returns:
        The same with the mask in place of secrets; other values as they are.
    """
    result: Any = value
    if isinstance(value, str):
        result = _masked_text(value)
    elif isinstance(value, Mapping):
        result = {
            key: MASK if is_secret(str(key)) and isinstance(each, str) else masked(each) for key, each in value.items()
        }
    elif isinstance(value, list | tuple):
        before = (None, *value)
        result = type(value)(
            MASK if isinstance(previous, str) and _is_option(previous) and isinstance(each, str) else masked(each)
            for previous, each in zip(before, value, strict=False)
        )
    same: _Value = result
    return same


def _masked_text(text: str) -> str:
    for secret in sorted(_known, key=len, reverse=True):
        text = text.replace(secret, MASK)
    for pattern, replacement in _IN_TEXT:
        text = pattern.sub(replacement, text)
    return text


def _is_option(word: str) -> bool:
    return word.startswith("--") and "=" not in word and is_secret(word)


def _secrets_in(values: Mapping[Any, Any]) -> list[str]:
    found = [value for name, value in values.items() if isinstance(value, str) and is_secret(str(name))]
    return found + [each for value in values.values() if isinstance(value, Mapping) for each in _secrets_in(value)]
