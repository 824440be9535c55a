"""Calls of a chat template: all messages, the first few, and the prompt that asks for a turn."""

from collections.abc import Callable
from typing import TypeVar

from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from slivertune.core.transformers_internals import generation_spans
from slivertune.training.data.conversations import Conversation, UnusableRowError

_Value = TypeVar("_Value")

Span = tuple[int, int]
"""From where to where, in characters."""


def render(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    num_messages: int | None = None,
    *,
    prompts: bool = False,
) -> str:
    """Write the first messages of a conversation by the chat template.

    Args:
        tokenizer: Has a chat template.
        conversation: The messages.
        num_messages: How many of them; all if None.
        prompts: Whether the generation prompt of a turn that is to come follows.

    Raises:
        UnusableRowError: If the template refuses the messages.
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
    """Write a conversation, and find where the template's `{% generation %}` blocks lie in the text.

    Raises:
        UnusableRowError: If the template refuses the messages.
    """
    return _or_unusable(lambda: generation_spans(tokenizer, conversation.messages, conversation.tools))


def _or_unusable(apply: Callable[[], _Value]) -> _Value:
    try:
        return apply()
    except TemplateSyntaxError:
        raise
    except Exception as error:  # a template is a program, which may fail by anything
        raise UnusableRowError(f"the chat template refuses them: {error}") from error
