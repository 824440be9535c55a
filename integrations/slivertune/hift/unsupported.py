"""Settings that HiFT does not support under a layout, in one list for `prepare`, `initialize` and the planner."""

from slivertune.core.layout import Layout
from slivertune.hift.base import BaseOptimizer
from slivertune.hift.config import HiFTConfig, InactiveLayers, MasterKind, StatePlace

_NAMES: dict[Layout, str] = {"ddp": "DDP", "fsdp2": "FSDP2", "zero1": "ZeRO", "zero2": "ZeRO", "zero3": "ZeRO"}


STEPPED_ONCE = (
    "gradients='stepped' takes one backward per update under DDP, which averages the gradients in it, and this run has "
    "several. Use one micro-batch per update, or gradients='host' with state='host', which need little more memory"
)
"""Refusal of several backward passes per update."""


def clash_with_layout(layout: Layout, base: BaseOptimizer, config: HiFTConfig) -> str | None:
    """Return why HiFT can't train with these settings under a layout.

    Args:
        layout: Layout of the run across ranks.
        base: The base optimizer.
        config: Settings of HiFT.

    Returns:
        Reason and way out; None if the two go together.
    """
    if layout == "single":
        return None
    name = _NAMES[layout]
    if config.weights == "host" and layout != "ddp":
        own = "CPUOffloadPolicy" if layout == "fsdp2" else "offload_param"
        return (
            f"weights='host' brings whole blocks to one device, and {name} shards them. Set weights='device' and "
            f"let {name} keep them on the host ({own}), or use one device or DDP"
        )
    if layout == "ddp":
        return None
    if config.gradients == "stepped":
        return (
            f"gradients='stepped' steps whole tensors inside the backward, and {name} shards their gradients. Set "
            "gradients='device', or use DDP"
        )
    if config.waiting is not None:
        return (
            f"waiting='{config.waiting}' is not available under {name}, whose ranks hold shards of exact weights. "
            "Leave it out, or train under DDP"
        )
    if config.gradients == "host":
        return f"gradients='host' is not available under {name}, which shards gradients. Set gradients='device'"
    if config.state_ram_bytes:
        return (
            f"state_ram_bytes={config.state_ram_bytes} is for one device and DDP, and {name} memory-maps its files, if "
            "there are any. Leave it out"
        )
    clash = _clash_of_shards(base, name)
    if clash is None and name == "ZeRO":
        clash = _clash_with_engine(base.optimizer_class, config.state, config.master)
    return clash


def clash_of_rounding(inactive: InactiveLayers, master: MasterKind) -> str | None:
    """Return why HiFT can't train bf16 weights with these settings, and the way out, or None if it can.

    Args:
        inactive: Setting of `HiFTConfig`.
        master: Setting of `HiFTConfig`.
    """
    if inactive == "frozen" or master == "stochastic":
        return None
    return (
        f"inactive='above' steps bf16 weights themselves, and with master='{master}' their small updates would be "
        "lost. Set master='stochastic', or train fp32 weights"
    )


def _clash_of_shards(base: BaseOptimizer, layout: str) -> str | None:
    """Return the reason if an optimizer computes something else on a part of a weight than on the whole."""
    name = base.optimizer_class.__name__
    if base.optimizer_class.__module__.startswith("bitsandbytes."):
        return (
            f"{name} keeps its state by blocks of a whole weight, which the shards of {layout} would cut elsewhere. "
            "Use torch.optim.AdamW (adamw), whose state HiFT offloads, or DDP"
        )
    if base.slicing.unit != "elements":
        return (
            f"{name} looks at whole tensors, or is not known not to, and a rank has only a shard of each under "
            f"{layout}. Use torch.optim.AdamW (adamw) or another element-wise optimizer, declare "
            "HiFTConfig(elementwise=True) for one that is, or train under DDP"
        )
    return None


def _clash_with_engine(optimizer_class: type, state: StatePlace, master: MasterKind) -> str | None:
    if optimizer_class.__name__ == "Adagrad":
        return (
            "DeepSpeed builds a new Adagrad and loses its param groups. Use torch.optim.AdamW (adamw) or RMSprop, or "
            "DDP or FSDP2"
        )
    if state not in ("host", "device"):
        return (
            f'state="{state}" is not available under ZeRO, where each rank keeps its share of the state in host '
            'memory. Use state="host", or "device"'
        )
    if master != "fp32":
        return (
            f'master="{master}" is not available under ZeRO, whose optimizers always step fp32 masters (a share '
            'on each rank). Use master="fp32", or DDP or FSDP2'
        )
    return None
