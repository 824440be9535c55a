from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from slivertune.training.tasks.answers import count_right_answers
from slivertune.training.tasks.task import PaddingCollator, Task
from slivertune.training.tasks.tokenization import IGNORED


@pytest.fixture(scope="module")
def model_and_tokenizer(tiny_base: Path) -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(tiny_base).eval(), AutoTokenizer.from_pretrained(tiny_base)


def greedy(model: Any, ids: list[int], num_tokens: int) -> list[int]:
    """The likeliest next token, one forward each."""
    for _ in range(num_tokens):
        ids = [*ids, int(model(torch.tensor([ids])).logits[0, -1].argmax())]
    return ids[-num_tokens:]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_row_counts_if_greedy_decoding_writes_its_whole_response(
    batch_size: int, model_and_tokenizer: tuple[Any, Any], tmp_path: Path
) -> None:
    model, tokenizer = model_and_tokenizer
    rows = []
    # Of eight rows, three have the model's own answer, of 1 to 5 tokens; in the others a token of it is another.
    for number in range(8):
        prompt = tokenizer("a prompt " * (1 + number % 3))["input_ids"]
        answer = greedy(model, prompt, 1 + number % 5)
        if number >= 3:
            wrong = number % len(answer)
            answer[wrong] = (answer[wrong] + 1) % 256
        rows.append({"input_ids": prompt + answer, "labels": [IGNORED] * len(prompt) + answer})
    naive = [
        greedy(
            model, row["input_ids"][: row["labels"].count(IGNORED)], len(row["labels"]) - row["labels"].count(IGNORED)
        )
        == [label for label in row["labels"] if label != IGNORED]
        for row in rows
    ]
    assert naive == [True] * 3 + [False] * 5
    task = count_right_answers(
        Task(
            train_dataset=rows, eval_dataset=rows, data_collator=PaddingCollator(pad_token_id=256, causal=True),
            model_kind="causal_lm", max_length=64, pad_token_id=256,
        )
    )  # fmt: skip
    arguments = TrainingArguments(
        str(tmp_path), per_device_eval_batch_size=batch_size, report_to="none", use_cpu=True, disable_tqdm=True
    )
    trainer = Trainer(
        model, arguments, data_collator=task.data_collator, eval_dataset=task.eval_dataset,
        compute_metrics=task.compute_metrics, preprocess_logits_for_metrics=task.preprocess_logits_for_metrics,
    )  # fmt: skip
    assert trainer.evaluate()["eval_accuracy"] == 3 / 8
