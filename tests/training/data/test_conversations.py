from dataclasses import replace
from typing import Any

import pytest

from slivertune.training.data.conversations import UnusableRowError, read_conversation, read_plain
from slivertune.training.data.formats import DatasetFormat

CHAT = DatasetFormat(name="messages", columns=("messages",), optional=("tools",), is_chat=True)
ALPACA = DatasetFormat(name="alpaca", columns=("instruction", "output"), optional=("input",))
PAIR = DatasetFormat(name="prompt_completion", columns=("prompt", "completion"))
PAIR_OF_CHATS = DatasetFormat(name="prompt_completion", columns=("prompt", "completion"), is_chat=True)
ASKED = {"role": "user", "content": "1+1?"}
ANSWERED = {"role": "assistant", "content": "2"}


@pytest.mark.parametrize(
    ("speaker", "role"),
    [
        ("human", "user"),
        ("gpt", "assistant"),
        ("chatgpt", "assistant"),
        ("function_call", "assistant"),
        ("observation", "tool"),
        ("system", "system"),
        ("user", "user"),
    ],
)
def test_who_speaks_is_told_in_the_words_of_chat_templates(speaker: str, role: str) -> None:
    rows = {"messages": [{"from": speaker, "value": "x"}, {"from": "gpt", "value": "2"}]}
    assert read_conversation(rows, CHAT).messages[0] == {"role": role, "content": "x"}


def test_what_a_message_has_beside_its_content_is_kept_but_for_what_is_empty() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "sum"}], "name": None}
    read = read_conversation({"messages": [ASKED, call]}, CHAT)
    assert read.messages == [ASKED, {"role": "assistant", "tool_calls": [{"name": "sum"}]}]


@pytest.mark.parametrize("given", [[{"name": "sum"}], '[{"name": "sum"}]', ['{"name": "sum"}']])
def test_tools_and_calls_are_lists_or_their_json(given: Any) -> None:
    assert read_conversation({"messages": [ASKED, ANSWERED], "tools": given}, CHAT).tools == [{"name": "sum"}]
    call = {"role": "assistant", "content": "", "tool_calls": given}
    assert read_conversation({"messages": [ASKED, call]}, CHAT).messages[1]["tool_calls"] == [{"name": "sum"}]


@pytest.mark.parametrize("said", [{}, {"content": None}, {"content": "Let me see."}])
def test_the_older_form_of_a_call_is_a_call(said: dict[str, Any]) -> None:
    given = {"role": "assistant", **said, "function_call": {"name": "sum", "arguments": '{"a": 1}'}}
    read = read_conversation({"messages": [ASKED, given]}, CHAT).messages[1]
    assert read["tool_calls"] == [{"type": "function", "function": {"name": "sum", "arguments": {"a": 1}}}]
    assert read.get("content") == said.get("content") and "function_call" not in read


def test_parts_of_a_text_become_the_text() -> None:
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1?", "image": None}]
    read = read_conversation({"messages": [{"role": "user", "content": parts}, ANSWERED]}, CHAT)
    assert read.messages == [ASKED, ANSWERED]


@pytest.mark.parametrize("arguments", ["[" * 100_000, f'{{"a": {"9" * 5000}}}', "sum", "[1]"])
def test_arguments_of_a_call_that_are_no_json_of_a_mapping_stay_text(arguments: str) -> None:
    read = read_conversation(
        {"messages": [ASKED, {"role": "assistant", "tool_calls": [{"arguments": arguments}]}]}, CHAT
    )
    assert read.messages[1]["tool_calls"] == [{"arguments": arguments}]


@pytest.mark.parametrize("call", [{"function": {"name": "sum", "arguments": '{"a": 1}'}}, {"arguments": '{"a": 1}'}])
def test_arguments_of_a_call_are_read_from_their_json(call: dict[str, Any]) -> None:
    read = read_conversation({"messages": [ASKED, {"role": "assistant", "tool_calls": [call]}]}, CHAT)
    (found,) = read.messages[1]["tool_calls"]
    assert found.get("function", found)["arguments"] == {"a": 1}


def test_keys_that_only_other_rows_of_a_table_have_are_left_out() -> None:
    rows = {
        "messages": [ASKED, {"role": "assistant", "tool_calls": [{"name": "sum", "arguments": {"a": 1, "b": None}}]}],
        "tools": [{"name": "sum", "parameters": {"a": {"type": "int"}, "b": None}}],
    }
    read = read_conversation(rows, CHAT)
    assert read.messages[1]["tool_calls"] == [{"name": "sum", "arguments": {"a": 1}}]
    assert read.tools == [{"name": "sum", "parameters": {"a": {"type": "int"}}}]
    kept = read_conversation(rows, replace(CHAT, keeps_nulls=True))
    assert kept.messages[1]["tool_calls"] == rows["messages"][1]["tool_calls"] and kept.tools == rows["tools"]


