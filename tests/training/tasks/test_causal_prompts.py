from typing import Any

import numpy as np
import pytest
import torch
from transformers import EvalPrediction, PreTrainedTokenizerFast

from slivertune.training.tasks.causal_prompts import CausalPromptHooks
from slivertune.training.tasks.task import Task
from slivertune.training.tasks.tokenization import IGNORED
from tests.helpers.tolerance import assert_sums_close, step_limit, sum_limit, with_exact
from tests.training.tiny import (
    SENTIMENTS,
    byte_tokenizer,
    llama_config,
    model_for,
    prepared,
    sentiment_splits,
    splits_of,
    trainer_of,
    word_tokenizer,
)

TEMPLATE = "{sentence} It was"
# Of different lengths in bytes, so that sums, means and counts of tokens tell apart.
WORDS = ("bad", "really great")


def prompted(splits: Any, tokenizer: PreTrainedTokenizerFast | None = None, **options: Any) -> Task:
    options = {"template": TEMPLATE, "label_words": ",".join(WORDS), "max_length": 64, **options}
    tokenizer = tokenizer or byte_tokenizer()
    return prepared(splits, tokenizer, llama_config(), task="prompt_classification", **options)


def candidate_scores(model: Any, tokenizer: PreTrainedTokenizerFast, sentence: str) -> list[float]:
    """Sum of each label word's log-probabilities, one unpadded row at a time; one token a byte."""
    scores = []
    for word in WORDS:
        ids = tokenizer(f"{sentence} It was {word}", return_tensors="pt")["input_ids"]
        with torch.no_grad():
            log_probabilities = model(input_ids=ids).logits[0].log_softmax(-1)
        length = len(f" {word}")
        scores.append(sum(float(log_probabilities[-length - 1 + i, ids[0, -length + i]]) for i in range(length)))
    return scores


@pytest.mark.parametrize("template", ["{sentence} It was", "{sentence} It was {mask}", "{sentence} It was "])
def test_a_training_row_ends_in_the_right_word_which_alone_has_labels(template: str) -> None:
    tokenizer = byte_tokenizer(bos=True)
    task = prompted(sentiment_splits(), tokenizer, template=template)
    for row, (sentence, label) in zip(task.train_dataset, SENTIMENTS, strict=True):
        assert tokenizer.decode(row["input_ids"]) == f"<bos>{sentence} It was {WORDS[label]}"
        scored = [token for token in row["labels"] if token != IGNORED]
        # Where the template ends in a space, that belongs to the prompt, as the tokenizer has a token for it.
        assert tokenizer.decode(scored) == (" " if template.endswith("was") else "") + WORDS[label]
    assert (task.model_kind, task.id2label) == ("causal_lm", {0: "0", 1: "1"})


def test_a_word_that_merges_with_the_space_before_it_is_whole() -> None:
    tokenizer = byte_tokenizer(corpus=["It was bad", "It was really great"] * 30)
    assert len(tokenizer(" bad")["input_ids"]) == 1
    task = prompted(sentiment_splits(), tokenizer, template="{sentence} It was {mask}")
    scored = [token for token in task.train_dataset[1]["labels"] if token != IGNORED]
    assert tokenizer.convert_ids_to_tokens(scored) == ["\u0120bad"]


def test_every_label_word_is_a_row_of_evaluation() -> None:
    tokenizer = byte_tokenizer()
    task = prompted(sentiment_splits(), tokenizer)
    texts = [tokenizer.decode(row["input_ids"]) for row in task.eval_dataset]
    assert texts == [f"{sentence} It was {word}" for sentence, _ in SENTIMENTS for word in WORDS]


@pytest.mark.parametrize("batch_size", [1, 5, 64])
@pytest.mark.parametrize("order", ["random", "group_by_length"])
def test_accuracy_and_loss_are_those_of_candidates_scored_one_by_one(
    batch_size: int, order: str, tmp_path: Any
) -> None:
    tokenizer = byte_tokenizer()
    task = prompted(sentiment_splits(), tokenizer)
    model = model_for(task, llama_config()).eval()
    scores, exact = with_exact(
        lambda: np.array([candidate_scores(model, tokenizer, sentence) for sentence, _ in SENTIMENTS])
    )
    labels = np.array([label for _, label in SENTIMENTS])
    options = {"per_device_eval_batch_size": batch_size, "train_sampling_strategy": order}
    metrics = trainer_of(task, model, tmp_path, **options).evaluate()
    assert metrics["eval_accuracy"] == np.mean(scores.argmax(1) == labels)
    # A mean is no farther off than the farthest of its terms, and by its own rounding and that of 13 log-probabilities.
    own = sum_limit(len(labels) + 13, torch.float32)
    limit = (step_limit(torch.from_numpy(scores), torch.from_numpy(exact), cap=1e-5) + own) * np.abs(scores).max()
    assert metrics["eval_loss"] == pytest.approx(-scores[np.arange(len(labels)), labels].mean(), rel=0, abs=limit)


