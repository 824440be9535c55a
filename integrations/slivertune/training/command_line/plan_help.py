"""`slivertune plan --help`: the options on which a plan depends, and its questions."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from slivertune.core.option_help import ON_SPELLING, HelpEntry, HelpGroup, render_help
from slivertune.core.options import Option
from slivertune.planning.arguments import SWEPT_FIELDS, PlanArguments
from slivertune.planning.cards import known_cards
from slivertune.planning.request import REQUEST_OPTIONS
from slivertune.planning.shipped import SHIPPED_MODELS
from slivertune.training.options.help import common_options, help_entry
from slivertune.training.options.methods import METHOD_OPTIONS
from slivertune.training.options.table import train_options

_DESCRIPTION = (
    "Report what a run will need before it runs: its real step is made on tensors without data, and every byte that "
    "it stores is counted. Needs neither weights nor a GPU. Takes a run file and all options of slivertune train. A "
    "line at the end names those on which a plan does not depend."
)
_CHECKPOINTED = "slivertune plan --model llama-3-8b --gradient_checkpointing --batch_size 1"
_EXAMPLES = (
    "slivertune plan runs/mine/slivertune_run.yaml --gpu 4090",
    "slivertune plan --model llama-2-7b --batch_size 8 --fit 24GiB",
    f"{_CHECKPOINTED} --gpu 4090 --tokens 10e6",
    f"{_CHECKPOINTED} --fit 24GiB --sweep seq_length=512,2048,8192 --plot lengths.png",
)
_LAYOUT = ("layout", "num_gpus", "offload_parameters")


def plan_help(own: Mapping[str, Option]) -> str:
    """Return the text of `slivertune plan --help`.

    Args:
        own: Options that `slivertune train` does not have, or has in another way, by name.
    """
    groups = [HelpGroup(title, list(map(help_entry, options))) for title, options in _groups(own)]
    return render_help(
        usage="slivertune plan [RUN.yaml] --model MODEL [--option value ...]",
        description=_DESCRIPTION,
        examples=_EXAMPLES,
        groups=[*groups, HelpGroup("help", [HelpEntry("-h, --help", "show this text")])],
        notes=(ON_SPELLING,),
    )


def _groups(own: Mapping[str, Option]) -> Iterator[tuple[str, list[Option]]]:
    options = {**train_options(), **common_options(), **own}
    read = [option for option in options.values() if _names(option) & REQUEST_OPTIONS.keys()]
    of_methods = {name: list(method.options()) for name, method in METHOD_OPTIONS.items()}
    placed = {*_LAYOUT, *(option.name for each in of_methods.values() for option in each)}
    models = f"Folder with config.json, hub id, or one of {', '.join(SHIPPED_MODELS)}."
    yield (
        "the run",
        [
            replace(options["model_name_or_path"], text=models, value_name="MODEL"),
            *(option for option in read if option.name not in placed),
            *(options[name] for name in ("bf16", "weights_dtype", "optim", "optim_args")),
        ],
    )
    for name, members in of_methods.items():
        if shown := [option for option in members if option in read]:
            yield f"--method {name}", shown
    yield "layout", [own[name] for name in _LAYOUT]
    asked = {option.name: option for option in own.values() if option.owner is PlanArguments}
    asked["gpu"] = replace(asked["gpu"], choices=tuple(known_cards()))
    asked["sweep"] = replace(asked["sweep"], choices=tuple(SWEPT_FIELDS))
    yield "what to find out", [*asked.values()]


def _names(option: Option) -> set[str]:
    return {option.name, *option.aliases}
