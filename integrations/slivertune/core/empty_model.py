"""A model of transformers without weights: parameters on the meta device, buffers where they compute."""

from typing import Any

import torch
from accelerate import init_empty_weights


def make_empty(model_class: Any, config: Any, dtype: torch.dtype) -> Any:
    """Make a model whose parameters hold no data.

    Args:
        model_class: An Auto class of transformers, or a model's own class.
        config: Its configuration.
        dtype: Of the parameters.

    Raises:
        TypeError: If the class is not one of transformers' models.
        ValueError: If the class has no model of this configuration.
    """
    from transformers import PreTrainedModel

    is_auto = isinstance(model_class, type) and hasattr(model_class, "_model_mapping")
    if is_auto:
        make, fits = model_class.from_config, type(config) in model_class._model_mapping
    elif isinstance(model_class, type) and issubclass(model_class, PreTrainedModel):
        make, fits = model_class._from_config, isinstance(config, model_class.config_class or ())
    else:
        raise TypeError(
            f"model_class={model_class!r} is not a model class of transformers. Name one that has from_pretrained, "
            "such as AutoModelForCausalLM or LlamaForCausalLM"
        )
    if not fits:
        raise ValueError(
            f"{model_class.__name__} has no model of type {config.model_type!r}. Name the class that the checkpoint "
            "was saved from"
        )
    with init_empty_weights(include_buffers=False):
        return make(config, dtype=dtype)
