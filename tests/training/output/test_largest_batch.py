from types import SimpleNamespace
from typing import Any

import torch

from slivertune.training.output.largest_batch import BatchSize, LargestBatch


def test_of_the_batches_that_are_trained_on_the_one_with_the_most_tokens_is_kept() -> None:
    seen = []
    trainer: Any = SimpleNamespace(training_step=lambda model, inputs, **more: seen.append((inputs, more)))
    largest = LargestBatch()
    largest.watch(trainer)
    assert largest.size is None
    for rows, length in ((2, 8), (3, 6), (1, 17), (4, 4)):
        trainer.training_step(None, {"input_ids": torch.zeros(rows, length)}, num_items_in_batch=5)
    assert largest.size == BatchSize(num_rows=3, num_tokens=6)
    assert len(seen) == 4 and all(more == {"num_items_in_batch": 5} for _, more in seen)


def test_a_batch_without_tokens_is_passed_over() -> None:
    largest = LargestBatch()
    largest.note({"pixel_values": torch.zeros(2, 3)})
    largest.note({"input_ids": None})
    assert largest.size is None
