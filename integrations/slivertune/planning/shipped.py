"""The figures of well-known models, so that they can be planned without a network; no weights.

`shipped.json` has for each model what its `config.json` on the hub says about sizes, and where that was read.
tests/planning/test_configs.py builds every one without memory and compares its number of parameters with the published
one.
"""

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class ShippedModel:
    """A model whose figures come with this library."""

    hub_id: str
    """Where its weights are, for the command that trains it; not looked at for a plan."""
    source: str
    """Where its figures can be read."""
    figures: dict[str, Any]
    """Arguments of `transformers.AutoConfig.for_model`."""


def _read() -> dict[str, ShippedModel]:
    text = files("slivertune.planning").joinpath("shipped.json").read_text(encoding="utf-8")
    return {name: ShippedModel(**values) for name, values in json.loads(text).items()}


SHIPPED_MODELS: dict[str, ShippedModel] = _read()
"""By the name that `slivertune plan --model` takes."""
