"""Conversion of a chat or instruction row to messages, or to a prompt and a response in plain text."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slivertune.training.data.formats import DatasetFormat
from slivertune.training.data.turn_weights import UnknownWeightError, asks_to_be_learned

_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "function_response": "tool",
    "observation": "tool",
    "function": "tool",
}
"""Role names of other formats -> role names of chat templates."""
TEMPLATE_ROLES = ("user", "assistant", "system", "tool", "developer")
"""Role names of chat templates."""

ALPACA_PROMPT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
"""Stanford Alpaca's prompt."""
ALPACA_PROMPT_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
"""Stanford Alpaca's prompt for a row with an input."""


class UnusableRowError(ValueError):
    """A row that can't be trained on. The message is the reason, the same for all rows of one kind."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """Messages of a conversation, some of which are trained on.

    Args:
        messages: Messages with `role`, and with `content` or other keys that the template reads.
        num_context: Number of messages at the beginning that are only read.
        tools: JSON schemas of functions that the assistant may call.
    """

    messages: list[dict[str, Any]]
    num_context: int = 0
    tools: list[Any] | None = None

    @property
    def turns(self) -> list[int]:
        """Positions of the assistant's messages to train on: all after the context, except those marked otherwise."""
        return [
            place
            for place, message in enumerate(self.messages)
            if place >= self.num_context and message["role"] == "assistant" and asks_to_be_learned(message) is not False
        ]

    @property
    def asks_for_others(self) -> bool:
        """Whether a message of another role asks to be trained on, clearly or not."""
        return any(each["role"] != "assistant" and _may_ask(each) for each in self.messages)


