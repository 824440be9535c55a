"""What `slivertune train` takes where the user says nothing."""

from __future__ import annotations

from typing import Any

from slivertune.sft.config import SelectionCriterion
from slivertune.training.embedded.base_model import BaseRecipe
from slivertune.training.options.method import Method

BASE_RECIPE = BaseRecipe()
"""The model of the embedded default."""

EMBEDDED_LEARNING_RATES: dict[Method, float] = {"dense": 2e-3, "hift": 2e-3, "sft": 8e-3, "lora": 4e-3}
"""The best on the language reference, each method for itself: dense and HiFT of 1e-3, 2e-3 and 3e-3; LoRA of 1e-3, 2e-3
and 4e-3; SFT by AdamW, at the density below, of 1e-3, 4e-3 and 8e-3; in runs of 160 updates. A model that was trained
for a minute or two is far from done, so that all want nearly the largest rate they stand."""
EMBEDDED_SM3_LEARNING_RATE = 1e-1
"""The same for SFT with `--selection momentum`: of 1e-2, 3e-2 and 1e-1."""
EMBEDDED_DENSITY = 0.05
"""SFT's share of the embedded model's blocks."""


def training_defaults(
    method: Method,
    *,
    embedded_model: bool,
    embedded_data: bool,
    has_cuda: bool,
    selection: SelectionCriterion = "accumulated_gradient",
) -> dict[str, Any]:
    """Defaults of `TrainingArguments` that differ from the library's own.

    Args:
        method: How the model is trained.
        embedded_model: Whether the embedded base model is fine-tuned, whose learning rates are known.
        embedded_data: Whether it is fine-tuned on the language reference, for which the run's length is set.
        has_cuda: Whether the run uses a CUDA device.
        selection: SFT's, which decides its update rule.

    Returns:
        Field names and values.
    """
    defaults: dict[str, Any] = {"report_to": "none", "dataloader_pin_memory": has_cuda}
    if embedded_model:
        is_sm3 = method == "sft" and selection == "momentum"
        defaults |= {
            "learning_rate": EMBEDDED_SM3_LEARNING_RATE if is_sm3 else EMBEDDED_LEARNING_RATES[method],
            "lr_scheduler_type": "cosine",
            # HiFT would hold the low rate at which a warm-up begins for its whole first cycle.
            "warmup_steps": 0.0 if method == "hift" else 0.05,
        }
    if embedded_data:
        defaults |= {
            "max_steps": 480,
            "per_device_train_batch_size": 4,
            "per_device_eval_batch_size": 16,
            "save_steps": 160,
        }
    return defaults


def sft_defaults(*, embedded_model: bool, given: frozenset[str]) -> dict[str, Any]:
    """Defaults of SFT's arguments that differ from their own.

    Args:
        embedded_model: Whether the embedded base model is fine-tuned: so narrow that a LoRA of rank 64 has as many
            weights as two thirds of its blocks.
        given: Names of the arguments that the user set.
    """
    if not embedded_model or given.intersection(("density", "num_weights", "equivalent_lora_rank")):
        return {}
    return {"density": EMBEDDED_DENSITY}


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
