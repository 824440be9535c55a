"""What `slivertune train` adds to the data arguments and to `transformers.TrainingArguments`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal

from slivertune.hift.config import HiFTConfig, MasterKind, Order, StatePlace

Method = Literal["dense", "hift"]
WeightsDtype = Literal["auto", "fp32", "bf16"]
LedgerUse = Literal["every_cycle", "first_cycles", "off"]

_DEFAULTS = HiFTConfig()


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelArguments:
    """The model that is fine-tuned; made for `transformers.HfArgumentParser`."""

    model_name_or_path: str | None = field(
        default=None,
        metadata={"help": "A hub id or a local folder; without it, a small byte-level Llama made on this machine."},
    )
    model_revision: str | None = field(
        default=None, metadata={"help": "Branch, tag or commit of a hub model; its main branch by default."}
    )
    weights_dtype: WeightsDtype = field(
        default="auto",
        metadata={
            "help": "In what the weights are held. auto with hift: bf16 under --bf16 (each with an fp32 master, see "
            "--master), else as stored, with fp16 read as bf16. auto with dense: fp32; --bf16 then is autocast."
        },
    )
    attn_implementation: str | None = field(
        default=None, metadata={"help": "Attention of the transformers library: sdpa, eager, flash_attention_2, ..."}
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodArguments:
    """The method, its settings, and what is watched and shown; made for `transformers.HfArgumentParser`.

    Raises:
        ValueError: If a number is out of its range.
    """

    method: Method = field(
        default="hift",
        metadata={"help": "hift: one group of layers an update, the rest frozen; dense: all weights every update."},
    )
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
    memory_ledger: LedgerUse = field(
        default="every_cycle",
        metadata={
            "help": "Count the bytes alive by kind and print a line per cycle: always, for the first two, never."
        },
    )
    non_finite_limit: int = field(
        default=10,
        metadata={"help": "Stop after this many updates in a row with a loss or gradient that is not finite."},
    )
    sample_tokens: int = field(
        default=160, metadata={"help": "Tokens of the samples written before and after; 0 writes none."}
    )
    sample_prompt: str | None = field(
        default=None, metadata={"help": "What the samples continue; by default the beginning of an evaluation row."}
    )

    def __post_init__(self) -> None:
        if self.non_finite_limit < 1:
            raise ValueError(f"non_finite_limit={self.non_finite_limit} must be at least 1")
        if self.sample_tokens < 0:
            raise ValueError(f"sample_tokens={self.sample_tokens} must be at least 0, which writes no samples")

    def hift_config(self, seed: int) -> HiFTConfig:
        """HiFT's settings.

        Args:
            seed: The run's seed.

        Raises:
            ValueError: If the settings contradict each other.
        """
        return HiFTConfig(**{name: getattr(self, name) for name in hift_settings()}, seed=seed)


def hift_settings() -> tuple[str, ...]:
    """Names of the arguments that only `--method hift` reads."""
    config_fields = {item.name for item in fields(HiFTConfig)}
    return tuple(item.name for item in fields(MethodArguments) if item.name in config_fields)
