"""What can't be trained sparsely where ranks hold shards of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slivertune.parallel.zero.engine import UnsupportedSetting, check_stage, refuse_unsupported
from slivertune.sft import SFT
from slivertune.sft.linear import check_layer_form


def check_layers(sft: SFT, layout: str) -> None:
    """Check that layers can add the deltas to every trained tensor.

    Args:
        sft: Before the model's weights are sharded.
        layout: For the message.

    Raises:
        ValueError: If a tensor is a 4-bit one, or not the weight of a plain linear layer.
    """
    for target in sft.targets:
        if target.is_4bit:
            raise ValueError(
                f"{target.name} is a 4-bit weight, which {layout} does not share out, as its codes belong to scales "
                "that no shard carries (accelerate leaves such weights whole on every rank); "
                "train 4-bit models under DDP, ZeRO-1 or ZeRO-2, or load this one in bf16"
            )
        try:
            check_layer_form(target, sft.config.phi_gradient)
        except ValueError as error:
            raise ValueError(
                f'{layout} shares the weights out, so that layers have to add the deltas (form="layer"): {error}; '
                "or leave that target out, or use DDP"
            ) from error


def check_zero_config(config: Mapping[str, Any]) -> int:
    """Refuse a DeepSpeed config that SFT can't be trained under. Pure.

    Args:
        config: The config; values may be "auto".

    Returns:
        The stage of ZeRO.

    Raises:
        ValueError: Naming the setting and what to use.
    """
    stage = check_stage(config, "SFT")
    zero = config["zero_optimization"]
    if (config.get("fp16") or {}).get("enabled") is True:
        raise ValueError(
            "fp16.enabled holds the weights in float16, whose range is too small for weights that are trained; use bf16"
        )
    offloaded = str((zero.get("offload_optimizer") or {}).get("device", "none"))
    if offloaded != "none":
        raise ValueError(
            f"zero_optimization.offload_optimizer (device {offloaded!r}) steps on the CPU with DeepSpeedCPUAdam, but "
            "SFT steps its few deltas by itself; remove it. offload_param may stay"
        )
    refuse_unsupported(config, "SFT", _UNSUPPORTED)
    return stage


_UNSUPPORTED: UnsupportedSetting = (
    ("zero_optimization", "zenflow", "remove it: SFT steps by itself"),
    ("zero_optimization", "zero_quantized_nontrainable_weights", "pretrained values would be lost; set it to false"),
    ("zero_optimization", "zero_quantized_weights", "pretrained values would be lost; set it to false"),
)
