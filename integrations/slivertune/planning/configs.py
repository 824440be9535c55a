"""From what the user calls a model to its configuration; no weights are read, and no code of a model's own is run."""

import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    PreTrainedConfig,
)

from slivertune.planning.hub_config import download_config, is_hub_id
from slivertune.planning.request import TaskName
from slivertune.planning.shipped import SHIPPED_MODELS, ShippedModel

CONFIG_NAME = "config.json"
_MOST_LAYERS = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFigures:
    """A model's configuration, and where it came from."""

    name: str
    """What the user called it."""
    source: str
    """Where the figures came from, for people."""
    name_or_path: str
    """What `slivertune train --model_name_or_path` takes."""
    config: PreTrainedConfig
    """The sizes."""

    def tasks(self) -> tuple[TaskName, ...]:
        """The tasks for which the model has a head; what it was made for comes first."""
        kinds: dict[TaskName, Any] = {
            "causal_lm": MODEL_FOR_CAUSAL_LM_MAPPING,
            "classification": MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
        }
        tasks = [task for task, mapping in kinds.items() if type(self.config) in mapping]
        architectures = self.config.architectures or ()
        # An encoder has a causal head, too, which is for decoding with a mask that it was not trained with.
        if any("MaskedLM" in name or "SequenceClassification" in name for name in architectures):
            tasks.reverse()
        return tuple(tasks)


def find_model(model: str) -> ModelFigures:
    """Find a model's configuration.

    Args:
        model: A folder with `config.json` or that file itself, the name of a shipped model, or a hub id, which the
            hub's cache is asked for first.

    Returns:
        The configuration, of a model with a causal or a classifier's head.

    Raises:
        ValueError: If there is no such model, the hub can't be reached, or the configuration is none of a transformer.
    """
    figures = _find(model)
    if not figures.tasks():
        raise ValueError(
            f"{figures.source} is of type {figures.config.model_type!r}, which has neither a causal language model's "
            "head nor a classifier's; a plan needs a transformer with one of these"
        )
    return figures


def _find(model: str) -> ModelFigures:
    path = Path(model).expanduser()
    if path.exists():
        file = path / CONFIG_NAME if path.is_dir() else path
        if not file.is_file():
            raise ValueError(f"the folder {model} has no {CONFIG_NAME}; name one that a model was saved in")
        config = _read_config(file)
        return ModelFigures(name=model, source=str(file), name_or_path=str(file.parent), config=config)
    shipped = _find_shipped(model)
    if shipped is not None:
        return ModelFigures(
            name=model,
            source=f"the figures of {shipped.hub_id} that come with slivertune",
            name_or_path=shipped.hub_id,
            config=_make_config(shipped.figures, model),
        )
    if not is_hub_id(model):
        raise ValueError(f"there is no folder {model!r}. {_ways_out(model)}")
    file = download_config(model, ways_out=_ways_out(model))
    return ModelFigures(name=model, source=f"{CONFIG_NAME} of {model}", name_or_path=model, config=_read_config(file))


def _find_shipped(model: str) -> ShippedModel | None:
    for name, shipped in SHIPPED_MODELS.items():
        if model.casefold() in (name, shipped.hub_id.casefold()):
            return shipped
    return None


def _ways_out(model: str) -> str:
    near = difflib.get_close_matches(model.rpartition("/")[2].casefold(), SHIPPED_MODELS, n=1)
    meant = f"Did you mean {near[0]}? " if near else ""
    return f"{meant}Name one of {', '.join(SHIPPED_MODELS)}, or a folder with the model's {CONFIG_NAME}, or a hub id"


def _read_config(file: Path) -> PreTrainedConfig:
    try:
        figures = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} can't be read as JSON: {error}") from error
    if not isinstance(figures, dict) or not isinstance(figures.get("model_type"), str):
        made_by = figures.get("_class_name") if isinstance(figures, dict) else None
        raise ValueError(
            f"{file} is no configuration of a transformer: it has no model_type"
            + (f", but is of a {made_by}" if isinstance(made_by, str) else "")
            + f"; name the folder of a transformers model, or one of {', '.join(SHIPPED_MODELS)}"
        )
    return _make_config(figures, str(file))


def _make_config(figures: dict[str, Any], name: str) -> PreTrainedConfig:
    kind = figures["model_type"]
    try:
        kinds = AutoConfig.for_model(kind)
    except (ValueError, KeyError) as error:
        own_code = " (it brings code of its own, which a plan never runs)" if "auto_map" in figures else ""
        raise ValueError(
            f"{name} has model_type={kind!r}, which is none of the installed transformers library's{own_code}; a newer "
            "version may know it"
        ) from error
    try:
        _check_counts(figures)
        _check_architectures(figures)
        # Not `for_model(**figures)`: older files hold names that from_dict alone translates.
        config: PreTrainedConfig = type(kinds).from_dict(figures)
    # Every model type checks its figures in its own way.
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{name}: the figures of this {kind!r} don't hold together: {reason}") from error
    return config


def _check_architectures(figures: dict[str, Any]) -> None:
    """Refuse what are no names of classes; the library takes anything."""
    names = figures.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ValueError(f"architectures={names!r}, which must be a list of the names of classes; the file is damaged")


def _check_counts(figures: dict[str, Any]) -> None:
    """Refuse numbers of layers that configurations would make lists of which no memory holds."""
    for key, value in figures.items():
        if isinstance(value, dict):
            _check_counts(value)
        elif isinstance(value, (int, float)) and "layer" in key and value > _MOST_LAYERS:
            raise ValueError(f"{key}={value}, and no model has more than {_MOST_LAYERS:,}; the file is damaged")
