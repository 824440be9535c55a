"""Positions of each message's words in a rendered conversation, and messages that the template left out.

The text and its marked form differ only in marks and words, which shows the positions of the words.
"""

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from slivertune.training.data.conversations import UnusableRowError
from slivertune.training.tasks.marked_words import (
    TOOLS,
    MarkedConversation,
    Words,
    find_marks,
    letters_of,
    with_marks_alike,
)
from slivertune.training.tasks.rendering import Span

EARLIER_REASONING = "the chat template leaves out the reasoning of earlier turns"
_PIECE = re.compile(r"[^\W_]+")
UNREAD_REASONING = "the chat template leaves out the reasoning of a turn"


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenWords:
    """Positions of words in a text.

    Args:
        marked: Conversation with the words.
        marked_text: Text with marks in place of the words.
        text: The text itself.
        marks: Numbers of the marks, in the text's order. A mark may come twice.
        marked_spans: Spans of these marks in the marked text.
        spans: Spans of these words in the text itself; empty if the two texts differ in more than marks and words.
        is_aligned: Whether the two texts differ only in marks and words.
        rewritten: Numbers of words that the text has in none of their forms, only changed.
        places_of: Message -> indices of its marks in `marks`.
    """

    marked: MarkedConversation
    marked_text: str
    text: str
    marks: list[int]
    marked_spans: list[Span]
    spans: list[Span]
    is_aligned: bool
    rewritten: set[int]
    places_of: dict[int, list[int]]

    def leave_out(self, message: int, spans: Sequence[Span]) -> bool:
        """Check whether written words of a message are missing from the given spans of the text.

        If the position of words is unknown, they may stand anywhere in the spans.
        """
        if not self.is_aligned:
            texts = [self.text[first:last] for first, last in spans]
            numbers = {self.marks[place] for place in self.places_of.get(message, ())} - self.rewritten
            forms_of = (set(self.marked.words[number].forms) for number in numbers)
            return any(not any(form in text for form in forms for text in texts) for forms in forms_of)
        inside, outside = set[int](), set[int]()
        for place in self.places_of.get(message, ()):
            begin, end = self.spans[place]
            is_inside = any(first <= begin and end <= last for first, last in spans)
            (inside if is_inside else outside).add(self.marks[place])
        return bool(outside - inside)

    def surroundings(self, message: int) -> tuple[int, str]:
        """Return the marked text around a message, as far as the words of other messages.

        Returns:
            Position where it begins, and the text with all marks alike.
        """
        places = self.places_of.get(message)
        if not places:
            # Without words of its own, the message is like no other.
            return 0, str(message)
        begin = self.marked_spans[places[0] - 1][1] if places[0] else 0
        after = next((place for place in range(places[0], len(self.marks)) if self._message_of(place) != message), None)
        end = len(self.marked_text) if after is None else self.marked_spans[after][0]
        return begin, with_marks_alike(self.marked_text[begin:end])

    def in_text(self, position: int) -> int:
        """Convert a position between the marks of the marked text to a position in the text."""
        num_before = bisect_right(self.marked_spans, position, key=lambda span: span[1])
        if not num_before:
            return position
        return self.spans[num_before - 1][1] + position - self.marked_spans[num_before - 1][1]

    def messages_in(self, begin: int, end: int) -> set[int]:
        """Find the assistant's messages to which a stretch of the marked text belongs.

        A stretch without words belongs to the turn before it, or else to the turn after it.
        """
        first = bisect_left(self.marked_spans, begin, key=lambda span: span[0])
        last = bisect_right(self.marked_spans, end, key=lambda span: span[1])
        near = range(first, last) or range(max(first - 1, 0), min(first + 1, len(self.marks)))
        owners = [self._message_of(place) for place in near]
        messages = self.marked.conversation.messages
        turns = [owner for owner in owners if owner != TOOLS and messages[owner]["role"] == "assistant"]
        return set(turns) if first < last else set(turns[:1])

    def _message_of(self, place: int) -> int:
        return self.marked.words[self.marks[place]].message


