"""Which model `slivertune train` fine-tunes, and in what its weights are held."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

WeightsDtype = Literal["auto", "fp32", "bf16"]


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
