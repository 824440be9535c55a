"""Turns found in one text: against a naive search that writes the conversation anew up to each turn."""

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from slivertune.core.transformers_internals import generation_spans
from slivertune.training.data.conversations import Conversation
from slivertune.training.tasks import rendering
from slivertune.training.tasks.chat import encode_conversation
from slivertune.training.tasks.marked_words import mark_words
from slivertune.training.tasks.rendering import render
from slivertune.training.tasks.turn_spans import find_turns
from slivertune.training.tasks.written_words import find_words
from tests.training.tiny import CHATML, MARKED, byte_tokenizer, chat_tokenizer, trl_template

CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "lookup", "arguments": {"city": "Bern", "n": 3}}}]}
PAIR = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": " 2\n"}]
LAST_ANSWER = "{% if loop.last and message['role'] == 'assistant' %}"
STABLE = ("cohere", "gemma3", "lfm2", "llama3", "llama3_2", "qwen2_5", "qwen3_instruct_2507")
"""Templates that write a turn alike, whatever follows."""


def templated(name: str) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer(bos=True)
    tokenizer.chat_template = trl_template(name)
    return tokenizer


def naive(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]]) -> list[tuple[int, int]]:
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    return [
        (
            len(tokenizer.apply_chat_template(messages[:place], tokenize=False, add_generation_prompt=True)),
            len(tokenizer.apply_chat_template(messages[: place + 1], tokenize=False)),
        )
        for place in places
    ]


def found(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]]) -> list[tuple[int, int]] | None:
    conversation = Conversation(messages=messages)
    marked, text = mark_words(conversation), render(tokenizer, conversation)
    written = find_words(marked, render(tokenizer, marked.conversation), text)
    return find_turns(tokenizer, conversation, text, conversation.turns, written)


@pytest.mark.parametrize("name", STABLE)
def test_turns_lie_where_a_naive_search_finds_them(name: str) -> None:
    tokenizer = templated(name)
    thought = {"role": "assistant", "content": "<think>\nsum\n</think>\n\n2"}
    for messages in (PAIR * 5, [*PAIR, PAIR[0], thought, *PAIR, PAIR[0]]):
        assert found(tokenizer, messages) == naive(tokenizer, messages)


@pytest.mark.parametrize("name", ["llama3_1", "llama3_2", "qwen2_5", "qwen3_instruct_2507"])
def test_calls_of_tools_are_turns(name: str) -> None:
    tokenizer = templated(name)
    messages = [PAIR[0], CALL, {"role": "tool", "content": '{"t": "4"}'}, PAIR[1], *PAIR, PAIR[0], CALL]
    assert found(tokenizer, messages) == naive(tokenizer, messages)


def test_a_template_that_writes_something_for_certain_words_is_searched_turn_by_turn() -> None:
    tokenizer = chat_tokenizer(CHATML.replace("<|im_end|>", "{% if 'please' in message['content'] %}!{% endif %}."))
    messages = [*PAIR, {"role": "user", "content": "1+1, please?"}, {"role": "assistant", "content": "2, please"}]
    assert found(tokenizer, messages) == naive(tokenizer, messages)


def test_a_turn_that_is_written_otherwise_later_is_not_found_in_the_whole() -> None:
    tokenizer = chat_tokenizer(CHATML.replace("<|im_end|>", f"{LAST_ANSWER}.{{% endif %}}<|im_end|>"))
    assert found(tokenizer, PAIR * 2) is None and found(tokenizer, PAIR) == naive(tokenizer, PAIR)


ASKED_FOR = [{"role": "user", "content": "1+1, please?"}, {"role": "assistant", "content": "2, please"}]
CALLED = [PAIR[0], CALL, {"role": "tool", "content": '{"t": "4"}'}, PAIR[1]]
LINES = [{"role": "user", "content": "1\n+1?"}, {"role": "assistant", "content": "2\n3"}]
BROKEN = CHATML.replace("message['content']", "message['content'].replace('\\n', '<br>')")
POLITE = CHATML.replace("<|im_end|>", "{% if 'please' in message['content'] %}!{% endif %}.")
GROWING = {
    "chatml": (CHATML, PAIR),
    "marked": (MARKED, PAIR),
    "llama3_1": ("llama3_1", CALLED),
    "qwen2_5": ("qwen2_5", CALLED),
    "qwen2_5_training": ("qwen2_5_training", CALLED),
    "text inside of words": (BROKEN, LINES),
    "text for certain words": (POLITE, [*PAIR, *ASKED_FOR]),
}
"""By name: a template, and messages that are repeated."""


@pytest.mark.parametrize("name", GROWING)
def test_a_conversation_is_tokenised_once_and_its_turns_are_not_written_one_by_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    template, repeated = GROWING[name]
    tokenizer = chat_tokenizer(template if "{" in template else trl_template(template))
    counted = {"characters": 0, "messages": 0}
    tokenise, write = type(tokenizer).__call__, type(tokenizer).apply_chat_template

    def counting_tokens(self: Any, text: Any, **options: Any) -> Any:
        counted["characters"] += sum(map(len, [text] if isinstance(text, str) else text))
        return tokenise(self, text, **options)

    def counting_messages(self: Any, messages: Any, **options: Any) -> Any:
        counted["messages"] += len(messages)
        return write(self, messages, **options)

    def counting_blocks(tokenizer: Any, messages: Any, tools: Any) -> Any:
        counted["messages"] += len(messages)
        return generation_spans(tokenizer, messages, tools)

    monkeypatch.setattr(type(tokenizer), "__call__", counting_tokens)
    monkeypatch.setattr(type(tokenizer), "apply_chat_template", counting_messages)
    monkeypatch.setattr(rendering, "generation_spans", counting_blocks)
    for num_repeats in (40, 160):
        messages = repeated * num_repeats
        length = len(tokenizer.apply_chat_template(messages, tokenize=False))
        counted.update(characters=0, messages=0)
        encode_conversation(tokenizer, Conversation(messages=messages))
        assert counted["characters"] == length
        # Whole, as it is and with two kinds of marks, and up to the last turn, with and without it. The first turns
        # are short.
        once = 6 * len(messages) + 20
        # Letters in words hide where these end, so that each turn is looked for in what is written up to it.
        limit = len(messages) ** 2 if name == "text inside of words" else once
        assert 2 * len(messages) <= counted["messages"] <= limit
