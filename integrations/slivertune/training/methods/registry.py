"""Registry of the methods that `slivertune train --method` takes, including those of other packages."""

import importlib.util
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from slivertune.core.missing_library import missing_library
from slivertune.interop.methods import register_trainer_method
from slivertune.parallel.adapters import register_adapters
from slivertune.parallel.checkpoint.sidecar import register_sidecar
from slivertune.planning.methods import check_options_are_read, clash_with_method, register_planned
from slivertune.training.methods.dense import DenseMethod
from slivertune.training.methods.hift import HiFTMethod
from slivertune.training.methods.lora import LoraMethod
from slivertune.training.methods.method import SliverMethod, TrainingMethod
from slivertune.training.methods.sft import SFTMethod
from slivertune.training.options.arguments import ParkedArguments
from slivertune.training.options.methods import METHOD_OPTIONS
from slivertune.training.ranks.processes import asks_for

TRAIN_METHODS: dict[str, type[TrainingMethod]] = {
    each.about.name: each for each in (DenseMethod, HiFTMethod, SFTMethod, LoraMethod)
}
"""Methods by the name that is typed."""


def register_method(method: type[TrainingMethod]) -> type[TrainingMethod]:
    """Register a method of another package. Call this before `slivertune.cli.main`.

    From then on, `--method` takes the method's name, the command line and its help include its options, and a run uses
    the class like a built-in method. `slivertune plan` plans it by `planned`, `slivertune.attach` takes the settings of
    `trainer_method`, and `slivertune.prepare` trains it in the layouts of `adapters`.

    Args:
        method: Class of the method.

    Returns:
        The same class, so that this function works as a decorator.

    Raises:
        ValueError: If another method has the same name, or an option of the same name.

    Example:
        >>> @register_method
        ... class RandomLayerMethod(TrainingMethod):
        ...     about = MethodOptions(name="random_layer", help="a random layer per update")
    """
    name = method.about.name
    if TRAIN_METHODS.get(name, method) is not method:
        raise ValueError(f"another method is registered as {name!r}. Choose another name for {method!r}")
    taken = {option.name: other.name for other in METHOD_OPTIONS.values() for option in other.options()}
    for option in method.about.options():
        if taken.get(option.name, name) != name:
            raise ValueError(f"--{option.name} is an option of --method {taken[option.name]}. Rename {name}'s option")
    TRAIN_METHODS[name], METHOD_OPTIONS[name] = method, method.about
    if issubclass(method, SliverMethod) and method.trainer_method is not None:
        register_trainer_method(*method.trainer_method)
    if method.planned is not None:
        register_planned(name, method.planned)
    register_adapters(name, **method.adapters)
    if method.sidecar is not None:
        register_sidecar(name, method.sidecar)
    return method


def check_method(method: type[TrainingMethod], given: frozenset[str]) -> None:
    """Refuse settings that only another method reads, and a method whose library is missing.

    Args:
        method: Class of the method.
        given: Names of the arguments that the user set.

    Raises:
        ValueError: If a setting would be ignored.
        ImportError: If the method needs a library that is not installed.
    """
    own = {name: [option.name for option in other.options()] for name, other in METHOD_OPTIONS.items()}
    check_options_are_read({method.about.name}, given, own)
    if method.requires is not None:
        _require(method.requires, f"--method {method.about.name}")


def check_method_parks(method: type[TrainingMethod], parked: ParkedArguments, values: Mapping[str, Any]) -> None:
    """Refuse to park weights for methods that train all of them, and in layouts that shard them.

    Args:
        method: Class of the method.
        parked: Form and place of weights that do not train now.
        values: Values by option, without those at their defaults.

    Raises:
        ValueError: If the method or the layout parks none, or a setting would be ignored.
        ImportError: If the codes need a library that is not installed.
    """
    asked = [f"--{name} {value}" for name, value in asdict(parked).items() if value != getattr(ParkedArguments(), name)]
    if not asked:
        return
    if not method.parks:
        others = " or ".join(name for name, each in TRAIN_METHODS.items() if each.parks)
        raise ValueError(
            f"{asked[0]}: --method {method.about.name} trains all weights in each update, and none can be parked. Use "
            f"--method {others}, or leave it out"
        )
    if parked.waiting == "nf4":
        _require("bitsandbytes", "--waiting nf4")
    if method.about.name == "hift":
        return  # whose settings say the rest
    if parked.weights == "device" and (parked.device_bytes != "auto" or parked.resident_bytes not in ("auto", 0)):
        raise ValueError(f"{asked[-1]} is for weights on the host. Set --weights host, or leave it out")
    engine = next((name for name in ("deepspeed", "fsdp") if asks_for(name, values)), None)
    if engine is not None:
        raise ValueError(
            f"{asked[0]} is not available under {engine}, whose ranks hold shards of weights. Use one GPU or DDP, or "
            "leave it out"
        )


def check_method_takes_4bit(method: type[TrainingMethod]) -> None:
    """Refuse 4-bit weights for methods that change every weight.

    Args:
        method: Class of the method.

    Raises:
        ValueError: If the method does not train beside 4-bit weights.
        ImportError: If bitsandbytes is not installed.
    """
    if not method.takes_4bit:
        others = " or ".join(name for name, each in TRAIN_METHODS.items() if each.takes_4bit)
        raise ValueError(
            clash_with_method(method.about.name)
            or f"--load_in_4bit does not go with --method {method.about.name}, which would change 4-bit weights. Use "
            f"--method {others}, which train beside them, or leave out --load_in_4bit"
        )
    _require("bitsandbytes", "--load_in_4bit")


def _require(module: str, setting: str) -> None:
    """Raise an error that says how to install a missing library, before anything is loaded."""
    if importlib.util.find_spec(module) is None:
        raise ImportError(missing_library(setting, module))