def find_words(marked: MarkedConversation, marked_text: str, text: str) -> WrittenWords:
    """Find the words of a conversation in its rendering.

    Args:
        marked: Conversation with marks.
        marked_text: Rendering of the conversation with marks.
        text: Rendering of the conversation itself.

    Raises:
        UnusableRowError: If the template leaves out words but writes their mark.
    """
    found = find_marks(marked_text, len(marked.words))
    marks, marked_spans = [number for number, _ in found], [span for _, span in found]
    spans = _align(marked.words, marks, marked_spans, marked_text, text)
    if spans is None:
        # A template may add text for certain words only.
        rewritten = _rewritten(marked, marks, text)
    else:
        words_at = ((number, text[begin:end]) for number, (begin, end) in zip(marks, spans, strict=True))
        rewritten = {number for number, said in words_at if said not in marked.words[number].forms}
    places_of: dict[int, list[int]] = {}
    for place, number in enumerate(marks):
        places_of.setdefault(marked.words[number].message, []).append(place)
    return WrittenWords(
        marked=marked,
        marked_text=marked_text,
        text=text,
        marks=marks,
        marked_spans=marked_spans,
        spans=spans or [],
        is_aligned=spans is not None,
        rewritten=rewritten,
        places_of=places_of,
    )


def check_all_is_written(written: WrittenWords, last: int, learned: Collection[int]) -> list[str]:
    """Reject a text in which words of a message are missing.

    Args:
        written: Words that were found.
        last: Position of the text's last message.
        learned: Positions of the turns to train on. Only their reasoning may be missing, and only beside other words.

    Returns:
        Lines about missing reasoning and about rewritten words.

    Raises:
        UnusableRowError: If other words of a message up to the last are missing. The error names the message's role.
    """
    conversation, found, remarks = written.marked.conversation, set(written.marks), set[str]()
    whole = {written.marked.words[number].message for number in found}
    for number, words in enumerate(written.marked.words):
        if number in found or words.message > last:
            continue
        if words.is_reasoning and (words.message in whole or words.message not in learned):
            remarks.add(EARLIER_REASONING if words.message < last else UNREAD_REASONING)
            continue
        if words.message == TOOLS:
            raise UnusableRowError("the chat template does not write tools")
        role = str(conversation.messages[words.message]["role"])
        if words.message in whole:
            raise UnusableRowError(f"the chat template leaves out a part of a message of the role {role!r}")
        raise UnusableRowError(f"the chat template leaves out a message of the role {role!r}")
    for number in written.rewritten:
        whom = _of_whom(written.marked, written.marked.words[number]).replace("a message", "messages")
        remarks.add(f"the chat template changes words or white space of {whom}")
    return sorted(remarks)


def _align(
    words: Sequence[Words], marks: Sequence[int], marked_spans: Sequence[Span], marked_text: str, text: str
) -> list[Span] | None:
    """Replace the marks by the words and return their spans, or None if the result is not the text."""
    borders = [0, *(border for span in marked_spans for border in span), len(marked_text)]
    between = [marked_text[begin:end] for begin, end in zip(borders[::2], borders[1::2], strict=True)]
    if not text.startswith(between[0]):
        return None
    spans, here = list[Span](), len(between[0])
    for number, after in zip(marks, between[1:], strict=True):
        end = _end_of(words[number], text, here, after)
        if end is None:
            return None
        spans.append((here, end))
        here = end + len(after)
    return spans if here == len(text) else None


def _end_of(words: Words, text: str, begin: int, after: str) -> int | None:
    """Find the end of words that begin at a position: after all their letters, before the text that follows."""
    ends = (begin + len(form) for form in words.forms if text.startswith(form, begin))
    end = next((end for end in ends if text.startswith(after, end)), None)
    if end is not None:
        return end
    said, letters = words.letters, ""
    while after and (place := text.find(after, begin)) >= 0:
        letters += letters_of(text[begin:place])
        if letters == said:
            return place
        if not said.startswith(letters):
            break
        letters, begin = letters + letters_of(text[place]), place + 1
    return None


def _rewritten(marked: MarkedConversation, marks: Sequence[int], text: str) -> set[int]:
    """Find the words that a text has in none of their forms, though their marks were written.

    Raises:
        UnusableRowError: If a part of such words is missing from the text.
    """
    counts = Counter(marked.words[number].text for number in marks)
    rewritten = {
        number
        for number in marks
        if sum(text.count(form) for form in set(marked.words[number].forms)) < counts[marked.words[number].text]
    }
    all_words, folded = "\n".join(marked.words[number].text for number in marks).casefold(), text.casefold()
    for number in sorted(rewritten):
        words = marked.words[number]
        pieces = set(_PIECE.findall(words.text.casefold()))
        if any(folded.count(piece) < all_words.count(piece) for piece in pieces):
            raise UnusableRowError(f"the chat template leaves out words of {_of_whom(marked, words)}")
    return rewritten


def _of_whom(marked: MarkedConversation, words: Words) -> str:
    role = "tool" if words.message == TOOLS else str(marked.conversation.messages[words.message]["role"])
    return f"a message of the role {role!r}"
