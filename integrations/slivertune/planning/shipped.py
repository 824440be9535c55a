"""Figures of well-known models, so that they can be planned without a network and without weights.

`shipped.json` has the sizes from each model's `config.json` on the hub, and the source from which they were read.
tests/planning/test_configs.py builds each model without memory and compares its number of parameters with the published
number.
"""

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class ShippedModel:
    """Model whose figures come with this library."""

    hub_id: str
    """Repository of its weights on the hub, for the command that trains it. A plan does not read it."""
    source: str
    """Source of its figures."""
    dtype: str
    """Name of the torch dtype of its weights on the hub."""
    figures: dict[str, Any]
    """Arguments of `transformers.AutoConfig.for_model`."""


def _read() -> dict[str, ShippedModel]:
    text = files("slivertune.planning").joinpath("shipped.json").read_text(encoding="utf-8")
    return {name: ShippedModel(**values) for name, values in json.loads(text).items()}


SHIPPED_MODELS: dict[str, ShippedModel] = _read()
"""Shipped models, by the name that `slivertune plan --model` takes."""
