"""Find a model's configuration by its name, without reading weights and without running code of the model's own."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import huggingface_hub
import torch
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    AutoConfig,
    PreTrainedConfig,
)

from slivertune.core.suggestions import closest
from slivertune.core.user_path import user_path
from slivertune.deltas.adapter_folder import check_no_adapter
from slivertune.planning.request import TaskName
from slivertune.planning.shipped import SHIPPED_MODELS

CONFIG_NAME = "config.json"
_MOST_LAYERS = 100_000
_COUNTS_LAYERS = re.compile(r"(^|_)layers?$")
"""Pattern of keys that count layers. `vocab_size_per_layer_input` does not match, since it is another size."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_PROBE_SECONDS = 10.0
"""Seconds that one request to the hub may take, to learn whether it is reachable. A download would try for 30 s."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFigures:
    """Configuration of a model, with its origin."""

    name: str
    """Name that the user gave."""
    source: str
    """Origin of the figures, for people."""
    name_or_path: str
    """Value for `slivertune train --model_name_or_path`."""
    config: PreTrainedConfig
    """Configuration with the model's sizes."""
    dtype: torch.dtype | None = None
    """Dtype of the weights. None if the configuration names none."""

    def tasks(self) -> tuple[TaskName, ...]:
        """List the tasks for which the model has a head, the task that it was made for first."""
        # A model of images or speech also has a head for text alone, which leaves out the other parts of the model.
        kinds: dict[TaskName, Any] = {
            "image_text": MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
            "speech": MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
            "causal_lm": MODEL_FOR_CAUSAL_LM_MAPPING,
            "classification": MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
        }
        tasks = [task for task, mapping in kinds.items() if type(self.config) in mapping]
        architectures = self.config.architectures or ()
        # An encoder also has a causal head, for decoding with a mask that the encoder was not trained with.
        if any("MaskedLM" in name or "SequenceClassification" in name for name in architectures):
            tasks.reverse()
        return tuple(tasks)


def find_model(model: str) -> ModelFigures:
    """Find a model's configuration.

    Args:
        model: Folder with `config.json`, that file itself, the name of a shipped model, or a hub id. The hub's cache
            is read before the hub is asked.

    Returns:
        Configuration of a model with a head for at least one of the tasks.

    Raises:
        ValueError: If there is no such model, the hub can't be reached, or it is no transformer with a head for a task.
    """
    figures = _find(model)
    if not figures.tasks():
        raise ValueError(
            f"{figures.source} is of type {figures.config.model_type!r}, which has no head for any of "
            f"{', '.join(get_args(TaskName))}. Name a transformer with such a head"
        )
    return figures


def _find(model: str) -> ModelFigures:
    path = user_path(model)
    if path.exists():
        check_no_adapter(path)
        file = path / CONFIG_NAME if path.is_dir() else path
        if not file.is_file():
            raise ValueError(f"the folder {model} has no {CONFIG_NAME}. Name one in which a model was saved")
        config = _read_config(file)
        return _figures_of(config, name=model, source=str(file), name_or_path=str(file.parent))
    for name, shipped in SHIPPED_MODELS.items():
        if model.casefold() in (name, shipped.hub_id.casefold()):
            source = f"the figures of {shipped.hub_id} that come with slivertune"
            config = _make_config(shipped.figures, model)
            dtype = getattr(torch, shipped.dtype)
            return ModelFigures(name=model, source=source, name_or_path=shipped.hub_id, config=config, dtype=dtype)
    config = _read_config(_download_config(model))
    return _figures_of(config, name=model, source=f"{CONFIG_NAME} of {model}", name_or_path=model)


def _figures_of(config: PreTrainedConfig, *, name: str, source: str, name_or_path: str) -> ModelFigures:
    named = config.dtype or config.get_text_config().dtype
    dtype = named if isinstance(named, torch.dtype) else None
    return ModelFigures(name=name, source=source, name_or_path=name_or_path, config=config, dtype=dtype)


