"""A plugin for axolotl: HiFT, SFT and TokenTune from its YAML.

    plugins:
      - slivertune.interop.axolotl.SlivertunePlugin
    slivertune:
      hift:
        layers_per_group: 4
      tokentune:
        ratio: 0.3

The fields under a name are those of `HiFTConfig`, `SFTConfig` and `TokenTune`; `momentum` beside `sft` is SM3's.
Axolotl and pydantic are imported only when axolotl asks for `SlivertunePlugin` and `SlivertuneArgs`.
"""

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from slivertune.core.suggestions import did_you_mean
from slivertune.hift import HiFTConfig
from slivertune.interop.plugin_settings import make_setting
from slivertune.interop.trainer import Setting, attach
from slivertune.sft import SFTConfig
from slivertune.tokentune import TokenTune

if TYPE_CHECKING:
    from transformers import Trainer

_SECTION = "slivertune"
_MOMENTUM = "momentum"
_SETTINGS: Mapping[str, type[Any]] = {"hift": HiFTConfig, "sft": SFTConfig, "tokentune": TokenTune}


def read_section(section: Any) -> tuple[list[Setting], float]:
    """Read the section `slivertune` of axolotl's YAML.

    Args:
        section: A mapping of `hift`, `sft`, `tokentune` to their fields, and `momentum`.

    Returns:
        The settings, and SM3's momentum, in the form for `slivertune.attach`.

    Raises:
        ValueError: If a name in it is unknown, or none of the three is named.
    """
    if not isinstance(section, Mapping) or not set(section) & set(_SETTINGS):
        raise ValueError(
            f"axolotl's config has {_SECTION}: {section!r}. Name hift, sft or tokentune under it, with its fields as "
            "a mapping, or remove the plugin"
        )
    for name in section:
        if name not in _SETTINGS and name != _MOMENTUM:
            known = (*_SETTINGS, _MOMENTUM)
            raise ValueError(f"{_SECTION}: {name} is unknown. Use {', '.join(known)}{did_you_mean(str(name), known)}")
    settings = [_setting(name, section[name]) for name in _SETTINGS if name in section]
    return settings, float(section.get(_MOMENTUM) or 0.0)


def _setting(name: str, values: Any) -> Setting:
    kind = _SETTINGS[name]
    if values is not None and not isinstance(values, Mapping):
        raise ValueError(
            f"{_SECTION}: {name}: {values!r} must be a mapping of fields of {kind.__name__}. Write one field per line "
            f"under {name}"
        )
    setting: Setting = make_setting(kind, values or {}, f"{_SECTION}: {name}")
    return setting


def __getattr__(name: str) -> Any:
    if name == "SlivertunePlugin":
        return _plugin_class()
    if name == "SlivertuneArgs":
        return _arguments_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@cache
def _plugin_class() -> type[Any]:
    base: Any = import_module("axolotl.integrations.base").BasePlugin

    class SlivertunePlugin(base):  # type: ignore[misc]
        """Attaches the methods of the section `slivertune` to axolotl's Trainer."""

        def register(self, cfg: Mapping[str, Any]) -> None:
            """Refuse an invalid section before the model is loaded."""
            read_section(cfg.get(_SECTION))

        def get_input_args(self) -> str:
            """Return the import path of the section's schema."""
            return f"{__name__}.SlivertuneArgs"

        def post_trainer_create(self, cfg: Mapping[str, Any], trainer: "Trainer") -> None:
            """Attach the methods to the Trainer."""
            # Not in `create_optimizer`: axolotl 0.19.0 declares that hook and calls no plugin's.
            settings, momentum = read_section(cfg.get(_SECTION))
            attach(trainer, *settings, momentum=momentum)

    return SlivertunePlugin


@cache
def _arguments_class() -> type[Any]:
    made: type[Any] = import_module("pydantic").create_model(
        "SlivertuneArgs", **{_SECTION: (dict[str, dict[str, Any] | float | None] | None, None)}
    )
    return made
