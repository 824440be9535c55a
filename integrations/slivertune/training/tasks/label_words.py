"""Prompt-based classification by label words: inputs and scores for masked and causal language models.

A masked language model scores the label words at the mask (paper, Tables 1 and 12).

A causal language model has them after the prompt (paper, Tables 2 and 13). It is trained with the ordinary
language-modelling loss on the right label word's tokens, as MeZO trains causal models on these prompts. It is evaluated
by candidates (paper, appendix B.4): every label word is tried, and the one whose tokens have the largest sum of
log-probabilities wins. For words of one token this is the largest logit.

An evaluation row of a causal model is therefore one (example, candidate) pair, and must identify the pair to the hooks.
A Trainer passes them no column except the labels, and may take rows in any order, so the labels carry the pair: the
bits from `_TOKEN_BITS` on, above the token id, are 0 in a training row. In an evaluation row, they are
1 + (example * candidates + candidate) * candidates + right class. The hooks separate the two, and no model sees them.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import EvalPrediction, PreTrainedTokenizerBase

from slivertune.training.data.columns import LABEL_COLUMN, ROW_COLUMN
from slivertune.training.tasks.prompting import Template, cut_to_fit
from slivertune.training.tasks.tokenization import (
    IGNORED,
    Columns,
    as_columns,
    common_prefix_length,
    leading_special_tokens,
    token_ids,
)

_TOKEN_BITS = 24
_TOKEN_MASK = (1 << _TOKEN_BITS) - 1


def encode_masked_prompts(
    batch: Columns,
    *,
    tokenizer: PreTrainedTokenizerBase,
    template: Template,
    word_ids: tuple[int, ...],
    max_length: int,
    truncate: bool,
) -> Columns:
    """Fill the template for each row, with the right label word's token as the only label, at the mask token.

    Args:
        batch: The rows.
        tokenizer: Tokenizer with a mask token.
        template: Template with {mask}.
        word_ids: Token id of each class's label word.
        max_length: Maximum length of a row in tokens.
        truncate: Whether to shorten the texts of longer rows. The template is never cut.

    Returns:
        The batch, row by row; `length` counts tokens before a cut, `num_masks` the mask tokens in the row.
    """

    def encode(rows: list[dict[str, str]]) -> Columns:
        texts = [template.fill(row, str(tokenizer.mask_token)) for row in rows]
        return dict(tokenizer(texts, verbose=False))

    def fits(row: dict[str, str]) -> bool:
        return len(encode([row])["input_ids"][0]) <= max_length

    rows = template.values(batch)
    encoded = encode(rows)
    lengths = [len(ids) for ids in encoded["input_ids"]]
    if truncate and max(lengths) > max_length:
        sized = zip(rows, lengths, strict=True)
        encoded = encode([row if length <= max_length else cut_to_fit(row, fits) for row, length in sized])
    masks = [[token == tokenizer.mask_token_id for token in ids] for ids in encoded["input_ids"]]
    labels = [
        [word_ids[label] if is_mask else IGNORED for is_mask in row]
        for row, label in zip(masks, batch[LABEL_COLUMN], strict=True)
    ]
    num_masks = [sum(row) for row in masks]
    return {**encoded, "labels": labels, "length": lengths, "num_masks": num_masks, ROW_COLUMN: batch[ROW_COLUMN]}


@dataclass(frozen=True, slots=True)
class MaskedPromptHooks:
    """Loss and accuracy over the label words, for the hooks of a stock Trainer.

    Labels have shape (rows, positions): the label word's token at the mask, -100 elsewhere.

    Args:
        word_ids: Token id of each class's label word.
    """

    word_ids: tuple[int, ...]

    def loss(
        self, outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Compute the cross entropy of the label words' logits at the mask (a `compute_loss_func`).

        Args:
            outputs: Output of a masked language model, with `logits` of shape (rows, positions, vocabulary).
            labels: Labels, as described in the class.
            num_items_in_batch: Rows over all accumulated batches, from the Trainer; None for the rows of this batch.

        Returns:
            Mean over the rows, a scalar.
        """
        scores = self.scores(outputs["logits"], labels)
        words = torch.tensor(self.word_ids, device=labels.device)
        classes = (labels[labels != IGNORED].unsqueeze(1) == words).int().argmax(dim=1)
        total = F.cross_entropy(scores, classes, reduction="sum")
        return total / (len(classes) if num_items_in_batch is None else num_items_in_batch)

    def scores(self, logits: Any, labels: torch.Tensor) -> torch.Tensor:
        """Return the label words' logits at the mask (a `preprocess_logits_for_metrics`).

        Args:
            logits: Logits of shape (rows, positions, vocabulary), or a tuple that begins with them.
            labels: Labels, as described in the class, with one mask per row.

        Returns:
            float32 of shape (rows, classes).
        """
        logits = logits[0] if isinstance(logits, tuple) else logits
        words = torch.tensor(self.word_ids, device=logits.device)
        scores: torch.Tensor = logits[labels != IGNORED][:, words]
        return scores.float()

    def accuracy(self, prediction: EvalPrediction) -> dict[str, float]:
        """Return the share of rows whose label word scores highest (a `compute_metrics`)."""
        # All labels except the one at the mask are -100, so the largest is the label word.
        tokens = np.asarray(prediction.label_ids).max(axis=1)
        predicted = np.asarray(self.word_ids)[np.asarray(prediction.predictions).argmax(axis=1)]
        return {"accuracy": float(np.mean(predicted == tokens))}


