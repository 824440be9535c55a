"""A LoRA adapter of PEFT merged into its base: a plain checkpoint, which transformers load without PEFT.

The mathematics is PEFT's `merge_and_unload`. The whole base is loaded on the CPU, as it is stored.
"""

import importlib.util
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slivertune.core.atomic import atomic_new_folder, check_absent

ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_MODEL_CONFIG = "config.json"
_AUTO_CLASSES = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "FEATURE_EXTRACTION": "AutoModel",
}
"""By PEFT's `task_type`."""
_HEADS = ("score", "classifier")
_NUM_NAMED = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """A folder that PEFT's `save_pretrained` wrote."""

    folder: Path
    config: Mapping[str, Any]
    """Of the adapter."""
    model_config: Mapping[str, Any] | None
    """Of the model that it was trained in, where that was saved with it."""

    @property
    def base_name(self) -> str | None:
        """Folder or hub id of the base, by the adapter's own word."""
        return self.config.get("base_model_name_or_path") or None

    @property
    def was_quantized(self) -> bool:
        """Whether the base was quantised while it was trained, as far as that was saved."""
        return bool((self.model_config or {}).get("quantization_config"))


@dataclass(frozen=True, kw_only=True, slots=True)
class MergedAdapter:
    """What a merge did."""

    num_adapted: int
    """Weights' matrices that a LoRA was added to."""
    replaced: tuple[str, ...]
    """Modules that were trained whole and took the place of the base's, such as a classifier's head."""
    has_tokenizer: bool


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter of PEFT."""
    return (folder / ADAPTER_CONFIG).is_file()


def open_adapter(folder: Path) -> Adapter:
    """Read what an adapter says of itself.

    Args:
        folder: The adapter.

    Raises:
        ImportError: If PEFT is not installed.
        ValueError: If it is damaged, or no LoRA.
    """
    if importlib.util.find_spec("peft") is None:
        raise ImportError(f"{folder} is an adapter, and merging it needs peft; pip install 'slivertune[peft]'")
    config = _read_json(folder / ADAPTER_CONFIG)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ValueError(f"{folder} is an adapter of the type {kind}; only LoRA's are merged here")
    if not any((folder / name).is_file() for name in _ADAPTER_WEIGHTS):
        raise ValueError(f"{folder} has no {_ADAPTER_WEIGHTS[0]}; the adapter is not whole")
    path = folder / _MODEL_CONFIG
    return Adapter(folder=folder, config=config, model_config=_read_json(path) if path.is_file() else None)


def merge_adapter(adapter: Adapter, base: Path, output: Path) -> MergedAdapter:
    """Write the base with an adapter merged into it. The folder appears whole or not at all.

    Args:
        adapter: From `open_adapter`.
        base: Folder of the base, not quantised; never changed. An adapter that was trained over 4-bit weights is added
            to what these were before, so that results are near, not the same.
        output: The folder to write; must not exist.

    Returns:
        What was merged.

    Raises:
        FileExistsError: If `output` exists.
        ValueError: If the base is quantised, an adapter itself, or not the base of this adapter. Nothing is written
            then.
    """
    check_absent(output)
    _check_base(base)
    model = _load(adapter, base)
    num_adapted, replaced = _count(model)
    try:
        merged: Any = model.merge_and_unload(safe_merge=True)
    except ValueError as error:
        raise ValueError(f"{adapter.folder} can't be merged into {base}: {error}") from error
    with atomic_new_folder(output, needs_bytes=sum(each.nbytes for each in merged.parameters())) as new:
        merged.save_pretrained(new)
        has_tokenizer = _save_tokenizer((adapter.folder, base), new)
    return MergedAdapter(num_adapted=num_adapted, replaced=replaced, has_tokenizer=has_tokenizer)


def _check_base(base: Path) -> None:
    if is_adapter(base):
        raise ValueError(f"{base} is an adapter itself; name the base by --model_name_or_path")
    if not (base / _MODEL_CONFIG).is_file():
        raise ValueError(f"{base} has no {_MODEL_CONFIG}, so it is no checkpoint; name the base's folder")
    if _read_json(base / _MODEL_CONFIG).get("quantization_config"):
        raise ValueError(
            f"{base} is quantised, and its weights have no room for the sum; name the 16-bit checkpoint that it was "
            "made of by --model_name_or_path"
        )


def _load(adapter: Adapter, base: Path) -> Any:
    """The base with the adapter beside its weights, all of which found its place."""
    from peft import PeftModel, get_peft_model_state_dict, load_peft_weights

    weights = load_peft_weights(str(adapter.folder), device="cpu")
    try:
        model = _model_class(adapter, base).from_pretrained(base, dtype="auto", **_head_options(adapter, weights))
    except (OSError, ValueError) as error:
        raise ValueError(f"{base} can't be loaded: {' '.join(str(error).split())}") from error
    try:
        with warnings.catch_warnings():
            # What it warns of is an error below.
            warnings.filterwarnings("ignore", "Found missing adapter keys", UserWarning)
            # PEFT 0.21 asks by the name that transformers 5.23 retires.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            adapted: Any = PeftModel.from_pretrained(model, str(adapter.folder))
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{base} is not the base of {adapter.folder}: {' '.join(str(error).split())}") from error
    # PEFT only warns of places that found no weight, and says nothing of weights that found no place.
    lost = sorted(weights.keys() ^ get_peft_model_state_dict(adapted).keys())
    if lost:
        more = f" and {len(lost) - _NUM_NAMED} more" if len(lost) > _NUM_NAMED else ""
        raise ValueError(
            f"{base} is not the base of {adapter.folder}: {', '.join(lost[:_NUM_NAMED])}{more} are in one of the two "
            "alone"
        )
    return adapted


def _model_class(adapter: Adapter, base: Path) -> Any:
    import transformers

    task = adapter.config.get("task_type")
    # Without a task, as for masked language models, PEFT writes down the class.
    mapping = adapter.config.get("auto_mapping") or {}
    architectures = _read_json(base / _MODEL_CONFIG).get("architectures") or [None]
    name = _AUTO_CLASSES.get(str(task)) or mapping.get("base_model_class") or architectures[0]
    found = getattr(transformers, str(name), None)
    if found is None:
        raise ValueError(f"{adapter.folder} does not say which class of transformers its base is of (task_type={task})")
    return found


def _head_options(adapter: Adapter, weights: Mapping[str, Any]) -> dict[str, Any]:
    """What a new head needs that the base's configuration does not say: its classes, and the id of padding."""
    if adapter.config.get("task_type") not in ("SEQ_CLS", "TOKEN_CLS"):
        return {}
    if adapter.model_config is not None:
        names = ("id2label", "label2id", "pad_token_id")
        return {name: adapter.model_config[name] for name in names if adapter.model_config.get(name) is not None}
    heads = [each for name, each in weights.items() if set(_HEADS).intersection(name.split(".")) and each.ndim == 2]
    # A head may have several layers, of which the last gives the classes.
    return {"num_labels": min(int(each.shape[0]) for each in heads)} if heads else {}


def _count(model: Any) -> tuple[int, tuple[str, ...]]:
    from peft.tuners.lora import LoraLayer
    from peft.utils import ModulesToSaveWrapper

    adapted = sum(isinstance(each, LoraLayer) for each in model.modules())
    whole = (name for name, each in model.named_modules() if isinstance(each, ModulesToSaveWrapper))
    return adapted, tuple(name.removeprefix("base_model.model.") for name in whole)


def _save_tokenizer(folders: tuple[Path, ...], output: Path) -> bool:
    """Save the tokenizer of the first folder that has one."""
    from transformers import AutoTokenizer

    for folder in folders:
        if any(folder.glob("tokenizer*")) or any(folder.glob("vocab*")):
            AutoTokenizer.from_pretrained(folder).save_pretrained(output)
            return True
    return False


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} can't be read: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is no JSON object; it is damaged")
    return found
