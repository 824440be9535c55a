"""Classification by a classifier's head, or by label words after a prompt and the language model's own head."""

import logging
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import EvalPrediction, PreTrainedConfig, PreTrainedTokenizerBase

from slivertune.training.data.columns import (
    LABEL_COLUMN,
    ROW_COLUMN,
    column_values,
    count_line,
    describe_rows,
    iterate_values,
    label_column,
    require_column,
    require_text_of_evaluation,
    sentence_columns,
    usable_rows,
)
from slivertune.training.data.labels import encode_labels, read_labels
from slivertune.training.options.arguments import DataArguments
from slivertune.training.tasks.label_words import (
    CausalPromptHooks,
    MaskedPromptHooks,
    check_words,
    encode_causal_prompts,
    encode_masked_prompts,
)
from slivertune.training.tasks.prompting import Template, mask_token_ids, parse_label_words, prompt_model_kind
from slivertune.training.tasks.special_ends import added_ends
from slivertune.training.tasks.task import PaddingCollator, Task
from slivertune.training.tasks.tokenization import Columns, check_lengths, encode_rows, padding_id, resolve_max_length

logger = logging.getLogger(__name__)


def prepare_classification(
    args: DataArguments, tokenizer: PreTrainedTokenizerBase, model_config: PreTrainedConfig, splits: dict[str, Any]
) -> Task:
    """Tokenise one text or a pair for a classifier.

    Args:
        args: Settings for columns and length.
        tokenizer: The tokenizer.
        model_config: Configuration of the model, which limits the length.
        splits: Numbered `train` and `eval` splits.

    Returns:
        Rows with `labels` (one class each), evaluated by `eval_accuracy`.

    Raises:
        ValueError: If labels are not classes or are missing from the training split, or if rows don't fit.
    """
    columns = sentence_columns(args, splits["train"])
    column = label_column(args, splits["train"])
    require_text_of_evaluation(splits["eval"], columns)
    return _labelled_task(
        args, tokenizer, model_config, splits,
        columns=columns,
        label_column=column,
        labels=read_labels(splits["train"], column),
        encoders=dict.fromkeys(("train", "eval"), partial(encode_sentences, columns=columns)),
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=predicted_classes,
        compute_loss_func=cross_entropy,
        model_kind="sequence_classification",
    )  # fmt: skip


def prepare_prompt_classification(
    args: DataArguments, tokenizer: PreTrainedTokenizerBase, model_config: PreTrainedConfig, splits: dict[str, Any]
) -> Task:
    """Fill the template and set the hooks that score label words (paper, appendix B.4).

    A masked language model is trained by cross entropy over the label words' logits at {mask}. A causal one is trained
    by its language-modelling loss on the right label word, and evaluated by the likeliest candidate (`label_words`).

    Args:
        args: Settings for template, label words, columns and length.
        tokenizer: The tokenizer.
        model_config: Configuration, which tells a masked from a causal language model.
        splits: Numbered `train` and `eval` splits.

    Returns:
        Rows and hooks, evaluated by `eval_accuracy`.

    Raises:
        ValueError: If the template names no columns of the data or does not suit the model, or if words, labels or rows
            don't fit.
    """
    ends = added_ends(tokenizer)
    template = Template.parse(ends.text_once(str(args.template)))
    if template.text != args.template:
        logger.warning("template %r: %s", args.template, ends.remark)
    for name in template.columns:
        require_column(splits["train"], name, "--template", text=False)
    column = label_column(args, splits["train"])
    labels = read_labels(splits["train"], column)
    words = parse_label_words(str(args.label_words), labels)
    logger.info("label words: %s", ", ".join(f"{label} is {word}" for label, word in zip(labels, words, strict=True)))
    kind = prompt_model_kind(model_config)
    encoders, hooks = (_masked if kind == "masked_lm" else _causal)(tokenizer, template, words)
    return _labelled_task(
        args, tokenizer, model_config, splits,
        columns=template.columns,
        label_column=column,
        labels=labels,
        encoders=encoders,
        with_indices=kind == "causal_lm",
        compute_metrics=hooks.accuracy,
        preprocess_logits_for_metrics=hooks.scores,
        compute_loss_func=hooks.loss,
        model_kind=kind,
    )  # fmt: skip


