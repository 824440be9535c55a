"""A method done by hand, for trainers to which nothing is attached."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

ADAM: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.0, "eps": 1e-8, "betas": (0.9, 0.999)}


class HandRotated(torch.optim.Optimizer):
    """One plain AdamW a group; a gradient of another group is dropped as soon as it arrives.

    Args:
        model: All of its trained parameters are in `groups`.
        groups: Names of the parameters of each.
        options: AdamW's.
    """

    def __init__(self, model: nn.Module, groups: Sequence[Sequence[str]], **options: Any) -> None:
        named = dict(model.named_parameters())
        options = ADAM | options
        self.groups = [[named[name] for name in group] for group in groups]
        super().__init__([parameter for group in self.groups for parameter in group], {"lr": options["lr"]})
        self.inner = [torch.optim.AdamW(group, **options) for group in self.groups]
        self.updates = 0
        for group in self.groups:
            for parameter in group:
                parameter.register_post_accumulate_grad_hook(self._keep_active)

    def _keep_active(self, parameter: torch.Tensor) -> None:
        if all(each is not parameter for each in self.groups[self.updates % len(self.groups)]):
            parameter.grad = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner[self.updates % len(self.groups)].step()
        self.updates += 1
