"""Loading of a LoRA adapter with its base in fp32. Adapters that PEFT would load wrongly are refused."""

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slivertune.deltas.adapter_folder import MODEL_CONFIG, Adapter, read_json
from slivertune.deltas.beside_weights import tokenizer_files
from slivertune.deltas.hashes import hash_tensor
from slivertune.deltas.names import NameIndex
from slivertune.deltas.plain_checkpoint import PlainCheckpoint, StoredTensor

_AUTO_CLASSES = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "FEATURE_EXTRACTION": "AutoModel",
}
"""Class of transformers for each `task_type` of PEFT."""
_HEADS = ("score", "classifier")
_BUFFERS = (".inv_freq", ".position_ids", ".masked_bias", "attn.bias", "attention.bias", "rotary_emb.freqs")
"""Ends of the names of tensors that old checkpoints hold beside the weights, and models compute."""
_NUM_NAMED = 3
_WRAPPERS = ("base_layer", "original_module", "modules_to_save", "token_adapter")
ADAPTER_PREFIX = "base_model.model."
"""Prefix of the names in an adapter's file."""
_RESIZED = (
    "Its vocabulary was resized for the training, and the adapter does not hold all rows. Resize the base alike "
    "(model.resize_token_embeddings), save it, and name it by --model_name_or_path"
)
_PEFT_WARNINGS = (
    # Each is an error here, or a line of our own output.
    "Found missing adapter keys",
    "Some weights of .* were not initialized from the model checkpoint",
    "Model with `tie_word_embeddings=True`",
    "Input and output embeddings are no longer tied",
    "Model has `tie_word_embeddings=True`",
    # PEFT 0.21 uses a name that transformers 5.23 deprecates.
    "`is_gradient_checkpointing` is deprecated",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedBase:
    """Tensors of a base and of an adapter, without the model that was loaded."""

    weights: dict[str, torch.Tensor]
    """Adapter's tensors, by PEFT's names."""
    names: frozenset[str]
    """Names of the model's tensors."""
    missing: frozenset[str]
    """Names of tensors that are not in the base's files."""
    random: tuple[str, ...]
    """Names of weights that are neither in the base's files nor in the adapter."""
    unread: tuple[str, ...]
    """Names of tensors in the base's files that the model has no place for."""
    stored: dict[str, StoredTensor]
    """Tensors in the base's files that the model holds unchanged, by each of its names. Others have another layout."""
    tied: list[list[str]]
    """Names of each weight that has several."""
    model_class: Any
    """Class of the model."""

    @property
    def in_another_layout(self) -> frozenset[str]:
        """Names of tensors that the base's files store in another layout, such as each expert by itself."""
        return self.names - self.stored.keys() - self.missing


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptedModel:
    """A base in fp32 with an adapter attached."""

    model: Any
    """Model of PEFT."""
    vocabulary: int | None
    """Number of rows that the embeddings were resized to, as for the training. None if they were not."""


def model_class(adapter: Adapter, base: Path, weights: Iterable[str]) -> Any:
    """Find the class of transformers that the base was trained as.

    Args:
        adapter: The adapter.
        base: Folder of the base.
        weights: Names of the adapter's tensors. They decide if the task, PEFT's record and the base differ.

    Raises:
        ValueError: If none of them names a class.
    """
    import transformers

    task = adapter.config.get("task_type")
    # Without a task, as for masked language models, PEFT records the class.
    mapping = adapter.config.get("auto_mapping") or {}
    architectures = read_json(base / MODEL_CONFIG).get("architectures") or [None]
    names = dict.fromkeys((_AUTO_CLASSES.get(str(task)), mapping.get("base_model_class"), architectures[0]))
    classes = [found for name in names if (found := getattr(transformers, str(name), None)) is not None]
    if not classes:
        raise ValueError(
            f"neither {adapter.folder} (task_type={task}) nor {base} names the base's class in transformers. Add it "
            f"to {base / MODEL_CONFIG}, as architectures"
        )
    named = map(base_name, weights)
    paths = {name.split(".lora_")[0] if ".lora_" in name else name.rpartition(".")[0] for name in named}
    fitting = (each for each in classes if paths <= _modules_of(each, base))
    return classes[0] if len(classes) == 1 else next(fitting, classes[0])


def _modules_of(made_by: Any, base: Path) -> set[str]:
    """Return the paths of all modules of a class's model. There are none if the class has no such model."""
    from transformers import AutoConfig

    from slivertune.core.empty_model import make_empty

    try:
        model = make_empty(made_by, AutoConfig.from_pretrained(base), torch.float32)
    except (AttributeError, OSError, TypeError, ValueError):
        return set()
    return {path for path, _ in model.named_modules()}


def load_base(adapter: Adapter, base: PlainCheckpoint) -> tuple[Any, LoadedBase]:
    """Load the base in fp32, which represents 16-bit values exactly, and the adapter's tensors.

    Args:
        adapter: The adapter.
        base: The base's files.

    Returns:
        The model, and its tensors.

    Raises:
        ValueError: If the base can't be loaded.
    """
    from peft import load_peft_weights

    weights: dict[str, torch.Tensor] = load_peft_weights(str(adapter.folder), device="cpu")
    model, report = load_model(adapter, base.folder, weights, torch.float32)
    held = NameIndex(map(base_name, weights))
    return model.eval(), LoadedBase(
        weights=weights,
        names=frozenset(model.state_dict()),
        missing=frozenset(report["missing_keys"]),
        random=tuple(sorted(name for name in report["missing_keys"] if held.find(name) is None)),
        unread=tuple(sorted({*report["unexpected_keys"], *_ignored(model, base)})),
        stored=_same_values(model, base),
        tied=_tied_names(model),
        model_class=type(model),
    )


def _ignored(model: Any, base: PlainCheckpoint) -> list[str]:
    """List the weights in files that the model's class ignores without a report, such as another tower's."""
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    held = NameIndex(model.state_dict())
    return [
        name
        for name in base.tensors
        if any(re.search(pattern, name) for pattern in patterns)
        and not name.endswith(_BUFFERS)
        and held.find(name) is None
    ]


def load_model(
    adapter: Adapter, base: Path, weights: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> tuple[Any, dict[str, Any]]:
    """Load the base as the class that the adapter was trained with.

    Args:
        adapter: The adapter.
        base: Folder of the base.
        weights: The adapter's tensors, for the size of its head.
        dtype: Dtype to load in.

    Returns:
        The model, and the report of transformers on missing and unexpected tensors.

    Raises:
        ValueError: If the base can't be loaded.
    """
    try:
        options = _head_options(adapter, weights)
        loaded: tuple[Any, dict[str, Any]] = model_class(adapter, base, weights).from_pretrained(
            base, dtype=dtype, output_loading_info=True, **options
        )
    except (OSError, ValueError) as error:
        said = " ".join(str(error).split())
        if "trust_remote_code" in said:
            said = "it brings code of its own, which is not run here. Merge with PEFT's merge_and_unload"
        raise ValueError(f"{base} can't be loaded: {said}") from error
    return loaded


def _same_values(model: nn.Module, base: PlainCheckpoint) -> dict[str, StoredTensor]:
    """Find the tensors in files that a model holds unchanged, by each of its names. Costs one read of the files."""
    index = NameIndex(base.tensors)
    state = model.state_dict(keep_vars=True)
    found: dict[int, StoredTensor] = {}
    for name, tensor in state.items():
        origin = index.find(name)
        if origin is not None and id(tensor) not in found:
            values = base.tensors[origin].load()
            if torch.equal(values.to(tensor.dtype), tensor.detach()):
                found[id(tensor)] = base.tensors[origin]
    return {name: found[id(tensor)] for name, tensor in state.items() if id(tensor) in found}


def _tied_names(model: nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [each for each in names.values() if len(each) > 1]


def load_adapter(model: Any, weights: Mapping[str, torch.Tensor], adapter: Adapter, base: Path) -> AdaptedModel:
    """Attach an adapter to its base.

    Args:
        model: The base, from `load_base`; changed.
        weights: The adapter's tensors.
        adapter: The adapter.
        base: Folder of the base, for errors.

    Raises:
        ValueError: If a tensor of the adapter has no place or another shape, or its value changes on loading; if PEFT
            changes a weight of the base that the adapter does not hold.
    """
    from peft import PeftModel

    vocabulary = _resize(model, weights)
    _check_tokens(model, adapter, base)
    _check_vocabulary(model, adapter, base)
    before = [(name, each, hash_tensor(each)) for name, each in model.named_parameters()]
    names = dict(model.named_parameters(remove_duplicate=False))
    try:
        with quiet_peft():
            adapted: Any = PeftModel.from_pretrained(model, str(adapter.folder), ignore_mismatched_sizes=True)
    except (RuntimeError, ValueError) as error:
        said = " ".join(str(error).split()).rstrip(".")
        raise ValueError(
            f"{base} is not the base of {adapter.folder}: {said}. Name the base that it was trained on"
        ) from error
    _check_places(adapted, weights, adapter, base)
    held = {id(names[name]) for key in weights if (name := base_name(key)) in names}
    changed = [name for name, each, sha256 in before if id(each) not in held and hash_tensor(each) != sha256]
    if changed:
        raise ValueError(
            f"{adapter.folder} changes {changed[0]} of the base when PEFT loads it, so the base of its training is "
            "unknown. Save it as a plain LoRA, and merge that"
        )
    return AdaptedModel(model=adapted.eval(), vocabulary=vocabulary)


@contextmanager
def quiet_peft() -> Iterator[None]:
    """Suppress PEFT's warnings that this library reports as errors or lines of its own."""
    with warnings.catch_warnings():
        for message in _PEFT_WARNINGS:
            warnings.filterwarnings("ignore", message)
        yield


def _head_options(adapter: Adapter, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Find a new head's settings that the base's configuration lacks: its classes, and the padding id."""
    if adapter.config.get("task_type") not in ("SEQ_CLS", "TOKEN_CLS"):
        return {}
    if adapter.model_config is not None:
        names = ("id2label", "label2id", "pad_token_id", "problem_type")
        return {name: adapter.model_config[name] for name in names if adapter.model_config.get(name) is not None}
    heads = [each for name, each in weights.items() if set(_HEADS).intersection(name.split(".")) and each.ndim == 2]
    # A head may have several layers; the last one has a row per class.
    return {"num_labels": min(int(each.shape[0]) for each in heads)} if heads else {}


def _embeddings(model: Any) -> dict[str, nn.Module]:
    """Return the modules with a row per token, by path."""
    found = {}
    for get in ("get_input_embeddings", "get_output_embeddings"):
        try:
            module = getattr(model, get)()
        except (AttributeError, NotImplementedError):
            continue
        if isinstance(getattr(module, "weight", None), nn.Parameter):
            found[next(path for path, each in model.named_modules() if each is module)] = module
    return found


def _resize(model: Any, weights: Mapping[str, torch.Tensor]) -> int | None:
    """Resize the vocabulary to that of an adapter with all of its rows. Return None if there is nothing to do."""
    rows, known = set(), set()
    parameters = {
        f"{path}.{name}": each
        for path, module in _embeddings(model).items()
        for name, each in module.named_parameters(recurse=False)
    }
    for key, tensor in weights.items():
        parameter = parameters.get(base_name(key))
        if parameter is not None and tensor.ndim == parameter.ndim:
            rows.add(tensor.shape[0])
            known.add(id(parameter))
    is_certain = len(rows) == 1 and all(id(each) in known for each in parameters.values())
    if not is_certain or all(each.shape[0] in rows for each in parameters.values()):
        return None
    model.resize_token_embeddings(num_rows := int(rows.pop()), mean_resizing=False)
    return num_rows


def _check_tokens(model: Any, adapter: Adapter, base: Path) -> None:
    tokens = trained_tokens(adapter)
    rows = min((len(each.get_parameter("weight")) for each in _embeddings(model).values()), default=0)
    if tokens and max(tokens) >= rows:
        raise ValueError(f"{base} has {rows} tokens, and {adapter.folder} trained token {max(tokens)}. {_RESIZED}")


def _check_vocabulary(model: Any, adapter: Adapter, base: Path) -> None:
    """Refuse a tokenizer whose tokens have no rows, unless the base's own has them too (Gemma 3's, of images)."""
    rows = min((len(each.get_parameter("weight")) for each in _embeddings(model).values()), default=None)
    if rows is None or not tokenizer_files(adapter.folder):
        return
    beyond = _tokens_beyond(rows, adapter.folder, model.config)
    if beyond and tokenizer_files(base):
        beyond -= _tokens_beyond(rows, base, model.config)
    if beyond:
        raise ValueError(
            f"the embeddings of {base} have {rows} rows, and none of them is for {min(beyond)!r}, which the tokenizer "
            f"in {adapter.folder} has. {_RESIZED}"
        )


def _tokens_beyond(num_rows: int, folder: Path, config: Any) -> set[str]:
    """Return the tokens whose ids are beyond a number of rows. There are none of a tokenizer that can't be loaded."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, config=config, trust_remote_code=False)
    except Exception:  # code of its own, or a library that is missing: its files are only copied
        return set()
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    return {token for token, row in vocabulary.items() if row >= num_rows}


def trained_tokens(adapter: Adapter) -> list[int]:
    """Return the ids of tokens whose rows were trained individually."""
    said = adapter.config.get("trainable_token_indices") or []
    return [int(each) for ids in (said.values() if isinstance(said, dict) else [said]) for each in ids]


def _check_places(adapted: Any, weights: Mapping[str, torch.Tensor], adapter: Adapter, base: Path) -> None:
    """Refuse tensors without a counterpart, with another shape, or with other values than in the file.

    PEFT only warns of places without a weight, and does not report weights without a place.
    """
    from peft import get_peft_model_state_dict

    wrong = f"{base} is not the base of {adapter.folder}"
    with quiet_peft():
        held = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    # A file may also hold tensors that PEFT keeps beside a fully trained module, without the adapter's name.
    state = {name.replace(".default", ""): each for name, each in adapted.state_dict().items()} | held
    embeddings = {base_name(path): each for path, each in _embeddings(adapted.get_base_model()).items()}
    for name in sorted(weights.keys() & state.keys()):
        here, there = tuple(state[name].shape), tuple(weights[name].shape)
        if here != there:
            rows = [len(each.get_parameter("weight")) for path, each in embeddings.items() if f".{path}." in name]
            is_row = rows and all(one in (other, *rows) for one, other in zip(here, there, strict=False))
            way_out = f". {_RESIZED}" if is_row else ". Name the base that it was trained on"
            raise ValueError(f"{wrong}: {name} is {there} in the adapter and {here} in the base{way_out}")
    lost = sorted((held.keys() - weights.keys()) | (weights.keys() - state.keys()))
    if lost:
        more = f" and {len(lost) - _NUM_NAMED} more" if len(lost) > _NUM_NAMED else ""
        raise ValueError(
            f"{wrong}: {', '.join(lost[:_NUM_NAMED])}{more} are in only one of the two. Name the base that it was "
            "trained on"
        )
    other = [name for name in weights if not _is_same(state[name], weights[name])]
    if other:
        raise ValueError(
            f"{wrong}: {other[0]} of the adapter can't keep its values in the base, where it is tied to another "
            "tensor. Untie the base, save it, and name it by --model_name_or_path"
        )


def _is_same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.allclose(first.float(), second.float(), rtol=0, atol=0, equal_nan=True)


def base_name(key: str) -> str:
    """Return the base's name of a tensor or module that PEFT has renamed."""
    return ".".join(part for part in key.removeprefix(ADAPTER_PREFIX).split(".") if part not in _WRAPPERS)


def wrapped_modules(model: nn.Module) -> list[str]:
    """Return the paths of the modules that PEFT has wrapped."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    wrappers = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    return [path for path, each in model.named_modules() if isinstance(each, wrappers)]
