from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer

from slivertune.training.options.arguments import DataArguments
from slivertune.training.options.parser import given_values
from slivertune.training.options.tasks import TASK_OPTIONS
from slivertune.training.tasks import prepare
from slivertune.training.tasks.prepare import prepare_datasets, register_train_task
from slivertune.training.tasks.task import Task
from tests.helpers.tolerance import step_limit, sum_limit, with_exact
from tests.training.tiny import (
    bert_config,
    byte_tokenizer,
    chat_tokenizer,
    llama_config,
    model_for,
    prepared,
    sentiment_splits,
    splits_from,
    splits_of,
    trainer_of,
    word_tokenizer,
    write,
)

PROMPT = {"task": "prompt_classification", "template": "{sentence} it was {mask}", "label_words": "bad,good"}

SHORT = "{% for message in messages %}{{ message['content'] }}|{% endfor %}"

MOST_TOKENS = 32
"""In a row."""


def task_of(name: str, splits: Any = None) -> tuple[Task, Any]:
    splits = splits or sentiment_splits()
    if name in ("classification", "masked prompts"):
        options = {"task": "classification"} if name == "classification" else PROMPT
        config = bert_config(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        return prepared(splits, word_tokenizer(), config, **options), config
    options = {
        "documents": {"text_column": "sentence"},
        "packed documents": {"text_column": "sentence", "packing": True, "max_length": 16},
        "responses": {"prompt_column": "sentence", "response_column": "sentence"},
        "causal prompts": PROMPT,
        "chats": {"prompt_column": "sentence", "response_column": "sentence", "chat_template": SHORT},
    }[name]
    return prepared(splits, byte_tokenizer(), llama_config(), **options), llama_config()


def losses_of_rows(trainer: Trainer) -> torch.Tensor:
    """Each training row's by itself."""
    model: Any = trainer.model
    rows = [trainer.data_collator([row]) for row in trainer.train_dataset]  # type: ignore[union-attr]
    with torch.no_grad():
        return torch.stack([trainer.compute_loss(model, row) for row in rows])


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
    "name", ["documents", "packed documents", "responses", "classification", "masked prompts", "causal prompts"]
)
def test_a_stock_trainer_learns_and_judges_every_task(name: str, accumulation: int, tmp_path: Path) -> None:
    task, config = task_of(name)
    trainer = trainer_of(
        task,
        model_for(task, config),
        tmp_path,
        max_steps=3,
        learning_rate=0.01,
        lr_scheduler_type="constant",
        per_device_train_batch_size=6 // accumulation,
        gradient_accumulation_steps=accumulation,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="no",
    )
    losses, exact = with_exact(lambda: losses_of_rows(trainer))
    before = trainer.evaluate()
    trainer.train()
    after = next(entry for entry in trainer.state.log_history if entry.get("step") == 3 and "eval_loss" in entry)
    assert ("eval_accuracy" in after) is (task.compute_metrics is not None)
    assert after["eval_loss"] < before["eval_loss"]
    # The first step is taken on the whole split, in one batch or two: its loss is that of the evaluation before it. Of
    # causal prompts, the former is a mean over tokens ("bad" has 3, "good" 4, as often), the latter one over words.
    first = trainer.state.log_history[0]["loss"] * (3.5 if name == "causal prompts" else 1.0)
    # A mean is no farther off than the farthest of its terms, and by its own rounding. A row too few would be a sixth.
    limit = step_limit(losses, exact, cap=1e-4) + sum_limit(len(losses) * MOST_TOKENS, torch.float32)
    assert first == pytest.approx(before["eval_loss"], rel=limit)


def test_the_tokenizer_stays_as_it_is_though_rows_are_cut() -> None:
    tokenizer = word_tokenizer()
    before = tokenizer.backend_tokenizer.to_str()
    prepared(sentiment_splits(), tokenizer, bert_config(), task="classification", max_length=4, truncate=True)
    assert tokenizer.backend_tokenizer.to_str() == before


