"""Learning rates by layer (`--layerwise_lr_decay`): each layer's is a factor of that of the layer above it.

Lower layers hold what a model has learned before, and change less (Howard and Ruder, 2018, section 3.2).
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from transformers import Trainer, TrainingArguments

from slivertune.core.layers import Layer, find_layers
from slivertune.core.options import enum_value
from slivertune.core.sliver import Sliver

_OWN_RATES = ("lomo", "adalomo")
"""Optimizers that step every weight at the one rate that the Trainer hands them."""
_ABSOLUTE = ("reduce_lr_on_plateau", "greedy")
"""Schedules that set rates, and not factors of them."""


def check_layerwise_lr(decay: float, training: TrainingArguments, *, own_optimizer_of: str | None) -> None:
    """Refuse rates by layer where something else sets the rates.

    Args:
        decay: As in `split_by_layer`; 1 gives all layers one rate.
        training: Arguments of the Trainer.
        own_optimizer_of: Name of a method that replaces the Trainer's optimizer; None for another method.

    Raises:
        ValueError: If the method, the optimizer, the schedule or DeepSpeed sets the rates of all layers.
    """
    if decay == 1:
        return
    optim, schedule = (enum_value(each) for each in (training.optim, training.lr_scheduler_type))
    if own_optimizer_of is not None:
        raise ValueError(_refusal(decay, f"--method {own_optimizer_of}"))
    if optim in _OWN_RATES or optim.endswith("_layerwise"):
        raise ValueError(_refusal(decay, f"--optim {optim}"))
    if schedule in _ABSOLUTE:
        raise ValueError(_refusal(decay, f"--lr_scheduler_type {schedule}"))
    engine: Any = getattr(training, "hf_deepspeed_config", None)
    _check_engine(decay, getattr(engine, "config", {}))


def _check_engine(decay: float, config: Mapping[str, Any]) -> None:
    for section in ("optimizer", "scheduler"):
        if section in config:
            raise ValueError(_refusal(decay, f"the {section} section of this DeepSpeed config"))


def _refusal(decay: float, owner: str) -> str:
    both = f"--layerwise_lr_decay {decay:g} gives each layer a rate, and {owner} sets those of all"
    return f"{both}. Leave out one of the two"


def split_by_layer(
    optimizer: Any, model: nn.Module, decay: float, layers: Sequence[str | Sequence[str]] | None = None
) -> None:
    """Split the param groups of an optimizer by the layers of its model, and give each layer its learning rate.

    Args:
        optimizer: Optimizer that has not stepped yet, and has no scheduler yet.
        model: Model whose parameters it trains.
        decay: A layer's rate over that of the next layer above that trains. The top one of these keeps the optimizer's.
        layers: Layers as `HiFTConfig.layers` takes them. By default they are found.

    Raises:
        ValueError: If the layers or their order are not found, or the optimizer has a parameter that the model has not.
    """
    parameters = dict(model.named_parameters())
    groups: list[dict[str, Any]] = []
    rate = 1.0
    for layer in reversed(_layers_of(model, layers)):  # the top first, whose rate logs show
        own = {id(parameters[name]) for name in layer.parameter_names}
        members = [[each for each in group["params"] if id(each) in own] for group in optimizer.param_groups]
        groups += [
            {**group, "lr": group["lr"] * rate, "params": of_layer}
            for group, of_layer in zip(optimizer.param_groups, members, strict=True)
            if of_layer
        ]
        rate *= decay if any(members) else 1.0
    count, held = (sum(len(group["params"]) for group in each) for each in (groups, optimizer.param_groups))
    if count != held:
        raise ValueError(
            f"--layerwise_lr_decay needs a layer for each trained parameter, and {held - count} of {held} are not of "
            "the model. Leave it out"
        )
    optimizer.param_groups[:] = groups


def _layers_of(model: nn.Module, layers: Sequence[str | Sequence[str]] | None) -> Sequence[Layer]:
    """Find the layers, and refuse a guess of their order."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=r"(?s).*the order of registration assigned")
        try:
            return find_layers(model, layers)
        except (ValueError, UserWarning) as error:
            raise ValueError(
                f"--layerwise_lr_decay needs the order of the layers: {error} (--method hift takes them), or leave out "
                "--layerwise_lr_decay"
            ) from error


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
            ValueError: As `split_by_layer`, or if a DeepSpeed config sets the rates.
        """
        if self.optimizer is not None:
            return super().create_optimizer(*arguments, **options)  # made before, and given its rates then
        plugin: Any = getattr(self.accelerator.state, "deepspeed_plugin", None)
        if plugin is not None:
            _check_engine(self._decay, plugin.deepspeed_config)
        optimizer = super().create_optimizer(*arguments, **options)
        if isinstance(optimizer, Sliver):
            return optimizer  # its base optimizer came from here, too
        assert self.model is not None
        split_by_layer(optimizer, self.model, self._decay, self._layers)
        return optimizer