def _download_config(model: str) -> Path:
    """Find the configuration of a model on the hub, in the hub's local cache or else by a small download.

    Raises:
        ValueError: If the hub has no such model, refuses access to it, or can't be reached.
    """
    near = closest(model.rpartition("/")[2], SHIPPED_MODELS, cutoff=0.6)
    meant = f"Did you mean {near}? " if near else ""
    ways_out = (
        f"{meant}Name one of {', '.join(SHIPPED_MODELS)}, or a folder with the model's {CONFIG_NAME}, or a hub id"
    )
    if _HUB_ID.fullmatch(model) is None:
        raise ValueError(f"there is no folder {model!r}. {ways_out}")
    cached = huggingface_hub.try_to_load_from_cache(model, CONFIG_NAME)
    if isinstance(cached, str):
        return Path(cached)
    try:
        huggingface_hub.HfApi().model_info(model, timeout=_PROBE_SECONDS)
        return Path(huggingface_hub.hf_hub_download(model, CONFIG_NAME))
    except GatedRepoError as error:
        raise ValueError(
            f"{model} is gated: accept its terms on the hub and log in with `hf auth login`. {ways_out}"
        ) from error
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"there is no folder {model!r}, and the hub shows no model of that name (a private one needs "
            f"`hf auth login`). {ways_out}"
        ) from error
    except EntryNotFoundError as error:
        raise ValueError(f"{model} on the hub has no {CONFIG_NAME}. {ways_out}") from error
    # Every transport raises errors of its own, and all mean the same.
    except Exception as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ValueError(
            f"there is no folder {model!r}, and the hub can't be reached to look for a model of that name ({reason}). "
            f"{ways_out}"
        ) from error


def _read_config(file: Path) -> PreTrainedConfig:
    try:
        figures = json.loads(file.read_text(encoding="utf-8"), object_hook=_as_float)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} can't be read as JSON: {error}. Repair the file, or get it again") from error
    if not isinstance(figures, dict) or not isinstance(figures.get("model_type"), str):
        made_by = figures.get("_class_name") if isinstance(figures, dict) else None
        raise ValueError(
            f"{file} is not a configuration of a transformer: it has no model_type"
            + (f", but is of a {made_by}" if isinstance(made_by, str) else "")
            + f". Name the folder of a transformers model, or one of {', '.join(SHIPPED_MODELS)}"
        )
    return _make_config(figures, str(file))


def _as_float(value: dict[str, Any]) -> Any:
    """Read infinity and NaN as transformers writes them, such as in the time steps of Mamba 2."""
    text = value.get("__float__")
    return float(text) if isinstance(text, str) else value


def _make_config(figures: dict[str, Any], name: str) -> PreTrainedConfig:
    kind = figures["model_type"]
    try:
        kinds = AutoConfig.for_model(kind)
    except (ValueError, KeyError) as error:
        own_code = " (it brings code of its own, which a plan never runs)" if "auto_map" in figures else ""
        raise ValueError(
            f"{name} has model_type={kind!r}, which the installed transformers library does not know{own_code}. Try a "
            "newer version"
        ) from error
    try:
        _check_counts(figures)
        _check_architectures(figures)
        # Not `for_model(**figures)`: only `from_dict` translates the names in older files.
        config: PreTrainedConfig = type(kinds).from_dict(figures)
    # Every model type checks its figures in its own way.
    except Exception as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ValueError(
            f"{name}: the figures of this {kind!r} don't hold together: {reason}. Correct them, or get the file again"
        ) from error
    return config


def _check_architectures(figures: dict[str, Any]) -> None:
    """Refuse `architectures` unless it is a list of class names (transformers accepts any value)."""
    names = figures.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ValueError(f"architectures={names!r} must be a list of class names, so the file is damaged")


def _check_counts(figures: dict[str, Any]) -> None:
    """Refuse numbers of layers for which a configuration would build lists that exceed any memory."""
    for key, value in figures.items():
        if isinstance(value, dict):
            _check_counts(value)
        elif isinstance(value, (int, float)) and _COUNTS_LAYERS.search(str(key)) and value > _MOST_LAYERS:
            raise ValueError(f"{key}={value}, and no model has more than {_MOST_LAYERS:,}, so the file is damaged")
