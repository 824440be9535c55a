"""Learning rates by layer (`--layerwise_lr_decay`): each layer's is a factor of that of the layer above it.

Lower layers hold what a model has learned before, and change less (Howard and Ruder, 2018, section 3.2).
"""

from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import Trainer, TrainingArguments

from slivertune.core.layers import find_layers
from slivertune.core.sliver import Sliver


def check_layerwise_lr(decay: float, training: TrainingArguments, *, own_optimizer_of: str | None) -> None:
    """Refuse rates by layer where the Trainer does not make the optimizer.

    Args:
        decay: As in `split_by_layer`; 1 gives all layers one rate.
        training: Arguments of the Trainer.
        own_optimizer_of: Name of a method that replaces the Trainer's optimizer; None for another method.

    Raises:
        ValueError: If the method or DeepSpeed has an optimizer of its own.
    """
    if decay == 1:
        return
    engine: Any = getattr(training, "hf_deepspeed_config", None)
    owner = f"--method {own_optimizer_of}" if own_optimizer_of is not None else None
    if engine is not None and "optimizer" in engine.config:
        owner = "this DeepSpeed config"
    if owner is not None:
        raise ValueError(
            f"--layerwise_lr_decay {decay:g} gives rates to the optimizer that --optim names, and {owner} has one of "
            "its own. Leave out one of the two"
        )


def split_by_layer(
    optimizer: Any, model: nn.Module, decay: float, layers: Sequence[str | Sequence[str]] | None = None
) -> None:
    """Split the param groups of an optimizer by the layers of its model, and give each layer its learning rate.

    Args:
        optimizer: Optimizer that has not stepped yet, and has no scheduler yet.
        model: Model whose parameters it trains.
        decay: A layer's rate over that of the layer above. The top layer keeps the optimizer's.
        layers: Layers as `HiFTConfig.layers` takes them. By default they are found.

    Raises:
        ValueError: If no layers are found, or the optimizer has a parameter that the model has not.
    """
    parameters = dict(model.named_parameters())
    groups: list[dict[str, Any]] = []
    for depth, layer in enumerate(reversed(find_layers(model, layers))):  # the top first, whose rate logs show
        own = {id(parameters[name]) for name in layer.parameter_names}
        members = [[each for each in group["params"] if id(each) in own] for group in optimizer.param_groups]
        groups += [
            {**group, "lr": group["lr"] * decay**depth, "params": of_layer}
            for group, of_layer in zip(optimizer.param_groups, members, strict=True)
            if of_layer
        ]
    count, held = (sum(len(group["params"]) for group in each) for each in (groups, optimizer.param_groups))
    if count != held:
        raise ValueError(
            f"--layerwise_lr_decay needs a layer for each trained parameter, and {held - count} of {held} are not of "
            "the model. Leave it out"
        )
    optimizer.param_groups[:] = groups


class LayerwiseTrainer(Trainer):
    """A Trainer whose own optimizer has learning rates by layer, also as the base optimizer of HiFT.

    Args:
        *arguments: Arguments of the Trainer.
        decay: As in `split_by_layer`.
        layers: As in `split_by_layer`.
        **options: Options of the Trainer.
    """

    def __init__(self, *arguments: Any, decay: float, layers: Sequence[Any] | None, **options: Any) -> None:
        self._decay, self._layers = decay, layers
        super().__init__(*arguments, **options)

    def create_optimizer(self, *arguments: Any, **options: Any) -> Any:
        """Make the optimizer, and give each layer its learning rate.

        Raises:
            ValueError: As `split_by_layer`.
        """
        optimizer = super().create_optimizer(*arguments, **options)
        if isinstance(optimizer, Sliver):
            return optimizer  # its base optimizer came from here, too
        assert self.model is not None
        split_by_layer(optimizer, self.model, self._decay, self._layers)
        return optimizer