def read_conversation(row: Mapping[str, Any], found: DatasetFormat) -> Conversation:
    """Convert a row to messages.

    Args:
        row: Values of the format's columns.
        found: Any format except text.

    Returns:
        The messages of a chat. For instruction data, one message of the user and one of the assistant; an Alpaca input
        follows its instruction after a blank line.

    Raises:
        UnusableRowError: If a value is empty or malformed, or if there is no assistant turn to train on.
        UnknownWeightError: If an assistant's turn does not say clearly whether to train on it.
    """
    if found.is_chat:
        parts = [_messages(_without_nulls(row[name], found), name) for name in found.columns]
        num_context = len(parts[0]) if len(parts) > 1 else 0
        messages = [message for part in parts for message in part]
    else:
        prompt, response = (_text(row, name) for name in found.columns)
        if found.name == "alpaca" and not _is_blank(row.get("input")):
            prompt = f"{prompt}\n\n{row['input']}"
        num_context, messages = 0, [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
    tools = _tools(_without_nulls(row.get("tools"), found)) if "tools" in found.optional else None
    conversation = Conversation(messages=messages, num_context=num_context, tools=tools)
    if not conversation.turns:
        raise UnusableRowError(_without_turns(conversation))
    check_something_is_said(conversation)
    return conversation


def check_something_is_said(conversation: Conversation) -> None:
    """Reject a conversation with an empty user turn, or with an empty turn to train on.

    Raises:
        UnusableRowError: If there is one.
    """
    if any(_says_nothing(conversation.messages[place]) for place in conversation.turns):
        raise UnusableRowError("an assistant's turn that says nothing")
    if any(each["role"] == "user" and _says_nothing(each) for each in conversation.messages):
        raise UnusableRowError("a user's turn that says nothing")


def read_plain(row: Mapping[str, Any], found: DatasetFormat, separator: str) -> tuple[str, str]:
    """Convert a row of instruction data to plain text, for models without a chat template.

    Args:
        row: Values of the format's columns.
        found: A format of instruction data.
        separator: Text between prompt and response. Alpaca's prompt has its own end and ignores the separator.

    Returns:
        The prompt, with everything before the response, and the response.

    Raises:
        UnusableRowError: If a column is blank.
    """
    prompt, response = (_text(row, name) for name in found.columns)
    if found.name != "alpaca":
        return prompt + separator, response
    if _is_blank(row.get("input")):
        return ALPACA_PROMPT.format(instruction=prompt), response
    return ALPACA_PROMPT_WITH_INPUT.format(instruction=prompt, input=row["input"]), response


def _without_nulls(value: Any, found: DatasetFormat) -> Any:
    """Drop keys with a null value, which a table adds to a row if another of its rows has the key."""
    if found.keeps_nulls:
        return value
    if isinstance(value, dict):
        return {key: _without_nulls(item, found) for key, item in value.items() if item is not None}
    return [_without_nulls(item, found) for item in value] if isinstance(value, list) else value


def _may_ask(message: dict[str, Any]) -> bool:
    """Check whether a message that is only read asks to be trained on. An unclear mark counts, and is no error."""
    try:
        return bool(asks_to_be_learned(message))
    except UnknownWeightError:
        return True


def _without_turns(conversation: Conversation) -> str:
    """Explain why a conversation has no turn to train on, and name its misspelt or unknown roles."""
    roles = {str(each["role"]) for each in conversation.messages[conversation.num_context :]}
    if "assistant" in roles:
        return "no assistant turn that says it is to be learned"
    others = sorted(roles - set(TEMPLATE_ROLES))
    return "no assistant turn" + (f"; roles that are not known are {', '.join(others)}" if others else "")


def _says_nothing(message: dict[str, Any]) -> bool:
    return _is_blank(message.get("content")) and not message.get("tool_calls")


def _is_blank(value: Any) -> bool:
    return value is None or not str(value).strip()


def _text(row: Mapping[str, Any], column: str) -> str:
    if _is_blank(row[column]):
        raise UnusableRowError(f"nothing in column {column!r}")
    return str(row[column])


def _messages(value: Any, column: str) -> list[dict[str, Any]]:
    if not value:
        raise UnusableRowError(f"nothing in column {column!r}")
    if not isinstance(value, list):
        raise UnusableRowError(f"column {column!r} holds no list of messages")
    return [_message(each) for each in value]


def _message(value: Any) -> dict[str, Any]:
    """Convert a message with either kind of keys to `role` and `content`. Keys with a null value are dropped."""
    given = {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else {}
    is_sharegpt = "role" not in given
    role = given.pop("from" if is_sharegpt else "role", None)
    if is_sharegpt and "value" in given:
        given["content"] = given.pop("value")
    if isinstance(given.get("function_call"), dict):
        # OpenAI's older format of a single call.
        given.setdefault("tool_calls", [{"type": "function", "function": given.pop("function_call")}])
    if not isinstance(role, str) or not given.keys() & {"content", "tool_calls"}:
        raise UnusableRowError("a message without a role or without content")
    if "content" in given:
        given["content"] = _content(given["content"])
    if "tool_calls" in given:
        given["tool_calls"] = [_tool_call(call) for call in _list(given["tool_calls"] or [], "tool_calls")]
    role = _ROLES.get(role, role)
    if is_sharegpt and role not in TEMPLATE_ROLES:
        raise UnusableRowError(f"a message from {role!r}, which is none of {', '.join((*_ROLES, *TEMPLATE_ROLES))}")
    return {"role": role, **given}


def _content(value: Any) -> str:
    """Return a message's text, with its parts joined. A template for text would print the parts as a Python list."""
    if isinstance(value, str):
        return value
    texts = []
    for part in value if isinstance(value, list) else [value]:
        kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
        text = part.get("text") if kind == "text" else part
        if not isinstance(text, str):
            raise UnusableRowError(f"a message whose content is no text ({kind})")
        texts.append(text)
    return "".join(texts)


def _tool_call(call: Any) -> Any:
    """Convert a tool call's arguments to a mapping, which chat templates expect. OpenAI stores them as JSON."""
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _tool_call(call["function"])}
    arguments = call.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        read = json.loads(arguments)
    except (ValueError, RecursionError):
        return call
    return {**call, "arguments": read} if isinstance(read, dict) else call


def _tools(value: Any) -> list[Any] | None:
    return _list(value, "tools") or None if value else None


def _list(value: Any, name: str) -> list[Any]:
    """Return a list of mappings. The list or each of its items may be written as JSON."""
    try:
        found = _from_json(value)
        found = list(map(_from_json, found)) if isinstance(found, list) else found
    except (ValueError, RecursionError) as error:
        raise UnusableRowError(f"{name} that are no JSON") from error
    if not isinstance(found, list):
        raise UnusableRowError(f"{name} that are no list")
    return found


def _from_json(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value
