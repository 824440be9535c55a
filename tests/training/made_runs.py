"""What a run plans for itself, without a model or data."""

from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset

from slivertune.planning.request import PlanRequest
from slivertune.training.command_line.parse import TrainArguments
from slivertune.training.planned_request import plan_request


def planned_back(arguments: TrainArguments) -> PlanRequest:
    """What a run plans for itself, whose model and rows are made up."""
    is_bf16 = arguments.precision.loading == "bf16"
    model = torch.nn.Linear(1, 1, dtype=torch.bfloat16 if is_bf16 else torch.float32)
    rows = Dataset.from_dict({"input_ids": [[0] * (arguments.data.max_length or 0)]})
    id2label = {0: "no", 1: "yes"} if arguments.data.task == "classification" else None
    trainer: Any = SimpleNamespace(model=model, accelerator=SimpleNamespace(state=None))
    task: Any = SimpleNamespace(train_dataset=rows, max_length=arguments.data.max_length, id2label=id2label)
    is_chunked = arguments.run.chunked_cross_entropy
    return plan_request(arguments, trainer, task, "single", is_chunked=is_chunked)
