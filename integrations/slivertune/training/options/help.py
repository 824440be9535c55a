"""`slivertune train --help`: our options and the Trainer's common ones. With `all`, it shows every option."""

import argparse
from collections.abc import Callable, Iterator
from typing import Any

from slivertune.core.option_help import ON_SPELLING, HelpEntry, HelpGroup, describe_option, render_help
from slivertune.core.options import Option, options_of
from slivertune.training.options.arguments import (
    DataArguments,
    ModelArguments,
    ParkedArguments,
    RunArguments,
    TokenArguments,
)
from slivertune.training.options.methods import METHOD_OPTIONS, method_option
from slivertune.training.options.trainer import CommonOptions

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

_MOST_CHOICES = 12
"""Maximum number of choices that the short help lists for an option."""
_OF_TRAINING = (
    "learning_rate",
    "layerwise_lr_decay",
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
_OF_DEVICE = ("device_bytes", "stream_bytes", "prefetch_bytes", "resident_bytes")
"""The budget of offloaded state and weights, and its parts."""
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
    """Prints the help and ends the program.

    Args:
        help_text: Function that returns the text. Its argument says whether `all` was typed.
        options: As for `argparse.Action`.
    """

    def __init__(self, *args: Any, help_text: Callable[[bool], str], **options: Any) -> None:
        self._help_text = help_text
        super().__init__(*args, **options)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Print the help, with all options if `all` was given, and exit."""
        print(self._help_text(values == "all"), end="")
        parser.exit()


def common_options() -> dict[str, Option]:
    """Return the options that `--help` shows, by name and in its order. This imports no torch."""
    return {option.name: option for _, options in _groups() for option in options}


def help_text(*, has_all: bool, width: int | None = None) -> str:
    """Return the text of `slivertune train --help`.

    Args:
        has_all: Whether to include the rarely used options of the Trainer, which imports torch.
        width: Characters per line; by default the terminal's.
    """
    groups = [HelpGroup(title, [help_entry(each, has_all=has_all) for each in members]) for title, members in _groups()]
    if has_all:
        from slivertune.training.options.table import train_options

        shown = common_options()
        others = [help_entry(each, has_all=True) for name, each in train_options().items() if name not in shown]
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


def _groups() -> Iterator[tuple[str, list[Option]]]:
    runs = {option.name: option for option in (*options_of(CommonOptions), *options_of(RunArguments))}
    placed = {*_OF_TRAINING, *_OF_MEMORY}
    yield "model and data", [*options_of(ModelArguments), *options_of(DataArguments)]
    yield "method", [method_option()]
    for method in METHOD_OPTIONS.values():
        if members := [each for each in method.options() if each.name not in _OF_DEVICE]:
            yield f"--method {method.name}, {method.help}", members
    yield "with any method, TokenTune", list(options_of(TokenArguments))
    parked = {option.name: option for option in options_of(ParkedArguments)}
    yield "weights that do not train now", [each for name, each in parked.items() if name not in _OF_DEVICE]
    parked |= {each.name: each for method in METHOD_OPTIONS.values() for each in method.options()}
    yield "bytes of the GPU for what is offloaded", [parked[name] for name in _OF_DEVICE]
    yield "training", [runs[name] for name in _OF_TRAINING]
    yield "memory", [runs[name] for name in _OF_MEMORY]
    yield "output and resume", [option for name, option in runs.items() if name not in placed]


def help_entry(option: Option, *, has_all: bool = False) -> HelpEntry:
    """Describe an option.

    Args:
        option: The option.
        has_all: Whether to list all choices, also where they are many.
    """
    names = [f"--{name}" for name in (option.name, *option.aliases)]
    default = " ".join(map(str, option.default)) if isinstance(option.default, list) else option.default
    choices = option.choices if has_all or len(option.choices) <= _MOST_CHOICES else ()
    return describe_option(names, option.text, value=_value_of(option), choices=choices, default=_spelled(default))


def _spelled(default: Any) -> Any:
    """Return a default as a user would type it."""
    if isinstance(default, str):
        return default.replace("\n", "\\n")
    return getattr(default, "value", default)


def _value_of(option: Option) -> str:
    if option.value_name is not None:
        return option.value_name
    if option.is_switch:
        return "[true|false]" if option.may_stand_alone else "true|false"
    if option.takes_mapping:
        return "JSON"
    if option.choices:
        return "NAME"
    if option.takes_words:
        return "N ..." if option.item_kind in (int, float) else "NAME ..."
    if int in option.kinds:
        return "N"
    return "X" if float in option.kinds else "TEXT"
