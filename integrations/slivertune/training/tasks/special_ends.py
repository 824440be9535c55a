"""Special tokens at the ends of a row, written once even if the data has them, too."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from slivertune.training.data.conversations import Conversation, UnusableRowError
from slivertune.training.tasks.marked_words import find_marks, mark_of
from slivertune.training.tasks.rendering import render
from slivertune.training.tasks.tokenization import added_tokens, leading_special_tokens

TEMPLATE_REMARK = "messages contain special tokens that the chat template also writes. The row has them once"
_SAMPLE = Conversation(messages=[{"role": role, "content": ""} for role in ("user", "assistant") * 2])
"""Sample conversation, rendered beside the one at hand to find the tokens that a template usually writes."""
_FIRST = ""
"""Key in place of a role, for the first message of any role."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecialEnds:
    """Special tokens at the ends of a row of plain text.

    Args:
        begin: Tokens before the text, such as BOS; empty if the tokenizer has none.
        adds_begin: Whether every row gets them, or only rows whose text has them.
        end: Token behind the text, which every row gets.
    """

    begin: str
    adds_begin: bool
    end: str

    @property
    def remark(self) -> str:
        """Line about texts that have such tokens themselves."""
        tokens = " or ".join(repr(token) for token in dict.fromkeys((self.begin, self.end)) if token)
        return f"the text already has {tokens}, which each row gets anyway. The row has it once"

    def text_once(self, text: str) -> str:
        """Return a text without the special tokens that its row gets, and with the others at most once."""
        return self._begin_once(without_end(text, (self.end,)))

    def pair_once(self, prompt: str, response: str) -> tuple[str, str]:
        """Return the prompt and the response of one row, without the special tokens that the row gets."""
        prompt, response = self._begin_once(prompt), without_end(response, (self.end,))
        if self.adds_begin or (self.begin and prompt.startswith(self.begin)):
            response = without_begin(response, self.begin)
        return prompt, response

    def _begin_once(self, text: str) -> str:
        bare = without_begin(text, self.begin)
        return bare if self.adds_begin or bare == text else self.begin + bare


def special_ends(tokenizer: PreTrainedTokenizerBase) -> SpecialEnds:
    """Find the special tokens at the ends of a row of plain text.

    Args:
        tokenizer: Tokenizer with an EOS token.
    """
    leading = "".join(map(str, tokenizer.convert_ids_to_tokens(leading_special_tokens(tokenizer))))
    return SpecialEnds(
        begin=leading or str(tokenizer.bos_token or ""), adds_begin=bool(leading), end=str(tokenizer.eos_token)
    )


def added_ends(tokenizer: PreTrainedTokenizerBase) -> SpecialEnds:
    """Find the special tokens that a tokenizer itself puts around a text, such as [CLS] and [SEP]."""
    encoded = tokenizer("a", return_special_tokens_mask=True)
    special = list(encoded["special_tokens_mask"])
    num_behind = special[::-1].index(0) if 0 in special else 0
    behind = encoded["input_ids"][len(special) - num_behind :]
    begin, end = (
        "".join(map(str, tokenizer.convert_ids_to_tokens(ids))) for ids in (leading_special_tokens(tokenizer), behind)
    )
    return SpecialEnds(begin=begin, adds_begin=True, end=end)


def without_begin(text: str, token: str) -> str:
    """Return a text without a special token at its beginning, however often it is there."""
    rest = text
    while token and rest.lstrip().startswith(token):
        rest = rest.lstrip().removeprefix(token)
    return rest


def without_end(text: str, tokens: Iterable[str]) -> str:
    """Return a text without special tokens at its end, however often they are there."""
    rest, tokens = text, tuple(token for token in tokens if token)
    while found := [token for token in tokens if rest.rstrip().endswith(token)]:
        rest = rest.rstrip().removesuffix(max(found, key=len))
    return rest


def messages_once(tokenizer: PreTrainedTokenizerBase, conversation: Conversation) -> Conversation:
    """Return a conversation without the special tokens in its messages that the chat template writes anyway.

    These are BOS before the first message (or before later ones, if the template repeats it), and the token that ends a
    turn, behind a message.

    Args:
        tokenizer: Tokenizer with a chat template.
        conversation: The messages.
    """
    tokens = [str(token) for token in added_tokens(tokenizer, len(tokenizer)).values()]
    has_ends = [
        without_begin(text, str(tokenizer.bos_token or "")) != text or text.rstrip().endswith(tuple(tokens))
        for text in (message.get("content") for message in conversation.messages)
        if isinstance(text, str)
    ]
    if not any(has_ends):
        return conversation
    begins, ends = _written_by_template(tokenizer, conversation, tokens)
    messages = []
    for place, message in enumerate(conversation.messages):
        text, role = message.get("content"), message["role"]
        if isinstance(text, str):
            begin = begins.get(role if place else _FIRST, "")
            message = {**message, "content": without_begin(without_end(text, ends.get(role, ())), begin)}
        messages.append(message)
    return replace(conversation, messages=messages)


def _written_by_template(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation, tokens: Iterable[str]
) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    """Find where the chat template writes BOS, and the tokens that it writes behind messages.

    Returns:
        BOS by the message after it (`_FIRST`, or the role of a later message), and the tokens behind messages by role.
    """
    bos = str(tokenizer.bos_token or "")
    begins, ends = dict[str, str](), dict[str, tuple[str, ...]]()
    for each in (_SAMPLE, conversation):
        messages = [
            {**message, "content": mark_of(place)} if isinstance(message.get("content"), str) else message
            for place, message in enumerate(each.messages)
        ]
        try:
            text = render(tokenizer, replace(each, messages=messages))
        except UnusableRowError:
            continue
        found = find_marks(text, len(messages))
        borders = [0, *(border for _, span in found for border in span), len(text)]
        around = [text[begin:end].lstrip() for begin, end in zip(borders[::2], borders[1::2], strict=True)]
        behind = list[str]()
        for (place, _), before, after in zip(found, around, around[1:], strict=False):
            role = messages[place]["role"]
            # A token that ends the previous message is not the BOS of this one.
            if bos and bos in before.removeprefix(max(behind, key=len, default="")):
                begins[role if place else _FIRST] = bos
            # A text may end with several tokens.
            behind = [token for token in tokens if after.startswith(token) or (after is around[-1] and token in after)]
            ends[role] = (*ends.get(role, ()), *behind)
    return begins, ends
