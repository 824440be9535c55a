"""Parse a command. Errors suggest a correction for a mistyped option or choice."""

import argparse
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar, NoReturn

from slivertune.core.removed_settings import say_removed, say_removed_value
from slivertune.core.suggestions import did_you_mean

_NEGATIVE = re.compile(r"-(?:\.?\d|(?:inf|infinity|nan)$)", re.IGNORECASE)
_NO_NUMBER = re.compile(r"argument (--\S+): invalid (int|float) value: (.+)", re.DOTALL)
_NOT_READ = re.compile(r"argument (--\S+): ('.*' must be .+)", re.DOTALL)
_NO_VALUE = re.compile(r"argument (\S+): expected (?:at least )?one argument")
_NUMBERS = {"int": "a whole number", "float": "a number"}


class PartedWords(argparse.Action):
    """Stores the words behind an option. A comma or a space separates them, also inside of one argument.

    A run file has one text where a shell passes several words. Both must mean the same.
    """

    separator: ClassVar[re.Pattern[str]] = re.compile(r"[,\s]")

    def __init__(self, *args: Any, **options: Any) -> None:
        # argparse would read the whole text as one value, before it is split.
        self._read: Callable[[str], Any] = options.pop("type", None) or str
        super().__init__(*args, **options)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Split and read the words. An option that is given again replaces them."""
        words = [part.strip() for word in values for part in self.parts_of(word) if part.strip()]
        setattr(namespace, self.dest, [self._value(word) for word in words or [""]])

    def parts_of(self, word: str) -> Sequence[str]:
        """Split one argument.

        Args:
            word: The argument.
        """
        return self.separator.split(word)

    def _value(self, word: str) -> Any:
        try:
            return self._read(word)
        except ValueError as error:
            name = getattr(self._read, "__name__", "")
            raise argparse.ArgumentError(self, f"invalid {name} value: {word!r}") from error


class PartedTexts(PartedWords):
    """Stores texts that may have spaces, such as names of columns. Only a comma separates them."""

    separator = re.compile(",")


class PartedPaths(PartedTexts):
    """Stores names of files. A comma in the name of an existing file separates nothing."""

    def parts_of(self, word: str) -> Sequence[str]:
        """Split one argument, unless it is the name of an existing file.

        Args:
            word: The argument.
        """
        # A `Path` raises for texts that can't be a path.
        is_there = os.path.exists(os.path.expanduser(word))  # noqa: PTH110, PTH111
        return [word] if is_there else super().parts_of(word)


class AddedWords(PartedWords):
    """Stores words of an option that may be given several times. Later ones are added."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Add the words to the earlier ones."""
        before = getattr(namespace, self.dest, None)
        super().__call__(parser, namespace, values, option_string)
        if isinstance(before, list):
            setattr(namespace, self.dest, before + getattr(namespace, self.dest))


class OptionParser(argparse.ArgumentParser):
    """Raises errors with suggestions, instead of argparse's usage text and exit."""

    other_words: ClassVar[Mapping[str, str]] = {}
    """Names of options of this program, by the names that other programs have for them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._names: list[str] = []
        # The meaning of a prefix would change with every option that is added.
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})
        self._typed: list[str] = []
        # argparse takes -1e-4, -1,5 and -inf for options, and reports that the option before lacks its value.
        self._negative_number_matcher = _NEGATIVE

    def add_argument(self, *names: Any, **options: Any) -> Any:
        """Add an option, and keep its names for suggestions.

        Args:
            names: As for argparse.
            options: As for argparse.
        """
        self._names += names
        return super().add_argument(*names, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the arguments, and keep the typed words for suggestions."""
        self._typed = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(self._typed, namespace)

    def error(self, message: str) -> NoReturn:
        """Turn argparse's complaint into an exception.

        Args:
            message: The complaint.

        Raises:
            ValueError: Always.
        """
        raise ValueError(self.explain(message))

    def explain(self, message: str) -> str:
        """Add suggestions and a pointer to `--help` to a complaint.

        Args:
            message: The complaint of argparse.
        """
        if wrong := _NO_NUMBER.fullmatch(message):
            typed = self._typed_name(wrong[1])
            rule = self.describe_number(typed.strip("-").replace("-", "_"), _NUMBERS[wrong[2]])
            message = f"{typed} {wrong[3]} must be {rule}"
        elif unread := _NOT_READ.fullmatch(message):
            message = f"{self._typed_name(unread[1])} {unread[2]}"
        return f"{message}{self._suggestion(message)}{self._value_behind(message)}; see {self.prog} --help"

    def describe_number(self, option: str, kind: str) -> str:
        """Describe the numbers that an option takes, after `must be`. A subclass adds their range.

        Args:
            option: Name of the option.
            kind: Kind of number: a whole number, or any.
        """
        return kind

    def suggest_option(self, word: str, known: Iterable[str]) -> str:
        """Say what replaced a removed option, or ask whether another one was meant, at the end of an error.

        Args:
            word: The word as typed, with hyphens or without.
            known: Names of options, as they are to be shown.
        """
        if removed := say_removed(word):
            return removed
        known = list(known)
        name = self.other_words.get(word.strip("-").replace("-", "_"))
        shown = next((each for each in known if name is not None and each.strip("-") == name), None)
        return did_you_mean(word, known) if shown is None else f"; did you mean {shown}?"

    def _typed_name(self, listed: str) -> str:
        """Choose the name that was typed from all names of an option, as argparse lists them."""
        names, typed = listed.split("/"), {word.partition("=")[0] for word in self._typed}
        return next((name for name in names if name in typed), names[0])

    def _suggestion(self, message: str) -> str:
        # argparse 3.11 to 3.13 names the unknown word and the choices in its message alone.
        kind, _, rest = message.partition("unrecognized arguments: ")
        if rest and not kind:
            options = [word.partition("=")[0] for word in rest.split() if word.startswith("--")]
            return next(filter(None, (self.suggest_option(each, self._options()) for each in options)), "")
        if "arguments are required: " in message:
            return self._unknown_typed()
        wrong = re.search(r"argument (\S+): invalid choice: (.+) \(choose from (.+)\)$", message)
        if wrong is None:
            return ""
        word = wrong[2].strip("'\"")
        return say_removed_value(wrong[1], word) or did_you_mean(word, re.findall(r"[\w.+-]+", wrong[3]))

    def _value_behind(self, message: str) -> str:
        """Say how to type a value that looks like an option, if one stands behind the option that lacks its value."""
        lacking = _NO_VALUE.fullmatch(message)
        names = [] if lacking is None else lacking[1].split("/")
        behind = [word for option, word in pairwise(self._typed) if option in names and word.startswith("-")]
        if not behind or behind[0].partition("=")[0] in self._options():
            return ""
        return f"; if {behind[0]!r} is its value, write {shlex.quote(f'{names[0]}={behind[0]}')}"

    def _unknown_typed(self) -> str:
        """Name the unknown options, since one of them may be the missing option mistyped."""
        options = [word.partition("=")[0] for word in self._typed if word.startswith("--")]
        known = set(re.findall(r"--[a-zA-Z][\w-]*", self.format_help()))
        unknown = [each for each in options if each not in known]
        meant = (self.suggest_option(each, self._options()) for each in unknown)
        return "".join(f"; there is no {each}{ask}" for each, ask in zip(unknown, meant, strict=True))

    def _options(self) -> list[str]:
        return [each for each in self._names if each.startswith("--") and "-" not in each[2:]]
