"""Prompt-based classification by a masked language model: label words scored at the mask (paper, Tables 1 and 12)."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import EvalPrediction, PreTrainedTokenizerBase

from slivertune.training.data.columns import LABEL_COLUMN, ROW_COLUMN
from slivertune.training.tasks.prompting import Template, cut_to_fit
from slivertune.training.tasks.tokenization import IGNORED, Columns


def encode_masked_prompts(
    batch: Columns,
    *,
    tokenizer: PreTrainedTokenizerBase,
    template: Template,
    word_ids: tuple[int, ...],
    max_length: int,
    truncate: bool,
) -> Columns:
    """Rows to filled templates whose label, at the mask token alone, is the right label word's token.

    Args:
        batch: The rows.
        tokenizer: Has a mask token.
        template: With {mask}.
        word_ids: The token of each class's label word.
        max_length: Longest row in tokens.
        truncate: Shorten the texts of longer rows, never the template.

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
        word_ids: The token of each class's label word.
    """

    word_ids: tuple[int, ...]

    def loss(
        self, outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Cross entropy of the label words' logits at the mask; a `compute_loss_func`.

        Args:
            outputs: Of a masked language model, with `logits` of shape (rows, positions, vocabulary).
            labels: As above.
            num_items_in_batch: Rows over all accumulated batches, from the Trainer; those of this batch if None.

        Returns:
            The mean over rows, a scalar.
        """
        scores = self.scores(outputs["logits"], labels)
        words = torch.tensor(self.word_ids, device=labels.device)
        classes = (labels[labels != IGNORED].unsqueeze(1) == words).int().argmax(dim=1)
        total = F.cross_entropy(scores, classes, reduction="sum")
        return total / (len(classes) if num_items_in_batch is None else num_items_in_batch)

    def scores(self, logits: Any, labels: torch.Tensor) -> torch.Tensor:
        """The label words' logits at the mask; a `preprocess_logits_for_metrics`.

        Args:
            logits: Shape (rows, positions, vocabulary), or a tuple that begins with it.
            labels: As above, one mask a row.

        Returns:
            float32 of shape (rows, classes).
        """
        logits = logits[0] if isinstance(logits, tuple) else logits
        words = torch.tensor(self.word_ids, device=logits.device)
        scores: torch.Tensor = logits[labels != IGNORED][:, words]
        return scores.float()

    def accuracy(self, prediction: EvalPrediction) -> dict[str, float]:
        """The share of rows whose label word scores highest; a `compute_metrics`."""
        # Everything but the mask's label is -100, so the largest is the label word.
        tokens = np.asarray(prediction.label_ids).max(axis=1)
        predicted = np.asarray(self.word_ids)[np.asarray(prediction.predictions).argmax(axis=1)]
        return {"accuracy": float(np.mean(predicted == tokens))}
