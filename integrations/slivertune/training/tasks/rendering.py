"""Calls of a chat template, for all messages, the first few, or the prompt that asks for a turn."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from slivertune.core.transformers_internals import generation_spans
from slivertune.training.data.conversations import Conversation, UnusableRowError

_Value = TypeVar("_Value")
_SAMPLE = "Zq"
"""Text that no template has itself."""

Span = tuple[int, int]
"""Start and end of a stretch of text, in characters."""


def render(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    num_messages: int | None = None,
    *,
    prompts: bool = False,
) -> str:
    """Render the first messages of a conversation by the chat template.

    Args:
        tokenizer: Tokenizer with a chat template.
        conversation: The messages.
        num_messages: Number of messages to render; None for all.
        prompts: Whether to append the generation prompt of the next turn.

    Raises:
        UnusableRowError: If the template rejects the messages.
    """
    return str(
        _or_unusable(
            lambda: tokenizer.apply_chat_template(
                _for_template(tokenizer, conversation)[:num_messages],
                tools=conversation.tools,
                tokenize=False,
                add_generation_prompt=prompts,
            )
        )
    )


def render_blocks(tokenizer: PreTrainedTokenizerBase, conversation: Conversation) -> tuple[str, list[Span]]:
    """Render a conversation, and find the spans of the template's `{% generation %}` blocks in the text.

    Raises:
        UnusableRowError: If the template rejects the messages.
    """
    messages = _for_template(tokenizer, conversation)
    return _or_unusable(lambda: generation_spans(tokenizer, messages, conversation.tools))


def _for_template(tokenizer: PreTrainedTokenizerBase, conversation: Conversation) -> list[dict[str, Any]]:
    """Return the messages with each text as the template reads it."""
    messages = conversation.messages
    if not _reads_only_parts(tokenizer, tokenizer.get_chat_template(tools=conversation.tools)):
        return messages
    return [
        {**each, "content": _as_parts(each["content"])} if isinstance(each.get("content"), str) else each
        for each in messages
    ]


@lru_cache(maxsize=8)
def _reads_only_parts(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    """Return whether a template writes lists of parts and no plain text, as those of models with images (Idefics 3)."""

    def writes(content: Any) -> bool:
        try:
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": content}], chat_template=template, tokenize=False
            )
        except TemplateSyntaxError:
            raise
        except Exception:  # a template is a program and may fail in any way
            return False
        return _SAMPLE in text

    return not writes(_SAMPLE) and writes(_as_parts(_SAMPLE))


def _as_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _or_unusable(apply: Callable[[], _Value]) -> _Value:
    try:
        return apply()
    except TemplateSyntaxError:
        raise
    except Exception as error:  # a template is a program and may fail in any way
        raise UnusableRowError(f"the chat template refuses them: {error}") from error
