"""Run files and options of `slivertune train`, as `slivertune plan` takes them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slivertune.planning.arguments import argument_fields
from slivertune.training.methods.method import TrainingMethod
from slivertune.training.methods.registry import TRAIN_METHODS
from slivertune.training.options.arguments import enum_value
from slivertune.training.options.methods import DEFAULT_METHOD
from slivertune.training.options.parser import given_values
from slivertune.training.options.table import option_named, train_options

_LAYOUTS = ("deepspeed", "fsdp", "fsdp_config")
_WITHOUT_PLAN = (
    *("fp16", "torch_compile", "use_liger_kernel", "neftune_noise_alpha", "label_smoothing_factor"),
    *("auto_find_batch_size", "full_determinism"),
)
"""Options of the Trainer that change a run's memory and that a plan does not model."""
_SETTLED_IN_TRAINING = ("prefetch_bytes", "resident_bytes")
"""Options whose value `auto` fills memory that is left free, which no plan counts."""


def plan_words(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Translate a command line of `slivertune plan` that names a run file or options of `slivertune train` alone.

    These options are checked as `slivertune train` checks them. Typed options win over those of the file.

    Args:
        argv: Words after `slivertune plan`: an optional run file, then options.

    Returns:
        The words without the file and without options that a plan does not read, and the names of these options.

    Raises:
        ValueError: If an option of the file is unknown, a value is refused, or a setting has no plan.
    """
    dest_of = _plans_options()
    file = argv[:1] if argv and not argv[0].startswith("-") else []
    typed = [(_name_of(words[0]), words) for words in _split(argv[len(file) :])]
    trains, options = [], train_options()
    for name, words in typed:
        if name not in dest_of and option_named(name, options) is not None:
            trains += words
    values = {**(given_values(file) if file else {}), **given_values(trains)}
    values |= {name: words[-1].partition("=")[2] or words[-1] for name, words in typed if name == "method"}
    typed_dests = {dest_of[name] for name, _ in typed if name in dest_of}
    _check(values, typed_dests)
    words, unread = list[str](), list[str]()
    for name, value in _with_preset(values).items():
        dest = dest_of.get(name)
        if dest is None or (value == "auto" and name in _SETTLED_IN_TRAINING):
            unread.append(name)
        elif dest not in typed_dests and value is not None:
            words += _typed(name, value)
    return [*words, *(word for name, each in typed if name in dest_of or name not in options for word in each)], unread


def _plans_options() -> dict[str, str]:
    """Return the field that each option of a plan sets, by its spellings without hyphens."""
    found = {
        spelling.removeprefix("--"): item.name
        for item, _ in argument_fields()
        for spelling in (item.metadata["names"] or (f"--{item.name}",))
    }
    return found | {f"no_{name}": dest for name, dest in found.items()} | {"help": "help", "h": "help"}


def _split(words: Sequence[str]) -> Iterator[list[str]]:
    """Split a command line into options, each with its values."""
    option = list[str]()
    for word in words:
        if word.startswith("--") and option:
            yield option
            option = []
        option.append(word)
    if option:
        yield option


def _name_of(word: str) -> str:
    return word.partition("=")[0].strip("-").replace("-", "_")


def _with_preset(values: Mapping[str, Any]) -> dict[str, Any]:
    method = TRAIN_METHODS.get(values.get("method", DEFAULT_METHOD.name), TrainingMethod)
    return {**values, **{name: each for name, each in method.preset_values(values).items() if name not in values}}


def _check(values: Mapping[str, Any], typed: set[str]) -> None:
    """Refuse settings that change a run's memory and have no plan."""
    method = TRAIN_METHODS.get(values.get("method", DEFAULT_METHOD.name), TrainingMethod)
    for name in (*_WITHOUT_PLAN, *method.not_planned):
        if values.get(name):
            raise ValueError(f"{name} {values[name]} has no plan, and changes the memory of a run. Leave it out here")
    for name in _LAYOUTS:
        if values.get(name) and "layout" not in typed:
            raise ValueError(
                f"{name} {values[name]} distributes the run. Say how, for example by --layout zero2 --num_gpus 2"
            )
    if values.get("keep_activations") == "auto" and "keep_activations" not in typed:
        raise ValueError("keep_activations auto fills the memory that the device has left. Give a number for the plan")


def _typed(name: str, value: Any) -> list[str]:
    if isinstance(value, list):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}={str(value).lower() if isinstance(value, bool) else enum_value(value)}"]
