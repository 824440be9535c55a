"""What the model says about one evaluation row, before and after."""

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedTokenizerBase, Trainer

from slivertune.training.tasks.task import Task
from slivertune.training.tasks.tokenization import IGNORED

_PROMPT_TOKENS = 48
"""Tokens of a text's beginning that the model is given to continue."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ContinuationProbe:
    """A language model continues a text.

    Answers that the data knows are decoded greedily; free text is drawn at temperature 0.7 from a fixed seed, since
    small models repeat themselves otherwise.
    """

    trainer: Trainer
    tokenizer: PreTrainedTokenizerBase
    token_ids: list[int]
    expected: str | None
    num_tokens: int

    @property
    def prompt(self) -> str:
        """The text to continue."""
        return str(self.tokenizer.decode(self.token_ids, skip_special_tokens=True))

    def ask(self) -> str:
        """The continuation alone."""
        model: Any = self.trainer.model
        ids = torch.tensor([self.token_ids], device=model.device)
        padding = self.tokenizer.pad_token_id
        drawing: dict[str, Any] = {"do_sample": False}
        if self.expected is None:
            drawing = {"do_sample": True, "temperature": 0.7, "top_k": 20}
        was_training = model.training
        model.eval()
        # As in evaluation, where accelerate puts it around the outermost forward, which PEFT's generate does not call.
        autocast = self.trainer.accelerator.autocast()
        with autocast, torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
            torch.manual_seed(0)
            out = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=self.num_tokens,
                pad_token_id=padding if padding is not None else self.tokenizer.eos_token_id,
                use_cache=True,
                **drawing,
            )
        model.train(was_training)
        return str(self.tokenizer.decode(out[0, len(self.token_ids) :], skip_special_tokens=True))


class ClassificationProbe:
    """A classifier, or a language model with label words, judges one row.

    Args:
        trainer: Judges it.
        task: Knows the rows and the classes.
        tokenizer: GroupSchedule the row back into text.
    """

    def __init__(self, trainer: Trainer, task: Task, tokenizer: PreTrainedTokenizerBase) -> None:
        # A causal language model is asked once for each label word, in rows that follow each other.
        num_rows = len(task.id2label or [1]) if task.model_kind == "causal_lm" else 1
        self._rows = task.eval_dataset.select(range(num_rows))
        self._trainer = trainer
        self._names = task.id2label if task.model_kind == "sequence_classification" else None
        self.prompt = str(tokenizer.decode(self._rows[0]["input_ids"], skip_special_tokens=True))
        self.expected = None if self._names is None else self._names[int(self._rows[0]["labels"])]

    def ask(self) -> str:
        """The label that the model chooses; for label words, whether it is right."""
        output = self._trainer.predict(self._rows, metric_key_prefix="sample")
        if self._names is not None:
            return self._names[int(torch.as_tensor(output.predictions).reshape(-1)[0])]
        return "right" if (output.metrics or {})["sample_accuracy"] == 1.0 else "wrong"


Probe: TypeAlias = ContinuationProbe | ClassificationProbe
"""One question to the model: `ask` lets it answer, as it is now, and leaves the random state as it was."""


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
        trainer: Holds the model, and judges rows of classification tasks.
        task: What is learned.
        tokenizer: Its tokenizer.
        asked: `--sample_prompt`; by default the beginning of the first evaluation row.
        num_tokens: The most tokens that a language model may answer; 0 asks nothing.
        cut: Whether a prompt that does not fit into a row is cut, as one that no user typed.

    Returns:
        The question, or None where none is wanted.

    Raises:
        ValueError: If the prompt asked for has no tokens, is too long, or the task is no language modelling.
    """
    if task.id2label is not None:
        if asked is not None:
            raise ValueError(f"sample_prompt={asked!r} is for language modelling; leave it out for classification")
        return ClassificationProbe(trainer, task, tokenizer) if num_tokens else None
    if num_tokens == 0:
        return None
    ids, expected = _first_prompt(task, tokenizer) if asked is None else (tokenizer(asked)["input_ids"], None)
    if asked is None:
        ids = ids[-(task.max_length - 1) :]  # what the response follows is the end
    elif cut:
        ids = ids[: task.max_length - 1]
    if not 0 < len(ids) < task.max_length:
        raise ValueError(
            f"sample_prompt has {len(ids)} tokens; it must have at least 1, and fewer than max_length={task.max_length}"
        )
    return ContinuationProbe(
        trainer=trainer, tokenizer=tokenizer, token_ids=ids, expected=expected, num_tokens=num_tokens
    )


def _first_prompt(task: Task, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], str | None]:
    """The first evaluation row: its beginning, or its prompt and the response in the data."""
    row = task.eval_dataset[0]
    ids, silent = row["input_ids"], [label == IGNORED for label in row.get("labels", ())]
    if True not in silent:  # no prompt in this row, all of it is learned
        return ids[: max(1, min(_PROMPT_TOKENS, len(ids) // 2))], None
    # A packed row may begin in the midst of a response; the first whole prompt begins after it.
    start = silent.index(True)
    end = silent.index(False, start) if False in silent[start:] else len(ids)
    stop = silent.index(True, end) if True in silent[end:] else len(ids)
    return ids[start:end], str(tokenizer.decode(ids[end:stop], skip_special_tokens=True))