def _masked(
    tokenizer: PreTrainedTokenizerBase, template: Template, words: tuple[str, ...]
) -> tuple[dict[str, partial[Columns]], MaskedPromptHooks]:
    if not template.has_mask:
        raise ValueError(
            f"template {template.text!r} has no {{mask}}, and a masked language model needs it. Put it in the label "
            "word's place, as in '{sentence} It was {mask} .'"
        )
    if tokenizer.mask_token_id is None:
        raise ValueError(
            f"{type(tokenizer).__name__} has no mask token. Choose a masked language model with its own tokenizer"
        )
    word_ids = mask_token_ids(tokenizer, words, template)
    encode = partial(encode_masked_prompts, template=template, word_ids=word_ids)
    return dict.fromkeys(("train", "eval"), encode), MaskedPromptHooks(word_ids)


def _causal(
    tokenizer: PreTrainedTokenizerBase, template: Template, words: tuple[str, ...]
) -> tuple[dict[str, partial[Columns]], CausalPromptHooks]:
    filled = template.fill(dict.fromkeys(template.columns, "x"), mask="{mask}").rstrip()
    if template.has_mask and not filled.endswith("{mask}"):
        raise ValueError(
            f"template {template.text!r} goes on after {{mask}}, and a causal language model sees only the text before "
            "it. End the template with {mask}"
        )
    check_words(tokenizer, words)
    encode = partial(encode_causal_prompts, template=template.before_mask, words=words)
    encoders = {"train": partial(encode, candidates=False), "eval": partial(encode, candidates=True)}
    return encoders, CausalPromptHooks(len(words))


def encode_sentences(
    batch: Columns, *, tokenizer: PreTrainedTokenizerBase, columns: tuple[str, ...], max_length: int, truncate: bool
) -> Columns:
    """Tokenise texts or pairs for a classifier.

    Args:
        batch: The rows.
        tokenizer: The tokenizer.
        columns: Name of the text column, and optionally of the column of second texts.
        max_length: Maximum length of a row in tokens.
        truncate: Whether to cut longer rows, beginning with the longer text of a pair.

    Returns:
        The batch, row by row; `length` counts tokens before a cut.
    """
    texts = [batch[column] for column in columns]
    encoded = tokenizer(*texts, verbose=False)
    lengths = [len(ids) for ids in encoded["input_ids"]]
    if truncate and max(lengths) > max_length:
        encoded = tokenizer(*texts, truncation=True, max_length=max_length)
    return {**encoded, "labels": batch[LABEL_COLUMN], "length": lengths, ROW_COLUMN: batch[ROW_COLUMN]}


def _labelled_task(
    args: DataArguments,
    tokenizer: PreTrainedTokenizerBase,
    model_config: PreTrainedConfig,
    splits: dict[str, Any],
    *,
    columns: tuple[str, ...],
    label_column: str,
    labels: tuple[str, ...],
    encoders: dict[str, partial[Columns]],
    with_indices: bool = False,
    **hooks: Any,
) -> Task:
    """Encode the non-blank rows of both splits, and reject rows that don't fit."""
    max_length = resolve_max_length(args.max_length, model_config, tokenizer)
    encoded, notes = {}, list[str]()
    for split, encode in encoders.items():
        rows = usable_rows(splits[split], (*columns, label_column), args, split=split)
        classes = np.asarray(encode_labels(rows, label_column, labels, split=split), dtype=np.int64)
        notes += _check_classes(classes, labels, split)
        rows = rows.select_columns(list(dict.fromkeys((*columns, ROW_COLUMN)))).add_column(LABEL_COLUMN, classes)
        rows, said = _special_once(rows, columns, tokenizer, split)
        notes += said
        rows = encode_rows(
            rows,
            partial(encode, tokenizer=tokenizer, max_length=max_length, truncate=args.truncate),
            num_workers=args.preprocessing_num_workers,
            description=f"Tokenising the {split} split",
            with_indices=with_indices,
        )
        check_lengths(rows, max_length=max_length, truncate=args.truncate, split=split)
        encoded[split] = _without_notes(rows, split)
    return Task(
        train_dataset=encoded["train"],
        eval_dataset=encoded["eval"],
        data_collator=PaddingCollator(pad_token_id=padding_id(tokenizer)),
        max_length=max_length,
        pad_token_id=padding_id(tokenizer),
        id2label=dict(enumerate(labels)),
        notes=tuple(notes),
        **hooks,
    )


