"""Spans of the assistant's turns in a rendered conversation, each from the end of the generation prompt on."""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from slivertune.training.data.conversations import Conversation, UnusableRowError
from slivertune.training.tasks.rendering import Span, render
from slivertune.training.tasks.tokenization import common_prefix_length
from slivertune.training.tasks.written_words import WrittenWords

_NO_PROMPT_HAS = "\uffff"
"""Noncharacter that no prompt contains. In place of an answer, it shows where the answer begins."""
_OTHER_BEGIN = (
    "the chat template does not begin the assistant's turn with its generation prompt (a --chat_template may mark the "
    "turn by {% generation %} and {% endgeneration %})"
)


def find_turns(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    text: str,
    turns: Sequence[int],
    written: WrittenWords,
) -> list[Span] | None:
    """Find turns in the rendering of a whole conversation.

    Rendering a conversation up to each of its turns takes time quadratic in its length. Turns between the same markup
    begin and end at the same places in it, so one turn of each kind is rendered.

    Args:
        tokenizer: Tokenizer with a chat template.
        conversation: The messages.
        text: Rendering of the messages.
        turns: Positions of the assistant's messages.
        written: Positions of the words of all messages in the text.

    Returns:
        The span of each turn, or None if the template renders a turn differently once others follow.

    Raises:
        UnusableRowError: If the template begins the assistant's turn differently from its generation prompt.
    """
    if not written.is_aligned:
        spans = [find_turn(tokenizer, conversation, place, text) for place in turns]
        return [span for span in spans if span is not None] if None not in spans else None
    marked = written.marked.conversation
    num_words = Counter(words.message for words in written.marked.words)
    known: dict[Hashable, Span] = {}
    found = []
    for place in turns:
        origin, around = written.surroundings(place)
        kinds = [_kind(marked, each, num_words[each], written) for each in (place, place + 1)]
        key = (around, *kinds)
        if key not in known:
            span = find_turn(tokenizer, marked, place, written.marked_text)
            if span is None:
                return None
            known[key] = (span[0] - origin, span[1] - origin)
        begin, end = known[key]
        found.append((written.in_text(origin + begin), written.in_text(origin + end)))
    return found


def find_turn(tokenizer: PreTrainedTokenizerBase, conversation: Conversation, place: int, text: str) -> Span | None:
    """Find one turn, from the end of the generation prompt to the end of the turn.

    Args:
        tokenizer: Tokenizer with a chat template.
        conversation: The messages.
        place: Position of the turn's message.
        text: Rendering of the messages up to the turn, or of more of them.

    Returns:
        The span, or None if the rendering of the messages up to the turn is not a prefix of the text.

    Raises:
        UnusableRowError: If the template begins the assistant's turn differently from its generation prompt.
    """
    start, end = render(tokenizer, conversation, place, prompts=True), render(tokenizer, conversation, place + 1)
    if not end.startswith(start):
        start = turn_begin(tokenizer, conversation, place)
    if not end.startswith(start):
        raise UnusableRowError(_OTHER_BEGIN)
    return (len(start), len(end)) if text.startswith(end) else None


def turn_begin(tokenizer: PreTrainedTokenizerBase, conversation: Conversation, place: int) -> str:
    """Return the text before a turn, with as much of the generation prompt as begins the turn in the data.

    Raises:
        UnusableRowError: If no part of the generation prompt begins it.
    """
    answered = [*conversation.messages[:place], {"role": "assistant", "content": _NO_PROMPT_HAS}]
    before, prompt = render(tokenizer, conversation, place), render(tokenizer, conversation, place, prompts=True)
    whole = render(tokenizer, replace(conversation, messages=answered))
    begin = prompt[: common_prefix_length((prompt, whole))]
    if len(begin) <= len(before):
        raise UnusableRowError(_OTHER_BEGIN)
    return begin


def _kind(conversation: Conversation, place: int, num_words: int, written: WrittenWords) -> Hashable:
    """Describe everything about a message that may change its rendering, apart from its words."""
    if place == len(conversation.messages):
        return None
    message = conversation.messages[place]
    return str(message["role"]), tuple(message), num_words, len(written.places_of.get(place, ()))
