"""Render the text of `--help`: examples, then groups of options, each option once, no word broken."""

import re
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

ON_SPELLING = (
    "An option that is true or false means true without a value. One that is true by default also has --no_NAME. "
    "Names may be written with hyphens."
)
"""Spelling rules for the options of `train` and of `plan`."""
_COLUMN = 24
_WIDEST = 100
_LONGEST_CHOICES = 44
"""Maximum length, in characters, of choices beside an option. Longer ones are listed in its text."""


@dataclass(frozen=True, slots=True)
class HelpEntry:
    """An option as `--help` shows it."""

    invocation: str
    """Option as it is typed, such as `--seed N`."""
    text: str


@dataclass(frozen=True, slots=True)
class HelpGroup:
    """Options that belong together."""

    title: str
    entries: Sequence[HelpEntry]


def describe_option(
    names: Sequence[str],
    text: str,
    *,
    value: str = "",
    choices: Sequence[str] = (),
    default: Any = None,
) -> HelpEntry:
    """Describe an option.

    Args:
        names: All of its spellings, with leading hyphens.
        text: Meaning of the option.
        value: Placeholder of its value, such as `N`. Empty for an option that takes none.
        choices: All values, if they are few. They replace `value`.
        default: Default, shown behind the text unless the text says it. None and False are not shown.
    """
    text = _as_clause(text)
    listed = f"{{{','.join(choices)}}}"
    if choices and len(listed) <= _LONGEST_CHOICES:
        value = listed
    elif choices:
        value = value or "NAME"
        text += "" if all(choice in text for choice in choices) else f"; one of {', '.join(choices)}"
    if default is not None and default is not False and default not in ("", [], ()) and "default" not in text:
        text += f" (default: {str(default).lower() if default is True else default})"
    first, *others = names
    return HelpEntry(", ".join([f"{first} {value}".rstrip(), *others]), text)


def render_help(
    *,
    usage: str,
    description: str,
    examples: Sequence[str],
    groups: Iterable[HelpGroup],
    notes: Sequence[str] = (),
    width: int | None = None,
) -> str:
    """Write the text of `--help`.

    Args:
        usage: Usage line of the command.
        description: Paragraph about the command.
        examples: Commands. One that is longer than a line continues on the next, behind a backslash.
        groups: Groups of options.
        notes: Paragraphs at the end.
        width: Line width in characters. By default, the terminal's.
    """
    width = width or min(shutil.get_terminal_size().columns - 2, _WIDEST)
    lines = [f"usage: {usage}", "", *_wrap(description, width), "", "examples:"]
    for example in examples:
        lines += _command(example, width)
    for group in groups:
        lines += ["", *_wrap(f"{group.title}:", width)]
        for entry in group.entries:
            lines += _entry(entry, width)
    for note in notes:
        lines += ["", *_wrap(note, width)]
    return "\n".join(lines) + "\n"


def _as_clause(text: str) -> str:
    """Make a help text a clause, as in other libraries: no capital in front, no full stop behind."""
    # Help texts are written for argparse, which wants a percent sign twice.
    text = text.strip().replace("%%", "%")
    text = text if text.endswith("...") else text.removesuffix(".")
    return text if text[1:2].isupper() or text[1:2].isdigit() else text[:1].lower() + text[1:]


def _entry(entry: HelpEntry, width: int) -> list[str]:
    head, text = f"  {entry.invocation}", _wrap(entry.text, width - _COLUMN)
    fits = len(head) + 2 <= _COLUMN
    first = [head.ljust(_COLUMN) + text.pop(0)] if fits and text else _wrap(entry.invocation, width - 6, "  ", "      ")
    return [*first, *(" " * _COLUMN + line for line in text)]


def _command(command: str, width: int) -> list[str]:
    """Split a command into lines, each of which begins with an option."""
    lines: list[str] = []
    for part in re.split(r" (?=--)", command):
        if lines and len(lines[-1]) + len(part) + len("  \\") < width:
            lines[-1] += f" {part}"
        else:
            lines.append(f"      {part}" if lines else f"  {part}")
    return [*(f"{line} \\" for line in lines[:-1]), lines[-1]]


def _wrap(text: str, width: int, first: str = "", later: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        max(width, 20),
        initial_indent=first,
        subsequent_indent=later,
        break_long_words=False,
        break_on_hyphens=False,
    )
