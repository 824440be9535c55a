from typing import Any

from accelerate.utils import DeepSpeedOptimizerWrapper
from torch import nn

from slivertune.parallel.zero.engine import (
    engine_over_placeholder,
    is_last_backward,
    prepare_over,
    replace_prepared,
)
from tests.random_layers.ddp import average_gradients
from tests.random_layers.optimizer import RandomLayers


def prepare(accelerator: Any, model: nn.Module, optimizer: RandomLayers, objects: tuple[Any, ...]) -> tuple[Any, ...]:
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    made: list[Any] = []
    with engine_over_placeholder(model, optimizer, config, made) as placeholder:
        prepared, engine = prepare_over(accelerator, model, objects, optimizer, placeholder)
        made.append(engine)
    average_gradients(model, lambda: is_last_backward(engine))
    return replace_prepared(
        accelerator, prepared, objects.index(optimizer), DeepSpeedOptimizerWrapper(optimizer), engine
    )
