"""What chat templates pass over: templates of many families, as the installed trl has them, and every role."""

import re
from importlib.metadata import version
from itertools import takewhile
from typing import Any

import pytest
from jinja2 import TemplateError
from packaging.version import Version

from slivertune.training.data.conversations import Conversation, UnusableRowError
from slivertune.training.tasks.chat import encode_conversation
from slivertune.training.tasks.marked_words import mark_words
from slivertune.training.tasks.tokenization import IGNORED
from slivertune.training.tasks.written_words import find_words
from tests.training.tiny import CHATML, byte_tokenizer, chat_tokenizer, trl_template, trl_template_names

# From each family one template of its own, and some that mark by themselves what is learned.
TEMPLATES = (
    "cohere", "cohere2", "deepseek_r1_distill", "deepseekv3", "diffusion_gemma", "gemma", "gemma3", "gemma4", "glm4moe",
    "gptoss", "idefics3", "lfm2", "lfm2_2_5", "llama3", "llama3_1", "llama3_2", "llava_next", "muse_glimmer",
    "nemotron_3_nano", "phi3", "phi3_5", "qwen2_5", "qwen3", "qwen3_5_think", "smolvlm",
    "gemma3_training", "gptoss_training", "llama3_training", "qwen2_5_training", "qwen3_training",
)  # fmt: skip
LATER = {
    "deepseek_r1_distill", "diffusion_gemma", "gemma4", "lfm2", "lfm2_2_5", "muse_glimmer", "smolvlm",
}  # fmt: skip
"""Templates that trl 1.9, the oldest under test, lacks; trl 1.16 has all."""
OF_PARTS = {"idefics3", "llava_next", "smolvlm"}
"""Templates that write only contents that are lists of parts."""
ASKED, ANSWERED = {"role": "user", "content": " alpha\n"}, {"role": "assistant", "content": "bravo 4"}
CHAT = [ASKED, ANSWERED, {"role": "user", "content": 'charlie "4" \u00e9'}, {"role": "assistant", "content": "delta"}]
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "lookup", "arguments": {"city": "bern"}}}]}
SPOKEN = {
    "system": [
        [{"role": "system", "content": "echo"}, *CHAT],
        [*CHAT[:2], {"role": "system", "content": "echo"}, *CHAT[2:]],
    ],
    "developer": [
        [{"role": "developer", "content": "echo"}, *CHAT],
        [*CHAT[:2], {"role": "developer", "content": "echo"}, *CHAT[2:]],
    ],
    "user": [CHAT, [ASKED, {"role": "user", "content": "echo"}, ANSWERED]],
    "assistant": [CHAT[1:], [ASKED, {"role": "assistant", "content": "echo"}, ANSWERED, *CHAT[2:]]],
    "tool": [
        [ASKED, CALL, {"role": "tool", "content": '{"echo": "4"}'}, ANSWERED],
        [ASKED, {**CALL, "content": "foxtrot"}, {"role": "tool", "content": "echo"}, ANSWERED],
        [ASKED, ANSWERED, {"role": "tool", "content": "echo"}, *CHAT[2:]],
    ],
    "critic": [[*CHAT[:2], {"role": "critic", "content": "echo"}, *CHAT[2:]]],
}
"""By role: conversations in which it speaks, at the places where it may."""


def words_of(message: dict[str, Any]) -> list[str]:
    content = message.get("content", "")
    said = content if isinstance(content, str) else " ".join(part["text"] for part in content)
    return re.findall("[a-z]{4,}", f"{said} {'lookup bern' if 'tool_calls' in message else ''}")


def in_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {**each, "content": [{"type": "text", "text": each["content"]}]} if "content" in each else each
        for each in messages
    ]


