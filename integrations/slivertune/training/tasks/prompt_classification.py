"""Prompt-based classification: a template, label words, and the language model's own head (paper, appendix B.4)."""

import logging
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from slivertune.training.data.columns import (
    label_column,
    require_column,
)
from slivertune.training.data.labels import read_labels
from slivertune.training.options.data import DataArguments
from slivertune.training.tasks.causal_prompts import CausalPromptEncoder, CausalPromptHooks, check_words
from slivertune.training.tasks.classification import encode_labelled
from slivertune.training.tasks.masked_prompts import MaskedPromptEncoder, MaskedPromptHooks
from slivertune.training.tasks.prompting import Template, mask_token_ids, parse_label_words, prompt_model_kind
from slivertune.training.tasks.task import PaddingCollator, Task
from slivertune.training.tasks.tokenization import (
    leading_special_tokens,
    padding_id,
    resolve_max_length,
)

logger = logging.getLogger(__name__)


def prepare_prompt_classification(
    args: DataArguments, tokenizer: PreTrainedTokenizerBase, model_config: PreTrainedConfig, splits: dict[str, Any]
) -> Task:
    """Fill the template and gather the hooks that score label words.

    A masked language model is trained by cross entropy over the label words' logits at {mask}; a causal one by its
    language-modelling loss on the right label word, and evaluated by the likeliest candidate (see `causal_prompts`).

    Args:
        args: Template, label words, columns, length.
        tokenizer: The tokenizer.
        model_config: Tells a masked from a causal language model.
        splits: Numbered `train` and `eval`.

    Returns:
        Rows and hooks, judged by `eval_accuracy`.

    Raises:
        ValueError: If the template names no columns of the data or does not suit the model, or words, labels or rows
            don't fit.
    """
    template = Template.parse(str(args.template))
    for column in template.columns:
        require_column(splits["train"], column, "--template", text=False)
    labels = read_labels(splits["train"], label_column(args, splits["train"]))
    words = parse_label_words(str(args.label_words), labels)
    logger.info(
        "label words: %s", ", ".join(f"{label} is {word}" for label, word in zip(labels.names, words, strict=True))
    )
    max_length = resolve_max_length(args.max_length, model_config, tokenizer)
    kind = prompt_model_kind(model_config)
    if kind == "masked_lm":
        train_encoder, eval_encoder, hooks = _masked(args, tokenizer, template, words, max_length)
    else:
        train_encoder, eval_encoder, hooks = _causal(args, tokenizer, template, words, max_length)
    encoders = {"train": train_encoder, "eval": eval_encoder}
    is_causal = kind == "causal_lm"
    encoded = encode_labelled(splits, template.columns, labels, encoders, args=args, with_indices=is_causal)
    return Task(
        train_dataset=encoded["train"],
        eval_dataset=encoded["eval"],
        data_collator=PaddingCollator(pad_token_id=padding_id(tokenizer)),
        model_kind=kind,
        max_length=max_length,
        pad_token_id=padding_id(tokenizer),
        id2label=labels.id2label,
        **hooks,
    )


def _masked(
    args: DataArguments, tokenizer: PreTrainedTokenizerBase, template: Template, words: tuple[str, ...], max_length: int
) -> tuple[Any, Any, dict[str, Any]]:
    if not template.has_mask:
        raise ValueError(
            f"template {template.text!r} has no {{mask}}, which a masked language model needs where the label word "
            "stands, as in '{sentence} It was {mask} .'"
        )
    if tokenizer.mask_token_id is None:
        raise ValueError(
            f"{type(tokenizer).__name__} has no mask token; choose a masked language model with its own tokenizer"
        )
    word_ids = mask_token_ids(tokenizer, words, template)
    encoder = MaskedPromptEncoder(
        tokenizer=tokenizer, template=template, word_ids=word_ids, max_length=max_length, truncate=args.truncate
    )
    hooks = MaskedPromptHooks(word_ids)
    return (
        encoder,
        encoder,
        {
            "compute_loss_func": hooks.loss,
            "preprocess_logits_for_metrics": hooks.scores,
            "compute_metrics": hooks.accuracy,
        },
    )


def _causal(
    args: DataArguments, tokenizer: PreTrainedTokenizerBase, template: Template, words: tuple[str, ...], max_length: int
) -> tuple[Any, Any, dict[str, Any]]:
    filled = template.fill(dict.fromkeys(template.columns, "x"), mask="{mask}").rstrip()
    if template.has_mask and not filled.endswith("{mask}"):
        raise ValueError(
            f"template {template.text!r} goes on after {{mask}}, and a causal language model sees only what stands "
            "before it; end the template with {mask}"
        )
    check_words(tokenizer, words)
    train, evaluation = (
        CausalPromptEncoder(
            tokenizer=tokenizer,
            template=template.before_mask,
            words=words,
            leading=tuple(leading_special_tokens(tokenizer)),
            max_length=max_length,
            truncate=args.truncate,
            candidates=candidates,
        )
        for candidates in (False, True)
    )
    hooks = CausalPromptHooks(len(words))
    return (
        train,
        evaluation,
        {
            "compute_loss_func": hooks.loss,
            "preprocess_logits_for_metrics": hooks.log_likelihood,
            "compute_metrics": hooks.accuracy,
        },
    )
