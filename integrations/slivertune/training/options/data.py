"""What a run learns from: the dataset, its columns, and how rows become tensors."""

from dataclasses import dataclass, field, fields
from typing import Literal

TaskName = Literal["causal_lm", "classification", "prompt_classification"]
SampleBy = Literal["line", "paragraph", "document"]

# Fields that only some tasks read; setting one for another task would be ignored in silence.
_READ_BY: dict[str, tuple[TaskName, ...]] = {
    "text_column": ("causal_lm", "classification"),
    "text_pair_column": ("classification",),
    "prompt_column": ("causal_lm",),
    "response_column": ("causal_lm",),
    "response_separator": ("causal_lm",),
    "label_column": ("classification", "prompt_classification"),
    "template": ("prompt_classification",),
    "label_words": ("prompt_classification",),
    "packing": ("causal_lm",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class DataArguments:
    """The dataset, its columns, and how its rows become tensors; made for `transformers.HfArgumentParser`.

    Raises:
        ValueError: If a field is out of range, contradicts another, or is not read by the chosen task.
    """

    dataset: str | None = field(
        default=None,
        metadata={
            "help": "A hub dataset id, or a local csv, tsv, json, jsonl, txt or parquet file, or a folder of such."
        },
    )
    dataset_config: str | None = field(
        default=None, metadata={"help": "Configuration of a hub dataset, e.g. sst2 of nyu-mll/glue."}
    )
    dataset_cache_dir: str | None = field(
        default=None, metadata={"help": "Where the datasets library keeps prepared data; its own cache by default."}
    )
    column_names: list[str] | None = field(
        default=None, metadata={"help": "Column names of a csv or tsv file without a header line, in order."}
    )
    sample_by: SampleBy = field(
        default="line",
        metadata={"help": "What is one row of a txt file: a line, a paragraph (blank line), or the file."},
    )
    train_split: str = field(default="train", metadata={"help": "Split to train on; slices such as train[:1000] work."})
    eval_split: str | None = field(
        default=None,
        metadata={"help": "Split to evaluate on; without it and --eval_file, --eval_fraction is held out."},
    )
    eval_file: str | None = field(
        default=None, metadata={"help": "A local file to evaluate on, in any of the formats."}
    )
    eval_fraction: float = field(
        default=0.1, metadata={"help": "Fraction of the training rows held out for evaluation, drawn with the seed."}
    )
    task: TaskName = field(
        default="causal_lm",
        metadata={
            "help": "causal_lm: language modelling; classification: a classifier head; prompt_classification: a "
            "language model scores label words inside a template."
        },
    )
    text_column: str | None = field(default=None, metadata={"help": "Column of texts; guessed when unambiguous."})
    text_pair_column: str | None = field(default=None, metadata={"help": "Column of second texts, for sentence pairs."})
    prompt_column: str | None = field(
        default=None, metadata={"help": "Column of prompts; carries no loss, and needs --response_column."}
    )
    response_column: str | None = field(
        default=None, metadata={"help": "Column of responses, which alone carry the loss; needs --prompt_column."}
    )
    response_separator: str = field(default="\n", metadata={"help": "Text between a prompt and its response."})
    label_column: str | None = field(
        default=None, metadata={"help": "Column of class labels, integers or words; `label` where there is one."}
    )
    template: str | None = field(
        default=None,
        metadata={
            "help": "Prompt with {column} placeholders and {mask} for the label word: '{sentence} It was {mask} .'"
        },
    )
    label_words: str | None = field(
        default=None,
        metadata={
            "help": "Words for the labels, in the labels' sorted order (terrible,great) or named (0=terrible,1=great)."
        },
    )
    max_length: int | None = field(
        default=None,
        metadata={"help": "Longest row in tokens; by default the least of 1024 and what the model and tokenizer take."},
    )
    packing: bool = field(
        default=False, metadata={"help": "Concatenate rows and cut blocks of --max_length; otherwise rows are padded."}
    )
    truncate: bool = field(
        default=False, metadata={"help": "Cut rows longer than --max_length, and say how many, in place of an error."}
    )
    skip_empty_rows: bool = field(
        default=False, metadata={"help": "Leave out rows with an empty field, and say how many, in place of an error."}
    )
    max_train_samples: int | None = field(default=None, metadata={"help": "Use at most this many training rows."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Use at most this many evaluation rows."})
    preprocessing_num_workers: int | None = field(
        default=None, metadata={"help": "Processes that tokenise; in the main process by default."}
    )

    def __post_init__(self) -> None:
        for name in ("max_train_samples", "max_eval_samples", "preprocessing_num_workers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1; leave it out for no limit")
        self._check_evaluation()
        self._check_task()

    def _check_evaluation(self) -> None:
        if self.eval_split is not None and self.eval_file is not None:
            raise ValueError(
                f"eval_split={self.eval_split!r} and eval_file={self.eval_file!r} both name the evaluation rows; "
                "keep one"
            )
        if not 0 < self.eval_fraction < 1:
            raise ValueError(
                f"eval_fraction={self.eval_fraction} must lie between 0 and 1; to evaluate on given rows, "
                "use --eval_split or --eval_file"
            )

    def _check_task(self) -> None:
        defaults = {option.name: option.default for option in fields(self)}
        for name, tasks in _READ_BY.items():
            value = getattr(self, name)
            if value != defaults[name] and self.task not in tasks:
                raise ValueError(
                    f"{name}={value!r} has no meaning for task={self.task}; it is for {' and '.join(tasks)}"
                )
        if (self.prompt_column is None) != (self.response_column is None):
            raise ValueError(
                f"prompt_column={self.prompt_column!r} and response_column={self.response_column!r} go together; "
                "name both"
            )
        if self.text_column is not None and self.prompt_column is not None:
            raise ValueError(
                f"text_column={self.text_column!r} and prompt_column={self.prompt_column!r} exclude each other: "
                "the first trains on whole texts, the second on responses"
            )
        if self.task == "prompt_classification":
            for name in ("template", "label_words"):
                if not getattr(self, name):
                    raise ValueError(
                        f"task=prompt_classification needs --{name}, as in "
                        "--template '{sentence} It was {mask} .' --label_words terrible,great"
                    )
