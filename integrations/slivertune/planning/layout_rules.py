"""What a layout can't train, refused before it is planned, with the way out that training itself names. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slivertune.planning.four_bit_rules import clash_with_zero3

if TYPE_CHECKING:
    from slivertune.planning.request import PlanRequest


def clash_of(request: PlanRequest) -> str | None:
    """Why training would refuse a method in this layout.

    Args:
        request: The run.

    Returns:
        The reason and the way out; None if the two go together.
    """
    layout = request.layout
    if request.load_in_4bit and layout == "zero3":
        return clash_with_zero3()
    if request.method == "sft" and request.load_in_4bit and layout == "fsdp2":
        return (
            f"layout={layout!r} does not share 4-bit weights out, as their codes belong to scales that no shard "
            "carries; train 4-bit models with layout='ddp', 'zero1' or 'zero2', or leave out load_in_4bit"
        )
    if request.method != "hift" or layout == "single":
        return None
    if request.step_in_backward:
        return (
            "step_in_backward updates a tensor before the other ranks' gradients have arrived; with "
            f"layout={layout!r}, leave it out"
        )
    return None if layout == "ddp" else _clash_of_optimizer(request) or _clash_of_zero(request)


def _clash_of_optimizer(request: PlanRequest) -> str | None:
    layout = request.layout
    if request.optimizer == "adamw8bit":
        return (
            f"optimizer='adamw8bit' keeps its state by blocks of a whole weight, which the shards of layout={layout!r} "
            "would cut elsewhere; take optimizer='adamw', whose state HiFT keeps off the GPU, or layout='ddp'"
        )
    if request.optimizer == "adafactor":
        return (
            f"optimizer='adafactor' looks at whole weights, of which a rank holds a part with layout={layout!r}; take "
            "optimizer='adamw' or another element-wise one, or layout='ddp'"
        )
    return None


def _clash_of_zero(request: PlanRequest) -> str | None:
    layout = request.layout
    if layout == "fsdp2":
        return None
    if request.optimizer == "adagrad":
        return (
            f"optimizer='adagrad' is built again by DeepSpeed (layout={layout!r}), which loses its param groups; take "
            "optimizer='adamw', or layout='ddp' or 'fsdp2'"
        )
    if request.state not in ("host", "device"):
        return (
            f"state={request.state!r} is not available with layout={layout!r}, where each rank keeps its share of the "
            "state in host memory; take state='host' or 'device'"
        )
    if request.precision == "bf16" or request.master_kind == "split":
        return (
            f"master={request.master_kind!r} is not available with layout={layout!r}, whose optimizers always step "
            "fp32 masters (a share on each rank); take precision='mixed_hi' with master='fp32', or layout='ddp' or "
            "'fsdp2'"
        )
    return None
