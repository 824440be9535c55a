"""A LoRA adapter of PEFT merged into its base: a plain checkpoint, which transformers load without PEFT.

PEFT makes the sums, in fp32. The base's tied weights are taken apart first: otherwise PEFT adds the deltas of all
places to the one tensor that they share. The folder gets its name after three checks:

- For eight tokens, the merged weights give the outputs of the base with the adapter, before they are rounded. So does
  each layer by itself.
- Each written tensor, read back, has the bits of the sum rounded once, or of the base where nothing was added.
- Transformers load these tensors from the folder, so that its configuration ties what is tied.
"""

import re
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slivertune.core.atomic import atomic_new_folder, check_absent
from slivertune.core.host_memory import available_host_bytes
from slivertune.deltas.adapter_folder import MODEL_CONFIG, Adapter, is_adapter, read_json
from slivertune.deltas.adapter_load import (
    AdaptedModel,
    is_touched,
    load_adapter,
    load_base,
    model_class,
    quiet_peft,
    trained_tokens,
    wrapped_modules,
)
from slivertune.deltas.adapter_outputs import (
    check_layers,
    check_outputs,
    choose_inputs,
    outputs_of,
    outputs_of_layers,
)
from slivertune.deltas.delta_file import PLAIN_DTYPES, name_of
from slivertune.deltas.hashes import hash_tensor
from slivertune.deltas.names import NameIndex
from slivertune.deltas.plain_checkpoint import PlainCheckpoint, open_checkpoint

_OF_TOKENIZER = re.compile(
    r"tokenizer|vocab|merges|special_tokens|added_tokens|chat_template|.*\.(model|tiktoken|spm|bpe|jinja)$"
)
"""Names of files that belong to a tokenizer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MergedAdapter:
    """What a merge did."""

    num_adapted: int
    """Weights' matrices that a LoRA was added to."""
    replaced: tuple[str, ...]
    """Modules that were trained whole and took the place of the base's, such as a classifier's head."""
    untied: tuple[str, ...]
    """Names of one tied weight of the base that are now several; its configuration says so."""
    vocabulary: int | None
    """Rows that the base's embeddings were resized to, as they were for the training; None if they were not."""
    not_run: str | None
    """Why outputs were not compared; None if they were."""
    has_tokenizer: bool
    random: tuple[str, ...]
    """Weights that neither the base nor the adapter has, and that the outputs do not depend on."""
    left_out: tuple[str, ...]
    """Tensors of the base's files that its class has no place for."""


def merge_adapter(adapter: Adapter, base: Path, output: Path) -> MergedAdapter:
    """Write the base with an adapter merged into it. The folder appears whole and checked, or not at all.

    Costs 4 bytes of host memory per weight, and while the result is read back its bytes beside them.

    Args:
        adapter: From `open_adapter`.
        base: Folder of the base, not quantised; never changed. An adapter that was trained over 4-bit weights is added
            to what these were before, so that results are near, not the same.
        output: The folder to write; must not exist.

    Returns:
        What was merged.

    Raises:
        FileExistsError: If `output` exists.
        FileNotFoundError: If the base has no safetensors files.
        ValueError: If the base is quantised, an adapter itself, or not the base of this adapter; if the merged model is
            not the base with the adapter. Nothing is written then.
    """
    check_absent(output)
    _check_base(base)
    stored = open_checkpoint(base)
    _check_dtypes(base, stored)
    _check_room(base, stored)
    loaded = load_base(adapter, base)
    tied = _tied_names(loaded.model)
    run = _Runs(loaded.model, trained_tokens(adapter))
    if run.depend_on(loaded.model, loaded.random):
        raise ValueError(
            f"{loaded.random[0]} of a {type(loaded.model).__name__} is neither in {base} nor in {adapter.folder}, and "
            "would be random. Save the model that was trained with it, and name its folder by --model_name_or_path"
        )
    adapted = load_adapter(loaded.model, loaded.weights, adapter, base)
    run.with_adapter(adapted.model.get_base_model())
    layers = outputs_of_layers(adapted.model.get_base_model(), trained_tokens(adapter))
    num_adapted, replaced = _count(adapted.model)
    try:
        merged, untied = _merge(adapted, tied)
    except (ValueError, RuntimeError, NotImplementedError) as error:
        raise ValueError(f"{adapter.folder} can't be merged into {base}: {error}") from error
    with atomic_new_folder(output, needs_bytes=sum(each.num_bytes for each in stored.tensors.values())) as new:
        try:
            merged.config.save_pretrained(new)
            check_layers(layers, merged)
            run.check(_model_of(model_class(adapter, base), new, merged))
            _round(merged, stored)
            merged.save_pretrained(new)
            has_tokenizer = _save_tokenizer((adapter.folder, base), new)
            _copy_rest(stored, new)
            _check_files(merged, stored, open_checkpoint(new), adapted.touched)
            _check_loaded(merged, model_class(adapter, base), new)
        except ValueError as error:
            raise ValueError(f"{adapter.folder} can't be merged into {base}: {error}") from error
    return MergedAdapter(
        num_adapted=num_adapted,
        replaced=replaced,
        untied=untied,
        vocabulary=adapted.vocabulary,
        not_run=run.not_run,
        has_tokenizer=has_tokenizer,
        random=loaded.random,
        left_out=loaded.unread,
    )


