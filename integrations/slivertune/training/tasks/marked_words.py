"""Conversations with a mark in the place of each message's words.

Words can't be searched for in what a chat template wrote: "4" also stands in a date, and what is said twice may be
written once. So a conversation is written a second time, with marks. A missing mark shows words that are left out.
"""

import html
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

from slivertune.training.data.conversations import Conversation

_MARK = re.compile(r"Zq(\d{7})qZ", re.IGNORECASE)
"""Letters and digits, which no template trims or escapes, and all of one length."""
_ANY_MARK = "Zq-------qZ"
"""A mark without its number, as long as one."""
_SWITCH = re.compile(r"(?<!<)/(?:no_)?think|/system_override")
"""A control of reasoning that templates read in a message, and may take out of it, also from within a word."""
_TAG = re.compile(rf"(</?\w+>|<\|[^<>|]{{1,40}}\|>|\[/?[A-Z_]+\]|{_SWITCH.pattern})")
"""Markup of a message, which templates look for, and which stays in its place."""
_THOUGHT = re.compile(r"<(/?)(?:think|thinking|thought|reasoning)>|\[(/?)THINK\]", re.IGNORECASE)
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message that transformers hands to templates as its reasoning."""


TOOLS = -1
"""In the place of a message: the functions that the assistant may call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Words:
    """A stretch of a message's text without markup, a text in a call of a tool, or the name of a tool.

    Args:
        message: The message's place; `TOOLS` for a tool.
        text: Without white space around it.
        is_reasoning: Whether templates may leave it out.
    """

    message: int
    text: str
    is_reasoning: bool = False

    @property
    def forms(self) -> Iterator[str]:
        """How a template may write it: as it is, or escaped as JSON, Python or XML do."""
        yield self.text
        yield json.dumps(self.text, ensure_ascii=False)[1:-1]
        yield json.dumps(self.text)[1:-1]
        yield repr(self.text)[1:-1]
        yield html.escape(self.text, quote=False)
        yield html.escape(self.text)
        # Jinja's own.
        yield html.escape(self.text).replace("&quot;", "&#34;").replace("&#x27;", "&#39;")

    @property
    def letters(self) -> str:
        """What a template keeps of it that changes its case, white space or punctuation."""
        return letters_of(self.text)


@dataclass(frozen=True, kw_only=True, slots=True)
class MarkedConversation:
    """A conversation with marks in place of its words.

    Args:
        conversation: The marked messages.
        words: By the number of their mark.
    """

    conversation: Conversation
    words: list[Words]


def mark_words(conversation: Conversation) -> MarkedConversation:
    """Put a mark in the place of all words of all messages, and of the names of tools.

    White space around words and markup (`<think>`, `<|channel|>`, `/no_think`) stays, since templates read it.
    """
    words: list[Words] = []
    messages = [_mark_message(message, place, words) for place, message in enumerate(conversation.messages)]
    tools = [_mark_tool(tool, words) for tool in conversation.tools or ()] or None
    return MarkedConversation(conversation=replace(conversation, messages=messages, tools=tools), words=words)


def find_marks(text: str, num_words: int) -> list[tuple[int, tuple[int, int]]]:
    """Find the marks of so many words in a text: the number of each, and from where to where it stands."""
    # Other numbers stand in the data.
    return [(int(each[1]), each.span()) for each in _MARK.finditer(text) if int(each[1]) < num_words]


def mark_of(number: int) -> str:
    """Return the mark of some words, which no template writes by itself."""
    return f"Zq{number:07}qZ"


def letters_of(text: str) -> str:
    """Return the letters and digits of a text, in one case."""
    return "".join(filter(str.isalnum, text.casefold()))


def with_marks_alike(text: str) -> str:
    """Return a text whose marks have no numbers."""
    return _MARK.sub(_ANY_MARK, text)


def _mark_message(message: dict[str, Any], place: int, words: list[Words]) -> dict[str, Any]:
    put, marked = partial(_put, words, message=place), dict(message)
    for key in _REASONING_KEYS:
        if isinstance(message.get(key), str):
            marked[key] = _mark_text(message[key], partial(put, is_reasoning=True))
    is_answer, has_calls = message["role"] == "assistant", bool(message.get("tool_calls"))
    if isinstance(text := message.get("content"), str):
        # An answer of nothing but a thought's tags has words by them, unless it calls a tool.
        has_words = is_answer and (has_calls or bool(_THOUGHT.sub("", text).strip()))
        # A message of nothing but switches may be written without a word.
        if is_answer or _SWITCH.sub("", text).strip():
            marked["content"] = (_mark_answer if has_words else _mark_text)(text, put)
    if is_answer and has_calls:
        marked["tool_calls"] = _mark_calls(message["tool_calls"], put)
    return marked


def _mark_tool(tool: Any, words: list[Words]) -> Any:
    """Mark the name of a function; templates read types and names of its parameters."""
    if not isinstance(tool, dict):
        return tool
    if isinstance(tool.get("function"), dict):
        return {**tool, "function": _mark_tool(tool["function"], words)}
    return {**tool, "name": _put(words, tool["name"], message=TOOLS)} if isinstance(tool.get("name"), str) else tool


def _put(words: list[Words], text: str, **about: Any) -> str:
    """Note words, and return their mark."""
    words.append(Words(text=text, **about))
    return mark_of(len(words) - 1)


def _mark_text(text: str, put: Callable[..., str]) -> str:
    """Mark the words between tags; where there are none, all of the text."""
    parts = _TAG.split(text)
    if not any(part.strip() for part in parts[::2]):
        return _mark_stretch(text, put)
    return "".join(part if place % 2 else _mark_stretch(part, put) for place, part in enumerate(parts))


def _mark_stretch(text: str, put: Callable[..., str]) -> str:
    core = text.strip()
    return text.replace(core, put(core), 1) if core else text


def _mark_answer(text: str, put: Callable[..., str]) -> str:
    """Mark an answer, in which a thought may stand between tags, or before a closing tag alone."""
    tags = list(_THOUGHT.finditer(text))
    borders = [0, *(border for tag in tags for border in tag.span()), len(text)]
    is_close = [bool(tag[1] or tag[2]) for tag in tags]
    marked = []
    for place, (begin, end) in enumerate(pairwise(borders)):
        part, number = text[begin:end], place // 2
        if place % 2:
            marked.append(part)
        elif number < len(tags) and is_close[number]:
            marked.append(_mark_text(part, partial(put, is_reasoning=True)))
        else:
            marked.append(_mark_text(part, put))
    return "".join(marked)


def _mark_calls(value: Any, put: Callable[..., str], *, is_said: bool = False) -> Any:
    """Mark the name of a called function, and all texts of its arguments."""
    if isinstance(value, dict):
        return {
            key: _mark_calls(item, put, is_said=is_said or key in ("name", "arguments")) for key, item in value.items()
        }
    if isinstance(value, list):
        return [_mark_calls(item, put, is_said=is_said) for item in value]
    return _mark_stretch(value, put) if is_said and isinstance(value, str) else value
