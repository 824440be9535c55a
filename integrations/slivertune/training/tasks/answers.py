"""Share of rows that a causal language model answers right, word for word."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import EvalPrediction

from slivertune.training.tasks.task import Task
from slivertune.training.tasks.tokenization import IGNORED


def count_right_answers(task: Task) -> Task:
    """Let a task's evaluation count the rows whose whole response is right.

    A response is right if each of its tokens is the likeliest one after the prompt and the tokens before it. Exactly
    then is it the model's answer in greedy decoding.

    Args:
        task: Task of causal language modelling on prompts and responses.

    Returns:
        The task, evaluated by `eval_loss` and `eval_accuracy`, the share of right rows.
    """
    return replace(task, compute_metrics=_right_answers, preprocess_logits_for_metrics=_likeliest)


def _likeliest(logits: Any, labels: torch.Tensor) -> torch.Tensor:
    whole = logits[0] if isinstance(logits, tuple) else logits
    likeliest: torch.Tensor = whole.argmax(-1)
    return likeliest


def _right_answers(prediction: EvalPrediction) -> dict[str, float]:
    """Compare what was likeliest after each token with the next label, as int arrays of shape (rows, longest)."""
    labels = np.asarray(prediction.label_ids)[:, 1:]
    predicted = np.asarray(prediction.predictions)[:, :-1]
    is_answer = labels != IGNORED
    is_right = np.all((predicted == labels) | ~is_answer, axis=1) & np.any(is_answer, axis=1)
    return {"accuracy": float(np.mean(is_right))}
