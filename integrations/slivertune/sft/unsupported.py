"""What SFT does not do under a layout: one list, which `prepare`, `initialize` and the planner read. Pure."""

from slivertune.core.layout import Layout
from slivertune.sft.config import PhiGradient
from slivertune.sft.linear import check_layer_form
from slivertune.sft.targets import Target

_SHARING_WEIGHTS: dict[Layout, str] = {"fsdp2": "FSDP2", "zero3": "ZeRO-3"}


def clash_with_layout(layout: Layout, target: Target, phi_gradient: PhiGradient) -> str | None:
    """Why a tensor can't be trained sparsely under a layout.

    Args:
        layout: How the ranks share the run.
        target: The tensor, before the model's weights are shared out.
        phi_gradient: As in `SFTConfig`.

    Returns:
        The reason and the way out; None if it can.
    """
    if layout not in _SHARING_WEIGHTS:
        return None
    name = _SHARING_WEIGHTS[layout]
    if target.is_4bit:
        return clash_of_4bit(layout, target.name)
    try:
        check_layer_form(target, phi_gradient)
    except ValueError as error:
        return (
            f'{name} shares the weights out, so that layers have to add the deltas (form="layer"): {error}; '
            "or leave that target out, or use DDP"
        )
    return None


def clash_of_4bit(layout: Layout, weight: str) -> str | None:
    """Why a 4-bit weight can't be trained beside under a layout.

    Args:
        layout: How the ranks share the run.
        weight: What the message calls it.

    Returns:
        The reason and the way out; None if it can.
    """
    if layout not in _SHARING_WEIGHTS:
        return None
    return (
        f"{weight} is a 4-bit weight, which {_SHARING_WEIGHTS[layout]} does not share out, as its codes belong to "
        "scales that no shard carries (accelerate leaves such weights whole on every rank); train 4-bit models under "
        "DDP, ZeRO-1 or ZeRO-2, or load this one in bf16"
    )
