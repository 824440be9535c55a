"""`slivertune train --help`: our options and the Trainer's common ones; with `all`, every option."""

import argparse
from collections.abc import Iterable, Iterator
from typing import Any

from slivertune.core.option_help import ON_SPELLING, HelpEntry, HelpGroup, describe_option, render_help
from slivertune.training.methods.registry import TRAIN_METHODS
from slivertune.training.options.arguments import DataArguments, ModelArguments, RunArguments, TokenArguments
from slivertune.training.options.table import Option, train_options

_RUN = "slivertune train --model_name_or_path PATH_OR_HUB_ID --dataset chats.jsonl"
_EXAMPLES = (
    f"{_RUN} --learning_rate 4e-5 --bf16 --output_dir runs/mine",
    "slivertune train run.yaml --learning_rate 2e-5",
    f"{_RUN} --method lora --load_in_4bit --bf16 --token_ratio 0.3 --output_dir runs/qlora",
)
_DESCRIPTION = (
    "Fine-tune a causal language model or a classifier with the Hugging Face Trainer. Without any options, HiFT "
    "teaches a small byte-level Llama, made on this machine, to write out dates, beside dense fine-tuning. A YAML "
    "or JSON file may hold options, one key each, as in learning_rate: 1e-4. Typed options win."
)
_ON_DEFAULTS = (
    "A log line is written once per HiFT turn (if turns are shorter than 8 updates: per cycle and turn), once per SFT "
    "reselection, or every 8 updates. The embedded model and built-in datasets set their own learning rate, schedule, "
    "length, batch size and layers_per_group of HiFT. Options that are given here win."
)
_ON_ALL = "slivertune train --help all lists every other field of transformers.TrainingArguments, too."

_TRAINERS: dict[str, str] = {
    "learning_rate": "peak learning rate of the schedule",
    "num_train_epochs": "passes over the training data",
    "max_steps": "number of updates, in place of epochs",
    "per_device_train_batch_size": "rows per forward on each device",
    "gradient_accumulation_steps": "forwards and backwards per update",
    "warmup_steps": "warmup updates; below 1, their share of all updates",
    "lr_scheduler_type": "schedule of the learning rate",
    "optim": "optimizer of dense, hift and lora: adamw_torch, sgd, adafactor, adamw_bnb_8bit, ...",
    "weight_decay": "weight decay of all weights except norms and biases",
    "max_grad_norm": "maximum norm to which gradients are clipped; 0 turns clipping off",
    "seed": "seed of the data order, dropout and all other random choices",
    "bf16": "train in bfloat16; see --weights_dtype for its effect on each method",
    "gradient_checkpointing": "store only each block's input, and recompute the block in the backward",
    "output_dir": (
        "folder of the run; by default runs/METHOD, or the first free one of runs/METHOD-2, -3, ...; its "
        "slivertune_run.yaml repeats the run"
    ),
    "resume_from_checkpoint": (
        "checkpoint folder to continue from; true: the newest complete checkpoint; auto: the newest complete "
        "checkpoint, or a new run if there is none, so that one command both starts a run and continues it after a "
        "kill, in the same folder (by default the newest of runs/METHOD). A finished run continues if max_steps or "
        "num_train_epochs was raised. Otherwise nothing is trained, and a line says so"
    ),
    "logging_strategy": "schedule of log lines",
    "logging_steps": "updates between two log lines; by default as said below (HiFT: a turn)",
    "eval_strategy": "schedule of evaluations, besides those before and after training",
    "eval_steps": "updates between two evaluations; by default logging_steps",
    "per_device_eval_batch_size": "rows per forward of an evaluation",
    "save_strategy": "schedule of checkpoints",
    "save_steps": "updates between two checkpoints",
    "save_total_limit": "checkpoints to keep; by default all",
    "report_to": "trackers that receive the log: tensorboard, wandb, ..., all",
}
"""Help texts of the Trainer's common options, in words that hold here."""
_MOST_CHOICES = 12
"""Maximum number of choices that the short help lists for an option."""
_OF_TRAINING = (
    "learning_rate",
    "num_train_epochs",
    "max_steps",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "warmup_steps",
    "lr_scheduler_type",
    "optim",
    "weight_decay",
    "max_grad_norm",
    "seed",
    "non_finite_limit",
)
_OF_MEMORY = (
    "bf16",
    "gradient_checkpointing",
    "keep_activations",
    "offload_activations",
    "token_tile_size",
    "chunked_cross_entropy",
    "memory_ledger",
)


