"""The task `retrieval` of `quality.py`: from the name of a function or class to the first paragraph of its docstring.

The pairs are those of the Python standard library that runs this: "json encoder JSONEncoder iterencode", and "Encode
the given object and yield each string representation as available." A model embeds both as the mean over their tokens.
Training scores each name of a batch against all its texts (softmax over 20 times the cosine similarity); the evaluation
counts the names whose nearest text, of all that are held out, is their own. Whole modules are held out, by a hash of
their names, so that no choice depends on an order.
"""

import ast
import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import BertModel, BertPreTrainedModel, EvalPrediction, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.modeling_outputs import SequenceClassifierOutput

from slivertune.training.data.columns import ROW_COLUMN, usable_rows
from slivertune.training.embedded.corpus import parse_modules, stdlib_folder
from slivertune.training.options.arguments import DataArguments
from slivertune.training.tasks.prepare import register_train_task
from slivertune.training.tasks.task import PaddingCollator, Task
from slivertune.training.tasks.tokenization import Columns, check_lengths, encode_rows, padding_id, resolve_max_length

TASK = "retrieval"
_COLUMNS = ("name", "text")
_SCALE = 20.0
"""Of a cosine similarity, before the softmax."""
_SHORTEST_TEXT = 16
_MOST_OF_A_MODULE = 24
"""Pairs; tkinter alone has ten times as many that are nearly alike."""
_HELD_OUT = 8
"""One module in this many."""

Pair = tuple[str, str, str]
"""Module, name in words, text."""


def find_pairs(folder: Path) -> dict[str, list[Pair]]:
    """The pairs of all modules under a folder, those to train on and those that are held out.

    A text that stands in several places counts once, and of each module at most 24 pairs count; which, says a hash.

    Args:
        folder: Such as the standard library's.

    Returns:
        `train` and `eval`, in the order of a hash.
    """
    every = sorted((pair for place, tree in parse_modules(folder) for pair in _pairs_of(place, tree)), key=_hash)
    by_module, seen = defaultdict[str, list[Pair]](list), set[str]()
    for pair in every:
        module, _, text = pair
        if text not in seen and len(by_module[module]) < _MOST_OF_A_MODULE:
            seen.add(text)
            by_module[module].append(pair)
    splits: dict[str, list[Pair]] = {"train": [], "eval": []}
    for module, pairs in by_module.items():
        splits["train" if int(_hash(module), 16) % _HELD_OUT else "eval"] += pairs
    return {split: sorted(pairs, key=_hash) for split, pairs in splits.items()}


def write_pairs(folder: Path) -> dict[str, Path]:
    """Write the standard library's pairs as `slivertune train` reads them.

    Args:
        folder: For `train.jsonl` and `eval.jsonl`.

    Returns:
        The files, by split.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    for split, pairs in find_pairs(stdlib_folder()).items():
        paths[split] = folder / f"{split}.jsonl"
        rows = [json.dumps({"name": name, "text": text}) + "\n" for _, name, text in pairs]
        paths[split].write_text("".join(rows), encoding="utf-8")
    return paths


def _pairs_of(place: Path, tree: ast.Module) -> Iterator[Pair]:
    parts = [part for part in place.with_suffix("").parts if part != "__init__"]

    def walk(node: ast.AST, names: Sequence[str]) -> Iterator[Pair]:
        for child in ast.iter_child_nodes(node):
            inner = names
            if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                inner = [*names, child.name]
                text = " ".join((ast.get_docstring(child) or "").partition("\n\n")[0].split())
                # Half a surrogate pair, which some docstrings quote, has no bytes.
                if len(text) >= _SHORTEST_TEXT and text.isprintable():
                    yield ".".join(parts), " ".join(" ".join(inner).replace("_", " ").split()), text
            yield from walk(child, inner)

    yield from walk(tree, parts)


def _hash(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


class TextEmbedder(BertPreTrainedModel):  # type: ignore[misc]
    """Embeds texts as the mean over their tokens, without a pooler, as MiniLM's package has it.

    A batch is names and below them their texts. The logits are the embeddings, of length 1, of shape (rows, 2, width):
    the name's, the text's. The loss is the mean over names of the negative log-probability of their own text.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.bert = BertModel(config, add_pooling_layer=False)
        self.post_init()

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor | None = None
    ) -> SequenceClassifierOutput:
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
        embedded = F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
        names, texts = embedded.chunk(2)
        loss = None if labels is None else F.cross_entropy(_SCALE * names @ texts.T, labels)
        return SequenceClassifierOutput(loss=loss, logits=torch.stack((names, texts), dim=1))


@dataclass(frozen=True, kw_only=True, slots=True)
class PairCollator:
    """Names and below them their texts, padded together; the label of a name is the place of its text."""

    pad_token_id: int

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        sides = [{"input_ids": row["input_ids"][side]} for side in range(2) for row in rows]
        return {**PaddingCollator(pad_token_id=self.pad_token_id)(sides), "labels": torch.arange(len(rows))}


def first_hits(prediction: EvalPrediction) -> dict[str, float]:
    """The share of names whose nearest text, of all texts, is their own."""
    names, texts = np.moveaxis(np.asarray(prediction.predictions), 1, 0)
    return {"accuracy": float(np.mean((names @ texts.T).argmax(1) == np.arange(len(names))))}


def prepare_retrieval(
    args: DataArguments, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, splits: Mapping[str, Any]
) -> Task:
    """Tokenise columns `name` and `text`; a row's `input_ids` are those of both."""
    max_length = resolve_max_length(args.max_length, config, tokenizer)
    encode = partial(_encode, tokenizer=tokenizer, max_length=max_length, truncate=args.truncate)
    encoded = {}
    for split in ("train", "eval"):
        rows = encode_rows(
            usable_rows(splits[split], _COLUMNS, args, split=split), encode, description=f"Tokenising the {split} split"
        )
        check_lengths(rows, max_length=max_length, truncate=args.truncate, split=split)
        encoded[split] = rows.select_columns(["input_ids"])
    return Task(
        train_dataset=encoded["train"],
        eval_dataset=encoded["eval"],
        data_collator=PairCollator(pad_token_id=padding_id(tokenizer)),
        compute_metrics=first_hits,
        model_kind=TextEmbedder,
        max_length=max_length,
        pad_token_id=padding_id(tokenizer),
    )


def _encode(batch: Columns, *, tokenizer: PreTrainedTokenizerBase, max_length: int, truncate: bool) -> Columns:
    sides = [tokenizer(batch[column], verbose=False)["input_ids"] for column in _COLUMNS]
    lengths = [max(map(len, pair)) for pair in zip(*sides, strict=True)]
    if truncate:
        sides = [tokenizer(batch[name], truncation=True, max_length=max_length)["input_ids"] for name in _COLUMNS]
    pairs = [list(pair) for pair in zip(*sides, strict=True)]
    return {"input_ids": pairs, "length": lengths, ROW_COLUMN: batch[ROW_COLUMN]}


def register() -> None:
    """Let `slivertune train --task` take it."""
    register_train_task(TASK, prepare_retrieval)
