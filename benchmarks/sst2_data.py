"""SST-2 for `sst2.py`: sentences to token ids, batches of similar length, padding."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

MAX_LENGTH = 128
"""Tokens of a sentence that are kept; the longest of SST-2 has 67."""
Example = tuple[list[int], int]
"""The token ids of a sentence, and its label."""


def read_examples(path: Path, tokenizer: Any) -> list[Example]:
    """Read lines of `sentence<TAB>label` into (token ids, label).

    Raises:
        ValueError: If a line has no label 0 or 1 after its last tab.
    """
    sentences, labels = [], []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        sentence, tab, label = line.rpartition("\t")
        if not tab or label not in ("0", "1"):
            raise ValueError(f"{path.name}, line {number}: {line!r} is not sentence<TAB>label with a label 0 or 1")
        sentences.append(sentence)
        labels.append(int(label))
    token_ids = tokenizer(sentences, truncation=True, max_length=MAX_LENGTH)["input_ids"]
    return list(zip(token_ids, labels, strict=True))


def length_grouped(examples: Sequence[Example], batch_size: int, generator: torch.Generator) -> list[list[int]]:
    """Draw an epoch of batches of similar length, as lists of indices: sorted in pools of 50 batches, then shuffled.

    With dynamic padding this about halves the tokens that are computed.
    """
    shuffled = torch.randperm(len(examples), generator=generator).tolist()
    pool_size = 50 * batch_size
    batches = []
    for start in range(0, len(shuffled), pool_size):
        pool = sorted(shuffled[start : start + pool_size], key=lambda index: len(examples[index][0]))
        batches += [pool[first : first + batch_size] for first in range(0, len(pool), batch_size)]
    return [batches[index] for index in torch.randperm(len(batches), generator=generator).tolist()]


def collate(examples: Sequence[Example], pad_token_id: int) -> dict[str, torch.Tensor]:
    """Pad to the longest: int64 `input_ids` and `attention_mask` (batch, length), `labels` (batch,)."""
    ids = [torch.tensor(tokens) for tokens, _ in examples]
    return {
        "input_ids": nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=pad_token_id),
        "attention_mask": nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
        "labels": torch.tensor([label for _, label in examples]),
    }
