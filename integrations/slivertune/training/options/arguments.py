"""What `slivertune train` is asked beside the method's options and the data: the run, the model, the tokens."""

from dataclasses import dataclass, field
from typing import Literal

from slivertune.tokentune.config import Pattern

LedgerUse = Literal["every_cycle", "first_cycles", "off"]
WeightsDtype = Literal["auto", "fp32", "bf16"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunArguments:
    """What a run watches, shows and computes its loss from; made for `transformers.HfArgumentParser`.

    Raises:
        ValueError: If a number is out of its range.
    """

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
            "help": "In what the weights are held. auto with hift and sft: bf16 under --bf16 (hift: each with an "
            "fp32 master, see --master; sft: with fp32 deltas), else as stored, with fp16 read as bf16. auto with "
            "dense: fp32; --bf16 then is autocast. auto with lora, and sft over 4 bits: frozen weights in bf16 under "
            "--bf16, else fp32; adapters and deltas always in fp32."
        },
    )
    load_in_4bit: bool = field(
        default=False,
        metadata={
            "help": "lora, sft: hold the frozen linear layers of the blocks in 4 bits (bitsandbytes NF4 with double "
            "quantisation); with --method lora this is QLoRA, with --method sft the deltas are kept apart from the "
            "codes, and --output_dir holds the deltas alone."
        },
    )
    attn_implementation: str | None = field(
        default=None, metadata={"help": "Attention of the transformers library: sdpa, eager, flash_attention_2, ..."}
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenArguments:
    """What share of each sequence carries gradient (TokenTune); made for `transformers.HfArgumentParser`.

    Raises:
        ValueError: If the share is out of its range, or a pattern is given without a share.
    """

    token_ratio: float | None = field(
        default=None,
        metadata={
            "help": "Share of each sequence's positions that carry gradient, in (0, 1]; the others are only read "
            "(TokenTune, with any method). Off by default."
        },
    )
    token_pattern: Pattern | None = field(
        default=None,
        metadata={
            "help": "Which positions: drawn one by one, in chunks, or one block; by default chunks for causal language "
            "models and random for others."
        },
    )

    def __post_init__(self) -> None:
        if self.token_ratio is None and self.token_pattern is not None:
            raise ValueError(
                f"--token_pattern {self.token_pattern} is read with --token_ratio alone; give a ratio, or leave it out"
            )
        if self.token_ratio is not None and not 0 < self.token_ratio <= 1:
            raise ValueError(f"token_ratio={self.token_ratio} must lie in (0, 1]; leave it out to train on all tokens")
