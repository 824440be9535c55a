from __future__ import annotations

import torch

from slivertune.training.methods.dense import DenseMethod
from tests.helpers.models import tiny_llama


def test_dense_warns_of_bf16_weights_without_masters() -> None:
    assert DenseMethod().notes(tiny_llama(), learning_rate=1.0) == []
    (note,) = DenseMethod().notes(tiny_llama(torch.bfloat16), learning_rate=None)
    assert note.startswith("dense fine-tuning of bf16 weights keeps no fp32 masters")
