"""What SFT was built with, compared over the ranks before training."""

from __future__ import annotations

from dataclasses import fields

from slivertune.parallel.consistency.heartbeat import check_agreement, comparable, digest
from slivertune.sft import SFT


def check_sft_agreement(sft: SFT) -> None:
    """Compare settings, options, tensors and positions. A collective.

    Args:
        sft: Before its model's weights are sharded.

    Raises:
        ValueError: On every rank, naming the first setting or tensor that differs.
    """
    facts: dict[str, object] = {"updates": sft.updates, "total_steps": sft.total_steps}
    for field in fields(sft.config):
        facts[f"config.{field.name}"] = comparable(getattr(sft.config, field.name))
    for key, value in sft.param_groups[0].items():
        if key != "params":
            facts[key] = comparable(value)
    positions = sft.positions()
    for target in sft.targets:
        facts[target.name] = (target.shape, str(target.parameter.dtype), positions[target.name].numel())
    facts["the positions of the trained weights"] = digest(positions)
    check_agreement(facts)
