"""What a chat template writes, and which of it is learned; what is expected is written by hand."""

import re
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from slivertune.training.data.conversations import Conversation, UnusableRowError
from slivertune.training.tasks.chat import (
    describe_turn_begin,
    describe_turn_end,
    encode_conversation,
    set_chat_template,
)
from slivertune.training.tasks.tokenization import IGNORED
from tests.training.tiny import CHATML, MARKED, byte_tokenizer, chat_tokenizer, trl_template

TWO_TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
]
BEGINNING = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
SECOND = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"

FORGETFUL = CHATML.replace(
    "{{ message['content'] }}",
    "{% if loop.last and message['role'] == 'assistant' %}<think></think>{% endif %}{{ message['content'] }}",
)
"""Writes thoughts before the last answer alone, as Qwen3 does."""
THOUGHTFUL = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}")
"""Lets the model think at generation, and forgets of it in the data, as DeepSeek-R1 does."""
OTHERWISE = CHATML.replace("<|im_start|>assistant\n{% endif %}", "Answer: {% endif %}")
"""Begins what the model is to write by something that no turn in the data begins by."""
IN_MACRO = (
    "{% macro say(message) %}<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' %}{% generation %}"
    "{{ message.content }}<|im_end|>{% endgeneration %}{% else %}{{ message.content }}<|im_end|>{% endif %}"
    "{% endmacro %}{% for message in messages %}{{ say(message) }}\n{% endfor %}"
)
"""Writes messages by a macro."""
IN_SET = IN_MACRO.replace("{{ say(message) }}", "{% set said %}{{ say(message) }}{% endset %}{{ said }}")
"""Writes messages into a variable."""
IN_TWO_BLOCKS = MARKED.replace(
    "<|im_end|>{% endgeneration", "{% endgeneration %}{% generation %}<|im_end|>{% endgeneration"
)
"""Marks what ends a turn by a block of its own."""
UNMARKED_FIRST = MARKED.replace("message['role'] == 'assistant'", "message['role'] == 'assistant' and loop.last")
"""Marks the last turn alone."""
UNMARKED_THOUGHT = MARKED.replace("{% generation %}", "{{ message.reasoning_content }}{% generation %}")
"""Writes thoughts before its blocks."""
UNMARKED_CALLS = MARKED.replace(
    "{% if message['role'] == 'assistant' %}",
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% elif message['role'] == 'assistant' %}",
)
"""Writes calls of tools in no block."""
ONE_BLOCK = "{% generation %}" + CHATML + "{% endgeneration %}"
"""Marks everything."""
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "sum", "arguments": {}}}]}
STRICT = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('a user must begin') }}{% endif %}" + CHATML


def parts(tokenizer: PreTrainedTokenizerFast, ids: list[int], labels: list[int]) -> list[tuple[str, str]]:
    """The texts of a row, each with whether it is read or learned."""
    assert len(ids) == len(labels) and all(label in (IGNORED, token) for token, label in zip(ids, labels, strict=True))
    pairs = zip(ids, labels, strict=True)
    return [
        ("learned" if is_learned else "read", tokenizer.decode([token for token, _ in run]))
        for is_learned, run in groupby(pairs, lambda pair: pair[1] != IGNORED)
    ]


def encoded(template: str, messages: list[dict[str, Any]], **options: Any) -> list[list[tuple[str, str]]]:
    # Merges that reach over a border, where they can.
    tokenizer = chat_tokenizer(template, corpus=["assistant\n\n\n2"] * 5)
    rows = encode_conversation(tokenizer, Conversation(messages=messages, **options))
    return [parts(tokenizer, ids, labels) for ids, labels in rows]


@pytest.mark.parametrize("template", [CHATML, "{# without {% generation %} #}" + CHATML])
def test_every_turn_of_the_assistant_is_learned_with_what_ends_it_and_nothing_else(template: str) -> None:
    tokenizer = chat_tokenizer(template)
    ((ids, labels),) = encode_conversation(tokenizer, Conversation(messages=TWO_TURNS))
    assert ids == tokenizer.apply_chat_template(TWO_TURNS)["input_ids"]
    assert parts(tokenizer, ids, labels) == [
        ("read", BEGINNING),
        ("learned", "2<|im_end|>\n"),
        ("read", SECOND),
        ("learned", "4<|im_end|>\n"),
    ]


