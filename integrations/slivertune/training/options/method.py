"""How `slivertune train` trains, and what it watches and shows meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Method = Literal["dense", "hift", "sft", "lora"]
LedgerUse = Literal["every_cycle", "first_cycles", "off"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodArguments:
    """The method, and what is watched and shown; made for `transformers.HfArgumentParser`.

    Raises:
        ValueError: If a number is out of its range.
    """

    method: Method = field(
        default="hift",
        metadata={
            "help": "hift: one group of layers an update, the rest frozen; sft: a sparse choice of weights, renewed "
            "now and then, and --output_dir/delta holds their deltas; lora: small adapters beside frozen weights "
            "(PEFT), and --output_dir/model holds the adapter alone; dense: all weights every update."
        },
    )
    memory_ledger: LedgerUse = field(
        default="every_cycle",
        metadata={
            "help": "Count the bytes alive by kind and print a line per cycle: always, for the first two, never."
        },
    )
    chunked_cross_entropy: bool = field(
        default=True,
        metadata={
            "help": "Causal language models: compute the loss from hidden states, a chunk at a time, so that logits "
            "and their gradient never exist whole; where a model's head does not allow it, a line says why. false: "
            "from whole logits, as transformers do."
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