@pytest.mark.parametrize("role", SPOKEN)
@pytest.mark.parametrize("name", TEMPLATES)
def test_every_message_is_written_and_every_turn_learned_or_the_row_is_dropped_with_the_reason(
    name: str, role: str
) -> None:
    tokenizer = byte_tokenizer(bos=True)
    tokenizer.chat_template = trl_template(name)
    for messages in SPOKEN[role]:
        reason = ""
        try:
            rows = encode_conversation(tokenizer, Conversation(messages=messages))
        except UnusableRowError as error:
            reason = str(error)
            rows = []
        if not rows:
            given = in_parts(messages) if name in OF_PARTS else messages
            assert is_justified(tokenizer, given, reason), reason
            continue
        texts = [tokenizer.decode(ids) for ids, _ in rows]
        learned = "".join(tokenizer.decode([label for label in labels if label != IGNORED]) for _, labels in rows)
        # One row has all messages: the only one, or that of the last turn.
        assert [word for message in messages for word in words_of(message) if word not in texts[-1]] == []
        # Nothing follows a turn that opens the conversation.
        answers = [each for place, each in enumerate(messages) if each["role"] == "assistant" and place > 0]
        assert [word for message in answers for word in words_of(message) if word not in learned] == []
        others = [each for each in messages if each["role"] != "assistant"]
        assert [word for message in others for word in words_of(message) if word in learned] == []


def is_justified(tokenizer: Any, messages: list[dict[str, Any]], reason: str) -> bool:
    """Whether a conversation can't be written, or loses words, or has turns of which the prompt is not known."""
    if reason.startswith("a message of the role 'critic'"):
        return True
    if reason.startswith("the chat template does not begin the assistant's turn"):
        return any(begins_otherwise(tokenizer, messages, place) for place in range(1, len(messages)))
    if "does not write calls of tools" in reason:
        return "tool_calls" not in tokenizer.chat_template
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except (TemplateError, TypeError, ValueError):
        return reason.startswith("the chat template refuses them")
    lost = [word for message in messages for word in words_of(message) if word not in text]
    return reason.startswith("the chat template leaves out") and lost != []


def begins_otherwise(tokenizer: Any, messages: list[dict[str, Any]], place: int) -> bool:
    """Whether a turn of the assistant is written without any part of the prompt with which it would be generated."""
    if messages[place]["role"] != "assistant":
        return False
    before, whole = (tokenizer.apply_chat_template(messages[:end], tokenize=False) for end in (place, place + 1))
    prompt = tokenizer.apply_chat_template(messages[:place], tokenize=False, add_generation_prompt=True)
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(prompt, whole, strict=False))
    return len(list(alike)) <= len(before)


def test_no_template_is_missing_from_the_installed_trl_but_those_of_later_versions() -> None:
    missing = {*TEMPLATES} - trl_template_names()
    assert (len(TEMPLATES), len({*TEMPLATES} - LATER)) == (30, 23)
    assert missing <= (LATER if Version(version("trl")) < Version("1.16") else set())


def test_most_templates_keep_the_roles_that_they_know() -> None:
    kept, present = set(), {*TEMPLATES} & trl_template_names()
    tokenizer = byte_tokenizer(bos=True)
    for name in present:
        tokenizer.chat_template = trl_template(name)
        try:
            encode_conversation(tokenizer, Conversation(messages=CHAT))
            kept.add(name)
        except UnusableRowError:
            continue
    assert kept == present


def encoded(template: str, messages: list[dict[str, Any]]) -> list[str]:
    remarks: list[str] = []
    encode_conversation(chat_tokenizer(template), Conversation(messages=messages), remarks=remarks)
    return remarks


