"""Conversations through a chat template, with labels on the assistant's turns alone."""

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias, TypeVar

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from slivertune.core.suggestions import did_you_mean
from slivertune.core.transformers_internals import generation_spans
from slivertune.training.data.conversations import TEMPLATE_ROLES, Conversation, UnusableRowError
from slivertune.training.tasks.tokenization import IGNORED, common_prefix_length, token_ids

Encoded: TypeAlias = tuple[list[int], list[int]]
"""Token ids and labels of one row, of one length."""

_Value = TypeVar("_Value")

_NO_PROMPT_HAS = "\uffff"
"""No character: it tells in a turn where the answer begins."""
_OTHER_BEGIN = (
    "the chat template does not begin the assistant's turn with its generation prompt (a --chat_template may mark the "
    "turn by {% generation %} and {% endgeneration %})"
)
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
    answers nothing, and is not learned so. Where the end of the generation prompt is not in the data (DeepSeek-R1's
    `<think>`), the rest of it is what begins a turn.

    Some templates write a turn otherwise once others follow (Qwen3 leaves out earlier thoughts). Such a conversation
    becomes a row for each turn, which ends with it and has labels on it alone: as it is at generation.

    Args:
        tokenizer: Has a chat template.
        conversation: Messages, at least one the assistant's.

    Returns:
        One row; or one for each turn.

    Raises:
        UnusableRowError: If the template refuses the messages, leaves out tools or calls of them, does not know a
            role, or begins the assistant's turn otherwise than by its generation prompt.
    """
    template = tokenizer.get_chat_template(tools=conversation.tools)
    _check_is_written(template, conversation)
    context = conversation.messages[: conversation.num_context]
    if _GENERATION.search(template) and not any(message["role"] == "assistant" for message in context):
        return [_by_generation_blocks(tokenizer, conversation)]
    turns = [place for place in conversation.turns if place > 0]
    if not turns:
        raise UnusableRowError("no assistant turn after another message")
    starts = [_render(tokenizer, conversation, place, prompts=True) for place in turns]
    ends = [_render(tokenizer, conversation, place + 1, prompts=False) for place in turns]
    whole = _render(tokenizer, conversation, len(conversation.messages), prompts=False)
    if not _begin(starts, ends):
        starts = [_turn_begin(tokenizer, conversation, place) for place in turns]
        if not _begin(starts, ends):
            raise UnusableRowError(_OTHER_BEGIN)
    if all(later.startswith(earlier) for earlier, later in pairwise([*_woven(starts, ends), whole])):
        return [_between(tokenizer, whole, starts, ends)]
    return [_between(tokenizer, end, [start], [end]) for start, end in zip(starts, ends, strict=True)]


def _check_is_written(template: str, conversation: Conversation) -> None:
    """Refuse what a template would leave out, or write as somebody's of whom the model never heard."""
    if conversation.tools and not re.search(r"\btools\b", template):
        raise UnusableRowError("the chat template does not write tools")
    for message in conversation.messages:
        if message.get("tool_calls") and "tool_calls" not in template:
            raise UnusableRowError("the chat template does not write calls of tools (tool_calls)")
        role = str(message["role"])
        if role not in TEMPLATE_ROLES and not re.search(rf"""['"]{re.escape(role)}['"]""", template):
            meant = did_you_mean(role, TEMPLATE_ROLES).removeprefix("; ") or f"none of {', '.join(TEMPLATE_ROLES)}"
            raise UnusableRowError(f"a message of the role {role!r}, which the chat template does not name ({meant})")


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


def describe_turn_begin(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Say what a generation prompt has at its end that answers in the data are not begun by.

    Args:
        tokenizer: Has a chat template.

    Returns:
        One line, or none; also none where the template refuses a single question.
    """
    asked = Conversation(messages=[{"role": "user", "content": "?"}])
    try:
        prompt, begin = _render(tokenizer, asked, 1, prompts=True), _turn_begin(tokenizer, asked, 1)
    except UnusableRowError:
        return []
    if _GENERATION.search(tokenizer.get_chat_template()) or begin == prompt:
        return []
    rest = prompt.removeprefix(begin)
    line = (
        f"the chat template's generation prompt ends by {rest!r}, which it does not write before the answers in the "
        "data: they are learned without it; a --chat_template may have it in both, or in none"
    )
    return [line]


def _turn_begin(tokenizer: PreTrainedTokenizerBase, conversation: Conversation, place: int) -> str:
    """What the template writes up to a turn, as far as its generation prompt is what begins the turn in the data."""
    answered = [*conversation.messages[:place], {"role": "assistant", "content": _NO_PROMPT_HAS}]
    before = _render(tokenizer, conversation, place, prompts=False)
    prompt = _render(tokenizer, conversation, place, prompts=True)
    whole = _render(tokenizer, replace(conversation, messages=answered), len(answered), prompts=False)
    begin = prompt[: common_prefix_length((prompt, whole))]
    if len(begin) <= len(before):
        raise UnusableRowError(_OTHER_BEGIN)
    return begin


def _begin(starts: list[str], ends: list[str]) -> bool:
    return all(end.startswith(start) for start, end in zip(starts, ends, strict=True))


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
