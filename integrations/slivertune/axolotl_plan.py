"""`axolotl slivertune-plan`: plan the run of axolotl's YAML before it trains.

    axolotl slivertune-plan run.yml --gpu 4090

The words after the file are options of `slivertune plan`, and replace the file's values. axolotl finds the command by
the entry point `axolotl.cli_commands`. Click is imported only when axolotl asks for `plan`.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import cache
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from slivertune.cli import main
from slivertune.core.terminal_text import print_line
from slivertune.core.typed_command import typed_command
from slivertune.hift import HiFTConfig
from slivertune.interop.axolotl import read_section
from slivertune.planning.arguments import DECIDED_BY_COMPARISON
from slivertune.planning.request import REQUEST_OPTIONS
from slivertune.sft import SFTConfig
from slivertune.sft.config import NAMES_OF_OPTIONS
from slivertune.tokentune import TokenTune
from slivertune.training.command_line.plan_words import NAMES_OF_FIELDS, plan_options
from slivertune.training.options.table import option_named, train_options

_SAME = {
    "base_model": "model_name_or_path",
    "sequence_len": "max_length",
    "micro_batch_size": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "optimizer": "optim",
}
"""Options by axolotl's name."""
_SIZES = {"micro_batch_size": 1, "sequence_len": 512}
"""Values that axolotl takes for settings that are left out."""
_LORA = {
    "lora_r": "lora_rank",
    "lora_dropout": "lora_dropout",
    "lora_target_modules": "lora_target_modules",
    "load_in_4bit": "load_in_4bit",
}
_METHODS: Mapping[type, str] = {HiFTConfig: "hift", SFTConfig: "sft"}
_WITHOUT_PLAN = ("rl", "reward_model", "process_reward_model", "load_in_8bit", "unfrozen_parameters", "fp16", "float16")
"""Settings of axolotl that change a run's memory in a way that no plan knows."""
_LAYOUTS = ("deepspeed", "fsdp", "fsdp_config")
_ALIKE = {"optimizer": "optim", "bf16": "precision", "weights_dtype": "precision"}
"""Options that set the same thing as another one."""


def plan_words(config: Mapping[str, Any], more: Sequence[str] = ()) -> list[str]:
    """Translate axolotl's config into the words of `slivertune plan`.

    Args:
        config: axolotl's YAML.
        more: Options of `slivertune plan`, which replace the values of the config.

    Returns:
        The words after `slivertune plan`.

    Raises:
        ValueError: If the config has a setting that changes memory but has no plan; names the option to type instead.
    """
    typed = _typed(more)
    words = list[str]()
    for name, value in _options(config, typed):
        if name in typed or value is None or value is False:
            continue
        values = value if isinstance(value, (list, tuple)) else () if value is True else (value,)
        words += [f"--{name}", *map(str, values)]
    if "chunked_cross_entropy" not in typed:  # axolotl's loss stores all logits
        words += ["--chunked_cross_entropy", "false"]
    return [*words, *more]


def _typed(more: Sequence[str]) -> dict[str, str]:
    """Return the options that were typed, by the names that this module writes, with their first words."""
    options = {**train_options(), **plan_options()}
    option_of = {field: name for name, field in NAMES_OF_FIELDS.items() if name in options}
    typed = dict[str, str]()
    for word, following in pairwise([*more, "--"]):
        if not word.startswith("--"):
            continue
        name, _, value = word[2:].partition("=")
        value = value or ("" if following.startswith("--") else following)
        name = name.replace("-", "_")
        option = option_named(name, options) or option_named(name.removeprefix("no_"), options)
        name = name if option is None else option.name
        typed[_ALIKE.get(name, name)] = value
        fields = set[str]()
        if name in ("sweep", "max"):  # the field that is swept over, or made as large as fits
            fields = {value.partition("=")[0]}
        if name == "compare":
            fields = {*DECIDED_BY_COMPARISON}
        typed.update({option_of.get(field, field): "" for field in fields})
    return typed