class _Runs:
    """Outputs of the base, of the base with the adapter, and of the merged weights.

    Args:
        model: The base alone.
        tokens: Tokens that must be among the inputs.
    """

    def __init__(self, model: Any, tokens: list[int]) -> None:
        self.not_run: str | None = None
        """Why the model was not run; None if it was."""
        try:
            self._inputs = choose_inputs(model, tokens)
            self._base = outputs_of(model, self._inputs)
        except Exception as error:  # dummy inputs do not suit every model
            self.not_run = f"{type(model).__name__} does not run on dummy inputs ({' '.join(str(error).split())[:80]})"

    @torch.no_grad()
    def depend_on(self, model: nn.Module, names: Sequence[str]) -> bool:
        """Return whether the model's outputs depend on some of its weights, or may."""
        if not names or self.not_run is not None:
            return bool(names)
        state = model.state_dict()
        kept = {name: state[name].clone() for name in names if state[name].is_floating_point()}
        for name in kept:
            state[name].fill_(torch.nan)
        found = outputs_of(model, self._inputs)
        for name, values in kept.items():
            state[name].copy_(values)
        return not bool(torch.isfinite(found).all())

    def with_adapter(self, model: Any) -> None:
        """Run the base with the adapter beside its weights."""
        if self.not_run is None:
            self._adapted = outputs_of(model, self._inputs)

    def check(self, model: Any) -> None:
        """Run the merged weights, and compare."""
        if self.not_run is None:
            check_outputs(self._base, self._adapted, outputs_of(model, self._inputs))


def _check_base(base: Path) -> None:
    if is_adapter(base):
        raise ValueError(f"{base} is an adapter itself; name the base by --model_name_or_path")
    if not (base / MODEL_CONFIG).is_file():
        raise ValueError(f"{base} has no {MODEL_CONFIG}, so it is no checkpoint; name the base's folder")
    if read_json(base / MODEL_CONFIG).get("quantization_config"):
        raise ValueError(
            f"{base} is quantised, and its weights have no room for the sum; name the 16-bit checkpoint that it was "
            "made of by --model_name_or_path"
        )


def _tied_names(model: nn.Module) -> list[list[str]]:
    """The names of each weight that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [each for each in names.values() if len(each) > 1]


def _merge(adapted: AdaptedModel, tied: list[list[str]]) -> tuple[Any, tuple[str, ...]]:
    """Merge in fp32, each place of a tied weight by itself; what ends equal is tied again.

    Returns:
        The merged model, and the names of tied weights that are no longer equal.
    """
    _untie(adapted.model)
    configs = list(_configs(adapted.model.get_base_model().config))
    said = [each.tie_word_embeddings for each in configs]
    with quiet_peft():
        merged: Any = adapted.model.merge_and_unload(safe_merge=True)
    if left := wrapped_modules(merged):
        raise ValueError(f"PEFT does not merge the adapters of {left[0]}. Train one kind of adapter for each module")
    weights = dict(merged.named_parameters(remove_duplicate=False))
    apart = [names for names in tied if any(not torch.equal(weights[names[0]], weights[each]) for each in names)]
    for config, tie in zip(configs, said, strict=True):
        config.tie_word_embeddings = tie and not apart
    if not apart:
        merged.tie_weights()
    return merged, tuple(name for names in apart for name in names)


def _untie(model: nn.Module) -> None:
    """Give each module a copy of the weights that it shares with others."""
    seen: set[int] = set()
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in seen:
                module._parameters[name] = nn.Parameter(parameter.detach().clone(), requires_grad=False)
            seen.add(id(parameter))


def _configs(config: Any) -> Iterator[Any]:
    """The parts of a configuration that say whether embeddings are tied."""
    parts = (getattr(config, name, None) for name in getattr(config, "sub_configs", {}))
    yield from (each for each in (config, *parts) if hasattr(each, "tie_word_embeddings"))


def _model_of(make: Any, folder: Path, merged: Any) -> Any:
    """A new model of the configuration in a folder, with the tensors of a merged one, which it shares."""
    from slivertune.core.empty_model import make_empty  # accelerate, which SFT's deltas need not import

    config = type(merged.config).from_pretrained(folder)
    model = make_empty(make, config, torch.float32)
    model.load_state_dict(merged.state_dict(), assign=True)
    return model.eval()


def _check_room(base: Path, stored: PlainCheckpoint) -> None:
    """Refuse a merge that the host's memory can't hold, before the base is loaded in fp32."""
    needed = sum(each.num_bytes // each.dtype.itemsize * 4 for each in stored.tensors.values())
    available = available_host_bytes()
    if available is not None and needed > available:
        raise ValueError(
            f"merging into {base} takes {needed / 2**30:.1f} GiB of host memory for weights in fp32, and "
            f"{available / 2**30:.1f} GiB are free. Free some, or merge on a machine with more"
        )


def _check_dtypes(base: Path, stored: PlainCheckpoint) -> None:
    """Refuse tensors that fp32 does not hold, or that the sum can't be rounded to."""
    for name, each in stored.tensors.items():
        if each.dtype.is_floating_point and name_of(each.dtype) not in PLAIN_DTYPES:
            raise ValueError(
                f"{base} holds {name!r} in {name_of(each.dtype)}. Only {', '.join(PLAIN_DTYPES)} are merged into; "
                "name a checkpoint in one of them by --model_name_or_path"
            )