def test_a_repeated_preparation_is_read_from_the_cache(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.csv", "sentence,label\n" + "a good film,1\na bad film,0\n" * 10)
    names = []
    for _ in range(2):
        splits = splits_from(file, dataset_cache_dir=str(tmp_path / "cache"))
        for name in ("classification", "masked prompts", "causal prompts", "packed documents", "chats"):
            task, _ = task_of(name, splits)
            names.append([entry["filename"] for entry in task.train_dataset.cache_files])
        names.append(sorted(path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.arrow")))
    assert names[:6] == names[6:]


def test_rows_of_splits_that_were_not_loaded_here_are_numbered_too() -> None:
    splits = sentiment_splits()
    splits["train"] = splits["train"].map(lambda row: {"sentence": "" if row["label"] else row["sentence"]})
    with pytest.raises(ValueError, match=r"3 of 6 rows of the train split .* \(rows 0, 2, 4, counted from 0\)"):
        prepared(splits, word_tokenizer(), bert_config(), task="classification")


QUESTIONS = splits_of({"question": ["1+1?", "2+2?"], "answer": ["2", "4"]})
TEXTS = splits_of({"text": [f"text {number}" for number in range(6)]})


def mixture(sources: dict[str, Any], **options: Any) -> Task:
    arguments = DataArguments(dataset=list(sources), **options)
    return prepare_datasets(arguments, chat_tokenizer(), llama_config(), sources, seed=0)


def test_datasets_of_different_formats_are_mixed_and_each_is_learned_as_its_own_says() -> None:
    tokenizer = chat_tokenizer()
    task = mixture({"q": QUESTIONS, "t": TEXTS})
    learned = [tokenizer.decode([label for label in row["labels"] if label >= 0]) for row in task.train_dataset]
    assert learned == ["2<|im_end|>\n", "4<|im_end|>\n", *(f"text {number}<eos>" for number in range(6))]
    assert len(task.eval_dataset) == 8
    assert [note for note in task.notes if "read as" in note] == [
        "q: read as question and answer (question, answer), written by the chat template; loss on the answer",
        "t: read as text (text); loss on all tokens",
    ]


def test_weights_change_the_training_rows_alone_and_are_said() -> None:
    task = mixture({"q": QUESTIONS, "t": TEXTS}, dataset_weights=[0.5, 0.5])
    answers = sum(-100 in row["labels"] for row in task.train_dataset)
    assert answers > 2 and len(task.train_dataset) - answers >= 6
    assert len(task.eval_dataset) == 8
    assert task.notes[0].startswith("q (weight 0.5): read as question")


def test_a_mixture_is_packed_as_one_stream() -> None:
    tokenizer = chat_tokenizer()
    task = mixture({"q": QUESTIONS, "t": TEXTS}, packing=True, max_length=32)
    text = "".join(tokenizer.decode(row["input_ids"]) for row in task.train_dataset)
    assert text.startswith("<|im_start|>user\n1+1?<|im_end|>") and "text 0<eos>text" in text


def test_an_evaluation_file_of_a_mixture_has_a_format_of_its_own() -> None:
    task = mixture({"t": {"train": TEXTS["train"]}, "e": {"eval": QUESTIONS["eval"]}})
    assert (len(task.train_dataset), len(task.eval_dataset)) == (6, 2)
    assert any(note.startswith("e: read as question and answer") for note in task.notes)


def test_a_dataset_of_a_mixture_that_can_not_be_read_is_named() -> None:
    with pytest.raises(ValueError, match=r"^q: the dataset's columns \(one, two\) give no plain choice"):
        mixture({"q": splits_of({"one": ["a"], "two": ["b"]}), "t": TEXTS})
    with pytest.raises(ValueError, match=r"^q: 2 of 2 rows of the train split are longer than max_length=16 tokens"):
        mixture({"t": TEXTS, "q": QUESTIONS}, max_length=16)


def prepare_sums(args: DataArguments, tokenizer: Any, config: Any, splits: dict[str, Any]) -> Task:
    raise NotImplementedError(sorted(splits))


def test_a_task_of_another_package_is_prepared_by_it_and_reads_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "_PREPARE", dict(prepare._PREPARE))
    try:
        register_train_task("sums", prepare_sums, reads=("text_column",))
        arguments = DataArguments(task="sums", text_column="sentence")
        with pytest.raises(NotImplementedError, match=r"eval.*train"):
            prepared(sentiment_splits(), word_tokenizer(), bert_config(), task="sums")
        with pytest.raises(ValueError, match="label_column='x' has no effect with task=sums"):
            DataArguments(task="sums", label_column="x")
        assert given_values(["--task", "sums"]) == {"task": arguments.task}
    finally:
        del TASK_OPTIONS["sums"]
    with pytest.raises(ValueError, match="invalid choice: 'sums'"):
        given_values(["--task", "sums"])


def test_a_task_of_a_taken_name_or_that_reads_what_all_do_is_refused() -> None:
    with pytest.raises(ValueError, match="another task is registered as 'causal_lm'"):
        register_train_task("causal_lm", prepare_sums)
    with pytest.raises(ValueError, match="reads='max_length' is no option of the data that only some tasks read"):
        register_train_task("sums", prepare_sums, reads=("max_length",))
    assert "sums" not in TASK_OPTIONS
