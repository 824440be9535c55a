"""From loaded splits to what the HF Trainer takes, for every task."""

import copy
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from slivertune.training.data.columns import number_rows
from slivertune.training.options.arguments import DataArguments
from slivertune.training.tasks.causal import prepare_causal, prepare_mixture
from slivertune.training.tasks.classification import prepare_classification, prepare_prompt_classification
from slivertune.training.tasks.registry import TASK_OPTIONS, tasks_reading
from slivertune.training.tasks.task import Task

Prepare: TypeAlias = Callable[[DataArguments, PreTrainedTokenizerBase, PreTrainedConfig, dict[str, Any]], Task]
"""From arguments, tokenizer, the model's configuration, and numbered splits `train` and `eval`."""

_PREPARE: dict[str, Prepare] = {
    "causal_lm": prepare_causal,
    "classification": prepare_classification,
    "prompt_classification": prepare_prompt_classification,
}


def register_train_task(name: str, prepare: Prepare, *, reads: tuple[str, ...] = ()) -> None:
    """Let `slivertune train` learn a task of another package; call it before `slivertune.cli.main`.

    From then on `--task` takes its name.

    Args:
        name: As it is typed.
        prepare: Makes a `Task`, whose `model_kind` may be a class of the other package's.
        reads: Which options of `DataArguments` it reads, of those that not every task does.

    Raises:
        ValueError: If another task has its name, or every task reads one of those options.
    """
    if _PREPARE.get(name, prepare) is not prepare:
        raise ValueError(f"another task is registered as {name!r}; choose another name for {prepare!r}")
    for option in reads:
        if not tasks_reading(option):
            raise ValueError(f"reads={option!r} is no option of the data that only some tasks read; leave it out")
    _PREPARE[name] = prepare
    TASK_OPTIONS[name] = frozenset(reads)


def prepare_task(
    args: DataArguments, tokenizer: PreTrainedTokenizerBase, model_config: PreTrainedConfig, splits: Any
) -> Task:
    """Tokenise the splits and gather the hooks of a task.

    In a run of several processes, call it inside `TrainingArguments.main_process_first()`, so that one tokenises and
    the others read its cache.

    Args:
        args: The task, its columns and lengths.
        tokenizer: Any transformers tokenizer; it stays as it is.
        model_config: Says how many positions the model has and, for prompts, whether it is a masked or a causal one.
        splits: A `datasets.DatasetDict` with `train` and `eval`, as from `load_splits`.

    Returns:
        What the Trainer takes.

    Raises:
        ValueError: If columns, labels, lengths or rows don't fit.
    """
    # Asked to cut, a fast tokenizer keeps cutting, and would write that into the checkpoints it is saved with.
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
    """`prepare_task` for one dataset or several, which only language modelling mixes.

    Args:
        args: As for `prepare_task`, and the datasets' weights.
        tokenizer: Any transformers tokenizer; it stays as it is.
        model_config: The model's.
        sources: As from `load_datasets`.
        seed: Decides in which order rows of weighted datasets are drawn.

    Raises:
        ValueError: As `prepare_task`.
    """
    if len(sources) == 1:
        (splits,) = sources.values()
        return prepare_task(args, tokenizer, model_config, splits)
    numbered = {name: {split: number_rows(rows) for split, rows in splits.items()} for name, splits in sources.items()}
    return prepare_mixture(args, copy.deepcopy(tokenizer), model_config, numbered, seed=seed)