_UNSET = HelpEntry("--unset NAME ...", "ignore these options of RUN.yaml, and use their defaults")


class PrintHelp(argparse.Action):
    """Prints the help and ends the program."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Print the help, with all options if `all` was given, and exit."""
        print(help_text(has_all=values == "all"), end="")
        parser.exit()


def common_options() -> list[Option]:
    """Return the options that `--help` shows, in its order."""
    return [option for _, options in _groups(train_options()) for option in options]


def help_text(*, has_all: bool, width: int | None = None) -> str:
    """Return the text of `slivertune train --help`.

    Args:
        has_all: Whether to include the rarely used options of the Trainer.
        width: Characters per line; by default the terminal's.
    """
    options = train_options()
    groups = [
        HelpGroup(title, [_entry(each, has_all=has_all) for each in members]) for title, members in _groups(options)
    ]
    if has_all:
        shown = {each.name for each in common_options()}
        others = [_entry(each, has_all=True) for name, each in options.items() if name not in shown]
        groups.append(HelpGroup("every other field of transformers.TrainingArguments", others))
    asked = HelpEntry("-h, --help [all]", "show this text; with all, also every option of the Trainer")
    return render_help(
        usage="slivertune train [RUN.yaml] [--option value ...]",
        description=_DESCRIPTION,
        examples=_EXAMPLES,
        groups=[*groups, HelpGroup("run file", [_UNSET]), HelpGroup("help", [asked])],
        notes=(_ON_DEFAULTS, ON_SPELLING) if has_all else (_ON_DEFAULTS, ON_SPELLING, _ON_ALL),
        width=width,
    )


def _groups(options: dict[str, Option]) -> Iterator[tuple[str, list[Option]]]:
    def named(names: Iterable[str]) -> list[Option]:
        return [options[name] for name in names]

    def owned(*owners: type) -> list[Option]:
        return [each for each in options.values() if each.owner in owners]

    placed = {*_OF_TRAINING, *_OF_MEMORY}
    rest = [name for name in _TRAINERS if name not in placed]
    rest += [each.name for each in owned(RunArguments) if each.name not in placed]
    yield "model and data", owned(ModelArguments, DataArguments)
    yield "method", named(["method"])
    for name, method in TRAIN_METHODS.items():
        if members := owned(method.options_class):
            yield f"--method {name}, {method.help}", members
    yield "with any method, TokenTune", owned(TokenArguments)
    yield "training", named(_OF_TRAINING)
    yield "memory", named(_OF_MEMORY)
    yield "output and resume", named(rest)


def _entry(option: Option, *, has_all: bool) -> HelpEntry:
    text = _TRAINERS[option.name] if option.name in _TRAINERS else _text_of(option)
    names = [f"--{name}" for name in (option.name, *option.aliases)]
    default = " ".join(map(str, option.default)) if isinstance(option.default, list) else option.default
    choices = option.choices if has_all or len(option.choices) <= _MOST_CHOICES else ()
    return describe_option(names, text, value=_value_of(option), choices=choices, default=_spelled(default))


def _spelled(default: Any) -> Any:
    """Return a default as a user would type it."""
    if isinstance(default, str):
        return default.replace("\n", "\\n")
    return getattr(default, "value", default)


def _text_of(option: Option) -> str:
    """Return an option's help text, without the name of its method, which is in the group's title."""
    name = next((name for name, each in TRAIN_METHODS.items() if each.options_class is option.owner), None)
    return option.text if name is None else option.text.removeprefix(f"{name}: ")


def _value_of(option: Option) -> str:
    if option.value_name is not None:
        return option.value_name
    if option.is_switch:
        return "[true|false]" if option.may_stand_alone else "true|false"
    if option.takes_mapping:
        return "JSON"
    if option.takes_words:
        return "N ..." if option.item_kind in (int, float) else "NAME ..."
    if int in option.kinds:
        return "N"
    return "X" if float in option.kinds else "TEXT"