def encode_causal_prompts(
    batch: Columns,
    indices: list[int],
    *,
    tokenizer: PreTrainedTokenizerBase,
    template: Template,
    words: tuple[str, ...],
    max_length: int,
    truncate: bool,
    candidates: bool,
) -> Columns:
    """Make prompts that end in a label word, with labels on the label word's tokens only.

    A label word follows the white space at the end of the template, or one space. Prompt and word are tokenised in one
    piece, and the word begins at the first token where a candidate differs from the prompt.

    Args:
        batch: The rows.
        indices: Positions of the rows in the split.
        tokenizer: The tokenizer.
        template: Template that ends where the label word stands.
        words: Label word of each class.
        max_length: Maximum length of a row in tokens.
        truncate: Whether to shorten the texts of longer rows. The template and the word are never cut.
        candidates: Whether to make one row per label word, for evaluation, instead of one row with the right word.

    Returns:
        The batch; `length` counts the tokens of the longest candidate before a cut.
    """
    leading = leading_special_tokens(tokenizer)
    spell = partial(_spell, tokenizer=tokenizer, leading=leading, template=template, words=words)

    def fits(row: dict[str, str]) -> bool:
        return max(map(len, spell(row)[0])) <= max_length

    encoded: list[dict[str, Any]] = []
    rows = zip(template.values(batch), batch[LABEL_COLUMN], batch[ROW_COLUMN], indices, strict=True)
    for row, label, number, example in rows:
        ids, num_silent = spell(row)
        length = max(map(len, ids))
        if truncate and length > max_length:
            ids, num_silent = spell(cut_to_fit(row, fits))
        for word in range(len(words)) if candidates else [label]:
            code = 1 + (example * len(words) + word) * len(words) + label if candidates else 0
            targets = [token | (code << _TOKEN_BITS) for token in ids[word][num_silent:]]
            labels = [*[IGNORED] * num_silent, *targets]
            encoded.append({"input_ids": ids[word], "labels": labels, "length": length, ROW_COLUMN: number})
    return as_columns(encoded)


def _spell(
    row: dict[str, str],
    *,
    tokenizer: PreTrainedTokenizerBase,
    leading: list[int],
    template: Template,
    words: tuple[str, ...],
) -> tuple[list[list[int]], int]:
    """Return one row of tokens per label word, and the number of tokens that belong to the prompt."""
    prompt = template.fill(row)
    space = "" if prompt[-1:].isspace() else " "
    *ids, prompt_ids = token_ids(tokenizer, [*(prompt + space + word for word in words), prompt])
    num_silent = len(leading) + min(common_prefix_length((word_ids, prompt_ids)) for word_ids in ids)
    return [[*leading, *word_ids] for word_ids in ids], num_silent