def _options(config: Mapping[str, Any], typed: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """Yield the options that the config stands for, with None for those that it leaves out."""
    settings, momentum = read_section(config.get("slivertune"))
    adapter = config.get("adapter")
    method = next((_METHODS[type(each)] for each in settings if type(each) in _METHODS), "")
    _check(config, method, adapter, typed)
    if typed.get("method") not in (None, "", method):  # another method, which does not read these settings
        settings, momentum = [each for each in settings if isinstance(each, TokenTune)], 0.0
    config = {**config, **{theirs: config.get(theirs) or size for theirs, size in _SIZES.items()}}
    for theirs, name in _SAME.items():
        yield name, config.get(theirs)
    if not config.get("gradient_accumulation_steps") and config.get("batch_size"):
        yield "gradient_accumulation_steps", config["batch_size"] // config["micro_batch_size"]
    yield "method", method or ("lora" if adapter else "dense")
    yield "precision", _precision(config, settings)
    yield "gradient_checkpointing", config.get("gradient_checkpointing")
    is_eager = config.get("eager_attention") or config.get("attn_implementation") == "eager"
    yield "attn_implementation", "eager" if is_eager else None
    if adapter and typed.get("method") in (None, "", "lora"):
        for theirs, name in _LORA.items():
            yield name, config.get(theirs)
    for setting in settings:
        if isinstance(setting, TokenTune):
            yield "token_ratio", setting.ratio or (setting.num_tokens or 0) / config["sequence_len"]
        else:
            yield from _own_options(setting)
    yield "sft_momentum", momentum or None


def _own_options(setting: HiFTConfig | SFTConfig) -> Iterator[tuple[str, Any]]:
    """Yield the options for the fields that are not at their defaults and on which a plan depends."""
    for item in fields(setting):
        name = NAMES_OF_OPTIONS.get(item.name, item.name)
        value = getattr(setting, item.name)
        default = None if item.default is MISSING else item.default
        if name not in REQUEST_OPTIONS or value in (default, "auto"):
            continue
        if item.name == "layers":
            value = [parts if isinstance(parts, str) else "+".join(parts) for parts in value]
        yield name, value


def _precision(config: Mapping[str, Any], settings: Sequence[Any]) -> str:
    if not (config.get("bf16") or config.get("bfloat16")):
        return "fp32"
    has_masters = any(isinstance(each, HiFTConfig) and each.master == "fp32" for each in settings)
    return "mixed_hi" if has_masters else "bf16"


def _check(config: Mapping[str, Any], method: str, adapter: Any, typed: Mapping[str, str]) -> None:
    """Refuse settings that change a run's memory but have no plan."""
    for name in _WITHOUT_PLAN:
        if config.get(name):
            raise ValueError(f"{name}: {config[name]} has no plan. Take it out, or plan by slivertune plan --help")
    if adapter and method:
        raise ValueError(f"adapter: {adapter} with {method} has no plan. Plan one of the two")
    if adapter not in (None, "lora", "qlora"):
        raise ValueError(f"adapter: {adapter} has no plan, only lora and qlora have. Plan by slivertune plan --help")
    for name in _LAYOUTS:
        if config.get(name) and "layout" not in typed:
            raise ValueError(
                f"{name}: {config[name]} distributes the run. Say how after the file: --layout zero2 --num_gpus 2"
            )
    for name, known in (("gradient_checkpointing", (None, True, False)), ("activation_offloading", (None, False))):
        if config.get(name) not in known and "gradient_checkpointing" not in typed:
            raise ValueError(
                f"{name}: {config[name]} has no plan. Say after the file what is nearest to it: "
                "--gradient_checkpointing, with --offload_activations if block inputs go to host memory"
            )
    section = config["slivertune"]
    for place, name, value in (("sft", "form", "layer"), ("tokentune", "checkpoint_mlp", True)):
        if (section.get(place) or {}).get(name) == value:
            raise ValueError(f"slivertune: {place}: {name}: {value} has no plan. Leave it out for the plan")


def __getattr__(name: str) -> Any:
    if name == "plan":
        return _command()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@cache
def _command() -> Any:
    click: Any = import_module("click")

    def plan(config: str, options: tuple[str, ...]) -> None:
        try:
            written = yaml.safe_load(Path(config).read_text(encoding="utf-8"))
            if not isinstance(written, Mapping):
                raise ValueError("this is no mapping of settings. Name the YAML of a training run")
            words = plan_words(written, options)
        except (ValueError, yaml.YAMLError) as error:
            raise click.UsageError(f"{config}: {error}") from error
        print_line("same as", sys.stderr, command=typed_command("plan", *words))
        sys.exit(main(["plan", *words]))

    return click.Command(
        "slivertune-plan",
        callback=plan,
        params=[
            click.Argument(["config"], type=click.Path(exists=True, dir_okay=False)),
            click.Argument(["options"], nargs=-1, type=click.UNPROCESSED),
        ],
        context_settings={"ignore_unknown_options": True},
        help="Plan memory and time of a run with slivertune's plugin.\n\nCONFIG is axolotl's YAML. OPTIONS are those "
        "of `slivertune plan`, such as --gpu 4090 or --fit 24GiB.",
    )
