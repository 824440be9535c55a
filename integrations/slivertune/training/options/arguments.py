"""Options of `slivertune train` other than the method's: the run, the model, the tokens, the data."""

import math
from dataclasses import dataclass, fields
from datetime import date
from typing import Annotated, Literal

from slivertune.core.option_parser import PartedPaths, PartedTexts
from slivertune.core.options import BytesOrAuto, Spelling
from slivertune.core.setting_checks import NumKept, check_integer, check_num_kept, integer_or_auto, read_bytes
from slivertune.parked.forms import CodesForm, WeightPlace
from slivertune.tokentune.config import Pattern
from slivertune.training.options.tasks import TASK_OPTIONS, tasks_reading

LedgerUse = Literal["every_cycle", "first_cycles", "off"]
WeightsDtype = Literal["auto", "fp32", "bf16"]
SampleBy = Literal["line", "paragraph", "document"]
FormatName = Literal["messages", "sharegpt", "alpaca", "prompt_completion", "question_answer"]
"""Format of the rows of chat or instruction data. See `slivertune.training.data.formats`."""


def is_date(text: object) -> bool:
    """Return whether a value is a date as `datetime.date` writes it."""
    try:
        return isinstance(text, str) and date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


@dataclass(frozen=True, kw_only=True, slots=True)
class RunArguments:
    """Options for a run's loss, activations, limits and reports.

    Raises:
        ValueError: If a number is out of its range.
    """

    memory_ledger: LedgerUse = "every_cycle"
    """Count allocated bytes by kind, and print a line per cycle in which they changed: in every cycle, in the first
    two, or never."""
    chunked_cross_entropy: bool = True
    """Causal language models: compute the loss from hidden states in chunks, so that logits and their gradient are
    never stored whole. If a model's head does not allow it, a line says why. false: compute whole logits, as
    transformers does."""
    keep_activations: Annotated[NumKept | None, Spelling(value_name="N|auto", read=integer_or_auto)] = None
    """With --gradient_checkpointing: number of blocks, from the top, that keep their activations and are not
    recomputed. auto (one CUDA device) takes as many as fit in memory. Results are the same to the bit."""
    offload_activations: bool = False
    """With --gradient_checkpointing: offload the inputs of blocks to host memory from the forward to the backward, for
    long sequences. Results are the same to the bit."""
    token_tile_size: Annotated[int | None, Spelling(value_name="N")] = None
    """Tokens per tile in which MLPs and norms process long batches, such as 8192. The backward recomputes each tile. By
    default batches are not tiled."""
    non_finite_limit: int = 10
    """Stop after this many updates in a row with a loss or gradient that is not finite."""
    layerwise_lr_decay: float = 1.0
    """Learning rate of each layer over that of the next layer above that trains, such as 0.8. The top one has
    --learning_rate, so try twice the usual one. 1 gives all layers one rate. For methods whose optimizer is that of
    --optim, so not for sft."""
    early_stopping_patience: int | None = None
    """Stop after this many evaluations in a row that are no better than the best. Needs --eval_strategy, and
    --load_best_model_at_end or --metric_for_best_model."""
    report: bool = True
    """At the end, draw the run's log into report.png in --output_dir, as slivertune report does. This needs
    matplotlib."""
    sample_tokens: int = 160
    """Tokens per sample written before and after training. 0 writes none."""
    sample_prompt: str | None = None
    """Prompt of the samples. By default the beginning of an evaluation row."""

    def __post_init__(self) -> None:
        if self.non_finite_limit < 1:
            raise ValueError(f"non_finite_limit={self.non_finite_limit} must be at least 1. Leave it out for 10")
        if not 0 < self.layerwise_lr_decay <= 1:
            raise ValueError(
                f"layerwise_lr_decay={self.layerwise_lr_decay} must lie in (0, 1]. Leave it out for one rate"
            )
        if self.early_stopping_patience is not None and self.early_stopping_patience < 1:
            raise ValueError(
                f"early_stopping_patience={self.early_stopping_patience} must be at least 1. Leave it out to train "
                "to the end"
            )
        if self.sample_tokens < 0:
            raise ValueError(f"sample_tokens={self.sample_tokens} must be at least 0. Pass 0 to write no samples")
        if self.keep_activations is not None and self.keep_activations != "auto":
            check_num_kept(self.keep_activations)
        if self.token_tile_size is not None:
            check_integer("token_tile_size", self.token_tile_size, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelArguments:
    """Options for the model that is fine-tuned."""

    model_name_or_path: Annotated[str | None, Spelling(aliases=("model",), value_name="NAME")] = None
    """Hub id or local folder of the model. By default a small byte-level Llama made on this machine."""
    model_revision: str | None = None
    """Branch, tag or commit of a hub model. Its main branch by default."""
    weights_dtype: WeightsDtype = "auto"
    """Dtype in which weights are stored. auto with hift and sft: bf16 under --bf16 (with fp32 master weights for hift,
    see --master, and fp32 deltas for sft), else the checkpoint's dtype, with fp16 read as bf16. auto with dense: fp32,
    and --bf16 means autocast. auto with lora, and sft over 4 bits: frozen weights in bf16 under --bf16, else fp32.
    Adapters and deltas are always in fp32."""
    load_in_4bit: bool = False
    """Lora, sft: store the frozen linear layers of the blocks in 4 bits (bitsandbytes NF4 with double quantisation).
    With --method lora, this is QLoRA. With --method sft, deltas are stored apart from the codes, and --output_dir holds
    only the deltas."""
    attn_implementation: str | None = None
    """Attention of the transformers library: sdpa, eager, flash_attention_2, ..."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParkedArguments:
    """Options for the weights of blocks that do not train now."""

    waiting: CodesForm | None = None
    """Hift, lora, sft: hold the blocks' linear weights in int8 or nf4 while they do not train: hift's idle layers, the
    frozen base of lora and sft. Weights in training and saved weights are exact."""
    weights: WeightPlace = "device"
    """Hift, lora, sft: place of the blocks' weights that do not train now. On the host, each block is loaded ahead of
    its forward and backward. Updates are the same to the bit. With sft, deltas are then stored beside the weights, and
    --output_dir has only them."""
    device_bytes: BytesOrAuto = "auto"
    """Hift, and lora and sft with --weights host: bytes of the GPU that may hold offloaded state and blocks of weights,
    beside those in use, such as 4GiB. Set it in place of --stream_bytes, --prefetch_bytes and --resident_bytes. auto
    takes what the updates so far left free."""
    resident_bytes: BytesOrAuto = "auto"
    """With --weights host: bytes of blocks that stay on the device, such as 4GiB. auto measures what the first updates
    leave free. Without a GPU it is 0."""

    @property
    def is_asked(self) -> bool:
        """Whether any weight is to be parked."""
        return self.waiting is not None or self.weights == "host"

    def __post_init__(self) -> None:
        for name in ("device_bytes", "resident_bytes"):
            read_bytes(name, getattr(self, name), may_be_auto=True)
        total, blocks = self.device_bytes, self.resident_bytes
        if total != "auto" and blocks != "auto" and blocks > total:
            raise ValueError(
                f"resident_bytes={blocks} does not fit into device_bytes={total}, of which it is a part. Lower it, or "
                "raise device_bytes"
            )

    @property
    def blocks_bytes(self) -> int | str:
        """Bytes of blocks that stay on the device, if no state shares the budget with them."""
        return self.device_bytes if self.resident_bytes == "auto" else self.resident_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenArguments:
    """Options for the tokens that carry gradient (TokenTune).

    Raises:
        ValueError: If the share of tokens is out of its range, or a pattern is given without a share.
    """

    token_ratio: float | None = None
    """Share of each sequence's positions that carry gradient, in (0, 1]. The others are only read (TokenTune, with any
    method). Off by default."""
    token_pattern: Pattern | None = None
    """Pattern of these positions: drawn one by one, in chunks, or as one block. By default chunks for causal language
    models and random for others."""

    def __post_init__(self) -> None:
        if self.token_ratio is None and self.token_pattern is not None:
            raise ValueError(f"--token_pattern {self.token_pattern} needs --token_ratio. Give a ratio, or leave it out")
        if self.token_ratio is not None and not 0 < self.token_ratio <= 1:
            raise ValueError(f"token_ratio={self.token_ratio} must lie in (0, 1]. Leave it out to train on all tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataArguments:
    """Options for the dataset, its columns and its preparation.

    Raises:
        ValueError: If a field is out of range, contradicts another, or is not read by the chosen task.
    """

    dataset: Annotated[list[str] | None, Spelling(words=PartedPaths)] = None
    """Hub dataset id, local csv, tsv, json, jsonl, txt or parquet file, or folder of such files. With --task causal_lm
    also several, each in its own format. builtin:dates (default) and builtin:python-reference need no network."""
    dataset_weights: list[float] | None = None
    """Share of the training rows from each of several datasets, such as 0.7 0.3. Rows are drawn with the seed until
    every dataset was seen whole, so rows of small datasets repeat. By default the datasets are concatenated."""
    dataset_format: FormatName | None = None
    """Format of chat or instruction data: messages (role, content), sharegpt (conversations of from, value), alpaca
    (instruction, input, output), prompt_completion, question_answer. By default detected from the columns."""
    chat_template: str | None = None
    """Chat template for chat and instruction data, in place of the tokenizer's: a Jinja file, or the template itself.
    It is saved with the model. The loss covers its generation blocks or, without any, the text after its generation
    prompt."""
    chat_template_date: Annotated[str | None, Spelling(value_name="YYYY-MM-DD")] = None
    """Date that a chat template writes as today's. By default the day on which the run started, also after a resume."""
    dataset_config: str | None = None
    """Configuration of a hub dataset, e.g. sst2 of nyu-mll/glue."""
    dataset_cache_dir: str | None = None
    """Cache folder of prepared data. By default that of the datasets library."""
    column_names: Annotated[list[str] | None, Spelling(words=PartedTexts)] = None
    """Column names of a csv or tsv file without a header line, in order."""
    sample_by: SampleBy = "line"
    """Text in a row of a txt file: a line, a paragraph (up to a blank line), or the file."""
    train_split: str = "train"
    """Split to train on. Slices such as train[:1000] work."""
    eval_split: str | None = None
    """Split to evaluate on. Without it and --eval_file, --eval_fraction is held out."""
    eval_file: Annotated[str | None, Spelling(value_name="FILE")] = None
    """A local file to evaluate on, in any of the formats."""
    eval_fraction: float = 0.1
    """Fraction of the training rows held out for evaluation, drawn with the seed."""
    task: Annotated[str, Spelling(choices=TASK_OPTIONS)] = "causal_lm"
    """Task to train for: causal_lm (language modelling), classification (a classifier head), or prompt_classification
    (a language model scores label words inside a template)."""
    text_column: str | None = None
    """Column of texts. It is guessed when unambiguous."""
    text_pair_column: str | None = None
    """Column of second texts, for sentence pairs."""
    prompt_column: str | None = None
    """Column of prompts. It carries no loss, and needs --response_column."""
    response_column: str | None = None
    """Column of responses, which alone carry the loss. It needs --prompt_column."""
    response_separator: str = "\n"
    """Text between a prompt and its response."""
    label_column: str | None = None
    """Column of class labels, integers or words. By default `label` if it exists."""
    template: str | None = None
    """Prompt with {column} placeholders and {mask} for the label word: '{sentence} It was {mask} .'"""
    label_words: str | None = None
    """Words for the labels, in the labels' sorted order (terrible,great) or named (0=terrible,1=great)."""
    max_length: int | None = None
    """Maximum tokens per row. By default 1024, or less if the model or tokenizer takes less."""
    packing: bool = False
    """Concatenate rows and cut blocks of --max_length. Otherwise rows are padded."""
    truncate: bool = False
    """Cut rows longer than --max_length, and say how many, in place of an error."""
    skip_empty_rows: bool = False
    """Leave out rows with an empty field, and say how many, in place of an error."""
    max_train_samples: int | None = None
    """Use at most this many training rows of each dataset."""
    max_eval_samples: int | None = None
    """Use at most this many evaluation rows of each dataset."""
    preprocessing_num_workers: int | None = None
    """Number of processes that tokenise. By default only the main process."""

    def __post_init__(self) -> None:
        for name in ("max_train_samples", "max_eval_samples", "preprocessing_num_workers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1. Leave it out for no limit")
        for option in fields(self):
            # An option that another task reads would be silently ignored.
            value, tasks = getattr(self, option.name), tasks_reading(option.name)
            if value != option.default and tasks and self.task not in tasks:
                raise ValueError(
                    f"{option.name}={value!r} has no effect with task={self.task}, only with {' and '.join(tasks)}. "
                    "Leave it out, or choose such a task"
                )
        if self.chat_template_date is not None and not is_date(self.chat_template_date):
            raise ValueError(f"chat_template_date={self.chat_template_date!r} is not a date. Write it as 2026-01-31")
        for is_broken, rule in self._rules():
            if is_broken:
                raise ValueError(rule)

    def _rules(self) -> tuple[tuple[bool, str], ...]:
        """Return whether each rule is broken, with its error message."""
        return (
            (
                self.eval_split is not None and self.eval_file is not None,
                (
                    f"eval_split={self.eval_split!r} and eval_file={self.eval_file!r} both name the evaluation rows. "
                    "Keep one"
                ),
            ),
            (
                not 0 < self.eval_fraction < 1,
                (
                    f"eval_fraction={self.eval_fraction} must lie between 0 and 1. To evaluate on given rows, use "
                    "--eval_split or --eval_file"
                ),
            ),
            (
                (self.prompt_column is None) != (self.response_column is None),
                (
                    f"prompt_column={self.prompt_column!r} and response_column={self.response_column!r} go together. "
                    "Name both"
                ),
            ),
            (
                self.text_column is not None and self.prompt_column is not None,
                (
                    f"text_column={self.text_column!r} and prompt_column={self.prompt_column!r} exclude each other: "
                    "the first trains on whole texts, the second on responses. Keep one"
                ),
            ),
            *self._rules_of_several(),
            (
                self.dataset_format is not None and (self.text_column or self.prompt_column) is not None,
                (
                    f"dataset_format={self.dataset_format!r} and "
                    f"{'text_column' if self.text_column else 'prompt_column'} both choose the columns. Keep one"
                ),
            ),
            *(
                (
                    self.task == "prompt_classification" and not getattr(self, name),
                    (
                        f"task=prompt_classification needs --{name}, as in "
                        "--template '{sentence} It was {mask} .' --label_words terrible,great"
                    ),
                )
                for name in ("template", "label_words")
            ),
        )

    def _rules_of_several(self) -> tuple[tuple[bool, str], ...]:
        """Return the rules for several datasets and their weights."""
        names, weights = self.dataset or [], self.dataset_weights or []
        return (
            (
                len(names) > 1 and self.task != "causal_lm",
                f"dataset={names} names several datasets, but only task=causal_lm mixes them. Name one",
            ),
            (len(set(names)) < len(names), f"dataset={names} names a dataset twice. Name each once"),
            (
                self.dataset_weights is not None and (len(weights) != len(names) or len(names) < 2),
                (
                    f"dataset_weights={self.dataset_weights} has {len(weights)} weights for {len(names)} datasets. "
                    "Give each of several datasets one weight, or leave the weights out"
                ),
            ),
            (
                any(not (weight > 0 and math.isfinite(weight)) for weight in weights),
                f"dataset_weights={self.dataset_weights} must all be positive numbers. Leave out a dataset instead",
            ),
        )
