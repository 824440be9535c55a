"""Hide secrets in all parts of a command that are kept, shown or published. No other module does so.

Secrets are the values of options such as `--hub_token`, of environment variables such as `WANDB_API_KEY`, and the
credentials of URLs. `learn` finds them when a command is read. `masked` replaces them in texts, lists and mappings, and
`Secret` in pickles.
"""

import itertools
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from slivertune.core.suggestions import closest

MASK = "<hidden>"
"""Text in place of a secret."""

_Value = TypeVar("_Value")

_NAME = (
    r"(?:token|secret|(?:pg)?passw(?:or)?d|passphrase|pwd|credentials?|auth|authorization|pat|connection[_-]?string|"
    r"(?:api|access|account|auth|encryption|private|secret|session|signing|ssh|storage)[_-]?keys?|"
    r"(?:anthropic|comet|hf|hub|huggingface|kaggle|neptune|openai|wandb)[_-]?keys?)"
)
_PREFIX = r"(?:[\w-]*[_-]|(?-i:\w*[a-z](?=[A-Z])))?"
_WHOLE_NAME = _PREFIX + _NAME
_IS_SECRET = re.compile(rf"(?:^|_){_NAME}$", re.IGNORECASE)
_OF_SHELLS = frozenset(("PWD", "OLDPWD"))
"""Variables that hold folders, in spite of their names."""
_OF_TOKENIZER = r"(?:pad|eos|bos|mask|unk|sep|cls|image)_token"
_VALUE = rf"(?!'?{MASK})('[^']*'|\"[^\"]*\"|[^\s'\"-]\S*)"
_IN_TEXT = (
    (re.compile(rf"(--{_WHOLE_NAME}(?:\s+|=)){_VALUE}", re.IGNORECASE), rf"\1{MASK}"),
    (re.compile(r"((?:\w\w:|\w:/)/)[^/\s'\"]+@"), rf"\1{MASK}@"),
    (re.compile(rf"([?&]{_PREFIX}(?:{_NAME}|sig|signature|key)=)[^&\s'\"#]+", re.IGNORECASE), rf"\1{MASK}"),
    (re.compile(rf"(?<![\w?&-])((?!{_OF_TOKENIZER}){_WHOLE_NAME}=){_VALUE}", re.IGNORECASE), rf"\1{MASK}"),
    (re.compile(rf"([\"'](?!{_OF_TOKENIZER}){_WHOLE_NAME}[\"']\s*:\s*[\"'])[^\"']+", re.IGNORECASE), rf"\1{MASK}"),
    (re.compile(r"(\bauthorization:\s*(?:\w+\s+)?+)[^\s'\"<]+", re.IGNORECASE), rf"\1{MASK}"),
    (
        re.compile(
            r"\b(?:hf_(?:oauth_[\w.-]{20,}|[A-Za-z0-9]{30,}|(?=\w*\d)\w{30,})|gh[oprsu]_[A-Za-z0-9]{36,}|"
            r"github_pat_\w{36,}|glpat-[\w-]{20,}|sk-(?:[A-Za-z0-9]{20,}|(?=[\w-]*\d)[\w-]{20,}))\b"
        ),
        MASK,
    ),
)
"""Patterns that are replaced in any text, with their replacements: an option, a URL's user and parameter, an assignment
as of a shell, a key in JSON, a header, the tokens of services. A URL made a path has one slash."""
_FEWEST_LETTERS = 6
"""Minimum length, in letters, of a secret that is looked for in texts. A shorter one would hide common words."""
_FEWEST_OF_ENVIRONMENT = 12
"""Minimum length, in letters, of a variable's value, which may be no secret in spite of its name."""
_SECRET_OPTIONS = ("hub_token", "push_to_hub_token")
"""Options of `slivertune train` that hold secrets."""
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
        name: Name with hyphens or underscores.
    """
    plain = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.strip("-").replace("-", "_"))
    if plain in _OF_SHELLS:
        return False
    return _IS_SECRET.search(plain) is not None and re.fullmatch(_OF_TOKENIZER, plain) is None


def learn(words: Sequence[str] = (), values: Mapping[str, Any] | None = None) -> None:
    """Remember the secrets of a command and of this process's environment, so that `masked` finds them anywhere.

    Args:
        words: Words of a command line.
        values: Options by name, such as those of a file.
    """
    variables = (value for name, value in os.environ.items() if is_secret(name))
    _known.update(value for value in variables if len(value) >= _FEWEST_OF_ENVIRONMENT)
    found = [*_secrets_of(words), *_secrets_in(values or {})]
    _known.update(word for word in found if len(word) >= _FEWEST_LETTERS)


def masked(value: _Value) -> _Value:
    """Replace every secret in a text, and in the texts of lists, tuples and mappings.

    Args:
        value: A text, or containers of texts and numbers. A list may be a command line.

    Returns:
        The same value with the mask in place of secrets. Other values stay as they are.
    """
    result: Any = value
    if isinstance(value, str):
        result = _masked_text(value)
    elif isinstance(value, Mapping):
        result = {key: _hidden(each) if is_secret(str(key)) else masked(each) for key, each in value.items()}
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


def _hidden(value: Any) -> Any:
    """Put the mask in place of every text in a value. Numbers, as of bytes per token, are no secrets."""
    if isinstance(value, Mapping):
        return {key: _hidden(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_hidden, value))
    return MASK if isinstance(value, str | bytes) else value


def _is_option(word: str) -> bool:
    return word.startswith("--") and "=" not in word and is_secret(word)


def _may_be_secret(word: str) -> bool:
    """Tell whether a word is an option for a secret, also if it is mistyped: the error shows its value."""
    is_mistyped = word.startswith("--") and "=" not in word and closest(word, _SECRET_OPTIONS, cutoff=0.85) is not None
    return is_mistyped or _is_option(word)


def _secrets_of(words: Sequence[str]) -> list[str]:
    """Find the secret values of options in a command line. A word of it may hold another command line."""
    found = [word for before, word in itertools.pairwise(words) if _may_be_secret(before)]
    found += [word.partition("=")[2] for word in words if "=" in word and _may_be_secret(word.partition("=")[0])]
    return found + [each for word in words if " --" in word for each in _secrets_of(word.split())]


def _secrets_in(value: Any, *, are_secret: bool = False) -> list[str]:
    """Find the texts under the name of a secret, at any depth."""
    if isinstance(value, Mapping):
        nested = ((each, are_secret or is_secret(str(name))) for name, each in value.items())
        return [found for each, is_one in nested for found in _secrets_in(each, are_secret=is_one)]
    if isinstance(value, list | tuple):
        return [found for each in value for found in _secrets_in(each, are_secret=are_secret)]
    return [value] if are_secret and isinstance(value, str) else []
