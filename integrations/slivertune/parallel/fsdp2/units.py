"""Which modules of a model FSDP2 is to gather as one, checked before accelerate cuts it."""

from typing import Any

from torch import nn


def check_units(accelerator: Any, model: nn.Module) -> None:
    """Refuse units that hold the input embedding, which accelerate makes a unit of its own afterwards.

    Accelerate 1.15 then fails deep inside of torch. The encoders of transformers name such a module among those that
    are not to be split (`RobertaEmbeddings`), and accelerate takes these where its configuration names none.

    Args:
        accelerator: `accelerate.Accelerator` under FSDP2.
        model: The model, not yet cut.

    Raises:
        ValueError: Naming the setting and its value.
    """
    plugin = accelerator.state.fsdp_plugin
    named = plugin.transformer_cls_names_to_wrap
    classes = list(getattr(model, "_no_split_modules", None) or ()) if named is None else list(named)
    find: Any = getattr(model, "get_input_embeddings", lambda: None)
    bottom = find()
    parents = {
        type(module).__name__
        for module in model.modules()
        if type(module).__name__ in classes and any(each is bottom for each in module.modules())
    }
    if parents:
        present = {type(module).__name__ for module in model.modules()}
        blocks = ",".join(each for each in classes if each in present - parents)
        raise ValueError(
            f"{', '.join(sorted(parents))} holds the input embedding, which accelerate gathers on its own under FSDP2; "
            f"set fsdp_transformer_layer_cls_to_wrap: {blocks} in the fsdp_config of your configuration"
        )
