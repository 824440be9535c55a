"""Print lines: on a terminal broken between words at its width, in a file whole."""

import shlex
import shutil
import textwrap
from collections.abc import Sequence
from typing import TextIO

from slivertune.core.masking import masked

_INDENT = " " * 4


def print_line(line: str, stream: TextIO, *, command: Sequence[str] = ()) -> None:
    """Print a line of words, and behind it a command that may be copied, with secrets in both masked.

    Args:
        line: The words.
        stream: Output stream. A terminal gets lines of its width, and a command in lines that a shell joins again.
        command: Words of the command.
    """
    line, command = masked(line), masked(list(command))
    if not stream.isatty():
        print(" ".join(filter(None, [line, shlex.join(command)])), file=stream, flush=True)
        return
    width = shutil.get_terminal_size().columns
    lines = textwrap.wrap(line, width, subsequent_indent=_INDENT, break_long_words=False, break_on_hyphens=False)
    print("\n".join([*lines, *_command_lines(command, width)]), file=stream, flush=True)


def _command_lines(command: Sequence[str], width: int) -> list[str]:
    """Split a command into lines, each but the last with a backslash. A word that does not fit gets its own line."""
    lines = list[str]()
    for word in map(shlex.quote, command):
        if lines and len(f"{lines[-1]} {word} \\") <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(_INDENT + word)
    return [f"{each} \\" for each in lines[:-1]] + lines[-1:]
