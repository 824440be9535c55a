"""Settings of a DeepSpeed config that HiFT and SFT do not support, refused before anything is built."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from slivertune.hift import HiFTConfig

UnsupportedSetting = Sequence[tuple[str, str, str]]
"""Section and key of a setting that must be off, and the way out."""

_BY_NEITHER: UnsupportedSetting = (
    ("hybrid_engine", "enabled", "Set it to false"),
    ("compile", "deepcompile", "Set it to false"),
    ("tensor_parallel", "autotp_size", "Set it to 1, and shard by ZeRO-3"),
    ("checkpoint", "load_universal", "Leave it out: any number of ranks resumes from a checkpoint as it is"),
)


def check_stage(config: Mapping[str, Any], method: str) -> int:
    """Refuse a DeepSpeed config that shards nothing. Pure.

    Args:
        config: The config; values may be "auto".
        method: Name of the method, for the message.

    Returns:
        The stage of ZeRO.

    Raises:
        ValueError: If it is not 1, 2 or 3.
    """
    stage = config.get("zero_optimization", {}).get("stage", 0)
    if stage not in (1, 2, 3):
        raise ValueError(
            f"zero_optimization.stage is {stage!r}, and {method} on DeepSpeed needs stage 1, 2 or 3. Without sharding, "
            "use DDP through accelerate"
        )
    return int(stage)


def _refuse_unsupported(config: Mapping[str, Any], method: str, own: UnsupportedSetting, without: str) -> None:
    """Refuse settings that a method does not support. Pure.

    Args:
        config: The config; values may be "auto".
        method: Name of the method, for the message.
        own: Settings that only this method does not support.
        without: Reason why the method needs no offloaded optimizer, for the message.

    Raises:
        ValueError: If a setting is on; names the first one and the way out.
    """
    device = str((config["zero_optimization"].get("offload_optimizer") or {}).get("device", "none"))
    if device != "none":
        raise ValueError(
            f"zero_optimization.offload_optimizer (device {device!r}) steps on the CPU with DeepSpeedCPUAdam{without}. "
            "Remove it. offload_param may stay"
        )
    for where, key, use in (*own, *_BY_NEITHER):
        section: Any = config.get(where)
        value = section.get(key) if isinstance(section, Mapping) else None
        if value not in (None, False, 0, 1, "auto") or value is True:
            raise ValueError(f"{where}.{key}={value!r} does not go together with {method}. {use}")
    if str((config["zero_optimization"].get("offload_param") or {}).get("device", "none")) == "nvme":
        raise ValueError(
            f"zero_optimization.offload_param (device 'nvme') leaves no weights in memory, and {method} reads them "
            "there. Use device 'cpu'"
        )


def check_hift_config(config: Mapping[str, Any]) -> int:
    """Refuse a DeepSpeed config that HiFT does not support. Pure.

    Args:
        config: The config; values may be "auto".

    Returns:
        The stage of ZeRO.

    Raises:
        ValueError: If a setting is not supported; names it and what to use.
    """
    stage = check_stage(config, "HiFT")
    if config.get("optimizer") is not None:
        raise ValueError(
            "the DeepSpeed config names an optimizer, and HiFT has its own base optimizer. Remove the section from the "
            "config"
        )
    accumulates_in_fp32 = (config.get("data_types") or {}).get("grad_accum_dtype") in ("fp32", "float32")
    if stage == 1 and (config.get("bf16") or {}).get("enabled", False) is True and accumulates_in_fp32:
        raise ValueError(_NO_BF16_OPTIMIZER)
    without = " in place of your optimizer, and HiFT offloads the state of idle groups to host memory by itself"
    _refuse_unsupported(config, "HiFT", _BY_HIFT, without)
    return stage


_NO_BF16_OPTIMIZER = (
    "ZeRO-1 with bf16 weights and data_types.grad_accum_dtype fp32 makes DeepSpeed use its BF16_Optimizer, which can't "
    "be rotated. Use stage 2 (or 3), which accumulates in fp32 as well, or leave out grad_accum_dtype"
)
_BY_HIFT: UnsupportedSetting = (
    ("zero_optimization", "zenflow", "Remove it: HiFT moves the state by itself"),
    ("zero_optimization", "zero_quantized_nontrainable_weights", "Idle groups would be quantised. Set it to false"),
    ("zero_optimization", "elastic_checkpoint", "Set it to false"),
)


def check_sft_config(config: Mapping[str, Any]) -> int:
    """Refuse a DeepSpeed config that SFT does not support. Pure.

    Args:
        config: The config; values may be "auto".

    Returns:
        The stage of ZeRO.

    Raises:
        ValueError: If a setting is not supported; names it and what to use.
    """
    stage = check_stage(config, "SFT")
    if (config.get("fp16") or {}).get("enabled") is True:
        raise ValueError(
            "fp16.enabled stores the weights in float16, whose range is too small for trained weights. Use bf16"
        )
    _refuse_unsupported(config, "SFT", _BY_SFT, ", and SFT steps its few deltas by itself")
    return stage


_BY_SFT: UnsupportedSetting = (
    ("zero_optimization", "zenflow", "Remove it: SFT steps by itself"),
    ("zero_optimization", "zero_quantized_nontrainable_weights", "Pretrained values would be lost. Set it to false"),
    ("zero_optimization", "zero_quantized_weights", "Pretrained values would be lost. Set it to false"),
)


def warn_of_stream_bytes(config: HiFTConfig) -> None:
    """Warn that chunks have no size under ZeRO, if one was set.

    Args:
        config: HiFT's settings.
    """
    if config.stream_bytes != HiFTConfig().stream_bytes:
        warnings.warn(
            f"stream_bytes={config.stream_bytes} has no effect under ZeRO, whose optimizers step a rank's whole share "
            "of a group at once. Use more ranks or fewer layers_per_group for a smaller share",
            UserWarning,
            stacklevel=2,
        )


def check_engine_optimizer(name: str) -> None:
    """Refuse DeepSpeed's own choice of an optimizer that can't be rotated, if the config did not show it before.

    Args:
        name: Name of the class that wraps the engine's base optimizer.

    Raises:
        ValueError: If it can't be rotated; says what to use.
    """
    if name == "BF16_Optimizer":
        raise ValueError(_NO_BF16_OPTIMIZER)


def fill_clipping(config: dict[str, Any]) -> None:
    """Turn clipping off if the config does not mention it, and warn. DeepSpeed would silently clip at norm 1.0.

    Args:
        config: The config; changed in place.
    """
    if "gradient_clipping" not in config:
        config["gradient_clipping"] = 0.0
        warnings.warn(
            "the DeepSpeed config has no gradient_clipping. DeepSpeed alone would clip at norm 1.0, and slivertune "
            "does not clip. Write the norm you want, or 0.0",
            UserWarning,
            stacklevel=4,
        )


def fill_buckets(config: dict[str, Any], model: nn.Module) -> None:
    """Let accelerate choose the reduce bucket by the model's width if the config does not mention it.

    Accelerate's own YAML can't name it, and DeepSpeed would allocate 5e8 elements, 1 GB in bf16.

    Args:
        config: The config; changed in place.
        model: Accelerate reads its `config.hidden_size`; without one, nothing is changed.
    """
    if getattr(getattr(model, "config", None), "hidden_size", None) is not None:
        config["zero_optimization"].setdefault("reduce_bucket_size", "auto")
