from collections.abc import Callable
from typing import Any

from torch import nn

from slivertune.parallel.consistency.heartbeat import Heartbeat
from slivertune.parallel.ddp.gradient_sync import BucketedAllReduce, broadcast_from_first
from slivertune.parallel.objects import prepare_rest
from tests.random_layers.optimizer import RandomLayers


def prepare(accelerator: Any, model: nn.Module, optimizer: RandomLayers, objects: tuple[Any, ...]) -> tuple[Any, ...]:
    placed = accelerator.prepare_model(model, evaluation_mode=True)
    average_gradients(model, lambda: bool(accelerator.sync_gradients))
    return prepare_rest(accelerator, model, placed, optimizer, objects)


def average_gradients(model: nn.Module, is_last: Callable[[], bool]) -> None:
    broadcast_from_first(model)
    BucketedAllReduce(model, model.parameters(), Heartbeat("random layers"), is_due=is_last)
