"""Conversations through a chat template, with labels on the assistant's turns alone."""

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias, TypeVar

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from slivertune.core.transformers_internals import generation_spans
from slivertune.training.data.conversations import Conversation, UnusableRowError
from slivertune.training.tasks.tokenization import IGNORED, common_prefix_length, token_ids

Encoded: TypeAlias = tuple[list[int], list[int]]
"""Token ids and labels of one row, of one length."""

_Value = TypeVar("_Value")

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def set_chat_template(tokenizer: PreTrainedTokenizerBase, given: str) -> None:
    """Put a chat template on a tokenizer.

    Args:
        tokenizer: Has the template afterwards, and saves it with itself.
        given: `--chat_template`: the path of a Jinja file, or the template itself, which has a `{{` or `{%`.

    Raises:
        ValueError: If it is neither, or no Jinja.
    """
    is_template = "{{" in given or "{%" in given
    if not is_template and not Path(given).expanduser().is_file():
        raise ValueError(
            f"chat_template={given!r} is neither a file nor a template (which has a {{{{ or {{%); give the path of a "
            "Jinja file, or the template itself"
        )
    tokenizer.chat_template = given if is_template else Path(given).expanduser().read_text(encoding="utf-8")
    try:
        _render(tokenizer, Conversation(messages=[{"role": "user", "content": ""}]), 1, prompts=False)
    except UnusableRowError:
        # Which conversations a template takes, the rows will show.
        return
    except TemplateSyntaxError as error:
        raise ValueError(f"chat_template={given!r} is no Jinja: line {error.lineno}: {error.message}") from error


def encode_conversation(tokenizer: PreTrainedTokenizerBase, conversation: Conversation) -> list[Encoded]:
    """Tokenise a conversation as its chat template writes it, with labels on the assistant's turns.

    Where the template has `{% generation %}` blocks, these are learned. Otherwise it is what follows the generation
    prompt: what the template writes for the messages before a turn, with the generation prompt, begins what it writes
    with the turn, and the tokens after that are learned, with all that ends the turn. A turn that opens a conversation
    answers nothing, and is not learned so.

    Some templates write a turn otherwise once others follow (Qwen3 leaves out earlier thoughts). Such a conversation
    becomes a row for each turn, which ends with it and has labels on it alone: as it is at generation.

    Args:
        tokenizer: Has a chat template.
        conversation: Messages, at least one the assistant's.

    Returns:
        One row; or one for each turn.

    Raises:
        UnusableRowError: If the template refuses the messages, or begins the assistant's turn otherwise than by its
            generation prompt.
    """
    template = tokenizer.get_chat_template(tools=conversation.tools)
    context = conversation.messages[: conversation.num_context]
    if _GENERATION.search(template) and not any(message["role"] == "assistant" for message in context):
        return [_by_generation_blocks(tokenizer, conversation)]
    turns = [place for place in conversation.turns if place > 0]
    if not turns:
        raise UnusableRowError("no assistant turn after another message")
    starts = [_render(tokenizer, conversation, place, prompts=True) for place in turns]
    ends = [_render(tokenizer, conversation, place + 1, prompts=False) for place in turns]
    whole = _render(tokenizer, conversation, len(conversation.messages), prompts=False)
    if not all(end.startswith(start) for start, end in zip(starts, ends, strict=True)):
        raise UnusableRowError(
            "the chat template does not begin the assistant's turn with its generation prompt (a --chat_template may "
            "mark the turn by {% generation %} and {% endgeneration %})"
        )
    if all(later.startswith(earlier) for earlier, later in pairwise([*_woven(starts, ends), whole])):
        return [_between(tokenizer, whole, starts, ends)]
    return [_between(tokenizer, end, [start], [end]) for start, end in zip(starts, ends, strict=True)]


def describe_turn_end(tokenizer: PreTrainedTokenizerBase, labels: list[int]) -> list[str]:
    """Say where generation would run on past a turn: it does not end by the tokenizer's EOS token.

    Args:
        tokenizer: Has a chat template.
        labels: Of one row, which was not cut.

    Returns:
        One line, or none.
    """
    learned = [label for label in labels if label != IGNORED]
    while learned and not str(tokenizer.decode(learned[-1:])).strip():
        learned.pop()
    if not learned or learned[-1] == tokenizer.eos_token_id:
        return []
    end = tokenizer.convert_ids_to_tokens(learned[-1])
    if learned[-1] not in tokenizer.added_tokens_decoder:
        line = (
            "the chat template ends a turn by no token of its own, so that the model does not learn where to stop; "
            "write {{ eos_token }} behind it in a --chat_template"
        )
        return [line]
    line = (
        f"the chat template ends a turn by {end!r} and not by the EOS token {tokenizer.eos_token!r}: where generation "
        "should end with the turn, pass the former's id as eos_token_id"
    )
    return [line]


def _woven(starts: list[str], ends: list[str]) -> list[str]:
    return [text for pair in zip(starts, ends, strict=True) for text in pair]


def _by_generation_blocks(tokenizer: PreTrainedTokenizerBase, conversation: Conversation) -> Encoded:
    text, spans = _or_unusable(lambda: generation_spans(tokenizer, conversation.messages, conversation.tools))
    return _between(tokenizer, text, [text[:start] for start, _ in spans], [text[:end] for _, end in spans])


def _between(tokenizer: PreTrainedTokenizerBase, text: str, starts: list[str], ends: list[str]) -> Encoded:
    """Tokens of a text, with labels from where each start ends to where its end ends; all are beginnings of the text.

    A token that reaches over a border belongs to what comes after it.
    """
    ids, *beginnings = token_ids(tokenizer, [text, *_woven(starts, ends)])
    borders = [common_prefix_length((ids, beginning)) for beginning in beginnings]
    labels = [IGNORED] * len(ids)
    for start, end in zip(borders[::2], borders[1::2], strict=True):
        labels[start:end] = ids[start:end]
    return ids, labels


def _render(tokenizer: PreTrainedTokenizerBase, conversation: Conversation, num_messages: int, *, prompts: bool) -> str:
    """What the template writes for the first messages, and for the beginning of a turn that is to come."""
    return str(
        _or_unusable(
            lambda: tokenizer.apply_chat_template(
                conversation.messages[:num_messages],
                tools=conversation.tools,
                tokenize=False,
                add_generation_prompt=prompts,
            )
        )
    )


def _or_unusable(apply: Callable[[], _Value]) -> _Value:
    try:
        return apply()
    except TemplateSyntaxError:
        raise
    # A template that joins what is no string fails by a TypeError, one that is given no schema for a tool by the other.
    except (TemplateError, TypeError, ValueError) as error:
        raise UnusableRowError(f"the chat template refuses them: {error}") from error
