from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import nn
from transformers import Trainer

from slivertune.interop.methods import TrainerMethod
from slivertune.training.methods.method import SliverMethod
from slivertune.training.options.methods import MethodOptions
from tests.random_layers.optimizer import RandomLayers, RandomLayersConfig
from tests.random_layers.plan import PlannedRandomLayers


class UnderTrainer(TrainerMethod):
    name = "RandomLayers"

    def make(
        self,
        trainer: Trainer,
        model: nn.Module,
        config: RandomLayersConfig,
        *,
        momentum: float,
        make_base: Callable[[], Any],
    ) -> RandomLayers:
        return RandomLayers(model, config=config, lr=trainer.args.learning_rate)


@dataclass(frozen=True, kw_only=True)
class RandomLayersOptions:
    num_random_blocks: int = field(default=1, metadata={"help": "blocks that an update trains."})

    def config(self, seed: int) -> RandomLayersConfig:
        return RandomLayersConfig(num_blocks=self.num_random_blocks, interval=1, seed=seed)


class RandomLayersMethod(SliverMethod):
    about = MethodOptions(
        name="random_layers",
        help="blocks drawn for each update, beside embedding and head",
        options_class=RandomLayersOptions,
    )
    trainer_method = (RandomLayersConfig, UnderTrainer())
    planned = PlannedRandomLayers()
    adapters: ClassVar = {"ddp": "tests.random_layers.ddp", "zero": "tests.random_layers.zero"}
    is_optimizer = True
