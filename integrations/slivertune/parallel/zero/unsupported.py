"""What HiFT does not do under DeepSpeed, said before anything is built."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from slivertune.hift import HiFTConfig
from slivertune.parallel.objects import refuse_step_in_backward
from slivertune.parallel.zero.engine import UnsupportedSetting, check_stage, refuse_unsupported


def check_method(config: HiFTConfig, base_class: type, unit: str) -> None:
    """Refuse settings of HiFT that mean nothing where DeepSpeed keeps masters and state.

    Args:
        config: HiFT's settings.
        base_class: Class of the base optimizer.
        unit: How far a weight may be cut for it, `BaseOptimizer.slicing.unit`.

    Raises:
        ValueError: Naming the setting and what to use.
    """
    if config.state not in ("host", "device"):
        raise ValueError(
            f'state="{config.state}" is not available under ZeRO, where each rank keeps its share of the state in host '
            'memory; use state="host", or "device"'
        )
    if config.master != "fp32":
        raise ValueError(
            f'master="{config.master}" is not available under ZeRO, whose optimizers always step fp32 masters (a share '
            'on each rank); use master="fp32", or DDP or FSDP2'
        )
    if config.stream_bytes != HiFTConfig().stream_bytes:
        warnings.warn(
            f"stream_bytes={config.stream_bytes} has no effect under ZeRO, whose optimizers step a rank's whole share "
            "of a group at once; the share shrinks with more ranks or fewer layers_per_group",
            UserWarning,
            stacklevel=2,
        )
    refuse_step_in_backward(config, "ZeRO")
    name = base_class.__name__
    if base_class.__module__.startswith("bitsandbytes."):
        raise ValueError(
            f"{name} quantises blocks of 256 elements, which would straddle tensors in ZeRO's flat shares and so "
            "change the updates; use torch.optim.AdamW, or DDP"
        )
    if unit != "elements":
        raise ValueError(
            f"{name} looks at whole tensors, which ZeRO cuts into flat shares; use an element-wise optimizer such as "
            "torch.optim.AdamW, DDP, or HiFTConfig(elementwise=True) if each element of it stands alone"
        )
    if name == "Adagrad":
        raise ValueError(
            "DeepSpeed builds a new Adagrad and loses its param groups; use torch.optim.AdamW or RMSprop, or "
            "DDP or FSDP2"
        )


def check_engine_config(config: Mapping[str, Any]) -> int:
    """Refuse a DeepSpeed config that HiFT can't be rotated under.

    Args:
        config: The config; values may be "auto".

    Returns:
        The stage of ZeRO.

    Raises:
        ValueError: Naming the setting and what to use.
    """
    stage = check_stage(config, "HiFT")
    target = (config["zero_optimization"].get("offload_optimizer") or {}).get("device", "none")
    if target != "none":
        raise ValueError(
            f"zero_optimization.offload_optimizer (device {str(target)!r}) steps on the CPU with DeepSpeedCPUAdam in "
            "place of your optimizer; remove it: HiFT keeps the state of waiting groups in host memory by itself. "
            "offload_param may stay"
        )
    if config.get("optimizer") is not None:
        raise ValueError(
            "the DeepSpeed config names an optimizer, and HiFT brings its own base optimizer; remove the section from "
            "the config"
        )
    if stage == 1 and _enabled(config, "bf16") and _accumulates_in_fp32(config):
        raise ValueError(_NO_BF16_OPTIMIZER)
    refuse_unsupported(config, "HiFT", _UNSUPPORTED)
    return stage


_NO_BF16_OPTIMIZER = (
    "ZeRO-1 with bf16 weights and data_types.grad_accum_dtype fp32 makes DeepSpeed use its BF16_Optimizer, which can't "
    "be rotated; use stage 2 (or 3), which accumulates in fp32 as well, or leave grad_accum_dtype"
)
_UNSUPPORTED: UnsupportedSetting = (
    ("zero_optimization", "zenflow", "remove it: HiFT moves the state by itself"),
    ("zero_optimization", "zero_quantized_nontrainable_weights", "waiting groups would be quantised; set it to false"),
    ("zero_optimization", "elastic_checkpoint", "set it to false"),
)


def check_engine_optimizer(name: str) -> None:
    """Refuse DeepSpeed's own choice of an optimizer that can't be rotated, where the config did not tell before.

    Args:
        name: Name of the class that the engine wrapped the base optimizer in.

    Raises:
        ValueError: With what to use.
    """
    if name == "BF16_Optimizer":
        raise ValueError(_NO_BF16_OPTIMIZER)


def fill_clipping(config: dict[str, Any]) -> None:
    """Write down that gradients are not clipped where the config says nothing; DeepSpeed would clip at 1.0 in silence.

    Args:
        config: The config; changed in place.
    """
    if "gradient_clipping" not in config:
        config["gradient_clipping"] = 0.0
        warnings.warn(
            "the DeepSpeed config has no gradient_clipping, for which DeepSpeed alone would clip at norm 1.0; "
            "slivertune does not clip then, as elsewhere. Write the norm you want, or 0.0",
            UserWarning,
            stacklevel=4,
        )


def fill_buckets(config: dict[str, Any], model: nn.Module) -> None:
    """Let accelerate choose the reduce bucket by the model's width where the config says nothing.

    Accelerate's own YAML can't name it, and DeepSpeed would allocate 5e8 elements, 1 GB in bf16.

    Args:
        config: The config; changed in place.
        model: Its `config.hidden_size` is what accelerate goes by; without one, nothing is changed.
    """
    if getattr(getattr(model, "config", None), "hidden_size", None) is not None:
        config["zero_optimization"].setdefault("reduce_bucket_size", "auto")


def _enabled(config: Mapping[str, Any], precision: str) -> bool:
    return (config.get(precision) or {}).get("enabled", False) is True


def _accumulates_in_fp32(config: Mapping[str, Any]) -> bool:
    return (config.get("data_types") or {}).get("grad_accum_dtype") in ("fp32", "float32")