@dataclass(frozen=True, slots=True)
class CausalPromptHooks:
    """Loss and accuracy of label words after a prompt, for the hooks of a stock Trainer.

    Labels have shape (rows, positions): the label word's tokens with the row's code in the bits above, -100 elsewhere.

    Args:
        num_words: Number of label words.
    """

    num_words: int

    def loss(
        self, outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Compute the negative log-likelihood of the right label word (a `compute_loss_func`).

        Args:
            outputs: Output of a causal language model, with `logits` of shape (rows, positions, vocabulary).
            labels: Labels, as described in the class.
            num_items_in_batch: Labelled tokens over all accumulated batches and processes, from the Trainer; None for
                those of this batch.

        Returns:
            A scalar. In training, the mean over label-word tokens. In evaluation, the mean over examples of the sum
            over their word's tokens. A row with a wrong candidate adds nothing, so that batches of any size agree.
        """
        log_likelihood = self.scores(outputs["logits"], labels)
        num_tokens = (labels != IGNORED).sum()
        num_items = num_tokens if num_items_in_batch is None else num_items_in_batch
        # Positions without a label are -100, so the largest value of a row is a label.
        code = (labels.amax(dim=1) >> _TOKEN_BITS) - 1
        if bool((code < 0).all()):
            return torch.div(-log_likelihood.sum(), num_items)
        is_right = code // self.num_words % self.num_words == code % self.num_words
        # With rows from several processes, the Trainer multiplies by their number if it counted the items of all.
        return -(log_likelihood * is_right).mean() * self.num_words * (num_tokens / num_items)

    def scores(self, logits: Any, labels: torch.Tensor) -> torch.Tensor:
        """Sum the log-probabilities of the label word's tokens (a `preprocess_logits_for_metrics`).

        Args:
            logits: Logits of shape (rows, positions, vocabulary), or a tuple that begins with them.
            labels: Labels, as described in the class.

        Returns:
            float32 of shape (rows,).
        """
        logits = logits[0] if isinstance(logits, tuple) else logits
        # The logits at a position predict the next one. Only labelled positions become float32 probabilities.
        rows, positions = torch.nonzero(labels[:, 1:] != IGNORED, as_tuple=True)
        targets = labels[rows, positions + 1] & _TOKEN_MASK
        vocabulary: torch.Tensor = logits[rows, positions].float().log_softmax(dim=-1)
        word_scores = vocabulary.gather(1, targets.unsqueeze(1)).squeeze(1)
        return word_scores.new_zeros(len(labels)).index_add(0, rows, word_scores)

    def accuracy(self, prediction: EvalPrediction) -> dict[str, float]:
        """Return the share of examples whose right label word is the likeliest (a `compute_metrics`).

        Raises:
            RuntimeError: If a candidate of an example was not evaluated.
        """
        code = np.asarray(prediction.label_ids).max(axis=1) // (1 << _TOKEN_BITS) - 1
        pair, right = np.divmod(code, self.num_words)
        example, word = np.divmod(pair, self.num_words)
        scores = np.full((example.max() + 1, self.num_words), np.nan)
        scored = np.zeros_like(scores, dtype=bool)
        scores[example, word], scored[example, word] = prediction.predictions, True
        if not scored.all():
            raise RuntimeError(
                f"{(~scored).sum()} of {scored.size} candidates were not evaluated. Evaluate whole splits"
            )
        classes = np.empty(len(scores), dtype=np.int64)
        classes[example] = right
        return {"accuracy": float(np.mean(scores.argmax(axis=1) == classes))}


def check_words(tokenizer: PreTrainedTokenizerBase, words: tuple[str, ...]) -> None:
    """Reject label words that the tokenizer does not know.

    Raises:
        ValueError: If a word has unknown tokens (the message names them), or if two words have the same tokens.
    """
    spelled = token_ids(tokenizer, [" " + word for word in words])
    for word, ids in zip(words, spelled, strict=True):
        if not ids or tokenizer.unk_token_id in ids:
            raise ValueError(
                f"label word {word!r} is {tokenizer.convert_ids_to_tokens(ids)} to the tokenizer, which does not know "
                "it. Choose another"
            )
    if len(set(map(tuple, spelled))) < len(words):
        raise ValueError(f"label words {', '.join(words)} are not different to the tokenizer: {spelled}. Choose others")