def test_a_token_that_reaches_over_the_end_of_the_prompt_is_learned() -> None:
    # "\n\n" is one token, whose first half is the prompt's.
    (row,) = encoded(CHATML, [*TWO_TURNS[:2], {"role": "assistant", "content": "\n\n2"}])
    assert row == [("read", BEGINNING.removesuffix("\n")), ("learned", "\n\n\n2<|im_end|>\n")]


@pytest.mark.parametrize("template", [MARKED, IN_MACRO, IN_SET, MARKED.replace("{% gen", "{%+ gen")])
def test_the_blocks_that_a_template_marks_are_learned(template: str) -> None:
    tokenizer = chat_tokenizer(template)
    ((ids, labels),) = encode_conversation(tokenizer, Conversation(messages=TWO_TURNS))
    assert ids == chat_tokenizer().apply_chat_template(TWO_TURNS)["input_ids"]
    assert parts(tokenizer, ids, labels) == [
        ("read", BEGINNING),
        ("learned", "2<|im_end|>"),
        ("read", "\n" + SECOND),
        ("learned", "4<|im_end|>"),
        ("read", "\n"),
    ]


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_white_space_at_the_border_is_learned_though_offsets_leave_it_out(template: str) -> None:
    tokenizer = chat_tokenizer(template.replace("<|im_end|>{% endgeneration", "<|im_end|> {% endgeneration"))
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    messages = [*TWO_TURNS[:2], {"role": "assistant", "content": " 2"}, *TWO_TURNS[3:]]
    ((ids, labels),) = encode_conversation(tokenizer, Conversation(messages=messages))
    learned = [text for kind, text in parts(tokenizer, ids, labels) if kind == "learned"]
    end = "<|im_end|> " if template is MARKED else "<|im_end|>\n"
    assert learned == [f" 2{end}", f"4{end}"]


@pytest.mark.parametrize(
    ("template", "end"),
    [(CHATML, [("learned", "4<|im_end|>\n")]), (MARKED, [("learned", "4<|im_end|>"), ("read", "\n")])],
)
def test_only_the_completion_of_a_prompt_is_learned_though_the_prompt_has_answers(
    template: str, end: list[tuple[str, str]]
) -> None:
    (row,) = encoded(template, TWO_TURNS, num_context=4)
    assert row == [("read", BEGINNING + "2<|im_end|>\n" + SECOND), *end]


@pytest.mark.parametrize("answer", ["</think>", "<think></think>", "<b>", "<|im_start|>"])
@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_an_answer_of_markup_alone_is_learned(template: str, answer: str) -> None:
    messages = [*TWO_TURNS[:2], {"role": "assistant", "content": answer}, *TWO_TURNS[3:]]
    (row,) = encoded(template, messages)
    end = "<|im_end|>\n" if template is CHATML else "<|im_end|>"
    assert [text for kind, text in row if kind == "learned"] == [f"{answer}{end}", f"4{end}"]


@pytest.mark.parametrize(
    ("template", "messages", "learned"),
    [
        (UNMARKED_FIRST, TWO_TURNS, ["4<|im_end|>"]),
        (UNMARKED_THOUGHT, [TWO_TURNS[1], {**TWO_TURNS[2], "reasoning_content": "sum"}], ["2<|im_end|>"]),
        (UNMARKED_CALLS, [TWO_TURNS[1], CALL, *TWO_TURNS[1:3]], ["2<|im_end|>"]),
    ],
)
def test_blocks_decide_alone_what_is_learned_and_a_line_says_what_they_leave_out(
    template: str, messages: list[dict[str, Any]], learned: list[str]
) -> None:
    tokenizer, remarks = chat_tokenizer(template), list[str]()
    ((ids, labels),) = encode_conversation(tokenizer, Conversation(messages=messages), remarks=remarks)
    assert [text for kind, text in parts(tokenizer, ids, labels) if kind == "learned"] == learned
    assert remarks == ["the template's generation blocks leave out words of the assistant"]


@pytest.mark.parametrize("said", [{"weight": 0}, {"train": False}, {"loss": False}, {"masked": True}])
@pytest.mark.parametrize("template", [CHATML, MARKED, IN_TWO_BLOCKS])
@pytest.mark.parametrize("place", [2, 4])
def test_a_turn_that_says_that_it_is_not_to_be_learned_is_read(place: int, template: str, said: dict[str, Any]) -> None:
    messages = [{**message, **said} if each == place else message for each, message in enumerate(TWO_TURNS)]
    (row,) = encoded(template, messages)
    end = "<|im_end|>\n" if template is CHATML else "<|im_end|>"
    assert [text for kind, text in row if kind == "learned"] == [f"{4 if place == 2 else 2}{end}"]
    assert "".join(text for _, text in row) == BEGINNING + "2<|im_end|>\n" + SECOND + "4<|im_end|>\n"


