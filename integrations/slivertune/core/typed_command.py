"""Commands and settings as their user writes them, for messages.

A command has the name of the program as it was typed: `python -m slivertune`, a path, or `make train`.
"""

import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

_NAME = "slivertune"
MAKE_VARIABLE = "SLIVERTUNE_MAKE"
"""Environment variable in which the Makefile gives the words of `make train`, which takes options as ARGS."""


_names_options: ContextVar[bool] = ContextVar("_names_options", default=False)


@contextmanager
def naming_options() -> Iterator[None]:
    """Let `setting_name` name options, since a command line asked for the code inside."""
    token = _names_options.set(True)
    try:
        yield
    finally:
        _names_options.reset(token)


def setting_name(option: str, keyword: str) -> str:
    """Name a setting in an error as its user can write it.

    Args:
        option: Name on the command line, such as `--layers`.
        keyword: Name in a script, such as `layers=`.
    """
    return option if _names_options.get() else keyword


def typed_command(*words: str) -> tuple[str, ...]:
    """Return a command with its program's name as it was typed for this process.

    Args:
        *words: The command without its program, such as `train` and its options.

    Returns:
        Words for a shell, to be joined by `shlex.join`.
    """
    make = os.environ.get(MAKE_VARIABLE)
    if make and words[:1] == ("train",):
        # Make takes $$ for a dollar sign.
        return (*shlex.split(make), f"ARGS={shlex.join(words[1:]).replace('$', '$$')}")
    return (*_program(sys.argv, sys.orig_argv), *words)


def _program(argv: Sequence[str], typed: Sequence[str]) -> tuple[str, ...]:
    """Find the words that were typed before the command's own, if this process is the command."""
    script = Path(argv[0]) if argv else Path()
    if script.parts[-2:] == (_NAME, "__main__.py"):
        return tuple(typed[: len(typed) - len(argv) + 1])
    if script.stem != _NAME:
        return (_NAME,)
    found = shutil.which(_NAME)
    return (_NAME,) if found is not None and Path(found).samefile(script) else (str(script),)
