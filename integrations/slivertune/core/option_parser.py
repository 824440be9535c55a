"""The parser of a command: its errors say what a mistyped option or choice may mean."""

import argparse
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NoReturn

from slivertune.core.removed_settings import say_removed, say_removed_value
from slivertune.core.suggestions import did_you_mean

_NEGATIVE = re.compile(r"-(?:(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|inf|infinity|nan)$", re.IGNORECASE)


def split_names(words: Iterable[str]) -> list[str]:
    """Return names that spaces or commas part, as a command line has them."""
    return [part.strip() for word in words for part in word.split(",") if part.strip()]


class OptionParser(argparse.ArgumentParser):
    """Raises where argparse would print its usage and exit, and suggests what was meant."""

    other_words: ClassVar[Mapping[str, str]] = {}
    """What other programs call an option of this one, by their name."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # A prefix of an option would change its meaning with every option that is added.
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})
        self._typed: list[str] = []
        # argparse takes -1e-4 and -inf for options, and says that the one before lacks its value.
        self._negative_number_matcher = _NEGATIVE

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse; what was typed is kept for suggestions."""
        self._typed = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(self._typed, namespace)

    def error(self, message: str) -> NoReturn:
        """Turn argparse's complaint into an exception.

        Args:
            message: What is wrong.

        Raises:
            ValueError: Always.
        """
        raise ValueError(self.explain(message))

    def explain(self, message: str) -> str:
        """Add to a complaint what may have been meant, and where to look.

        Args:
            message: argparse's.
        """
        return f"{message}{self._suggestion(message)}; see {self.prog} --help"

    def suggest_option(self, word: str, known: Iterable[str]) -> str:
        """Say what became of an option, or ask whether another was meant; at the end of an error.

        Args:
            word: As it was typed, with its hyphens or without.
            known: Names of options, as they are to be shown.
        """
        if removed := say_removed(word):
            return removed
        known = list(known)
        name = self.other_words.get(word.strip("-").replace("-", "_"))
        shown = next((each for each in known if name is not None and each.strip("-") == name), None)
        return did_you_mean(word, known) if shown is None else f"; did you mean {shown}?"

    def _suggestion(self, message: str) -> str:
        # argparse 3.11 to 3.13 tells which word it does not know, and which choices there are, in its message alone.
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

    def _unknown_typed(self) -> str:
        """Options that are not known: one of them may be the one that is missing."""
        options = [word.partition("=")[0] for word in self._typed if word.startswith("--")]
        known = set(re.findall(r"--[a-zA-Z][\w-]*", self.format_help()))
        unknown = [each for each in options if each not in known]
        meant = (self.suggest_option(each, self._options()) for each in unknown)
        return "".join(f"; there is no {each}{ask}" for each, ask in zip(unknown, meant, strict=True))

    def _options(self) -> list[str]:
        return re.findall(r"--[a-zA-Z]\w*", self.format_usage())
