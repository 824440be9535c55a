"""What can't be trained sparsely where ranks hold shards of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
                "or leave that target away, or use DDP"
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
    zero = config.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    if stage not in (1, 2, 3):
        raise ValueError(
            f"zero_optimization.stage is {stage!r}; SFT on DeepSpeed needs stage 1, 2 or 3. Without sharding, use DDP "
            "through accelerate"
        )
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
    if str((zero.get("offload_param") or {}).get("device", "none")) == "nvme":
        raise ValueError(
            "zero_optimization.offload_param (device 'nvme') leaves no part of the weights in memory, from which SFT "
            "reads pretrained values; use device 'cpu'"
        )
    for where, key, use in _UNSUPPORTED:
        section: Any = config.get(where)
        value = section.get(key) if isinstance(section, Mapping) else None
        if value not in (None, False, 0, 1, "auto") or value is True:
            raise ValueError(f"{where}.{key}={value!r} does not go together with SFT; {use}")
    return int(stage)


_UNSUPPORTED = (
    ("zero_optimization", "zenflow", "remove it: SFT steps by itself"),
    ("zero_optimization", "zero_quantized_nontrainable_weights", "pretrained values would be lost; set it to false"),
    ("zero_optimization", "zero_quantized_weights", "pretrained values would be lost; set it to false"),
    ("hybrid_engine", "enabled", "set it to false"),
    ("compile", "deepcompile", "set it to false"),
    ("tensor_parallel", "autotp_size", "set it to 1, and shard by ZeRO-3"),
    ("checkpoint", "load_universal", "resume with the ranks that saved, from their own checkpoint"),
)