def test_what_follows_the_last_answer_is_read() -> None:
    (row,) = encoded(CHATML, [*TWO_TURNS[:3], {"role": "user", "content": "Thanks"}])
    assert row[1:] == [("learned", "2<|im_end|>\n"), ("read", "<|im_start|>user\nThanks<|im_end|>\n")]


def test_a_turn_that_opens_a_conversation_answers_nothing_and_is_read() -> None:
    (row,) = encoded(CHATML, [{"role": "assistant", "content": "Hello"}, *TWO_TURNS[1:3]])
    assert row[0] == (
        "read",
        "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n",
    )
    assert row[1:] == [("learned", "2<|im_end|>\n")]


def test_turns_that_a_template_writes_otherwise_later_become_rows_of_their_own() -> None:
    first, second = encoded(FORGETFUL, TWO_TURNS)
    assert first == [("read", BEGINNING), ("learned", "<think></think>2<|im_end|>\n")]
    # As the model will see it when it is asked the second time: without the thoughts of the first.
    assert second == [
        ("read", BEGINNING + "2<|im_end|>\n" + SECOND),
        ("learned", "<think></think>4<|im_end|>\n"),
    ]
    assert len(encoded(FORGETFUL, TWO_TURNS[:3])) == 1


@pytest.mark.parametrize("answer", ["2", "<th", "\n"])
def test_a_generation_prompt_may_end_by_what_the_data_have_not(answer: str) -> None:
    messages = [*TWO_TURNS[:2], {"role": "assistant", "content": answer}, *TWO_TURNS[3:]]
    tokenizer = chat_tokenizer(THOUGHTFUL)
    ((ids, labels),) = encode_conversation(tokenizer, Conversation(messages=messages))
    assert parts(tokenizer, ids, labels) == [
        ("read", BEGINNING),
        ("learned", f"{answer}<|im_end|>\n"),
        ("read", SECOND),
        ("learned", "4<|im_end|>\n"),
    ]


