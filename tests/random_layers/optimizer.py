"""A method that the library does not know: blocks drawn at random train beside embedding and head (as in LISA)."""

import random
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from slivertune.core.hyperparameters import load_hyperparameters, own_hyperparameters
from slivertune.core.layers import find_layers
from slivertune.core.layout import Layout
from slivertune.core.sliver import Sliver


@dataclass(frozen=True, kw_only=True)
class RandomLayersConfig:
    """How many blocks train, and for how many updates."""

    num_blocks: int = 1
    interval: int = 2
    seed: int = 0


class RandomLayers(Sliver):
    """AdamW over embedding, head, and blocks that are drawn again every few updates."""

    method = "random_layers"

    def __init__(self, model: nn.Module, *, config: RandomLayersConfig | None = None, **options: Any) -> None:
        self._config, self._model, self._updates = config or RandomLayersConfig(), model, 0
        self._named = dict(model.named_parameters())
        self._layers = find_layers(model)
        self._base = torch.optim.AdamW(self._named.values(), **options)
        super().__init__(self._base.param_groups, self._base.defaults)
        self.param_groups, self.state = self._base.param_groups, self._base.state
        self._draw()

    @property
    def config(self) -> RandomLayersConfig:
        return self._config

    @property
    def updates(self) -> int:
        return self._updates

    @property
    def uses_sidecar(self) -> bool:
        return False

    @property
    def active(self) -> set[str]:
        """Names of the parameters that train in the next update."""
        blocks = [layer for layer in self._layers if layer.kind == "block"]
        turn = self._updates // self.config.interval
        drawn = random.Random(f"{self.config.seed} {turn}").sample(blocks, self.config.num_blocks)
        return {
            name
            for layer in (*drawn, *[layer for layer in self._layers if layer.kind != "block"])
            for name in layer.parameter_names
        }

    def identity(self) -> dict[str, object]:
        return {**asdict(self.config), "parameters": list(self._named)}

    def check_built_over(self, model: nn.Module) -> None:
        if model is not self._model:
            raise ValueError("RandomLayers was built over another model; build it over this one")

    def unsupported(self, layout: Layout) -> str | None:
        return f"RandomLayers needs whole weights; take DDP in place of {layout}" if layout == "zero3" else None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        if all(parameter.grad is None for parameter in self._named.values()):
            return
        self._base.step()
        self.zero_grad()
        self._updates += 1
        self._draw()

    def whole_state(self) -> dict[str, Any]:
        return {
            "state": {name: self.state[each] for name, each in self._named.items() if each in self.state},
            "param_groups": [{**own_hyperparameters(group), "params": []} for group in self.param_groups],
            "random_layers": {"updates": self._updates, **self.identity()},
        }

    def load_whole_state(self, state_dict: Mapping[str, Any]) -> None:
        saved = dict(state_dict["random_layers"])
        updates = saved.pop("updates")
        if saved != self.identity():
            raise ValueError("the saved state is of another RandomLayers")
        load_hyperparameters(self.param_groups, state_dict["param_groups"])
        for name, values in state_dict["state"].items():
            self.state[self._named[name]] = {key: value.clone() for key, value in values.items()}
        self._updates = updates
        self._draw()

    def state_dict(self) -> dict[str, Any]:
        return self.whole_state()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.load_whole_state(state_dict)

    def detach(self) -> None:
        for parameter in self._named.values():
            parameter.requires_grad_(True)

    def _draw(self) -> None:
        active = self.active
        for name, parameter in self._named.items():
            parameter.requires_grad_(name in active)