def test_accuracy_follows_the_scores_not_the_order_of_rows() -> None:
    task = prompted(sentiment_splits())
    batch = task.data_collator(list(task.eval_dataset))
    right = np.array([label for _, label in SENTIMENTS])
    for predicted in (right, 1 - right, np.zeros_like(right)):
        scores = np.array([[float(word == choice) for word in range(2)] for choice in predicted]).reshape(-1)
        order = np.random.default_rng(0).permutation(len(scores))
        given = EvalPrediction(scores[order], batch["labels"].numpy()[order])
        assert task.compute_metrics(given) == {"accuracy": float(np.mean(predicted == right))}


def test_a_candidate_that_was_not_evaluated_is_an_error() -> None:
    task = prompted(sentiment_splits())
    labels = task.data_collator(list(task.eval_dataset))["labels"].numpy()
    with pytest.raises(RuntimeError, match="1 of 12 candidates were not evaluated"):
        task.compute_metrics(EvalPrediction(np.zeros(11), labels[1:]))


def test_the_training_loss_is_the_language_models_own() -> None:
    task = prompted(sentiment_splits())
    model = model_for(task, llama_config()).eval()
    batch = task.data_collator(list(task.train_dataset))
    with torch.no_grad():
        reference = model(**batch).loss
        outputs = model(**{name: value for name, value in batch.items() if name != "labels"})
    num_items = (batch["labels"] != IGNORED).sum()
    # Of the same logits: the sum of a softmax over the vocabulary, and the mean over the tokens.
    num_terms = outputs.logits.shape[-1] + int(num_items)
    assert_sums_close(task.compute_loss_func(outputs, batch["labels"]), reference, num_terms)
    quarter = task.compute_loss_func(outputs, batch["labels"], num_items_in_batch=4 * num_items)
    assert_sums_close(quarter * 4, reference, num_terms)


def test_the_evaluation_loss_of_several_processes_is_that_of_one() -> None:
    # The Trainer counts the items of all processes, multiplies each loss by their number, and takes the mean.
    task = prompted(sentiment_splits())
    hooks = CausalPromptHooks(2)
    rows = list(task.eval_dataset)
    logits = torch.randn(len(rows), 64, 400, generator=torch.Generator().manual_seed(0))

    def loss(part: slice, num_items: torch.Tensor) -> torch.Tensor:
        labels = task.data_collator(rows)["labels"][part]
        return hooks.loss({"logits": logits[part, : labels.shape[1]]}, labels, num_items)

    num_items = (task.data_collator(rows)["labels"] != IGNORED).sum()
    whole = loss(slice(None), num_items)
    halves = torch.stack([loss(slice(0, 6), num_items), loss(slice(6, 12), num_items)]) * 2
    # The sum of a softmax over the vocabulary, and the mean over the tokens.
    assert_sums_close(halves.mean(), whole, logits.shape[-1] + int(num_items))


def test_a_long_row_is_an_error_or_loses_text_but_never_template_or_word(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = byte_tokenizer()
    splits = splits_of({"sentence": ["x" * 40, "short"], "label": [0, 1]})
    with pytest.raises(
        ValueError, match=r"1 of 2 rows of the train split are longer than max_length=40 tokens \(row 0, .* 60 tokens"
    ):
        prompted(splits, max_length=40)
    task = prompted(splits, max_length=40, truncate=True)
    texts = [tokenizer.decode(row["input_ids"]) for row in task.eval_dataset]
    assert texts[:2] == ["x" * 20 + " It was bad", "x" * 20 + " It was really great"], "candidates share one prompt"
    assert "1 of 2 rows of the eval split are longer than max_length=40 tokens" in caplog.text


def test_what_a_causal_model_can_not_score_is_refused() -> None:
    with pytest.raises(ValueError, match=r"goes on after \{mask\}, and a causal language model sees only"):
        prompted(sentiment_splits(), template="{sentence} {mask} it was")
    tokenizer = word_tokenizer()
    with pytest.raises(ValueError, match=r"label word 'superb' is \['\[UNK\]'\] to the tokenizer"):
        prompted(sentiment_splits(), tokenizer, label_words="superb,good")


def test_no_model_is_asked_for_a_loss_on_labels_that_carry_more_than_a_token() -> None:
    # The marks stand above every vocabulary: a model that got these labels would fail, not learn something else.
    task = prompted(sentiment_splits())
    assert min(max(row["labels"]) for row in task.eval_dataset) >= 1 << 24
    assert max(max(row["labels"]) for row in task.train_dataset) < 400
