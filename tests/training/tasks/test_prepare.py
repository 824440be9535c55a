from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer

from slivertune.training.tasks.task import Task
from tests.helpers.tolerance import step_limit, sum_limit, with_exact
from tests.training.tiny import (
    bert_config,
    byte_tokenizer,
    llama_config,
    model_for,
    prepared,
    sentiment_splits,
    splits_from,
    trainer_of,
    word_tokenizer,
    write,
)

PROMPT = {"task": "prompt_classification", "template": "{sentence} it was {mask}", "label_words": "bad,good"}

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
        for name in ("classification", "masked prompts", "causal prompts", "packed documents"):
            task, _ = task_of(name, splits)
            names.append([entry["filename"] for entry in task.train_dataset.cache_files])
        names.append(sorted(path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.arrow")))
    assert names[:5] == names[5:]


def test_rows_of_splits_that_were_not_loaded_here_are_numbered_too() -> None:
    splits = sentiment_splits()
    splits["train"] = splits["train"].map(lambda row: {"sentence": "" if row["label"] else row["sentence"]})
    with pytest.raises(ValueError, match=r"3 of 6 rows of the train split .* \(rows 0, 2, 4, counted from 0\)"):
        prepared(splits, word_tokenizer(), bert_config(), task="classification")
