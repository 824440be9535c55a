"""The settings of `slivertune train --method hift`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from slivertune.hift.config import HiFTConfig, MasterKind, Order, StatePlace

_DEFAULTS = HiFTConfig()


@dataclass(frozen=True, kw_only=True, slots=True)
class HiFTArguments:
    """HiFT's settings, each named as in `HiFTConfig`; made for `transformers.HfArgumentParser`."""

    layers_per_group: int = field(
        default=_DEFAULTS.layers_per_group, metadata={"help": "hift: layers that an update trains (m in the paper)."}
    )
    steps_per_group: int = field(
        default=_DEFAULTS.steps_per_group, metadata={"help": "hift: updates before the next group's turn."}
    )
    order: Order = field(
        default=_DEFAULTS.order, metadata={"help": "hift: order of the groups; random is shuffled once, by --seed."}
    )
    state: StatePlace = field(
        default=_DEFAULTS.state,
        metadata={"help": "hift: where optimizer state and fp32 masters wait; discard throws them away after a turn."},
    )
    state_dir: str | None = field(default=None, metadata={"help": "hift: folder of the files of --state disk."})
    master: MasterKind = field(
        default=_DEFAULTS.master,
        metadata={"help": "hift: what 16-bit weights are trained on: an fp32 copy, its missing half, or nothing else."},
    )
    stream_bytes: int = field(
        default=_DEFAULTS.stream_bytes,
        metadata={"help": "hift: bytes of one piece of a group on the device while it is stepped; 0: the whole group."},
    )

    step_in_backward: bool = field(
        default=_DEFAULTS.step_in_backward,
        metadata={
            "help": "hift: step each tensor inside the backward, as soon as its gradient is there, so that about one "
            "gradient is alive at a time; with --max_grad_norm 0, without --gradient_accumulation_steps and --fp16."
        },
    )

    def config(self, seed: int) -> HiFTConfig:
        """The same settings as HiFT takes them.

        Args:
            seed: The run's seed.

        Raises:
            ValueError: If the settings are out of range or contradict each other.
        """
        return HiFTConfig(**{item.name: getattr(self, item.name) for item in fields(self)}, seed=seed)
