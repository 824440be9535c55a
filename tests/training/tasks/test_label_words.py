import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import EvalPrediction, PreTrainedTokenizerFast

from slivertune.training.tasks.label_words import CausalPromptHooks, MaskedPromptHooks
from slivertune.training.tasks.task import Task
from slivertune.training.tasks.tokenization import IGNORED
from tests.helpers.tolerance import assert_step_close, assert_sums_close, step_limit, sum_limit, with_exact
from tests.training.tiny import (
    SENTIMENTS,
    bert_config,
    byte_tokenizer,
    llama_config,
    model_for,
    prepared,
    sentiment_splits,
    splits_of,
    trainer_of,
    word_tokenizer,
)

# Of different lengths in bytes, so that sums, means and counts of tokens tell apart.
WORDS = ("bad", "really great")
RIGHT = np.array([label for _, label in SENTIMENTS])


def masked(splits: Any = None, tokenizer: PreTrainedTokenizerFast | None = None, **options: Any) -> Task:
    options = {"template": "{sentence} it was {mask} .", "label_words": "terrible,great", **options}
    splits, tokenizer = splits or sentiment_splits(), tokenizer or word_tokenizer()
    return prepared(splits, tokenizer, bert_config(), task="prompt_classification", **options)


def causal(splits: Any = None, tokenizer: PreTrainedTokenizerFast | None = None, **options: Any) -> Task:
    options = {"template": "{sentence} It was", "label_words": ",".join(WORDS), "max_length": 64, **options}
    splits, tokenizer = splits or sentiment_splits(), tokenizer or byte_tokenizer()
    return prepared(splits, tokenizer, llama_config(), task="prompt_classification", **options)


