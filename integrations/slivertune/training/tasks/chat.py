"""Tokenisation of conversations by a chat template, with labels on the assistant's turns only."""

import re
from collections.abc import Iterable
from datetime import date
from typing import TypeAlias

from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from slivertune.core.suggestions import did_you_mean
from slivertune.core.text_encoding import find_not_utf8
from slivertune.core.transformers_internals import has_generation_blocks, template_date
from slivertune.core.user_path import user_path
from slivertune.training.data.conversations import (
    TEMPLATE_ROLES,
    Conversation,
    UnusableRowError,
    check_something_is_said,
)
from slivertune.training.tasks.marked_words import mark_words
from slivertune.training.tasks.rendering import Span, render, render_blocks
from slivertune.training.tasks.special_ends import TEMPLATE_REMARK, messages_once
from slivertune.training.tasks.tokenization import IGNORED, split_token_ids
from slivertune.training.tasks.turn_spans import find_turn, find_turns, turn_begin
from slivertune.training.tasks.written_words import WrittenWords, check_all_is_written, find_words

Encoded: TypeAlias = tuple[list[int], list[int]]
"""Token ids and labels of one row, of the same length."""

UNMARKED_REMARK = "the template's generation blocks leave out words of the assistant"
_ELSEWHERE = "the chat template writes words of an assistant's turn outside the learned part"


def set_chat_template(tokenizer: PreTrainedTokenizerBase, given: str) -> None:
    """Set the chat template of a tokenizer.

    Args:
        tokenizer: Tokenizer that gets the template, and saves it with itself.
        given: Value of `--chat_template`: the path of a Jinja file, or the template itself, which has a `{{` or `{%`.

    Raises:
        ValueError: If the value is neither a file nor a template, is not valid Jinja, or is a file that is not UTF-8.
    """
    is_template = "{{" in given or "{%" in given
    if not is_template and not user_path(given).is_file():
        raise ValueError(
            f"chat_template={given!r} is neither a file nor a template (which has a {{{{ or {{%). Give the path of a "
            "Jinja file, or the template itself"
        )
    if not is_template and (not_text := find_not_utf8(user_path(given))) is not None:
        raise ValueError(f"chat_template={given!r}: {not_text}")
    tokenizer.chat_template = given if is_template else user_path(given).read_text(encoding="utf-8-sig")
    try:
        render(tokenizer, Conversation(messages=[{"role": "user", "content": ""}]))
    except UnusableRowError:
        # The rows will show which conversations the template accepts.
        return
    except TemplateSyntaxError as error:
        raise ValueError(
            f"chat_template={given!r} is no Jinja: line {error.lineno}: {error.message}. Correct it there"
        ) from error


def encode_conversation(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    *,
    day: date | None = None,
    remarks: list[str] | None = None,
) -> list[Encoded]:
    """Tokenise a conversation as its chat template renders it, with labels on the assistant's turns.

    If the template has `{% generation %}` blocks, only these are trained on, even if words of the assistant stand
    outside. Otherwise, the tokens between the generation prompt and the end of the turn are trained on: the messages
    before a turn, rendered with the generation prompt, are a prefix of the messages up to the turn. A turn that opens a
    conversation answers nothing, and is then not trained on. If the end of the generation prompt is not in the data
    (DeepSeek-R1's `<think>`), a turn begins after the rest of the prompt.

    Some templates render a turn differently once others follow (Qwen3 leaves out earlier thoughts). Such a conversation
    becomes one row per turn, which ends with the turn and has labels on it only, as at generation.

    Characters are tokenised once, and the number of renderings per message does not grow with the conversation, unless
    it becomes several rows or the template writes letters into the words of a message.

    Args:
        tokenizer: Tokenizer with a chat template.
        conversation: Messages, at least one of them the assistant's.
        day: Date that the template writes; None for today.
        remarks: List that gets lines about text that differs from the data.

    Returns:
        One row, or one per turn.

    Raises:
        UnusableRowError: If a turn consists only of special tokens, or if the template rejects the messages, leaves out
            a message, tools or tool calls, does not know a role, or begins the assistant's turn differently from its
            generation prompt.
    """
    template = tokenizer.get_chat_template(tools=conversation.tools)
    _check_is_written(template, conversation)
    remarks = [] if remarks is None else remarks
    with template_date(template, day):
        given, conversation = conversation, messages_once(tokenizer, conversation)
        if conversation != given:
            check_something_is_said(conversation)
            remarks.append(TEMPLATE_REMARK)
        if has_generation_blocks(template):
            return [_by_generation_blocks(tokenizer, conversation, remarks)]
        return _by_prompts(tokenizer, conversation, remarks)