@pytest.mark.parametrize(
    ("template", "said"), [(THOUGHTFUL, ["ends by '<think>'"]), (CHATML, []), (MARKED, []), (STRICT, [])]
)
def test_a_generation_prompt_that_ends_otherwise_than_the_data_is_said(template: str, said: list[str]) -> None:
    lines = describe_turn_begin(chat_tokenizer(template))
    assert [re.search("ends by '.*?'", line)[0] for line in lines] == said  # type: ignore[index]


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (OTHERWISE, TWO_TURNS, r"does not begin the assistant's turn with its generation prompt .*\{% generation %\}"),
        (CHATML, [TWO_TURNS[1], CALL], r"does not write calls of tools \(tool_calls\)"),
        (
            CHATML,
            [*TWO_TURNS, {"role": "asistant", "content": "5"}],
            r"role 'asistant', which the chat template does not name \(did you mean assistant\?\)",
        ),
        (
            CHATML,
            [{"role": "critic", "content": "5"}, *TWO_TURNS],
            r"'critic', which the chat template does not name \(none of user, assistant, system, tool, developer\)",
        ),
        (STRICT, TWO_TURNS, "the chat template refuses them: a user must begin"),
        (CHATML, [*TWO_TURNS[:4], {"role": "assistant", "content": "4\ud83d"}], "half of a surrogate pair"),
        ("{{ 1 // 0 }}" + CHATML, TWO_TURNS, "the chat template refuses them: .*division"),
        (
            "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
            TWO_TURNS,
            "the chat template refuses them: maximum recursion",
        ),
        (
            "{% filter length | string %}" + MARKED + "{% endfilter %}",
            TWO_TURNS,
            r"it changes {% generation %} blocks after writing",
        ),
        (CHATML, [{"role": "assistant", "content": "Hello"}], "no assistant turn after another message"),
        ("{{ messages[0]['content'] + 1 }}", TWO_TURNS, "the chat template refuses them: can only concatenate"),
        (UNMARKED_FIRST, [*TWO_TURNS, TWO_TURNS[1]], "marks no words of the assistant's turns that are learned"),
        (ONE_BLOCK, [*TWO_TURNS[:4], {**TWO_TURNS[4], "weight": 0}], "a turn that is learned and another in one block"),
    ],
)
def test_a_conversation_that_a_template_can_not_write_is_no_row(
    template: str, messages: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(UnusableRowError, match=message):
        encoded(template, messages)


@pytest.mark.parametrize(
    ("template", "bos", "given"),
    [
        (CHATML, False, {"1+1?": "1+1?<|im_end|>\n", "4": "4<|im_end|><|im_end|>"}),
        (MARKED, False, {"4": "4<|im_end|> "}),
        (CHATML, False, {"Be brief.": "Be brief.<|im_end|>\n"}),
        (CHATML + "{{ eos_token }}", False, {"4": "4<eos>", "2": "2<|im_end|>"}),
        ("{{ bos_token }}" + CHATML, True, {"Be brief.": "<bos><bos>Be brief.", "2": "2<|im_end|>"}),
        (CHATML.replace("<|im_end|>", "{{ eos_token }}"), False, {"2": "2<eos>", "4": "4<eos>\n"}),
    ],
)
def test_special_tokens_that_the_template_writes_are_written_once(
    template: str, bos: bool, given: dict[str, str]
) -> None:
    tokenizer = byte_tokenizer(bos=bos, more=("<|im_start|>", "<|im_end|>"))
    tokenizer.chat_template = template
    remarks: list[str] = []
    plain = encode_conversation(tokenizer, Conversation(messages=TWO_TURNS), remarks=remarks)
    assert remarks == []
    messages = [{**each, "content": given.get(each["content"], each["content"])} for each in TWO_TURNS]
    assert encode_conversation(tokenizer, Conversation(messages=messages), remarks=remarks) == plain
    assert remarks == ["messages contain special tokens that the chat template also writes. The row has them once"]


BOS_ONCE = "{{ bos_token }}" + CHATML
BOS_BEFORE_USERS = CHATML.replace("<|im_start|>{{", "{{ bos_token if message.role == 'user' }}<|im_start|>{{")
"""Writes BOS again before every question, as Llama 2 does."""


@pytest.mark.parametrize(
    ("template", "given", "kept"),
    [
        (BOS_ONCE, {"1+1?": "<bos>1+1?", "2": "<bos>2"}, {"1+1?": "<bos>1+1?", "2": "<bos>2"}),
        (BOS_ONCE, {"Be brief.": "<bos>Be brief.", "2+2?": "<bos> tag?"}, {"2+2?": "<bos> tag?"}),
        (BOS_BEFORE_USERS, {"1+1?": "<bos>1+1?", "2+2?": "<bos>2+2?", "2": "<bos>2"}, {"2": "<bos>2"}),
        (CHATML.replace("<|im_end|>", "{{ bos_token }}"), {"2": "<bos>2<bos>", "1+1?": "1+1?<bos>"}, {"2": "<bos>2"}),
    ],
)
def test_bos_is_taken_from_messages_before_which_the_template_writes_it(
    template: str, given: dict[str, str], kept: dict[str, str]
) -> None:
    tokenizer = byte_tokenizer(bos=True, more=("<|im_start|>", "<|im_end|>"))
    tokenizer.chat_template = template
    messages, expected = (
        [{**each, "content": new.get(each["content"], each["content"])} for each in TWO_TURNS] for new in (given, kept)
    )
    ((ids, _),) = encode_conversation(tokenizer, Conversation(messages=messages))
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(expected, tokenize=False)


@pytest.mark.parametrize("template", [CHATML, MARKED])
@pytest.mark.parametrize(
    ("place", "who"), [(1, "a user's turn"), (2, "an assistant's turn"), (4, "an assistant's turn")]
)
def test_a_turn_of_the_end_token_alone_says_nothing(place: int, who: str, template: str) -> None:
    messages = [
        {**message, "content": "<|im_end|>\n"} if each == place else message for each, message in enumerate(TWO_TURNS)
    ]
    with pytest.raises(UnusableRowError, match=f"{who} that says nothing"):
        encoded(template, messages)


@pytest.mark.parametrize("place", [1, 3])
def test_an_end_that_only_the_last_answer_gets_is_taken_from_every_answer(place: int) -> None:
    tokenizer = byte_tokenizer(more=("<|im_start|>", "<|im_end|>"))
    tokenizer.chat_template = CHATML.replace(
        "<|im_end|>", "{{ eos_token if loop.last and message.role == 'assistant' else '<|im_end|>' }}"
    )
    plain = [TWO_TURNS[1], TWO_TURNS[2], TWO_TURNS[3], TWO_TURNS[4]]
    for end in ("<eos>", "<|im_end|>"):
        messages = [*plain[:place], {**plain[place], "content": plain[place]["content"] + end}, *plain[place + 1 :]]
        found, expected = (encode_conversation(tokenizer, Conversation(messages=each)) for each in (messages, plain))
        assert found == expected


def test_special_tokens_that_the_template_does_not_write_stay() -> None:
    messages = [*TWO_TURNS[:2], {"role": "assistant", "content": "2<eos>"}]
    (row,) = encoded(CHATML, messages)
    assert row[-1] == ("learned", "2<eos><|im_end|>\n")


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("llama3", [["2<|eot_id|>", "4<|eot_id|>"]]),
        ("qwen2_5", [["2<|im_end|>\n", "4<|im_end|>\n"]]),
        ("gemma3", [["2<end_of_turn>\n", "4<end_of_turn>\n"]]),
        # These write a turn otherwise once others follow.
        ("qwen3", [["<think>\n\n</think>\n\n2<|im_end|>\n"], ["<think>\n\n</think>\n\n4<|im_end|>\n"]]),
        ("phi3", [["2<|end|>\n<eos>"], ["4<|end|>\n<eos>"]]),
        ("gptoss", [["<|channel|>final<|message|>2<|return|>"], ["<|channel|>final<|message|>4<|return|>"]]),
        # This one marks by itself what is learned.
        ("llama3_training", [["2<|eot_id|>", "4<|eot_id|>"]]),
    ],
)
def test_templates_of_well_known_models_say_what_is_learned(name: str, rows: list[list[str]]) -> None:
    tokenizer = byte_tokenizer(bos=True)
    tokenizer.chat_template = trl_template(name)
    found = encode_conversation(tokenizer, Conversation(messages=TWO_TURNS[1:]))
    texts = [[text for kind, text in parts(tokenizer, *row) if kind == "learned"] for row in found]
    assert texts == rows


