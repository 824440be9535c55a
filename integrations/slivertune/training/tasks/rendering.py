"""Calls of a chat template, for all messages, the first few, or the prompt that asks for a turn."""

from collections.abc import Callable
from typing import TypeVar

from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from slivertune.core.transformers_internals import generation_spans
from slivertune.training.data.conversations import Conversation, UnusableRowError

_Value = TypeVar("_Value")

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
                conversation.messages[:num_messages],
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
    return _or_unusable(lambda: generation_spans(tokenizer, conversation.messages, conversation.tools))


def _or_unusable(apply: Callable[[], _Value]) -> _Value:
    try:
        return apply()
    except TemplateSyntaxError:
        raise
    except Exception as error:  # a template is a program and may fail in any way
        raise UnusableRowError(f"the chat template refuses them: {error}") from error