def _check_classes(classes: Any, labels: tuple[str, ...], split: str) -> list[str]:
    """Refuse to train on one class alone, as in the first rows of a sorted file, and note that all evaluation has one.

    Raises:
        ValueError: If all training rows have one class.
    """
    if len(np.unique(classes)) > 1 or len(classes) == 1:
        return []
    said = f"all {len(classes):,} {split} rows have the label {labels[classes[0]]!r}"
    if split == "train":
        raise ValueError(
            f"{said}, and a classifier needs at least two. Shuffle the rows of the dataset, or read more of them "
            "(--max_train_samples)"
        )
    return [f"{said}, so eval_accuracy tells nothing of the others"]


def _special_once(
    rows: Any, columns: tuple[str, ...], tokenizer: PreTrainedTokenizerBase, split: str
) -> tuple[Any, list[str]]:
    """Remove special tokens that the tokenizer adds anyway from the texts, and report the number of changed rows."""
    ends, is_changed = added_ends(tokenizer), np.zeros(len(rows), dtype=bool)
    for column in dict.fromkeys(columns):
        differs = np.asarray([ends.text_once(str(text)) != str(text) for text in iterate_values(rows, column)])
        if differs.any():
            once = [ends.text_once(str(text)) for text in iterate_values(rows, column)]
            rows, is_changed = rows.remove_columns(column).add_column(column, once), is_changed | differs
    count = int(is_changed.sum())
    return rows, [count_line(count, len(rows), split, ends.remark)] if count else []


def _without_notes(rows: Any, split: str) -> Any:
    """Drop the columns made for checks, after the last check."""
    if "num_masks" in rows.column_names:
        odd = np.flatnonzero(np.asarray(column_values(rows, "num_masks")) != 1)
        if len(odd):
            found = describe_rows(rows, odd, "hold another mask token beside the template's", split)
            raise ValueError(f"{found}. Remove it from the text")
    return rows.remove_columns([name for name in ("length", "num_masks", ROW_COLUMN) if name in rows.column_names])


def cross_entropy(
    outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None
) -> torch.Tensor:
    """Return the mean negative log-probability of the right class (a `compute_loss_func` of the Trainer).

    The classifiers of transformers (5.23) take the mean of each batch. The Trainer expects the mean over all
    accumulated batches and adds up the results: with 4 accumulated batches, the gradient would be 4 times as large.

    Args:
        outputs: Output of a classifier, with `logits` of shape (rows, classes).
        labels: int64 classes, shape (rows,).
        num_items_in_batch: Rows over all accumulated batches, from the Trainer; None for the rows of this batch.

    Returns:
        A scalar.
    """
    total = F.cross_entropy(outputs["logits"].float(), labels, reduction="sum")
    return total / (len(labels) if num_items_in_batch is None else num_items_in_batch)


def predicted_classes(logits: Any, labels: torch.Tensor) -> torch.Tensor:
    """Return the likeliest class of each row (a `preprocess_logits_for_metrics` of the Trainer).

    Args:
        logits: Logits of shape (rows, classes), or a tuple that begins with them, from models that return more.
        labels: Labels, not read.

    Returns:
        int64 classes, shape (rows,).
    """
    scores: torch.Tensor = logits[0] if isinstance(logits, tuple) else logits
    return scores.argmax(dim=-1)


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Return the share of rows with a correctly predicted class (a `compute_metrics` of the Trainer).

    Args:
        prediction: Predicted classes and labels, both of shape (rows,).

    Returns:
        `accuracy`, in [0, 1].
    """
    return {"accuracy": float(np.mean(np.asarray(prediction.predictions) == np.asarray(prediction.label_ids)))}