def _round(merged: nn.Module, stored: PlainCheckpoint) -> None:
    """Round each tensor once, to the dtype that the base's files have for it; what is new, to that of most weights."""
    index = NameIndex(stored.tensors)
    sizes: Counter[torch.dtype] = Counter()
    for each in stored.tensors.values():
        sizes[each.dtype] += each.num_bytes * each.dtype.is_floating_point
    most = sizes.most_common(1)[0][0]
    saved = merged.state_dict().keys()
    for name, tensor in (*merged.named_parameters(), *merged.named_buffers()):
        if name in saved and tensor.is_floating_point():
            found = index.find(name)
            dtype = stored.tensors[found].dtype if found is not None else most
            rounded = tensor.detach().to(dtype)
            is_narrow = torch.finfo(dtype).max < torch.finfo(tensor.dtype).max
            if is_narrow and bool((torch.isfinite(tensor) & ~torch.isfinite(rounded)).any()):
                raise ValueError(
                    f"{name!r} is beyond the range of {name_of(dtype)}. Take the base in bfloat16 or float32"
                )
            tensor.data = rounded


def _check_files(merged: nn.Module, base: PlainCheckpoint, new: PlainCheckpoint, touched: frozenset[str]) -> None:
    """Compare what was written with the sums, and what no adapter touches with the base's files."""
    state, index = merged.state_dict(), NameIndex(base.tensors)
    for name, tensor in new.tensors.items():
        written = tensor.sha256()
        if name in state and (tensor.dtype != state[name].dtype or written != hash_tensor(state[name])):
            raise ValueError(f"{name!r} was not written as it was summed. Check the disk, and merge again")
        origin = index.find(name)
        if origin is None or name not in state or is_touched(name, touched):
            continue
        stored = base.tensors[origin]
        if (stored.dtype, stored.shape) != (tensor.dtype, tensor.shape) or stored.sha256() != written:
            raise ValueError(f"{name!r} is not the base's, and the adapter does not touch it. Use the adapter by PEFT")


def _check_loaded(merged: nn.Module, make: Any, folder: Path) -> None:
    """Compare what transformers load from a folder with what was to be written."""
    loaded, report = make.from_pretrained(folder, dtype="auto", output_loading_info=True)
    found, wanted = loaded.state_dict(), merged.state_dict()
    lost = sorted((found.keys() ^ wanted.keys()) | set(report["missing_keys"]))
    other = [name for name in wanted if name not in lost and not torch.equal(found[name], wanted[name].to(found[name]))]
    if lost or other:
        raise ValueError(
            f"transformers do not load {(lost + other)[0]!r} as it was merged: a {type(loaded).__name__} can't be "
            "configured so. Leave tied modules out of the adapter, or use it by PEFT, beside the base"
        )


def _count(model: Any) -> tuple[int, tuple[str, ...]]:
    from peft.tuners.lora import LoraLayer
    from peft.utils import ModulesToSaveWrapper

    adapted = sum(isinstance(each, LoraLayer) for each in model.modules())
    whole = (name for name, each in model.named_modules() if isinstance(each, ModulesToSaveWrapper))
    return adapted, tuple(name.removeprefix("base_model.model.") for name in whole)


def _copy_rest(stored: PlainCheckpoint, output: Path) -> None:
    """Copy what models saved by transformers leave behind: settings of images and sounds, code, a licence."""
    shards = {each.shard for each in stored.tensors.values()}
    for relative in stored.files:
        source, target = stored.folder / relative, output / relative
        is_weight = source in shards or relative.name.endswith(".index.json")
        # The tokenizer may be the adapter's, of which files of the base's would not be.
        if not is_weight and not target.exists() and not _OF_TOKENIZER.match(relative.name):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)


def _save_tokenizer(folders: tuple[Path, ...], output: Path) -> bool:
    """Save the tokenizer of the first folder that has one."""
    from transformers import AutoTokenizer

    for folder in folders:
        if any(folder.glob("tokenizer*")) or any(folder.glob("vocab*")):
            AutoTokenizer.from_pretrained(folder).save_pretrained(output)
            return True
    return False
