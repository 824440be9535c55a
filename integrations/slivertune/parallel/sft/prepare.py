"""SFT on several ranks: deltas, positions and moments are the same on all of them, and SFT steps on each.

Every layout shards the frozen weights at most. What trains is small, so its gradients are averaged by small collectives
of our own (`sft.gradient_sync`), and its state is replicated.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from slivertune.core.layout import Layout
from slivertune.parallel.consistency.sft import check_sft_agreement
from slivertune.sft import SFT


def prepare_sft(accelerator: Any, layout: Layout, objects: tuple[Any, ...]) -> tuple[Any, ...]:
    """Prepare a model, the SFT that was built over it, loaders and schedulers.

    Args:
        accelerator: `accelerate.Accelerator`.
        layout: The Accelerator's, of several ranks.
        objects: As for `accelerator.prepare`.

    Returns:
        The prepared objects in the same order.

    Raises:
        ValueError: If the ranks were given other settings, the SFT was built over another model, or what it trains
            can't be trained under the layout.
    """
    (model,) = [each for each in objects if isinstance(each, nn.Module)]
    (sft,) = [each for each in objects if isinstance(each, SFT)]
    _check(sft, model)
    if layout == "ddp":
        from slivertune.parallel.ddp.sft import prepare
    elif layout == "fsdp2":
        from slivertune.parallel.fsdp2.sft import prepare
    else:
        from slivertune.parallel.zero.sft import prepare
    return prepare(accelerator, model, sft, objects)


def initialize_sft(
    *, optimizer: SFT, config: dict[str, Any], model: nn.Module, **arguments: Any
) -> tuple[Any, SFT, Any, Any]:
    """Make a bare DeepSpeed engine that steps SFT; see `slivertune.initialize`.

    Args:
        optimizer: Built over the model.
        config: DeepSpeed's, without "auto".
        model: The model.
        **arguments: The others of `deepspeed.initialize`.

    Returns:
        The engine, SFT, the loader and the schedule.

    Raises:
        ValueError: If the ranks disagree, the SFT was built over another model, or it and the config don't go together.
    """
    from slivertune.parallel.zero.sft import initialize

    _check(optimizer, model)
    return initialize(optimizer, config, {"model": model, **arguments})


def _check(sft: SFT, model: nn.Module) -> None:
    if sft.model is not model:
        raise ValueError(
            "the SFT was built over another model than the one that was passed; build it over this model, before "
            "anything wraps that"
        )
    check_sft_agreement(sft)
