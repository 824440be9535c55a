"""Make transformers models without weights: parameters on the meta device, buffers with data."""

from typing import Any

import torch
from accelerate import init_empty_weights

from slivertune.core.transformers_internals import maker_of


def make_empty(model_class: Any, config: Any, dtype: torch.dtype) -> Any:
    """Make a model whose parameters hold no data.

    Args:
        model_class: An Auto class of transformers, or a model's own class.
        config: The configuration of the model.
        dtype: Dtype of the parameters.

    Raises:
        TypeError: If the class is not a model class of transformers.
        ValueError: If the class has no model of this configuration.
    """
    found = maker_of(model_class, config)
    if found is None:
        raise TypeError(
            f"model_class={model_class!r} is not a model class of transformers. Name one that has from_pretrained, "
            "such as AutoModelForCausalLM or LlamaForCausalLM"
        )
    make, fits = found
    if not fits:
        raise ValueError(
            f"{model_class.__name__} has no model of type {config.model_type!r}. Name the class that the checkpoint "
            "was saved from"
        )
    with init_empty_weights(include_buffers=False):
        return make(config, dtype=dtype)
