"""Prompt templates for rows, and label words with their tokens.

The paper's prompts (appendix B.4, Tables 12 and 13) put a row's texts into a template with one open place. The label is
read from the word that the language model finds likeliest there.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from slivertune.training.tasks.task import ModelKind
from slivertune.training.tasks.tokenization import Columns, token_ids

MASK = "mask"
"""Placeholder of the label word."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Template:
    """A prompt with placeholders.

    Args:
        text: Text as the user wrote it, with {column} and {mask} placeholders; literal braces are doubled.
        pieces: Pairs of literal text and the placeholder after it (None at the end), in order.
    """

    text: str
    pieces: tuple[tuple[str, str | None], ...]

    @classmethod
    def parse(cls, text: str) -> Template:
        """Parse a template.

        Raises:
            ValueError: If a brace is open, a placeholder is no plain name, no column is named, or {mask} comes twice.
        """
        try:
            parsed = list(string.Formatter().parse(text))
        except ValueError as error:
            raise ValueError(f"template {text!r} can't be read: {error}. Write a literal brace twice") from error
        for _, name, form, conversion in parsed:
            if name is not None and (not name or form or conversion):
                raise ValueError(
                    f"template {text!r} has the placeholder {{{name}{'!' if conversion else ''}{conversion or ''}"
                    f"{':' if form else ''}{form or ''}}}, which is no plain column name. Write a literal brace twice"
                )
        template = cls(text=text, pieces=tuple((literal, name) for literal, name, _, _ in parsed))
        if not template.columns:
            raise ValueError(f"template {text!r} names no column. Put one in, as in '{{sentence}} It was {{mask}} .'")
        if sum(name == MASK for _, name in template.pieces) > 1:
            raise ValueError(f"template {text!r} has {{mask}} more than once, and only one place is scored. Keep one")
        return template

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that the template names, each once."""
        return tuple(dict.fromkeys(name for _, name in self.pieces if name not in (None, MASK) and name is not None))

    @property
    def has_mask(self) -> bool:
        """Whether the place of the label word is marked."""
        return any(name == MASK for _, name in self.pieces)

    @property
    def before_mask(self) -> Template:
        """Template before {mask}, or the whole template if it has none."""
        if not self.has_mask:
            return self
        place = [name for _, name in self.pieces].index(MASK)
        return Template(text=self.text, pieces=(*self.pieces[:place], (self.pieces[place][0], None)))

    def values(self, batch: Columns) -> list[dict[str, str]]:
        """Return the texts in a batch's columns that the template names, row by row."""
        texts = zip(*(batch[column] for column in self.columns), strict=True)
        return [dict(zip(self.columns, map(str, row), strict=True)) for row in texts]

    def fill(self, values: Mapping[str, str], mask: str = "") -> str:
        """Fill in the values and the mask token. Nothing inside a value is read as a placeholder."""
        filled = {**values, MASK: mask}
        return "".join(literal + ("" if name is None else filled[name]) for literal, name in self.pieces)


def prompt_model_kind(config: PreTrainedConfig) -> ModelKind:
    """Determine whether a model is a masked or a causal language model.

    Args:
        config: Configuration of the model. The architecture decides if it is named, as in a saved model, else the type.

    Returns:
        "masked_lm" or "causal_lm".

    Raises:
        ValueError: If the model is an encoder-decoder.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"task=prompt_classification takes masked and causal language models, and {config.model_type} is an "
            "encoder-decoder. Choose another model"
        )
    architectures = getattr(config, "architectures", None) or ()
    if any(name.endswith("ForMaskedLM") for name in architectures):
        return "masked_lm"
    if any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in architectures) or getattr(
        config, "is_decoder", False
    ):
        return "causal_lm"
    return "masked_lm" if config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES else "causal_lm"


def parse_label_words(text: str, labels: Sequence[str]) -> tuple[str, ...]:
    """Assign a word to every label.

    Args:
        text: Words in the order of the labels ("terrible,great"), or pairs ("0=terrible,1=great").
        labels: Labels of the training split.

    Returns:
        One word per class.

    Raises:
        ValueError: If words and labels don't match one to one.
    """
    words = [word.strip() for word in text.split(",")]
    there = ", ".join(labels)
    if all("=" in word for word in words):
        named = {label.strip(): word.strip() for label, _, word in (word.partition("=") for word in words)}
        if set(named) != set(labels) or len(named) != len(words):
            raise ValueError(
                f"label_words={text!r} names the labels {', '.join(named)}, and the data has {there}. Name each once"
            )
        words = [named[label] for label in labels]
    if len(words) != len(labels):
        raise ValueError(
            f"label_words={text!r} are {len(words)} words for {len(labels)} labels ({there}). Give each label one"
        )
    if not all(words) or len(set(words)) != len(words):
        raise ValueError(f"label_words={text!r} must be different words, none empty. Give each label its own word")
    return tuple(words)


def mask_token_ids(tokenizer: PreTrainedTokenizerBase, words: tuple[str, ...], template: Template) -> tuple[int, ...]:
    """Return the single token of every label word, as a masked language model scores it.

    Byte-level tokenizers have one token for a word after a space and another for the word alone. The form that the
    template requires is tried first, then the other. All words take the same form.

    Args:
        tokenizer: The tokenizer.
        words: One word per class.
        template: Template, which shows whether {mask} follows white space.

    Returns:
        One token id per class.

    Raises:
        ValueError: If in neither form every word is one known token of its own. The message names the tokens.
    """
    before = template.before_mask.fill(dict.fromkeys(template.columns, "x"))
    tried = []
    for lead in (" ", "") if before[-1:].isspace() else ("", " "):
        ids = token_ids(tokenizer, [lead + word for word in words])
        known = {word_ids[0] for word_ids in ids if len(word_ids) == 1 and word_ids[0] != tokenizer.unk_token_id}
        if len(known) == len(words):
            return tuple(word_ids[0] for word_ids in ids)
        tried.append(ids)
    pieces = "; ".join(
        f"{word!r} is {tokenizer.convert_ids_to_tokens(first)} or {tokenizer.convert_ids_to_tokens(second)}"
        for word, first, second in zip(words, *tried, strict=True)
    )
    raise ValueError(
        f"label words of a masked language model must each be one known token of their own, and these are not: "
        f"{pieces}. Choose words that the tokenizer knows"
    )


def cut_to_fit(values: dict[str, str], fits: Callable[[dict[str, str]], bool]) -> dict[str, str]:
    """Shorten the longest values until a row fits, without cutting the template.

    Args:
        values: Column -> text.
        fits: Function that tells whether a row with these values is short enough.

    Returns:
        The values, each cut to the same maximum number of characters, the largest that fits (found by bisection).

    Raises:
        ValueError: If the row is too long even with empty values.
    """
    low, high = 0, max(len(text) for text in values.values())
    if not fits(dict.fromkeys(values, "")):
        raise ValueError("the template alone is longer than --max_length. Raise it")
    while low < high:
        middle = (low + high + 1) // 2
        if fits({name: text[:middle] for name, text in values.items()}):
            low = middle
        else:
            high = middle - 1
    return {name: text[:low] for name, text in values.items()}