def test_the_messages_of_a_prompt_are_context() -> None:
    rows = {"prompt": [ASKED, ANSWERED, ASKED], "completion": [ANSWERED]}
    read = read_conversation(rows, PAIR_OF_CHATS)
    assert (len(read.messages), read.num_context, read.turns) == (4, 3, [3])


def test_turns_that_say_that_they_are_only_read_are_not_learned() -> None:
    rows = {"messages": [ASKED, {**ANSWERED, "weight": 0}, {**ASKED, "weight": 0}, {**ANSWERED, "weight": None}]}
    read = read_conversation(rows, CHAT)
    assert read.turns == [3] and not read.asks_for_others
    assert read_conversation({"messages": [{**ASKED, "train": True}, ANSWERED]}, CHAT).asks_for_others


def test_braces_in_an_instruction_stay_as_they_are() -> None:
    prompt, _ = read_plain({"instruction": "Fill {input}.", "input": "{0}", "output": "x"}, ALPACA, "\n")
    assert "### Instruction:\nFill {input}.\n\n### Input:\n{0}\n\n" in prompt


@pytest.mark.parametrize(
    ("row", "found", "message"),
    [
        ({"messages": [ASKED]}, CHAT, "no assistant turn$"),
        (
            {"messages": [ASKED, {"role": "bot", "content": "2"}]},
            CHAT,
            "no assistant turn; roles that are not known are bot$",
        ),
        ({"messages": [ASKED, {**ANSWERED, "content": " "}]}, CHAT, "an assistant's turn that says nothing"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "url": "a.png"}]}, ANSWERED]},
            CHAT,
            r"a message whose content is no text \(image\)",
        ),
        ({"messages": [{"role": "user", "content": 3}, ANSWERED]}, CHAT, r"a message whose content is no text \(int\)"),
        ({"messages": "[]"}, CHAT, "column 'messages' holds no list of messages"),
        ({"messages": ["hello"]}, CHAT, "a message without a role or without content"),
        ({"messages": [{**ASKED, "role": ["user"]}, ANSWERED]}, CHAT, "a message without a role or without content"),
        ({"messages": [ASKED, {**ANSWERED, "tool_calls": "sum()"}]}, CHAT, "tool_calls that are no JSON"),
        ({"messages": [ASKED, {**ANSWERED, "tool_calls": {"name": "sum"}}]}, CHAT, "tool_calls that are no list"),
        ({"messages": [ASKED, ANSWERED], "tools": "[" * 100_000}, CHAT, "tools that are no JSON"),
        ({"messages": [ASKED, ANSWERED], "tools": f"[{'9' * 5000}]"}, CHAT, "tools that are no JSON"),
        ({"messages": [ASKED, ANSWERED], "tools": "sum"}, CHAT, "tools that are no JSON"),
        ({"messages": [ASKED, ANSWERED], "tools": "{}"}, CHAT, "tools that are no list"),
        ({"prompt": [ASKED, ANSWERED], "completion": [ASKED]}, PAIR_OF_CHATS, "no assistant turn"),
        ({"prompt": "x", "completion": "\n"}, PAIR, "nothing in column 'completion'"),
        ({"messages": [{**ASKED, "content": ""}, ANSWERED]}, CHAT, "a user's turn that says nothing"),
        ({"messages": [{"from": "human", "value": " \n"}, ANSWERED]}, CHAT, "a user's turn that says nothing"),
        ({"messages": [ASKED, ANSWERED, {**ASKED, "content": []}]}, CHAT, "a user's turn that says nothing"),
        ({"prompt": [{**ASKED, "content": ""}], "completion": [ANSWERED]}, PAIR_OF_CHATS, "a user's turn that says no"),
        ({"messages": [ASKED, {**ANSWERED, "weight": 0}]}, CHAT, "no assistant turn that says it is to be learned"),
    ],
)
def test_a_row_that_says_nothing_is_refused_with_the_reason(
    row: dict[str, Any], found: DatasetFormat, message: str
) -> None:
    with pytest.raises(UnusableRowError, match=message):
        read_conversation(row, found)