def _check_is_written(template: str, conversation: Conversation) -> None:
    """Reject tools and tool calls that a template would leave out, and roles that it does not name."""
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
    """Report turns that don't end with the tokenizer's EOS token, so that generation would run past them.

    Args:
        tokenizer: Tokenizer with a chat template.
        labels: Labels of one row that was not cut.

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
            "the chat template ends a turn by no token of its own, so the model does not learn where to stop. "
            "Write {{ eos_token }} after it in a --chat_template"
        )
        return [line]
    line = (
        f"the chat template ends a turn by {end!r} and not by the EOS token {tokenizer.eos_token!r}. To end "
        f"generation with the turn, pass the id of {end!r} as eos_token_id"
    )
    return [line]


def describe_turn_begin(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Report text at the end of a generation prompt that does not begin the answers in the data.

    Args:
        tokenizer: Tokenizer with a chat template.

    Returns:
        One line, or none. There is none either if the template rejects a single question.
    """
    asked = Conversation(messages=[{"role": "user", "content": "?"}])
    try:
        prompt, begin = render(tokenizer, asked, prompts=True), turn_begin(tokenizer, asked, 1)
    except UnusableRowError:
        return []
    if has_generation_blocks(tokenizer.get_chat_template()) or begin == prompt:
        return []
    rest = prompt.removeprefix(begin)
    line = (
        f"the chat template's generation prompt ends by {rest!r}, which it does not write before the answers in the "
        "data, so they are learned without it. A --chat_template may have it in both, or in none"
    )
    return [line]


def _by_prompts(tokenizer: PreTrainedTokenizerBase, conversation: Conversation, remarks: list[str]) -> list[Encoded]:
    """Label the text after the generation prompt in each turn to train on."""
    turns = [place for place in conversation.turns if place > 0]
    if not turns:
        raise UnusableRowError("no assistant turn after another message")
    if turns != conversation.turns:
        remarks.append("the assistant's turn that opens a conversation is read and not learned")
    marked = mark_words(conversation)
    text = render(tokenizer, conversation)
    written = find_words(marked, render(tokenizer, marked.conversation), text)
    spans = find_turns(tokenizer, conversation, text, turns, written)
    if spans is not None:
        remarks += check_all_is_written(written, len(conversation.messages) - 1, turns)
        _check_are_inside(written, zip(turns, spans, strict=True))
        return [_label(tokenizer, text, spans)]
    rows = []
    for place in turns:
        text = render(tokenizer, conversation, place + 1)
        written = find_words(marked, render(tokenizer, marked.conversation, place + 1), text)
        remarks += check_all_is_written(written, place, [place])
        span = find_turn(tokenizer, conversation, place, text)
        if span is None:
            raise UnusableRowError(_ELSEWHERE)
        _check_are_inside(written, [(place, span)])
        rows.append(_label(tokenizer, text, [span]))
    return rows


def _check_are_inside(written: WrittenWords, turns: Iterable[tuple[int, Span]]) -> None:
    """Reject a turn with words outside its span."""
    if any(written.leave_out(place, [span]) for place, span in turns):
        raise UnusableRowError(_ELSEWHERE)


def _by_generation_blocks(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation, remarks: list[str]
) -> Encoded:
    """Label the blocks that the template marks as generated, in the turns to train on."""
    marked = mark_words(conversation)
    text, blocks = render_blocks(tokenizer, conversation)
    marked_text, marked_blocks = render_blocks(tokenizer, marked.conversation)
    if len(blocks) != len(marked_blocks):
        raise UnusableRowError("the chat template marks other blocks as generated for other words of a turn")
    written = find_words(marked, marked_text, text)
    remarks += check_all_is_written(written, len(conversation.messages) - 1, conversation.turns)
    learned: dict[int, list[Span]] = {place: [] for place in conversation.turns}
    for block, marked_block in zip(blocks, marked_blocks, strict=True):
        owners = written.messages_in(*marked_block)
        to_learn = owners & learned.keys()
        if to_learn and to_learn != owners:
            raise UnusableRowError("the chat template marks a turn that is learned and another in one block")
        for owner in to_learn:
            learned[owner].append(block)
    blocks = [block for of_turn in learned.values() for block in of_turn]
    if not blocks:
        raise UnusableRowError("the chat template marks no words of the assistant's turns that are learned")
    if any(not of_turn or written.leave_out(place, of_turn) for place, of_turn in learned.items()):
        remarks.append(UNMARKED_REMARK)
    return _label(tokenizer, text, blocks)


def _label(tokenizer: PreTrainedTokenizerBase, text: str, learned: Iterable[Span]) -> Encoded:
    """Tokenise a text, with labels on the spans to train on."""
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON may have half of a surrogate pair, which no tokenizer takes
        raise UnusableRowError("a character that is no Unicode (half of a surrogate pair)") from error
    spans = sorted(set(learned))
    ids, places = split_token_ids(tokenizer, text, [border for span in spans for border in span])
    labels = [IGNORED] * len(ids)
    for start, end in zip(places[::2], places[1::2], strict=True):
        labels[start:end] = ids[start:end]
    return ids, labels
