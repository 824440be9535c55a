"""Layouts under which SFT can't train a tensor: one list for `prepare`, `initialize` and the planner. Pure."""

from slivertune.core.layout import Layout
from slivertune.sft.config import PhiGradient
from slivertune.sft.linear import check_layer_form
from slivertune.sft.targets import Target

_SHARING_WEIGHTS: dict[Layout, str] = {"fsdp2": "FSDP2", "zero3": "ZeRO-3"}


def clash_with_layout(layout: Layout, target: Target, phi_gradient: PhiGradient) -> str | None:
    """Return the reason why a tensor can't be trained sparsely under a layout.

    Args:
        layout: Distribution of the run over the ranks.
        target: Tensor before the model's weights are sharded.
        phi_gradient: Gradient method, as in `SFTConfig`.

    Returns:
        Reason and way out; None if the tensor can be trained.
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
            f'{name} shards the weights, so layers have to add the deltas (form="layer"): {error}. '
            "Or leave that target out, or use DDP"
        )
    return None


def clash_of_4bit(layout: Layout, weight: str) -> str | None:
    """Return the reason why deltas of a 4-bit weight can't be trained under a layout.

    Args:
        layout: Distribution of the run over the ranks.
        weight: Name of the weight in the message.

    Returns:
        Reason and way out; None if they can be trained.
    """
    if layout not in _SHARING_WEIGHTS:
        return None
    return (
        f"{weight} is a 4-bit weight, which {_SHARING_WEIGHTS[layout]} does not shard, as its codes belong to "
        "scales that no shard carries (accelerate leaves such weights whole on every rank). Train 4-bit models under "
        "DDP, ZeRO-1 or ZeRO-2, or load this one in bf16"
    )


def clash_of_parking(*, embeddings: bool) -> str | None:
    """Return why SFT can't train beside parked weights, with the way out, or None if it can.

    Args:
        embeddings: Whether embeddings have deltas, too.
    """
    if not embeddings:
        return None
    return (
        "--train_embeddings adds deltas to the embeddings, and beside parked weights only linear layers have deltas. "
        "Leave out --train_embeddings, or --waiting and --weights"
    )
