"""Answers of the model to one evaluation row, before and after training."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, Trainer

from slivertune.training.tasks.special_ends import added_ends
from slivertune.training.tasks.task import Task
from slivertune.training.tasks.tokenization import IGNORED, padding_id

_PROMPT_TOKENS = 48
"""Maximum length of a prompt taken from the beginning of a text, in tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """One question to the model."""

    prompt: str
    """Text to continue, or row to judge."""
    expected: str | None
    """Answer in the data, if there is one."""
    ask: Callable[[], str]
    """Function that lets the current model answer and leaves the random state as it was. It returns the continuation
    alone, the chosen label or, for label words, whether the answer is right."""


def make_probe(
    trainer: Trainer,
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    *,
    asked: str | None,
    num_tokens: int,
    cut: bool = False,
) -> Probe | None:
    """Make the question that suits a task.

    Args:
        trainer: Trainer with the model, which judges rows of classification tasks.
        task: Task of the run.
        tokenizer: Tokenizer of the model.
        asked: Value of `--sample_prompt`. The default is the beginning of the first evaluation row.
        num_tokens: Maximum length of a language model's answer in tokens; 0 asks nothing.
        cut: Whether to cut a prompt that does not fit into a row, as for a prompt that no user typed.

    Returns:
        The question, or None if there is none to ask.

    Raises:
        ValueError: If `asked` has no tokens or is too long, or if the task is not language modelling.
    """
    is_own = not isinstance(task.model_kind, str)
    if asked is not None and (is_own or task.id2label is not None):
        raise ValueError(f"sample_prompt={asked!r} is for language modelling. Leave it out for other tasks")
    # The answers of another package's model are unknown.
    if num_tokens == 0 or is_own:
        return None
    if task.id2label is not None:
        return _judgement(trainer, task, tokenizer)
    if asked is None:
        ids, expected = _first_prompt(task, tokenizer)
        ids = ids[-(task.max_length - 1) :]  # keep the end, which the response follows
    else:
        # A prompt that begins with BOS, as copied from a rendered chat, has it once.
        ids, expected = tokenizer(added_ends(tokenizer).text_once(asked))["input_ids"], None
        ids = ids[: task.max_length - 1] if cut else ids
    if not 0 < len(ids) < task.max_length:
        raise ValueError(
            f"sample_prompt has {len(ids)} tokens, and must have 1 or more and fewer than "
            f"max_length={task.max_length}. Pass another, or leave it out"
        )
    return Probe(
        prompt=str(tokenizer.decode(ids, skip_special_tokens=True)),
        expected=expected,
        ask=partial(_continue_text, trainer, tokenizer, ids, num_tokens, is_greedy=expected is not None),
    )


def _continue_text(
    trainer: Trainer, tokenizer: PreTrainedTokenizerBase, ids: list[int], num_tokens: int, *, is_greedy: bool
) -> str:
    """Continue a text with a language model.

    If the answer is in the data, decoding is greedy. Otherwise, text is sampled at temperature 0.7 with a fixed seed,
    since small models repeat themselves in greedy decoding.
    """
    model: Any = trainer.model
    given = torch.tensor([ids], device=model.device)
    drawing = {"do_sample": False} if is_greedy else {"do_sample": True, "temperature": 0.7, "top_k": 20}
    was_training = model.training
    model.eval()
    # As in evaluation. Accelerate wraps the outermost forward in autocast, and PEFT's generate does not call that one.
    autocast = trainer.accelerator.autocast()
    with autocast, torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(0)
        out = model.generate(
            input_ids=given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=num_tokens,
            pad_token_id=padding_id(tokenizer),
            use_cache=True,
            **drawing,
        )
    model.train(was_training)
    return str(tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True))


def _judgement(trainer: Trainer, task: Task, tokenizer: PreTrainedTokenizerBase) -> Probe:
    """Let a classifier, or a language model with label words, judge one row."""
    # A causal language model is asked once per label word, in consecutive rows.
    rows = task.eval_dataset.select(range(len(task.id2label or [1]) if task.model_kind == "causal_lm" else 1))
    names = task.id2label if task.model_kind == "sequence_classification" else None

    def ask() -> str:
        output = trainer.predict(rows, metric_key_prefix="sample")
        if names is not None:
            return names[int(torch.as_tensor(output.predictions).reshape(-1)[0])]
        return "right" if (output.metrics or {})["sample_accuracy"] == 1.0 else "wrong"

    return Probe(
        prompt=str(tokenizer.decode(rows[0]["input_ids"], skip_special_tokens=True)),
        expected=None if names is None else names[int(rows[0]["labels"])],
        ask=ask,
    )


def _first_prompt(task: Task, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], str | None]:
    """Return the beginning of the first evaluation row, or its prompt and the response in the data."""
    row = task.eval_dataset[0]
    ids, silent = row["input_ids"], [label == IGNORED for label in row.get("labels", ())]
    if True not in silent:  # no prompt in this row: all of it is trained on
        return ids[: max(1, min(_PROMPT_TOKENS, len(ids) // 2))], None
    # A packed row may begin in the middle of a response. The first whole prompt begins after it.
    start = silent.index(True)
    end = silent.index(False, start) if False in silent[start:] else len(ids)
    stop = silent.index(True, end) if True in silent[end:] else len(ids)
    return ids[start:end], str(tokenizer.decode(ids[end:stop], skip_special_tokens=True))
