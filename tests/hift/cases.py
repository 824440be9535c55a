"""The optimizers that the tests of HiFT run over, and what they share: schedules, set-ups, saving and loading."""

import errno
import io
import math
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from typing import Any

import bitsandbytes
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_cosine_schedule_with_warmup
from transformers.optimization import Adafactor as TransformersAdafactor

from slivertune import HiFT, HiFTConfig
from tests.helpers.models import LAYERS, token_batches, twin
from tests.helpers.reference import NaiveHiFT, naive_groups


class CountingSGD(torch.optim.Optimizer):
    """Adapts a hyperparameter of its own with every step, as Prodigy and schedule-free optimizers do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"] / group["k"])


class Stumbling(torch.optim.AdamW):
    """Raises before the piece that `countdown` counts to; set it by monkeypatch."""

    countdown = -1

    def step(self, closure: Any = None) -> Any:
        type(self).countdown -= 1
        if type(self).countdown == 0:
            raise RuntimeError("stumbled")
        return super().step(closure)


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])

OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "AdamW amsgrad": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True}),
    "Adam": (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.01}),
    "SGD": (torch.optim.SGD, {"lr": 0.5}),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 1e-4}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.9, "centered": True}),
    "torch Adafactor": (torch.optim.Adafactor, {"lr": 1e-2}),
    "transformers Adafactor": (TransformersAdafactor, {"lr": None}),
    "transformers Adafactor with lr": (
        TransformersAdafactor,
        {"lr": 1e-2, "relative_step": False, "scale_parameter": False, "beta1": 0.9},
    ),
    "own hyperparameter": (CountingSGD, {"lr": 0.5}),
    "AdamW8bit": (bitsandbytes.optim.AdamW8bit, {"lr": 1e-2, "weight_decay": 0.1}),
}
WITH_LR = [name for name, (_, options) in OPTIMIZERS.items() if options["lr"] is not None]

BIG_VOCAB = 259
"""259 x 32 elements: the embedding and the head hold 8-bit state, in pieces with a remainder."""


def cosine(optimizer: torch.optim.Optimizer, total: int) -> LambdaLR:
    """Cosine decay after a tenth of warm-up; the first learning rate is not zero, or the first cycle would idle."""
    scheduler = get_cosine_schedule_with_warmup(optimizer, max(1, total // 10), total)
    assert isinstance(scheduler, LambdaLR)
    return scheduler


def warm_cosine(step: int, total: int) -> float:
    """A schedule that never is zero before its end and changes at every tick."""
    progress = step / total
    return 0.25 + progress if progress < 0.25 else 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


UPDATES = 2 * LAYERS + 2
"""Two cycles of one layer a step, and a little of the third."""


def run(
    model: Any,
    stepping: Any,
    updates: int = UPDATES,
    *,
    accumulation: int = 1,
    clip: float | None = None,
    start: int = 0,
    hift: HiFT | None = None,
) -> list[torch.Tensor]:
    """So many updates; the norm is clipped as any script does it.

    Args:
        model: A causal language model.
        stepping: Its optimizer.
        updates: How many.
        accumulation: Micro-batches of an update.
        clip: The norm to clip to.
        start: Updates that were made before, whose batches are passed over.
        hift: Told which backward passes are not their update's last.

    Returns:
        The losses of all micro-batches.
    """
    losses = []
    batches = token_batches((start + updates) * accumulation, vocab=int(model.config.vocab_size))
    for update in range(start, start + updates):
        for index in range(accumulation):
            loss = model(**batches[update * accumulation + index]).loss / accumulation
            with nullcontext() if index == accumulation - 1 or hift is None else hift.accumulating():
                loss.backward()
            losses.append(loss.detach())
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        stepping.step()
        stepping.zero_grad()
    return losses


def hift_over(model: nn.Module, optimizer: Any, **settings: Any) -> tuple[Any, HiFT]:
    """A model and HiFT over it.

    Args:
        model: The model.
        optimizer: A class, or a name of `OPTIMIZERS`, which has options too.
        **settings: Fields of HiFT's configuration, or options of the base optimizer.
    """
    optimizer_class, options = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else (optimizer, {})
    of_config = {each.name: settings.pop(each.name) for each in fields(HiFTConfig) if each.name in settings}
    return model, HiFT(model, optimizer_class, config=HiFTConfig.paper(**of_config), **{**options, **settings})


def with_reference(
    model: nn.Module, optimizer_class: Any, *, kind: type[NaiveHiFT] = NaiveHiFT, **settings: Any
) -> tuple[Any, HiFT, Any, Any]:
    """A model under HiFT, and a twin under the naive reference with the same options of the base optimizer."""
    options = {key: value for key, value in settings.items() if key not in {each.name for each in fields(HiFTConfig)}}
    unknown = {"order", "steps_per_group"} & settings.keys()
    assert not unknown and settings.get("state") != "discard" and settings.get("master") != "none", settings
    other = twin(model)
    hift = hift_over(model, optimizer_class, **settings)[1]
    groups = naive_groups(other, settings.get("layers_per_group", 1))
    return model, hift, other, kind(other, optimizer_class, groups=groups, **options)


def reloaded(value: Any, *, weights_only: bool = True) -> Any:
    """What a file holds that a value was saved in."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


@contextmanager
def said() -> Iterator[list[str]]:
    """The texts of all warnings meanwhile; the list is filled when the block ends, so look at it after that."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
    messages += [str(each.message) for each in caught]


@contextmanager
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No file can be allocated meanwhile."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse)
        yield
