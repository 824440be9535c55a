"""Conversations with marks in place of each message's words.

Words can't be searched for in the output of a chat template: "4" also stands in a date, and a repeated word may be
written once. So a conversation is rendered a second time, with marks. A missing mark shows words that are left out.
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
"""Pattern of a mark: letters and digits, which no template trims or escapes, of constant length."""
_ANY_MARK = "Zq-------qZ"
"""Mark without its number, of the same length."""
_SWITCH = re.compile(r"(?<!<)/(?:no_)?think|/system_override")
"""Switch for reasoning that templates read in a message and may remove, even from within a word."""
_TAG = re.compile(rf"(</?\w+>|<\|[^<>|]{{1,40}}\|>|\[/?[A-Z_]+\]|{_SWITCH.pattern})")
"""Markup of a message that templates look for. It is not marked."""
_THOUGHT = re.compile(r"<(/?)(?:think|thinking|thought|reasoning)>|\[(/?)THINK\]", re.IGNORECASE)
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message that transformers passes to templates as its reasoning."""


TOOLS = -1
"""Value of `Words.message` for the functions that the assistant may call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Words:
    """Words of a message between markup, text in a tool call, or the name of a tool.

    Args:
        message: Position of the message; `TOOLS` for a tool.
        text: Text without white space around it.
        is_reasoning: Whether templates may leave out the text.
    """

    message: int
    text: str
    is_reasoning: bool = False

    @property
    def forms(self) -> Iterator[str]:
        """Forms in which a template may write the text: as it is, or escaped as in JSON, Python or XML."""
        yield self.text
        yield json.dumps(self.text, ensure_ascii=False)[1:-1]
        yield json.dumps(self.text)[1:-1]
        yield repr(self.text)[1:-1]
        yield html.escape(self.text, quote=False)
        yield html.escape(self.text)
        # Jinja's own escapes.
        yield html.escape(self.text).replace("&quot;", "&#34;").replace("&#x27;", "&#39;")

    @property
    def letters(self) -> str:
        """Letters and digits of the text, which remain if a template changes case, white space or punctuation."""
        return letters_of(self.text)


@dataclass(frozen=True, kw_only=True, slots=True)
class MarkedConversation:
    """A conversation with marks in place of its words.

    Args:
        conversation: The marked messages.
        words: The words, indexed by the number of their mark.
    """

    conversation: Conversation
    words: list[Words]


def mark_words(conversation: Conversation) -> MarkedConversation:
    """Replace all words of all messages, and the names of tools, by marks.

    White space around words and markup (`<think>`, `<|channel|>`, `/no_think`) stays, since templates read it.
    """
    words: list[Words] = []
    messages = [_mark_message(message, place, words) for place, message in enumerate(conversation.messages)]
    tools = [_mark_tool(tool, words) for tool in conversation.tools or ()] or None
    return MarkedConversation(conversation=replace(conversation, messages=messages, tools=tools), words=words)


def find_marks(text: str, num_words: int) -> list[tuple[int, tuple[int, int]]]:
    """Find the marks in a text with numbers below `num_words`. Return the number and the span of each."""
    # Other numbers come from the data.
    return [(int(each[1]), each.span()) for each in _MARK.finditer(text) if int(each[1]) < num_words]


def mark_of(number: int) -> str:
    """Return the mark of a number. No template writes such a mark by itself."""
    return f"Zq{number:07}qZ"


def letters_of(text: str) -> str:
    """Return the letters and digits of a text, case-folded."""
    return "".join(filter(str.isalnum, text.casefold()))


def with_marks_alike(text: str) -> str:
    """Return a text whose marks have dashes instead of numbers."""
    return _MARK.sub(_ANY_MARK, text)


def _mark_message(message: dict[str, Any], place: int, words: list[Words]) -> dict[str, Any]:
    put, marked = partial(_put, words, message=place), dict(message)
    for key in _REASONING_KEYS:
        if isinstance(message.get(key), str):
            marked[key] = _mark_text(message[key], partial(put, is_reasoning=True))
    is_answer, has_calls = message["role"] == "assistant", bool(message.get("tool_calls"))
    if isinstance(text := message.get("content"), str):
        # An answer that is only a thought's tags has these as its words, unless it calls a tool.
        has_words = is_answer and (has_calls or bool(_THOUGHT.sub("", text).strip()))
        # A message that is only switches may be rendered without a word.
        if is_answer or _SWITCH.sub("", text).strip():
            marked["content"] = (_mark_answer if has_words else _mark_text)(text, put)
    if is_answer and has_calls:
        marked["tool_calls"] = _mark_calls(message["tool_calls"], put)
    return marked


def _mark_tool(tool: Any, words: list[Words]) -> Any:
    """Mark the name of a function. Types and names of its parameters stay, since templates read them."""
    if not isinstance(tool, dict):
        return tool
    if isinstance(tool.get("function"), dict):
        return {**tool, "function": _mark_tool(tool["function"], words)}
    return {**tool, "name": _put(words, tool["name"], message=TOOLS)} if isinstance(tool.get("name"), str) else tool


def _put(words: list[Words], text: str, **about: Any) -> str:
    """Record words and return their mark."""
    words.append(Words(text=text, **about))
    return mark_of(len(words) - 1)


def _mark_text(text: str, put: Callable[..., str]) -> str:
    """Mark the words between tags, or the whole text if there are none."""
    parts = _TAG.split(text)
    if not any(part.strip() for part in parts[::2]):
        return _mark_stretch(text, put)
    return "".join(part if place % 2 else _mark_stretch(part, put) for place, part in enumerate(parts))


def _mark_stretch(text: str, put: Callable[..., str]) -> str:
    core = text.strip()
    return text.replace(core, put(core), 1) if core else text


def _mark_answer(text: str, put: Callable[..., str]) -> str:
    """Mark an answer, in which a thought may stand between tags or before a closing tag alone."""
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
    """Mark the name of a called function and all texts in its arguments."""
    if isinstance(value, dict):
        return {
            key: _mark_calls(item, put, is_said=is_said or key in ("name", "arguments")) for key, item in value.items()
        }
    if isinstance(value, list):
        return [_mark_calls(item, put, is_said=is_said) for item in value]
    return _mark_stretch(value, put) if is_said and isinstance(value, str) else value
