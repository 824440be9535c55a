import re
from typing import Any

import pytest

from slivertune.training.options.arguments import DataArguments
from slivertune.training.options.parser import given_values


def test_the_command_line_parser_reads_every_kind_of_field() -> None:
    words = "--dataset d.tsv --column_names a b --task prompt_classification --label_words 0=no,1=yes --truncate"
    given = given_values([*words.split(), "--template", "{a}? {mask}", "--eval_fraction", "0.25", "--max_length", "32"])
    assert DataArguments(**given) == DataArguments(
        dataset=["d.tsv"],
        column_names=["a", "b"],
        task="prompt_classification",
        label_words="0=no,1=yes",
        truncate=True,
        template="{a}? {mask}",
        eval_fraction=0.25,
        max_length=32,
    )


def test_several_datasets_and_their_weights_are_read() -> None:
    words = "--dataset a.jsonl b.jsonl --dataset_weights 0.7 3 --dataset_format alpaca --chat_template chat.jinja"
    assert DataArguments(**given_values(words.split())) == DataArguments(
        dataset=["a.jsonl", "b.jsonl"], dataset_weights=[0.7, 3.0], dataset_format="alpaca", chat_template="chat.jinja"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_train_samples": 0}, "max_train_samples=0 must be at least 1"),
        ({"preprocessing_num_workers": -1}, "preprocessing_num_workers=-1 must be at least 1"),
        ({"eval_fraction": 1.0}, "eval_fraction=1.0 must lie between 0 and 1"),
        ({"eval_split": "test", "eval_file": "e.csv"}, "'test' and eval_file='e.csv' both name the evaluation rows"),
        ({"template": "{a}"}, "template='{a}' has no effect with task=causal_lm, only with prompt_classification"),
        ({"packing": True, "task": "classification"}, "packing=True has no effect with task=classification"),
        ({"label_column": "x"}, "only with classification and prompt_classification"),
        ({"prompt_column": "p"}, "prompt_column='p' and response_column=None go together"),
        ({"prompt_column": "p", "response_column": "r", "text_column": "t"}, "exclude each other"),
        ({"task": "prompt_classification", "template": "{a} {mask}"}, "needs --label_words"),
        ({"task": "prompt_classification", "label_words": "a,b"}, "needs --template"),
        (
            {"dataset": ["a", "b"], "task": "classification"},
            "['a', 'b'] names several datasets, but only task=causal_lm",
        ),
        ({"dataset": ["a", "b", "a"]}, "names a dataset twice. Name each once"),
        ({"dataset": ["a", "b"], "dataset_weights": [1.0]}, "=[1.0] has 1 weights for 2 datasets. Give each"),
        ({"dataset": ["a"], "dataset_weights": [1.0]}, "Give each of several datasets one weight, or leave the"),
        ({"dataset_weights": [0.5, 0.5]}, "has 2 weights for 0 datasets"),
        ({"dataset": ["a", "b"], "dataset_weights": [1.0, 0.0]}, "must all be positive numbers. Leave out a dataset"),
        ({"dataset": ["a", "b"], "dataset_weights": [1.0, float("nan")]}, "must all be positive numbers"),
        ({"dataset_format": "alpaca", "text_column": "t"}, "='alpaca' and text_column both choose the columns"),
        ({"dataset_format": "alpaca", "prompt_column": "p", "response_column": "r"}, "'alpaca' and prompt_column both"),
        ({"chat_template": "{{ x }}", "task": "classification"}, "has no effect with task=classification"),
        ({"chat_template_date": "20260131"}, "chat_template_date='20260131' is not a date. Write it as 2026-01-31"),
        ({"chat_template_date": "2026-02-30"}, "chat_template_date='2026-02-30' is not a date"),
    ],
)
def test_what_contradicts_itself_or_would_be_ignored_is_an_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        DataArguments(**options)
