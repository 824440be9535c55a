"""`--method full`: HiFT of all layers, stepped in the backward, with its small state on the device."""

from collections.abc import Mapping
from typing import Any

from slivertune.hift.config import ALL_LAYERS
from slivertune.training.options.methods import FULL
from slivertune.training.options.table import RENAMED

_OF_PRECISION = ("bf16", "fp16", "weights_dtype", "precision")


def without_full(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace `--method full` by the options that it stands for. Options that were given stay.

    Weights are bf16 unless another precision was given. fp32 weights need no rounding.

    Args:
        values: Given values by option.

    Raises:
        ValueError: If an option contradicts all layers, or weights in bf16.
    """
    if values.get("method") != FULL:
        return {**values}
    for name in ("layers_per_group", "preset"):
        if values.get(name, "all") != "all":
            raise ValueError(
                f"--{name} {values[name]} does not go with --method {FULL}, whose updates train all layers. Use "
                "--method hift, or leave it out"
            )
    if values.get("load_in_4bit"):
        raise ValueError(
            f"--load_in_4bit does not go with --method {FULL}, which trains every weight by small steps. Use --method "
            "lora or sft, which train beside 4-bit weights, or leave it out"
        )
    if values.get("bf16") is False and "weights_dtype" not in values:
        raise ValueError(
            f"--bf16 false does not go with --method {FULL}, which trains bf16 weights. Use --weights_dtype fp32, or "
            "leave it out"
        )
    meant = {**ALL_LAYERS, "optim": "adafactor", "max_grad_norm": 0.0, "gradient_checkpointing": True}
    if {values.get("weights_dtype"), values.get("precision")} & {"fp32", "mixed"}:
        del meant["master"]
    if values.get("gradients") == "host":  # which a state on the device does not take
        del meant["state"]
    if not any(values.get(name) for name in _OF_PRECISION):
        meant["bf16"] = True
    if "optimizer" in values:  # in place of optim, in a plan
        del meant["optim"]
    return {**{RENAMED.get(name, name): value for name, value in meant.items()}, **values, "method": "hift"}
