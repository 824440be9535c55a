"""In what the weights are held and computed with, from `--weights_dtype`, `--bf16` and `--fp16`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slivertune.training.options.arguments import WeightsDtype

Loading = Literal["fp32", "bf16", "stored"]
Autocast = Literal["no", "bf16", "fp16"]

Bf16Use = Literal["autocast", "weights", "both"]
"""What a method takes `--bf16` for: `autocast` over fp32 weights; bf16 `weights`, where it keeps in fp32 what these
have no room for; `both`, where they are frozen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """How weights are loaded and whether operators autocast."""

    loading: Loading
    """`stored` takes the checkpoint's own type, with fp16 read as bf16."""
    autocast: Autocast
    """The Trainer's mixed precision; "no" where all that is trained is bf16."""


def choose_precision(
    bf16_use: Bf16Use,
    weights_dtype: WeightsDtype,
    *,
    bf16: bool,
    fp16: bool,
    four_bit: bool = False,
    deepspeed: bool = False,
) -> Precision:
    """Settle the precision of a run.

    `--bf16` with HiFT means the paper's Mixed^Hi: weights in bf16, whose fp32 masters wait on the host. Autocast is
    then off: it would only cast what is bf16 already. Dense fine-tuning has no masters, so `--bf16` there keeps fp32
    weights under bf16 autocast, as in the Trainer. LoRA's frozen weights need no masters, and its adapters are held in
    fp32, so there `--bf16` is both: weights in bf16 (unless `--weights_dtype` says fp32), and bf16 autocast.

    DeepSpeed itself turns the weights to bf16 or fp16 and keeps fp32 masters of what trains, so there the setting goes
    to its config.

    SFT adds fp32 deltas to weights that may be bf16, so it holds them as HiFT does; beside 4-bit weights, where norms
    are fp32, as LoRA does.

    Args:
        bf16_use: What `--bf16` means to the method.
        weights_dtype: `--weights_dtype`.
        bf16: `--bf16`, or a launcher's mixed precision.
        fp16: `--fp16`, or a launcher's; not together with `bf16`.
        four_bit: Whether the blocks' linear layers are held in 4 bits.
        deepspeed: Whether DeepSpeed trains.

    Returns:
        What to load and how to compute.

    Raises:
        ValueError: If fp16 autocast is asked for over bf16 weights.
    """
    if deepspeed and (bf16 or weights_dtype == "bf16"):
        return Precision(loading="bf16" if weights_dtype != "fp32" else "fp32", autocast="bf16")
    if fp16:
        if weights_dtype == "bf16":
            raise ValueError("--fp16 autocast needs fp32 weights; leave out --weights_dtype bf16, or take --bf16")
        return Precision(loading="fp32", autocast="fp16")
    if bf16_use == "both" or four_bit:
        is_bf16 = bf16 or weights_dtype == "bf16"
        loading: Loading = "bf16" if is_bf16 and weights_dtype != "fp32" else "fp32"
        return Precision(loading=loading, autocast="bf16" if is_bf16 else "no")
    if weights_dtype == "bf16" or (weights_dtype == "auto" and bf16 and bf16_use == "weights"):
        return Precision(loading="bf16", autocast="no")
    if weights_dtype == "auto" and bf16_use == "weights":
        return Precision(loading="stored", autocast="no")
    return Precision(loading="fp32", autocast="bf16" if bf16 else "no")
