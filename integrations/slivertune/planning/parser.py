"""Parser and help text of `slivertune plan`, made from the fields that hold its options."""

import argparse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field
from typing import Any, ClassVar, Literal, get_args, get_origin

from slivertune.core.number_rule import NumberRule
from slivertune.core.option_help import ON_SPELLING, HelpEntry, HelpGroup, describe_option, render_help
from slivertune.core.option_parser import OptionParser, PartedWords
from slivertune.planning.methods import planned_methods
from slivertune.planning.request import rule_of

_DESCRIPTION = (
    "Report what a run will need before it runs: its real step is made on tensors without data, and every byte that "
    "it stores is counted. Needs neither weights nor a GPU. Takes a run file and all options of slivertune train. A "
    "line at the end names those on which a plan does not depend."
)
_CHECKPOINTED = "slivertune plan --model llama-3-8b --precision mixed_hi --gradient_checkpointing"
_EXAMPLES = (
    "slivertune plan --model llama-2-7b --batch_size 8 --fit 24GiB",
    f"{_CHECKPOINTED} --gpu 4090 --tokens 10e6",
    f"{_CHECKPOINTED} --fit 24GiB --sweep seq_length=512,2048,8192 --plot lengths.png",
)


class _PlanParser(OptionParser):
    other_words: ClassVar[Mapping[str, str]] = {
        "max_seq_length": "seq_length",
        "fp16": "precision",
        "optimizer_name": "optimizer",
        "lora_r": "lora_rank",
        "checkpointing": "gradient_checkpointing",
        "card": "gpu",
        "gpus": "num_gpus",
        "epochs": "num_train_epochs",
    }
    groups: tuple[HelpGroup, ...] = ()
    rules: Mapping[str, NumberRule]

    def format_help(self) -> str:
        """Return the text of `slivertune plan --help`."""
        return render_help(
            usage="slivertune plan [RUN.yaml] --model MODEL [--option value ...]",
            description=_DESCRIPTION,
            examples=_EXAMPLES,
            groups=[*self.groups, HelpGroup("help", [HelpEntry("-h, --help", "show this text")])],
            notes=(ON_SPELLING,),
        )

    def describe_number(self, option: str, kind: str) -> str:
        """Add an option's range to its kind of number."""
        rule = self.rules.get(option)
        return kind if rule is None else f"{kind}, {rule.describe()}"


def make_parser(arguments: Iterable[tuple[Field[Any], Any]]) -> argparse.ArgumentParser:
    """Make the parser of `slivertune plan`, which leaves out values that were not typed.

    Args:
        arguments: Field with metadata by `planning.request.option`, and type of its values, for each argument.
    """
    parser = _PlanParser(prog="slivertune plan", argument_default=argparse.SUPPRESS)
    groups: dict[str, list[HelpEntry]] = {}
    rules: dict[str, NumberRule] = {}
    for item, kind in arguments:
        words = _words(item, kind)
        names = item.metadata["names"] or (f"--{item.name}",)
        parser.add_argument(*names, dest=item.name, **words)
        if (rule := rule_of(item, kind)) is not None:
            rules |= dict.fromkeys((name.strip("-") for name in names), rule)
        if item.default is True:
            parser.add_argument(f"--no_{item.name}", dest=item.name, action="store_false")
        groups.setdefault(item.metadata["group"], []).append(_entry(item, names, words))
    parser.rules = rules
    parser.groups = tuple(HelpGroup(title, entries) for title, entries in groups.items())
    return parser


def _words(item: Any, kind: Any) -> dict[str, Any]:
    """Return argparse's arguments for a field."""
    read, more = item.metadata["read"], dict(item.metadata["more"])
    if kind is bool:
        return {"nargs": "?", "const": True, "type": _reader(_true_or_false), "metavar": "true|false"}
    if item.name == "method" or get_origin(kind) is Literal:
        return {"choices": get_args(kind) or planned_methods()}
    if get_origin(kind) is tuple:
        return {"nargs": "+", "metavar": "NAME", "action": PartedWords}
    if read is not None:
        return {**more, "type": _reader(read)}
    if kind in (int, float):
        return {"metavar": "N" if kind is int else "SHARE", **more, "type": kind}
    return more


def _entry(item: Any, names: tuple[str, ...], words: Mapping[str, Any]) -> HelpEntry:
    value = {"?": "[{}]", "+": "{} ..."}.get(words.get("nargs", ""), "{}").format(words.get("metavar", ""))
    default = None if item.default is MISSING else item.default
    return describe_option(
        names, item.metadata["text"], value=value, choices=tuple(words.get("choices", ())), default=default
    )


def _reader(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Wrap a reader, so that argparse shows its errors."""

    def read_or_complain(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return read_or_complain


def _true_or_false(text: str) -> bool:
    if text.lower() in ("true", "false", "yes", "no", "1", "0"):
        return text.lower() in ("true", "yes", "1")
    raise ValueError(f"{text!r} must be true or false")
