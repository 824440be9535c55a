"""The layout that an Accelerator has chosen."""

from collections.abc import Mapping
from typing import Any

from slivertune.core.layout import Layout
from slivertune.core.options import enum_value

_PLAIN = ("MULTI_GPU", "MULTI_CPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_MUSA", "MULTI_SDAA", "MULTI_HPU")
LAYOUT_OF_STAGE: Mapping[int, Layout] = {1: "zero1", 2: "zero2", 3: "zero3"}
"""Layout of each ZeRO stage."""


def layout_of(accelerator: Any) -> Layout:
    """Name the layout of an Accelerator.

    Args:
        accelerator: `accelerate.Accelerator`.

    Returns:
        The layout.

    Raises:
        ValueError: If slivertune does not support the Accelerator's kind of distribution.
    """
    name = enum_value(accelerator.distributed_type).upper()
    if name == "DEEPSPEED":
        stage = accelerator.state.deepspeed_plugin.zero_stage
        if stage in LAYOUT_OF_STAGE:
            return LAYOUT_OF_STAGE[stage]
        raise ValueError(
            f"DeepSpeed's stage {stage} shards nothing. Use stage 1, 2 or 3, or leave DeepSpeed out on one device"
            if accelerator.num_processes == 1
            else f"DeepSpeed's stage {stage} keeps a gradient bucket as large as the whole model. Use stage 1, 2 or 3, "
            "or DDP"
        )
    if name == "FSDP":
        version = accelerator.state.fsdp_plugin.fsdp_version
        if version != 2:
            raise ValueError(
                f"fsdp_version={version} flattens all parameters into one, so groups can't be told apart. "
                "Set fsdp_version to 2"
            )
        return "fsdp2"
    if name in _PLAIN:
        return "ddp"
    if name == "NO":
        return "single"
    raise ValueError(f"slivertune does not run under {name}. Use DDP, FSDP2 or DeepSpeed's ZeRO-1, 2 or 3")
