"""What `slivertune train` takes where the user says nothing."""

from __future__ import annotations

from typing import Any

from slivertune.training.base_model import BaseRecipe
from slivertune.training.method_arguments import Method

BASE_RECIPE = BaseRecipe()
"""The model of the embedded default."""

EMBEDDED_LEARNING_RATES: dict[Method, float] = {"dense": 2e-3, "hift": 2e-3, "lora": 4e-3}
"""The best on the language reference, each method for itself: dense and HiFT of 1e-3, 2e-3 and 3e-3; LoRA of 1e-3, 2e-3
and 4e-3, in runs of 160 updates. A model that was trained for a minute or two is far from done, so that all want nearly
the largest rate they stand."""


def training_defaults(method: Method, *, embedded_model: bool, embedded_data: bool, has_cuda: bool) -> dict[str, Any]:
    """Defaults of `TrainingArguments` that differ from the library's own.

    Args:
        method: How the model is trained.
        embedded_model: Whether the embedded base model is fine-tuned, whose learning rates are known.
        embedded_data: Whether it is fine-tuned on the language reference, for which the run's length is set.
        has_cuda: Whether the run uses a CUDA device.

    Returns:
        Field names and values.
    """
    defaults: dict[str, Any] = {"report_to": "none", "dataloader_pin_memory": has_cuda}
    if embedded_model:
        defaults |= {
            "learning_rate": EMBEDDED_LEARNING_RATES[method],
            "lr_scheduler_type": "cosine",
            "warmup_steps": 0.05,
        }
    if embedded_data:
        defaults |= {
            "max_steps": 480,
            "per_device_train_batch_size": 4,
            "per_device_eval_batch_size": 16,
            "save_steps": 160,
        }
    return defaults


def method_defaults(*, embedded_data: bool) -> dict[str, Any]:
    """Defaults of the method's arguments that differ from their own.

    Args:
        embedded_data: Whether the language reference is trained on, for which there is a telling prompt.
    """
    return {"sample_prompt": 'The "while" statement is used for'} if embedded_data else {}


def data_defaults(*, embedded_data: bool) -> dict[str, Any]:
    """Defaults of the data arguments that differ from their own.

    Args:
        embedded_data: Whether the language reference is trained on: long texts, so they are packed.
    """
    return {"packing": True, "max_length": 256} if embedded_data else {}
