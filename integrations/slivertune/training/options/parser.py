"""Reads the values that the user typed after `slivertune train` or `slivertune plan`, or wrote in a config file."""

import argparse
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_origin

from transformers import HfArgumentParser, TrainingArguments
from transformers.hf_argparser import string_to_bool

from slivertune.core.option_parser import AddedWords, OptionParser, PartedWords
from slivertune.core.options import Option, add_option, read_switch
from slivertune.core.removed_settings import is_only_value
from slivertune.training.options.config_file import SUFFIXES, Setting, read_settings
from slivertune.training.options.help import PrintHelp, help_text
from slivertune.training.options.number_rules import check_mapping, check_number, check_text, number_rule
from slivertune.training.options.table import RENAMED, option_named, train_options

_OTHER_WORDS = {
    "lr": "learning_rate",
    "epochs": "num_train_epochs",
    "num_epochs": "num_train_epochs",
    "steps": "max_steps",
    "batch_size": "per_device_train_batch_size",
    "train_batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "grad_accum": "gradient_accumulation_steps",
    "gradient_accumulation": "gradient_accumulation_steps",
    "micro_batch_size": "per_device_train_batch_size",
    "warmup_ratio": "warmup_steps",
    "scheduler": "lr_scheduler_type",
    "optimizer": "optim",
    "seq_length": "max_length",
    "max_seq_length": "max_length",
    "sequence_len": "max_length",
    "cutoff_len": "max_length",
    "data": "dataset",
    "datasets": "dataset",
    "dataset_name": "dataset",
    "base_model": "model_name_or_path",
    "output": "output_dir",
    "resume": "resume_from_checkpoint",
    "lora_r": "lora_rank",
    "target_modules": "lora_target_modules",
    "precision": "bf16",
}
"""Names of these options elsewhere: in `slivertune plan`, TRL, axolotl and LlamaFactory."""
UNSET = "--unset"
"""Option that resets options of a config file to their defaults."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verb:
    """A verb of the program that takes the options of `slivertune train`."""

    name: str
    """The word after `slivertune`."""
    own: Mapping[str, Option]
    """Options beside those of `slivertune train`, by name. They replace its options of the same name."""
    other_words: Mapping[str, str]
    """Names of options by their names elsewhere."""
    help_text: Callable[[bool], str]
    """Function that returns the text of `--help`. Its argument says whether `all` was typed."""

    @property
    def prog(self) -> str:
        """Program and verb."""
        return f"slivertune {self.name}"

    def options(self) -> dict[str, Option]:
        """Return all options by name."""
        return {**train_options(), **self.own}


TRAIN = Verb(name="train", own={}, other_words=_OTHER_WORDS, help_text=lambda has_all: help_text(has_all=has_all))


class _Parser(OptionParser, HfArgumentParser):
    verb = TRAIN

    def add_argument(self, *names: Any, **options: Any) -> Any:
        """Add an option, and allow several trackers, commas in lists, and switches without a value.

        For a field that is a text or a list, HfArgumentParser takes one word. A switch with default None needs a value.
        """
        if "--report_to" in names:
            options["nargs"] = "+"
        if options.get("type") is string_to_bool:
            options = {"nargs": "?", "const": True, **options, "type": read_switch}
        if get_origin(options.get("type")) is dict:
            options["type"] = str
        if options.get("nargs") == "+" and not options.get("choices"):
            options.setdefault("action", PartedWords)
        return super().add_argument(*names, **options)

    def explain(self, message: str) -> str:
        """Add to an error message the option that may be meant, or that a config file comes first."""
        words = message.partition("unrecognized arguments: ")[2].split()
        if any(word == "--config" or word.endswith(SUFFIXES) for word in words):
            return f"{message}. Name a config file before all options: {self.prog} run.yaml --seed 3"
        return super().explain(message)

    def describe_number(self, option: str, kind: str) -> str:
        """Add an option's range to its kind of number."""
        known = option_named(option, self.verb.options())
        rule = None if known is None else number_rule(known)
        return kind if rule is None else f"{kind}, {rule.describe()}"


def make_parser(verb: Verb = TRAIN) -> HfArgumentParser:
    """Make the parser of a verb, with every option.

    Args:
        verb: The verb.
    """
    kind = type("_Parser", (_Parser,), {"verb": verb, "other_words": verb.other_words})
    # An option of the verb replaces that of the Trainer with the same name.
    parser: HfArgumentParser = kind(TrainingArguments, prog=verb.prog, add_help=False, conflict_handler="resolve")
    for option in verb.options().values():
        if option.owner is not TrainingArguments:
            add_option(parser, option)
    parser.add_argument("-h", "--help", nargs="?", choices=("all",), action=PrintHelp, help_text=verb.help_text)
    parser.add_argument(UNSET, nargs="+", action=AddedWords)
    return parser


