"""What `slivertune train` takes where the user says nothing."""

from collections.abc import Mapping
from typing import Any

import torch

from slivertune.training.embedded.base_model import BaseRecipe
from slivertune.training.methods import TrainingMethod

BASE_RECIPE = BaseRecipe()
"""The model of the embedded default."""


def default_values(method: type[TrainingMethod], given: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults that differ from those of the arguments themselves.

    The embedded model has a rate of its own for each method: the best on the language reference, in runs of 160
    updates. A model that was trained for a minute or two is far from done, so that all want nearly the largest rate
    they stand. For the language reference, the length of the run is set, and there is a telling prompt; its texts are
    long, so they are packed.

    Args:
        method: How the model is trained.
        given: What the user typed, by name.

    Returns:
        Names of arguments and their values.
    """
    has_cuda = torch.cuda.is_available() and not given.get("use_cpu", False)
    defaults: dict[str, Any] = {"report_to": "none", "dataloader_pin_memory": has_cuda}
    if "model_name_or_path" not in given:
        defaults |= {"lr_scheduler_type": "cosine", "warmup_steps": 0.05, **method.embedded_defaults(given)}
    if "dataset" not in given:
        defaults |= {
            "max_steps": 480,
            "per_device_train_batch_size": 4,
            "per_device_eval_batch_size": 16,
            "save_steps": 160,
            "packing": True,
            "max_length": 256,
            "sample_prompt": 'The "while" statement is used for',
        }
    return defaults
