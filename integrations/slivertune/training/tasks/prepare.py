"""Conversion of loaded splits to datasets and hooks for the HF Trainer, for every task."""

import copy
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from slivertune.training.data.columns import number_rows
from slivertune.training.options.arguments import DataArguments
from slivertune.training.options.tasks import TASK_OPTIONS, tasks_reading
from slivertune.training.tasks.causal import prepare_causal, prepare_mixture
from slivertune.training.tasks.classification import prepare_classification, prepare_prompt_classification
from slivertune.training.tasks.task import Task

Prepare: TypeAlias = Callable[[DataArguments, PreTrainedTokenizerBase, PreTrainedConfig, dict[str, Any]], Task]
"""Function of settings, tokenizer, model configuration, and numbered splits `train` and `eval` that makes a task."""

_PREPARE: dict[str, Prepare] = {
    "causal_lm": prepare_causal,
    "classification": prepare_classification,
    "prompt_classification": prepare_prompt_classification,
}


def register_train_task(name: str, prepare: Prepare, *, reads: tuple[str, ...] = ()) -> None:
    """Register a task of another package for `slivertune train`. Call it before `slivertune.cli.main`.

    From then on, `--task` takes its name.

    Args:
        name: Name of the task, as typed.
        prepare: Function that makes a `Task`, whose `model_kind` may be a class of the other package.
        reads: Options of `DataArguments` that it reads and that not every task reads.

    Raises:
        ValueError: If another task has its name, or if an option in `reads` is not one that only some tasks read.
    """
    if _PREPARE.get(name, prepare) is not prepare:
        raise ValueError(f"another task is registered as {name!r}. Choose another name for {prepare!r}")
    for option in reads:
        if not tasks_reading(option):
            raise ValueError(f"reads={option!r} is no option of the data that only some tasks read. Leave it out")
    _PREPARE[name] = prepare
    TASK_OPTIONS[name] = frozenset(reads)


def prepare_task(
    args: DataArguments, tokenizer: PreTrainedTokenizerBase, model_config: PreTrainedConfig, splits: Any
) -> Task:
    """Tokenise the splits and set the hooks of a task.

    With several processes, call it inside `TrainingArguments.main_process_first()`, so that one process tokenises and
    the others read its cache.

    Args:
        args: Settings for the task, its columns and lengths.
        tokenizer: Any transformers tokenizer. It is not changed.
        model_config: Configuration with the model's number of positions and, for prompts, its kind (masked or causal).
        splits: A `datasets.DatasetDict` with `train` and `eval`, as from `load_splits`.

    Returns:
        Datasets and hooks for the Trainer.

    Raises:
        ValueError: If columns, labels, lengths or rows don't fit.
    """
    # A fast tokenizer that has truncated once keeps truncating, and would save that with its checkpoints.
    tokenizer = copy.deepcopy(tokenizer)
    return _PREPARE[args.task](
        args, tokenizer, model_config, {name: number_rows(splits[name]) for name in ("train", "eval")}
    )


def prepare_datasets(
    args: DataArguments,
    tokenizer: PreTrainedTokenizerBase,
    model_config: PreTrainedConfig,
    sources: Mapping[str, Any],
    *,
    seed: int,
) -> Task:
    """Prepare a task for one dataset, or language modelling on a mixture of several.

    Args:
        args: Settings, as for `prepare_task`, and the weights of the datasets.
        tokenizer: Any transformers tokenizer. It is not changed.
        model_config: Configuration of the model.
        sources: Splits by dataset name, as from `load_datasets`.
        seed: Seed for the order in which rows of weighted datasets are drawn.

    Raises:
        ValueError: As `prepare_task`.
    """
    if len(sources) == 1:
        (splits,) = sources.values()
        return prepare_task(args, tokenizer, model_config, splits)
    numbered = {name: {split: number_rows(rows) for split, rows in splits.items()} for name, splits in sources.items()}
    return prepare_mixture(args, copy.deepcopy(tokenizer), model_config, numbered, seed=seed)