def given_values(
    argv: Sequence[str], read: Callable[[Path], list[Setting]] = read_settings, verb: Verb = TRAIN
) -> dict[str, Any]:
    """Return the user's values by field name, without defaults. Typed values win over those of the config file.

    An option of the file that `--unset` names is treated as if the file did not have it.

    Args:
        argv: Words after the command's name: an optional config file, then options.
        read: Function that reads the config file.
        verb: The verb.

    Raises:
        ValueError: If an option is unknown, or its value can't be read; names the line of a file.
    """
    parser, options = make_parser(verb), verb.options()
    # argparse fills in a default only if the namespace does not have the name.
    absent = object()
    nothing = dict.fromkeys(vars(parser.parse_args([])), absent)

    def parse(words: Sequence[str]) -> dict[str, Any]:
        given = vars(parser.parse_args(list(words), argparse.Namespace(**nothing)))
        names = [word.partition("=")[0].strip("-").replace("-", "_") for word in words if word.startswith("--")]
        spelled = {option.name: name for name in names if (option := option_named(name, options)) is not None}
        for name, value in given.items():
            if value is not absent and name in options:
                check_number(options[name], value, spelled.get(name, name))
                check_mapping(options[name], value)
                check_text(options[name], value)
                if options[name].takes_mapping and str not in options[name].kinds:
                    given[name] = json.loads(value)
        trackers = given["report_to"]
        if isinstance(trackers, list) and len(trackers) == 1:
            given["report_to"] = trackers[0]
        return {RENAMED.get(name, name): value for name, value in given.items() if value is not absent}

    has_file = bool(argv) and not argv[0].startswith("-")
    typed = parse(argv[1:] if has_file else argv)
    unset: list[str] = typed.pop(UNSET.strip("-"), [])
    if unset and not has_file:
        raise ValueError(f"{UNSET} {unset[0]}: no run file is read. Name one before all options, or leave it out")
    written = _written_values(read(Path(argv[0])), verb, parser, parse) if has_file else {}
    taken_back = {_name_to_unset(word, verb, parser): word for word in unset}
    for name, word in taken_back.items():
        if name in typed:
            raise ValueError(f"{UNSET} {word} resets what --{name} {typed[name]} sets. Leave out one of the two")
        if name not in written:
            raise ValueError(f"{UNSET} {word}: {argv[0]} does not set it. Leave it out")
    return {**{name: value for name, value in written.items() if name not in taken_back}, **typed}


def _name_to_unset(word: str, verb: Verb, parser: Any) -> str:
    """Return the field name of an option that `--unset` names."""
    options = verb.options()
    option = option_named(word.strip("-").replace("-", "_"), options)
    if option is None:
        meant = parser.suggest_option(word, options)
        raise ValueError(f"{UNSET} {word}: there is no such option{meant}; see {verb.prog} --help")
    return RENAMED.get(option.name, option.name)


def without_unset(words: Sequence[str], names: Collection[str]) -> list[str]:
    """Drop options that will be added to a command line from its `--unset`.

    Args:
        words: Command line of `slivertune train`, whose `--unset` names options that exist.
        names: Options that will be added, with underscores.
    """
    kept, taken_back, is_name = list[str](), list[str](), False
    for word in words:
        name, _, value = word.partition("=")
        if word.startswith("--"):
            is_name = name == UNSET
        else:
            value = word
        if is_name:
            taken_back += PartedWords.separator.split(value)
        else:
            kept.append(word)
    options = train_options() if taken_back else {}
    left = [
        word
        for word in filter(None, taken_back)
        if (option := option_named(word.replace("-", "_"), options)) is None or option.name not in names
    ]
    return [*kept, UNSET, *left] if left else kept


def _written_values(
    settings: Sequence[Setting], verb: Verb, parser: Any, parse: Callable[[Sequence[str]], dict[str, Any]]
) -> dict[str, Any]:
    """Return the values of a config file, each checked as if it had been typed."""
    options = verb.options()
    values: dict[str, Any] = {}
    for setting in settings:
        option = option_named(setting.key, options)
        if setting.value is not None and is_only_value(setting.key, setting.value):
            continue
        if option is None and isinstance(setting.value, dict):
            raise ValueError(
                f"{setting.place}: there is no option {setting.key!r}, and options are not nested. Write each alone"
            )
        if option is None:
            known = [*options, *(alias for each in options.values() for alias in each.aliases)]
            meant = parser.suggest_option(setting.key, known)
            raise ValueError(f"{setting.place}: there is no option {setting.key!r}{meant}; see {verb.prog} --help")
        if setting.value is None:
            if option.default is not None:
                raise ValueError(
                    f"{setting.place}: {setting.key} can't be null, since its default is not null. Leave the key out "
                    "for the default, or give a value"
                )
            # null for an option whose default is None has no effect.
            continue
        try:
            value = _read_value(option, setting.value, parse)
        except ValueError as error:
            raise ValueError(f"{setting.place}: {error}") from error
        for name in value.keys() & values.keys():
            raise ValueError(f"{setting.place}: {setting.key} sets {name}, and so does another line. Keep one")
        values |= value
    return values


def _read_value(option: Option, value: Any, parse: Callable[[Sequence[str]], dict[str, Any]]) -> Mapping[str, Any]:
    name = option.name
    if isinstance(value, dict):
        if not option.takes_mapping:
            raise ValueError(f"{name} takes one value, not a mapping. Options are not nested")
        check_mapping(option, value)
        return {RENAMED.get(name, name): value}
    if isinstance(value, list):
        if option.item_kind is None:
            raise ValueError(f"{name} takes one value, not a list of {len(value)}. Keep one of them")
        # Options that are one word or a list can't be typed as a list.
        return parse([f"--{name}", *value]) if option.takes_words else {name: value}
    if option.is_switch:
        value = {"on": "true", "off": "false"}.get(value.lower(), value)
    if option.may_stand_alone and not option.is_switch and value.lower() in ("true", "false"):
        # `--fsdp` alone means true. A word true after it would be a text.
        return {name: value.lower() == "true"}
    return parse([f"--{name}={value}"])
