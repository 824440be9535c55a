"""Folder of a LoRA adapter that PEFT saved: its configuration, and whether it can be merged."""

import importlib.util
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from slivertune.core.missing_library import missing_library
from slivertune.core.typed_command import typed_command
from slivertune.core.user_path import user_path

ADAPTER_CONFIG = "adapter_config.json"
TRAINED_CONFIG = "trained_model_config.json"
"""Name of the trained model's configuration, beside the adapter.

Named `config.json`, it would make transformers take the folder for a whole model.
"""
MODEL_CONFIG = "config.json"
_ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_PLAIN_INITS = (True, False, "gaussian", "eva", "orthogonal", "mica")
"""Values of `init_lora_weights` that leave the base unchanged. Others subtract the first adapter, or quantise."""
_NO_SUM = (
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "megatron_config",
    "monteclora_config",
    "use_bdlora",
    "use_qalora",
)
"""Settings with which a model is not the base plus a delta of its weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """A folder that PEFT's `save_pretrained` wrote."""

    folder: Path
    config: Mapping[str, Any]
    """Configuration of the adapter."""
    model_config: Mapping[str, Any] | None
    """Configuration of the model that the adapter was trained in. None if it was not saved."""

    @property
    def base_name(self) -> str | None:
        """Folder or hub id of the base, from the adapter's configuration."""
        return self.config.get("base_model_name_or_path") or None

    @property
    def was_quantized(self) -> bool:
        """Whether the base was quantised in training, as far as this was saved."""
        return bool((self.model_config or {}).get("quantization_config"))


def is_adapter(folder: Path) -> bool:
    """Return whether a folder holds a PEFT adapter."""
    return (folder / ADAPTER_CONFIG).is_file()


def check_no_adapter(model: str | Path) -> None:
    """Refuse an adapter in place of a model.

    Args:
        model: A folder; a hub id is accepted.

    Raises:
        ValueError: If the folder holds an adapter.
    """
    if is_adapter(user_path(model)):
        command = shlex.join(typed_command("merge", str(model), "--output_dir", "FOLDER"))
        raise ValueError(
            f"{model} holds an adapter and not a model. Merge it into its base first ({command}), and name that folder"
        )


def open_adapter(folder: Path) -> Adapter:
    """Read an adapter's configuration, and check that it can be merged.

    Args:
        folder: Folder of the adapter.

    Raises:
        ImportError: If PEFT is not installed.
        ValueError: If it is damaged, no LoRA, or a LoRA that is no sum of the base and a delta.
    """
    if importlib.util.find_spec("peft") is None:
        raise ImportError(missing_library(f"{folder} is an adapter, and merging it", "peft"))
    config = read_json(folder / ADAPTER_CONFIG)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ValueError(f"{folder} is an adapter of the type {kind}, and only LoRA's can be merged. Merge it by PEFT")
    _check_is_sum(folder, config)
    if not any((folder / name).is_file() for name in _ADAPTER_WEIGHTS):
        raise ValueError(f"{folder} has no {_ADAPTER_WEIGHTS[0]}: the adapter is not whole. Get it again")
    # Other tools, and earlier versions, save the model's configuration as `config.json`.
    paths = [path for name in (TRAINED_CONFIG, MODEL_CONFIG) if (path := folder / name).is_file()]
    return Adapter(folder=folder, config=config, model_config=read_json(paths[0]) if paths else None)


def _check_is_sum(folder: Path, config: Mapping[str, Any]) -> None:
    from peft import LoraConfig

    init = config.get("init_lora_weights", True)
    if init not in _PLAIN_INITS:
        raise ValueError(
            f"{folder} has init_lora_weights={init!r}, which changed the base before the training, and the adapter "
            "does not hold the changed base. Save it as a plain LoRA, with PEFT's "
            "save_pretrained(folder, path_initial_model_for_weight_conversion=...), and merge that"
        )
    known = {each.name for each in fields(LoraConfig)}
    if unknown := [name for name in config if name.startswith("use_") and config[name] and name not in known]:
        raise ValueError(
            f"{folder} has {unknown[0]}={config[unknown[0]]!r}, which this PEFT does not know and would ignore. "
            "Merge by the PEFT that it was trained with"
        )
    if found := [name for name in _NO_SUM if config.get(name)]:
        raise ValueError(
            f"{folder} has {found[0]}, so the model is not its base plus a delta of the weights. Use it by PEFT, "
            "beside the base"
        )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Args:
        path: The file.

    Raises:
        ValueError: If the file can't be read, or holds no JSON object.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} can't be read: {error}. Make it readable, or get it again") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is no JSON object: it is damaged. Get the adapter again")
    return found