WITHOUT_SYSTEM = CHATML.replace(
    "{% for message in messages %}", "{% for message in messages if message.role != 'system' %}"
)
CONTENT = "{{ message['content'] }}"
CUT = CHATML.replace(CONTENT, "{{ message['content'].split('--')[0] }}")
QUOTED = CHATML.replace(CONTENT, "{{ message['content'] | tojson(ensure_ascii=True) }}")
UNLIKED = CHATML.replace(CONTENT, "{{ message['content'] if message['content'] != 'no' }}")
NORMALISED = {
    "upper": "message['content'] | upper",
    "joined": "message['content'].replace(' ', '_')",
    "one_line": "message['content'].replace('\\n', ' ')",
    "squeezed": "message['content'].split() | join(' ')",
    "safe": "message['content'].replace('<|', '< |')",
    "renamed": "message['content'].replace('\\n', '<br>')",
}
"""By name: how a template writes the words of a message otherwise."""
LINES = [{"role": "user", "content": 'two\nlines  & "x" <|y it\'s'}, {"role": "assistant", "content": "a\n b <|z"}]
TOOLS_AT_EQUALS = (
    "{% set asked = messages | selectattr('role', 'equalto', 'user') | list %}{% for message in messages %}"
    "{% if tools and message == asked[-1] %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}"
    "{% if message.role == 'user' %}[INST]{{ message.content }}[/INST]{% else %} {{ message.content }}<eos>{% endif %}"
    "{% endfor %}"
)
"""Writes tools before each message of the user that is like the last, as Mistral does."""
NEVER_ANALYSIS = CHATML.replace(CONTENT, "{{ message['content'].split('</think>')[-1] }}")
NO_ANALYSIS = CHATML.replace(
    CONTENT, "{{ message['content'] if loop.last else message['content'].split('</think>')[-1] }}"
)
NO_SWITCHES = CHATML.replace(
    CONTENT,
    "{{ message['content'].replace('</think>', '<_e>').replace('/no_think', '').replace('/think', '')"
    ".replace('/system_override', '').replace('<_e>', '</think>').strip() }}",
)
"""Takes its switches out of all messages, as Nemotron does."""
THOUGHT = {"role": "assistant", "content": "<think>sum</think>2"}
BARE_THOUGHT = {"role": "assistant", "content": "<think>sum</think>"}


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        # Words that stand in the text for another reason: in what the user says, or in the markup.
        (WITHOUT_SYSTEM, [{"role": "system", "content": "alpha"}, *CHAT], "leaves out a message of the role 'system'"),
        (WITHOUT_SYSTEM, [{"role": "system", "content": "user"}, *CHAT], "leaves out a message of the role 'system'"),
        (CUT, [{"role": "user", "content": "What? -- alpha"}, ANSWERED, *CHAT], "leaves out words of a message of"),
        (UNLIKED, [{"role": "user", "content": "no"}, *CHAT[1:]], "leaves out words of a message of the role 'user'"),
        # Nothing of the answer is left.
        (NEVER_ANALYSIS, [ASKED, BARE_THOUGHT], "leaves out a message of the role 'assistant'"),
        (NEVER_ANALYSIS, [ASKED, BARE_THOUGHT, *CHAT], "leaves out a message of the role 'assistant'"),
        ("{% if tool_calls %}{% endif %}" + CHATML, [ASKED, {**CALL, "content": "so"}], "leaves out a part of a mess"),
    ],
)
def test_words_that_are_not_written_cost_the_row(template: str, messages: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(UnusableRowError, match=message):
        encoded(template, messages)


@pytest.mark.parametrize(
    ("template", "messages", "said"),
    [
        (QUOTED, CHAT, []),
        (CHATML.replace("}}<", " | trim }}<"), [{"role": "user", "content": " <b>x</b>\n"}, ANSWERED], []),
        (CHATML, [{"role": "user", "content": "<think>"}, {"role": "assistant", "content": "</s>"}], []),
        (CHATML, [{"role": "user", "content": "same"}, {"role": "assistant", "content": "same"}] * 2, []),
        (CHATML, [{"role": "system", "content": ""}, *CHAT], []),
        (NO_SWITCHES, [{"role": "system", "content": "You are brief. /no_think"}, *CHAT], []),
        (NO_SWITCHES, [{"role": "system", "content": "/system_override"}, *CHAT], []),
        (NO_SWITCHES, [{"role": "system", "content": "/no_think\n"}, *CHAT], []),
        (NO_SWITCHES, [{"role": "user", "content": "Sum up. /think please"}, THOUGHT], []),
        (NO_SWITCHES, [{"role": "user", "content": "Read a/thinking/no_thinker."}, THOUGHT], []),
        (CHATML, [{"role": "user", "content": "/think"}, {"role": "assistant", "content": "/no_think"}], []),
        # Each turn is learned in a row of its own, in which its thought stands.
        (NO_ANALYSIS, [ASKED, THOUGHT, ASKED, THOUGHT], ["leaves out the reasoning of earlier turns"]),
        (NO_ANALYSIS, [ASKED, BARE_THOUGHT, *CHAT[:2]], ["leaves out the reasoning of earlier turns"]),
        (NEVER_ANALYSIS, [ASKED, THOUGHT], ["leaves out the reasoning of a turn"]),
        (
            NEVER_ANALYSIS,
            [ASKED, {"role": "assistant", "content": "sum</think>2"}],
            ["leaves out the reasoning of a turn"],
        ),
        (NEVER_ANALYSIS, [ASKED, THOUGHT, *CHAT], ["leaves out the reasoning of earlier turns"]),
        (CHATML, [ASKED, {**ANSWERED, "reasoning_content": "sum"}], ["leaves out the reasoning of a turn"]),
    ],
)
def test_words_that_are_written_otherwise_or_are_earlier_thoughts_are_found(
    template: str, messages: list[dict[str, Any]], said: list[str]
) -> None:
    assert encoded(template, messages) == [f"the chat template {line}" for line in said]


@pytest.mark.parametrize("again", [[], CHAT[2:3], [{"role": "user", "content": "a<|im_end|>\nb"}]])
@pytest.mark.parametrize("how", NORMALISED)
def test_words_that_a_template_rewrites_are_learned_as_it_writes_them_and_said(
    how: str, again: list[dict[str, Any]]
) -> None:
    messages, remarks = [*LINES, *again, *LINES], list[str]()
    tokenizer = chat_tokenizer(CHATML.replace(CONTENT, f"{{{{ {NORMALISED[how]} }}}}"))
    ((_, labels),) = encode_conversation(tokenizer, Conversation(messages=messages), remarks=remarks)
    learned = tokenizer.decode([label for label in labels if label != IGNORED])
    bare = tokenizer.apply_chat_template(LINES[1:], tokenize=False).removeprefix("<|im_start|>assistant\n")
    assert learned == bare * 2
    assert set(remarks) >= {"the chat template changes words or white space of messages of the role 'user'"}


def test_words_that_are_escaped_as_xml_are_found() -> None:
    assert encoded(CHATML.replace(CONTENT, "{{ message['content'] | e }}"), LINES) == []


def test_what_looks_like_a_mark_is_none() -> None:
    template = "{{ tools | tojson }}" + CHATML
    tool = {"type": "function", "function": {"name": "lookup", "description": "Zq0000099qZ"}}
    messages = [{"role": "user", "content": "Zq0000099qZ"}, {"role": "assistant", "content": "Zq0000000qZ"}]
    assert encode_conversation(chat_tokenizer(template), Conversation(messages=messages, tools=[tool]))


@pytest.mark.parametrize("answer", ["1", "s", "function"])
def test_a_short_answer_is_found_though_the_text_is_like_no_text_of_marks(answer: str) -> None:
    tool = {"type": "function", "function": {"name": "lookup", "description": "1 s", "parameters": {}}}
    turns = [{"role": "user", "content": "ok"}, {"role": "assistant", "content": answer}]
    tokenizer = chat_tokenizer(TOOLS_AT_EQUALS)
    ((ids, labels),) = encode_conversation(tokenizer, Conversation(messages=turns * 3, tools=[tool]))
    assert tokenizer.decode([label for label in labels if label != IGNORED]) == f" {answer}<eos>" * 3
    assert tokenizer.decode(ids).count("[TOOLS]") == 3


@pytest.mark.parametrize("tool", [{"name": "user"}, {"type": "function", "function": {"name": "user"}}])
def test_tools_that_the_template_reads_and_does_not_write_cost_the_row(tool: dict[str, Any]) -> None:
    conversation = Conversation(messages=CHAT, tools=[tool])
    with pytest.raises(UnusableRowError, match="the chat template does not write tools"):
        encode_conversation(chat_tokenizer("{% if tools %}Tools:\n{% endif %}" + CHATML), conversation)
    assert encode_conversation(chat_tokenizer("{{ tools | tojson }}" + CHATML), conversation)


def test_words_lie_where_they_are_written_though_they_are_escaped() -> None:
    tokenizer, conversation = chat_tokenizer(QUOTED), Conversation(messages=CHAT)
    marked = mark_words(conversation)
    text, marked_text = (
        tokenizer.apply_chat_template(each.messages, tokenize=False) for each in (conversation, marked.conversation)
    )
    written = find_words(marked, marked_text, text)
    assert written.is_aligned
    assert [text[begin:end] for begin, end in written.spans] == ["alpha", "bravo 4", r"charlie \"4\" \u00e9", "delta"]
    assert written.in_text(len(marked_text)) == len(text) and written.in_text(0) == 0