def test_tools_that_are_no_schemas_are_refused() -> None:
    with pytest.raises(UnusableRowError, match="the chat template refuses them: Tools should either be a JSON schema"):
        encoded(f"{{% if tools %}}{{% endif %}}{CHATML}", TWO_TURNS, tools=["sum"])


def test_a_role_that_the_template_names_is_known() -> None:
    messages = [{"role": "critic", "content": "5"}, *TWO_TURNS[1:3]]
    assert encoded("{% if messages[0]['role'] == 'critic' %}{% endif %}" + CHATML, messages)


def test_tools_that_the_template_leaves_out_are_refused() -> None:
    with pytest.raises(UnusableRowError, match="the chat template does not write tools"):
        encoded(CHATML, TWO_TURNS, tools=[{"name": "sum"}])


def test_tools_are_written_where_the_template_does() -> None:
    ((read, _),) = encoded("{{ tools[0]['name'] }}: " + CHATML, TWO_TURNS[1:3], tools=[{"name": "sum"}])
    assert read[1].startswith("sum: <|im_start|>user")


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (CHATML, ["the chat template ends a turn by '<|im_end|>' and not by the EOS token '<eos>'"]),
        (CHATML.replace("<|im_end|>", "{{ eos_token }}"), []),
        (CHATML.replace("<|im_end|>", "."), ["the chat template ends a turn by no token of its own"]),
    ],
)
def test_a_turn_that_ends_by_another_token_than_a_text_does_is_said(template: str, said: list[str]) -> None:
    tokenizer = chat_tokenizer(template)
    ((_, labels),) = encode_conversation(tokenizer, Conversation(messages=TWO_TURNS))
    assert [re.split(r"[:,]|\. ", line)[0] for line in describe_turn_end(tokenizer, labels)] == said


def test_a_template_is_a_file_or_the_text_itself(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(CHATML, encoding="utf-8")
    marked = tmp_path / "marked.jinja"
    marked.write_text(CHATML, encoding="utf-8-sig")
    for given in (CHATML, str(file), str(marked)):
        tokenizer = byte_tokenizer()
        set_chat_template(tokenizer, given)
        assert tokenizer.chat_template == CHATML


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("nowhere.jinja", r"'nowhere.jinja' is neither a file nor a template \(which has a \{\{ or \{%\)"),
        ("{% for %}", "is no Jinja: line 1: "),
        ("latin.jinja", r"chat_template='latin.jinja': latin.jinja is not UTF-8 text: line 5 has the byte 0xe9"),
    ],
)
def test_what_is_no_template_is_refused(
    given: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("latin.jinja").write_bytes(f"{CHATML}\n{{# café #}}".encode("latin-1"))
    with pytest.raises(ValueError, match=message):
        set_chat_template(byte_tokenizer(), given)
