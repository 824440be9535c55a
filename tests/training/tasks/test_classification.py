from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import EvalPrediction

from slivertune.training.tasks.classification import accuracy, predicted_classes
from slivertune.training.tasks.task import Task
from tests.training.tiny import (
    SENTIMENTS,
    bert_config,
    byte_tokenizer,
    llama_config,
    prepared,
    sentiment_splits,
    splits_from,
    splits_of,
    word_tokenizer,
)


def classified(splits: Any, **options: Any) -> Task:
    return prepared(splits, word_tokenizer(), bert_config(), task="classification", **options)


def test_rows_are_what_the_tokenizer_makes_of_a_sentence_with_its_class() -> None:
    task = classified(sentiment_splits())
    assert list(task.train_dataset) == [{**word_tokenizer()(text), "labels": label} for text, label in SENTIMENTS]
    assert task.id2label == {0: "0", 1: "1"}
    assert (task.model_kind, task.pad_token_id) == ("sequence_classification", 0)


def test_pairs_carry_the_tokenizers_marks_for_the_second_text() -> None:
    data = {"premise": ["a film", "a play"], "hypothesis": ["it was", "b c d"], "label": ["yes", "no"]}
    task = classified(splits_of(data), text_column="premise", text_pair_column="hypothesis")
    assert task.train_dataset[0] == {**word_tokenizer()("a film", "it was"), "labels": 1}
    assert 1 in task.train_dataset[0]["token_type_ids"]
    assert task.id2label == {0: "no", 1: "yes"}


def test_labels_are_known_from_all_training_rows_though_few_are_used() -> None:
    task = classified(sentiment_splits(), max_train_samples=1)
    assert (len(task.train_dataset), len(task.id2label)) == (1, 2)


def test_rows_of_one_class_are_no_training_and_said_of_an_evaluation() -> None:
    """The first rows of a file that is sorted by class."""
    by_class = {"text": ["a", "b", "c", "d"], "label": ["x", "x", "y", "y"]}
    with pytest.raises(ValueError, match=r"all 2 train rows have the label 'x', .* at least two\. Shuffle the rows"):
        classified(splits_of(by_class), max_train_samples=2)
    task = classified(splits_of(by_class), max_eval_samples=2)
    assert task.notes == ("all 2 eval rows have the label 'x', so eval_accuracy tells nothing of the others",)


SOME_EMPTY = splits_of({"text": ["a", " ", "c", "d"], "label": [0, 1, None, 1]})
ONE_LONG = splits_of({"text": ["a " * 10, "b"], "label": [0, 1]})


@pytest.mark.parametrize(
    ("splits", "options", "message"),
    [
        (
            splits_of({"text": ["a", "b"], "label": ["x", "y"]}, {"text": ["a", "b"], "label": ["x", "z"]}),
            {},
            r"of the eval split holds labels that the train split does not have: z \(1 rows: row 1",
        ),
        (SOME_EMPTY, {}, "2 of 4 rows of the train split have nothing in column 'text', 'label'"),
        (ONE_LONG, {"max_length": 6}, r"1 of 2 rows .* longer than max_length=6 tokens \(row 0, .* with 12 tokens"),
    ],
)
def test_rows_that_can_not_be_classified_are_an_error(splits: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        classified(splits, **options)


def test_empty_rows_are_left_out_and_long_ones_cut_on_request(caplog: pytest.LogCaptureFixture) -> None:
    assert list(classified(SOME_EMPTY, skip_empty_rows=True).train_dataset["labels"]) == [0, 1]
    first = list(classified(ONE_LONG, max_length=6, truncate=True).train_dataset[0]["input_ids"])
    assert (len(first), first[0], first[-1]) == (6, 2, 3), "[CLS] and [SEP] stay"
    assert "they are cut" in caplog.text


def test_special_tokens_that_texts_and_templates_have_themselves_are_there_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    given = splits_of({"text": ["[CLS] a film [SEP]", "b"], "label": [0, 1]})
    plain = splits_of({"text": ["a film", "b"], "label": [0, 1]})
    task = classified(given)
    assert list(task.train_dataset) == list(classified(plain).train_dataset)
    line = "1 of 2 train rows: the text already has '[CLS]' or '[SEP]', which each row gets anyway. The row has it once"
    assert line in task.notes
    prompt = {"task": "prompt_classification", "label_words": "bad,good"}
    rows = [
        list(prepared(plain, word_tokenizer(), bert_config(), template=template, **prompt).train_dataset)
        for template in ("[CLS] {text} {mask} [SEP]", "{text} {mask}")
    ]
    assert rows[0] == rows[1] and "template '[CLS] {text} {mask} [SEP]': the text already has '[CLS]'" in caplog.text


def test_a_causal_classifier_is_padded_with_what_its_configuration_must_name() -> None:
    task = prepared(sentiment_splits(), byte_tokenizer(pad=False), llama_config(), task="classification")
    assert task.pad_token_id == task.data_collator.pad_token_id == byte_tokenizer().eos_token_id


def test_a_column_of_the_data_may_have_any_name() -> None:
    task = classified(splits_of({"labels": ["a film", "a play"], "label": [1, 0]}), text_column="labels")
    assert list(task.train_dataset["labels"]) == [1, 0]


def test_accuracy_is_the_share_of_right_classes() -> None:
    logits = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.6, 0.4], [0.3, 0.7]])
    labels = torch.tensor([1, 0, 1, 1])
    for given in (logits, (logits, torch.zeros(4, 7))):
        predicted = predicted_classes(given, labels)
        assert accuracy(EvalPrediction(predicted.numpy(), np.asarray(labels))) == {"accuracy": 0.75}


def test_the_sentiment_treebank_gets_its_two_classes(shared_data: Path) -> None:
    splits = splits_from(shared_data / "sst2" / "dev.tsv", column_names=["sentence", "label"])
    task = prepared(splits, word_tokenizer(), bert_config(positions=128), task="classification")
    assert task.id2label == {0: "0", 1: "1"}
    assert np.bincount([*task.train_dataset["labels"], *task.eval_dataset["labels"]]).tolist() == [428, 444]
