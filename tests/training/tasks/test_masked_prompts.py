from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import EvalPrediction

from slivertune.training.tasks.masked_prompts import MaskedPromptHooks
from slivertune.training.tasks.task import Task
from slivertune.training.tasks.tokenization import IGNORED
from tests.helpers.tolerance import assert_step_close, with_exact
from tests.training.tiny import (
    SENTIMENTS,
    bert_config,
    byte_tokenizer,
    model_for,
    prepared,
    sentiment_splits,
    splits_of,
    word_tokenizer,
)

TEMPLATE = "{sentence} it was {mask} ."


def prompted(splits: Any, **options: Any) -> Task:
    options = {"template": TEMPLATE, "label_words": "terrible,great", **options}
    return prepared(splits, word_tokenizer(), bert_config(), task="prompt_classification", **options)


def test_a_row_is_the_filled_template_with_its_label_word_at_the_mask() -> None:
    tokenizer = word_tokenizer()
    task = prompted(sentiment_splits())
    for row, (sentence, label) in zip(task.train_dataset, SENTIMENTS, strict=True):
        assert tokenizer.decode(row["input_ids"]) == f"[CLS] {sentence} it was [MASK] . [SEP]"
        (place,) = [place for place, token in enumerate(row["labels"]) if token != IGNORED]
        assert row["input_ids"][place] == tokenizer.mask_token_id
        assert tokenizer.decode([row["labels"][place]]) == ("terrible", "great")[label]
    assert (task.model_kind, task.id2label) == ("masked_lm", {0: "0", 1: "1"})


def test_the_paper_s_pair_and_leading_mask_templates_can_be_written() -> None:
    tokenizer = word_tokenizer()
    pair = {"premise": ["a film"], "hypothesis": ["b"], "label": ["no"]}
    pairs = {name: values * 2 for name, values in pair.items()} | {"label": ["no", "yes"]}
    task = prompted(splits_of(pairs), template="{premise} ? {mask} , {hypothesis}", label_words="no,yes")
    assert tokenizer.decode(task.train_dataset[0]["input_ids"]) == "[CLS] a film ? [MASK] , b [SEP]"
    task = prompted(sentiment_splits(), template="{mask} . {sentence}", label_words="1=good,0=bad")
    assert tokenizer.decode(task.train_dataset[0]["input_ids"]) == "[CLS] [MASK] . a good film [SEP]"


def test_loss_and_scores_are_those_of_each_row_alone_over_the_label_words() -> None:
    tokenizer = word_tokenizer()
    task = prompted(sentiment_splits())
    model = model_for(task, bert_config()).eval()
    words = torch.tensor([tokenizer.convert_tokens_to_ids(word) for word in ("terrible", "great")])

    def each_row_alone() -> dict[str, torch.Tensor]:
        scores = []
        for sentence, _ in SENTIMENTS:
            encoded = tokenizer(f"{sentence} it was [MASK] .", return_tensors="pt")
            place = encoded["input_ids"][0].tolist().index(tokenizer.mask_token_id)
            with torch.no_grad():
                scores.append(model(**encoded).logits[0, place, words])
        loss = F.cross_entropy(torch.stack(scores), torch.tensor([label for _, label in SENTIMENTS]))
        return {"scores": torch.stack(scores), "loss": loss, "loss of three": loss}

    expected, exact = with_exact(each_row_alone)
    batch = task.data_collator(list(task.train_dataset))
    labels = batch.pop("labels")
    with torch.no_grad():
        outputs = model(**batch)
    hooks = MaskedPromptHooks(tuple(words.tolist()))
    # Three such batches accumulated: the Trainer sums what each gives.
    three = task.compute_loss_func(outputs, labels, num_items_in_batch=torch.tensor(3 * len(SENTIMENTS)))
    found = {
        "scores": hooks.scores(outputs.logits, labels),
        "loss": task.compute_loss_func(outputs, labels),
        "loss of three": 3 * three,
    }
    # In a padded batch a row's sums have another order. A row too few changes the loss by far more than 1e-3.
    assert_step_close(found, expected, exact, cap=1e-5)


def test_accuracy_compares_the_likeliest_word_with_the_label() -> None:
    hooks = MaskedPromptHooks((20, 10))
    scores = np.array([[1.0, 2.0], [3.0, 0.0], [0.0, 1.0], [5.0, 4.0]])
    labels = np.array([[-100, 10], [-100, 10], [10, -100], [20, -100]])
    assert hooks.accuracy(EvalPrediction(scores, labels)) == {"accuracy": 0.75}


def test_a_long_row_is_an_error_or_loses_text_but_never_the_template(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = word_tokenizer()
    splits = splits_of({"sentence": ["a b c d " * 3, "a b"], "label": [0, 1]})
    with pytest.raises(
        ValueError, match=r"1 of 2 rows of the train split are longer than max_length=10 tokens \(row 0"
    ):
        prompted(splits, max_length=10)
    task = prompted(splits, max_length=10, truncate=True)
    assert tokenizer.decode(task.train_dataset[0]["input_ids"]) == "[CLS] a b c d it was [MASK] . [SEP]"
    assert "the longest has 18; they are cut" in caplog.text
    with pytest.raises(ValueError, match="the template alone is longer"):
        prompted(splits, max_length=4, truncate=True)


def test_a_text_that_holds_the_mask_token_is_refused() -> None:
    splits = splits_of({"sentence": ["a film", "a [MASK] film"], "label": [0, 1]})
    with pytest.raises(ValueError, match=r"1 of 2 rows of the train split hold another mask token .*\(row 1,"):
        prompted(splits)


def test_a_template_that_does_not_suit_data_or_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--template names the column 'text'.*its columns are sentence, label"):
        prompted(sentiment_splits(), template="{text} {mask}")
    with pytest.raises(ValueError, match=r"has no \{mask\}, which a masked language model needs"):
        prompted(sentiment_splits(), template="{sentence} it was")
    tokenizer = byte_tokenizer()
    tokenizer.mask_token = None
    options = {"task": "prompt_classification", "template": TEMPLATE, "label_words": "a,b"}
    with pytest.raises(ValueError, match="has no mask token"):
        prepared(sentiment_splits(), tokenizer, bert_config(), **options)