def texts_of(rows: Any, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    return [tokenizer.decode(row["input_ids"]) for row in rows]


def scored(row: dict[str, Any]) -> list[int]:
    return [token for token in row["labels"] if token != IGNORED]


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


def test_a_masked_row_is_the_filled_template_with_its_label_word_at_the_mask() -> None:
    tokenizer = word_tokenizer()
    task = masked()
    for row, (sentence, label) in zip(task.train_dataset, SENTIMENTS, strict=True):
        assert tokenizer.decode(row["input_ids"]) == f"[CLS] {sentence} it was [MASK] . [SEP]"
        (place,) = [place for place, token in enumerate(row["labels"]) if token != IGNORED]
        assert row["input_ids"][place] == tokenizer.mask_token_id
        assert tokenizer.decode([row["labels"][place]]) == ("terrible", "great")[label]
    assert (task.model_kind, task.id2label) == ("masked_lm", {0: "0", 1: "1"})


@pytest.mark.parametrize(
    ("data", "options", "expected"),
    [
        (
            {"premise": ["a film"] * 2, "hypothesis": ["b"] * 2, "label": ["no", "yes"]},
            {"template": "{premise} ? {mask} , {hypothesis}", "label_words": "no,yes"},
            "[CLS] a film ? [MASK] , b [SEP]",
        ),
        (
            {"sentence": ["a good film", "b"], "label": [1, 0]},
            {"template": "{mask} . {sentence}", "label_words": "1=good,0=bad"},
            "[CLS] [MASK] . a good film [SEP]",
        ),
    ],
)
def test_the_papers_pair_and_leading_mask_templates_can_be_written(
    data: dict[str, list[Any]], options: dict[str, str], expected: str
) -> None:
    assert texts_of(masked(splits_of(data), **options).train_dataset, word_tokenizer())[0] == expected


@pytest.mark.parametrize("template", ["{sentence} It was", "{sentence} It was {mask}", "{sentence} It was "])
def test_a_causal_row_ends_in_the_right_word_which_alone_has_labels(template: str) -> None:
    tokenizer = byte_tokenizer(bos=True)
    task = causal(tokenizer=tokenizer, template=template)
    for row, (sentence, label) in zip(task.train_dataset, SENTIMENTS, strict=True):
        assert tokenizer.decode(row["input_ids"]) == f"<bos>{sentence} It was {WORDS[label]}"
        # Where the template ends in a space, that belongs to the prompt, as the tokenizer has a token for it.
        assert tokenizer.decode(scored(row)) == (" " if template.endswith("was") else "") + WORDS[label]
    assert (task.model_kind, task.id2label) == ("causal_lm", {0: "0", 1: "1"})


def test_a_word_that_merges_with_the_space_before_it_is_whole() -> None:
    tokenizer = byte_tokenizer(corpus=["It was bad", "It was really great"] * 30)
    assert len(tokenizer(" bad")["input_ids"]) == 1
    task = causal(tokenizer=tokenizer, template="{sentence} It was {mask}")
    assert tokenizer.convert_ids_to_tokens(scored(task.train_dataset[1])) == ["\u0120bad"]


def test_every_label_word_is_a_row_of_evaluation() -> None:
    expected = [f"{sentence} It was {word}" for sentence, _ in SENTIMENTS for word in WORDS]
    assert texts_of(causal().eval_dataset, byte_tokenizer()) == expected


def test_loss_and_scores_at_a_mask_are_those_of_each_row_alone_over_the_label_words() -> None:
    tokenizer = word_tokenizer()
    task = masked()
    model = model_for(task, bert_config()).eval()
    words = torch.tensor([tokenizer.convert_tokens_to_ids(word) for word in ("terrible", "great")])

    def each_row_alone() -> dict[str, torch.Tensor]:
        scores = []
        for sentence, _ in SENTIMENTS:
            encoded = tokenizer(f"{sentence} it was [MASK] .", return_tensors="pt")
            place = encoded["input_ids"][0].tolist().index(tokenizer.mask_token_id)
            with torch.no_grad():
                scores.append(model(**encoded).logits[0, place, words])
        loss = F.cross_entropy(torch.stack(scores), torch.from_numpy(RIGHT))
        return {"scores": torch.stack(scores), "loss": loss, "loss of three": loss}

    expected, exact = with_exact(each_row_alone)
    batch = task.data_collator(list(task.train_dataset))
    labels = batch.pop("labels")
    with torch.no_grad():
        outputs = model(**batch)
    found = {
        "scores": MaskedPromptHooks(tuple(words.tolist())).scores(outputs.logits, labels),
        "loss": task.compute_loss_func(outputs, labels),
        # Three such batches accumulated: the Trainer sums what each gives.
        "loss of three": 3 * task.compute_loss_func(outputs, labels, num_items_in_batch=torch.tensor(3 * len(RIGHT))),
    }
    # In a padded batch a row's sums have another order. A row too few changes the loss by far more than 1e-3.
    assert_step_close(found, expected, exact, cap=1e-5)


def test_accuracy_at_a_mask_compares_the_likeliest_word_with_the_label() -> None:
    prediction = EvalPrediction(
        np.array([[1.0, 2.0], [3.0, 0.0], [0.0, 1.0], [5.0, 4.0]]),
        np.array([[-100, 10], [-100, 10], [10, -100], [20, -100]]),
    )
    assert MaskedPromptHooks((20, 10)).accuracy(prediction) == {"accuracy": 0.75}


@pytest.mark.parametrize("batch_size", [1, 5, 64])
@pytest.mark.parametrize("order", ["random", "group_by_length"])
def test_accuracy_and_loss_are_those_of_candidates_scored_one_by_one(
    batch_size: int, order: str, tmp_path: Path
) -> None:
    task = causal()
    model = model_for(task, llama_config()).eval()
    scores, exact = with_exact(
        lambda: np.array([candidate_scores(model, byte_tokenizer(), sentence) for sentence, _ in SENTIMENTS])
    )
    options = {"per_device_eval_batch_size": batch_size, "train_sampling_strategy": order}
    metrics = trainer_of(task, model, tmp_path, **options).evaluate()
    assert metrics["eval_accuracy"] == np.mean(scores.argmax(1) == RIGHT)
    # A mean is no farther off than the farthest of its terms, and by its own rounding and that of 13 log-probabilities.
    own = sum_limit(len(RIGHT) + 13, torch.float32)
    limit = (step_limit(torch.from_numpy(scores), torch.from_numpy(exact), cap=1e-5) + own) * np.abs(scores).max()
    assert metrics["eval_loss"] == pytest.approx(-scores[np.arange(len(RIGHT)), RIGHT].mean(), rel=0, abs=limit)


def test_accuracy_follows_the_scores_of_candidates_not_the_order_of_rows_and_needs_them_all() -> None:
    task = causal()
    labels = task.data_collator(list(task.eval_dataset))["labels"].numpy()
    for predicted in (RIGHT, 1 - RIGHT, np.zeros_like(RIGHT)):
        scores = np.array([[float(word == choice) for word in range(2)] for choice in predicted]).reshape(-1)
        order = np.random.default_rng(0).permutation(len(scores))
        given = EvalPrediction(scores[order], labels[order])
        assert task.compute_metrics(given) == {"accuracy": float(np.mean(predicted == RIGHT))}
    with pytest.raises(RuntimeError, match="1 of 12 candidates were not evaluated"):
        task.compute_metrics(EvalPrediction(np.zeros(11), labels[1:]))


def test_the_training_loss_after_a_prompt_is_the_language_models_own() -> None:
    task = causal()
    model = model_for(task, llama_config()).eval()
    batch = task.data_collator(list(task.train_dataset))
    with torch.no_grad():
        outputs = model(**batch)
    num_items = (batch["labels"] != IGNORED).sum()
    # Of the same logits: the sum of a softmax over the vocabulary, and the mean over the tokens.
    num_terms = outputs.logits.shape[-1] + int(num_items)
    assert_sums_close(task.compute_loss_func(outputs, batch["labels"]), outputs.loss, num_terms)
    quarter = task.compute_loss_func(outputs, batch["labels"], num_items_in_batch=4 * num_items)
    assert_sums_close(quarter * 4, outputs.loss, num_terms)


def test_the_evaluation_loss_of_several_processes_is_that_of_one() -> None:
    # The Trainer counts the items of all processes, multiplies each loss by their number, and takes the mean.
    task = causal()
    labels = task.data_collator(list(task.eval_dataset))["labels"]
    logits = torch.randn(*labels.shape, 400, generator=torch.Generator().manual_seed(0))
    num_items = (labels != IGNORED).sum()

    def loss(part: slice) -> torch.Tensor:
        return CausalPromptHooks(2).loss({"logits": logits[part]}, labels[part], num_items)

    halves = torch.stack([loss(slice(0, 6)), loss(slice(6, 12))]) * 2
    # The sum of a softmax over the vocabulary, and the mean over the tokens.
    assert_sums_close(halves.mean(), loss(slice(None)), logits.shape[-1] + int(num_items))


LONG_MASKED = {"splits": splits_of({"sentence": ["a b c d " * 3, "a b"], "label": [0, 1]}), "max_length": 10}
LONG_CAUSAL = {"splits": splits_of({"sentence": ["x" * 40, "short"], "label": [0, 1]}), "max_length": 40}


def test_a_long_row_loses_text_but_never_template_or_word(caplog: pytest.LogCaptureFixture) -> None:
    rows = masked(**LONG_MASKED, truncate=True).train_dataset
    assert texts_of(rows, word_tokenizer())[0] == "[CLS] a b c d it was [MASK] . [SEP]"
    assert "the longest has 18; they are cut" in caplog.text
    texts = texts_of(causal(**LONG_CAUSAL, truncate=True).eval_dataset, byte_tokenizer())
    assert texts[:2] == ["x" * 20 + " It was bad", "x" * 20 + " It was really great"], "candidates share one prompt"
    assert "1 of 2 rows of the eval split are longer than max_length=40 tokens" in caplog.text


@pytest.mark.parametrize(
    ("prompted", "changes", "message"),
    [
        (masked, LONG_MASKED, "1 of 2 rows of the train split are longer than max_length=10 tokens (row 0"),
        (
            causal,
            LONG_CAUSAL,
            "1 of 2 rows of the train split are longer than max_length=40 tokens (row 0, counted from 0, with 60",
        ),
        (masked, {**LONG_MASKED, "max_length": 4, "truncate": True}, "the template alone is longer"),
        (
            masked,
            {"splits": splits_of({"sentence": ["a film", "a [MASK] film"], "label": [0, 1]})},
            "1 of 2 rows of the train split hold another mask token beside the template's (row 1,",
        ),
        (
            masked,
            {"template": "{text} {mask}"},
            "--template names the column 'text', which is not in the dataset. Name one of its columns: sentence, label",
        ),
        (masked, {"template": "{sentence} it was"}, "has no {mask}, and a masked language model needs it"),
        (
            masked,
            {"tokenizer": PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer().backend_tokenizer)},
            "has no mask token",
        ),
        (
            causal,
            {"template": "{sentence} {mask} it was"},
            "goes on after {mask}, and a causal language model sees only",
        ),
        (
            causal,
            {"tokenizer": word_tokenizer(), "label_words": "superb,good"},
            "label word 'superb' is ['[UNK]'] to the tokenizer",
        ),
    ],
)
def test_what_does_not_suit_data_or_model_is_refused(prompted: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        prompted(**changes)


def test_no_model_is_asked_for_a_loss_on_labels_that_carry_more_than_a_token() -> None:
    # The marks stand above every vocabulary: a model that got these labels would fail, not learn something else.
    task = causal()
    assert min(max(row["labels"]) for row in task.eval_dataset) >= 1 << 24
    assert max(max(row["labels"]) for row in task.train_dataset) < 400
