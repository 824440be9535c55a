"""A PEFT LoRA adapter merged into its base: a plain checkpoint that transformers loads without PEFT.

PEFT computes the sums in fp32. The base's tied weights are separated first: otherwise PEFT adds the deltas of all
places to their one shared tensor. The folder gets its name after three checks:

- For eight tokens, the merged weights before rounding give the outputs of the base with the adapter. So does each
  layer by itself.
- Each written tensor, read back, has the bits of the sum rounded once, or of the base if nothing was added.
- transformers loads these tensors from the folder, so its configuration ties the right weights.
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
"""Pattern of file names that belong to a tokenizer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MergedAdapter:
    """Result of a merge."""

    num_adapted: int
    """Number of weight matrices that a LoRA was added to."""
    replaced: tuple[str, ...]
    """Fully trained modules that replaced the base's, such as a classifier's head."""
    untied: tuple[str, ...]
    """Names of the base's tied weights that are now separate; the new configuration says so."""
    vocabulary: int | None
    """Number of rows that the base's embeddings were resized to, as for the training; None if they were not."""
    not_run: str | None
    """Reason why outputs were not compared; None if they were."""
    has_tokenizer: bool
    random: tuple[str, ...]
    """Names of weights that neither the base nor the adapter has, and that do not affect the outputs."""
    left_out: tuple[str, ...]
    """Names of tensors in the base's files that its class has no place for."""


def merge_adapter(adapter: Adapter, base: Path, output: Path) -> MergedAdapter:
    """Write the base with an adapter merged into it. The folder appears complete and checked, or not at all.

    Costs 4 bytes of host memory per weight, plus the bytes of the result while it is read back.

    Args:
        adapter: Adapter from `open_adapter`.
        base: Folder of the base, not quantised; never changed. If an adapter was trained over 4-bit weights, this is
            their original, so results are close, not equal.
        output: Folder to write; must not exist.

    Returns:
        Details of the merge.

    Raises:
        FileExistsError: If `output` exists.
        FileNotFoundError: If the base has no safetensors files.
        ValueError: If the base is quantised, an adapter itself, or not the base of this adapter; if the merged model
            does not equal the base with the adapter. Nothing is written then.
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
    """Compares outputs of the base, of the base with the adapter, and of the merged weights.

    Args:
        model: The base alone.
        tokens: Tokens that must be among the inputs.
    """

    def __init__(self, model: Any, tokens: list[int]) -> None:
        self.not_run: str | None = None
        """Reason why the model was not run; None if it was."""
        try:
            self._inputs = choose_inputs(model, tokens)
            self._base = outputs_of(model, self._inputs)
        except Exception as error:  # not every model accepts dummy inputs
            self.not_run = f"{type(model).__name__} does not run on dummy inputs ({' '.join(str(error).split())[:80]})"

    @torch.no_grad()
    def depend_on(self, model: nn.Module, names: Sequence[str]) -> bool:
        """Return whether the model's outputs depend, or may depend, on some of its weights."""
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
        """Run the base with the adapter attached."""
        if self.not_run is None:
            self._adapted = outputs_of(model, self._inputs)

    def check(self, model: Any) -> None:
        """Run the merged weights, and compare their outputs."""
        if self.not_run is None:
            check_outputs(self._base, self._adapted, outputs_of(model, self._inputs))


def _check_base(base: Path) -> None:
    if is_adapter(base):
        raise ValueError(f"{base} is an adapter itself. Name the base by --model_name_or_path")
    if not (base / MODEL_CONFIG).is_file():
        raise ValueError(f"{base} has no {MODEL_CONFIG}, so it is no checkpoint. Name the base's folder")
    if read_json(base / MODEL_CONFIG).get("quantization_config"):
        raise ValueError(
            f"{base} is quantised, and its codes can't hold the sum. Name the 16-bit checkpoint that it was made of "
            "by --model_name_or_path"
        )


def _tied_names(model: nn.Module) -> list[list[str]]:
    """Return all names of each weight that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [each for each in names.values() if len(each) > 1]


def _merge(adapted: AdaptedModel, tied: list[list[str]]) -> tuple[Any, tuple[str, ...]]:
    """Merge in fp32, each place of a tied weight separately; tie the weights again if all stay equal.

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
    """Give each module its own copy of the weights that it shares with others."""
    seen: set[int] = set()
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in seen:
                module._parameters[name] = nn.Parameter(parameter.detach().clone(), requires_grad=False)
            seen.add(id(parameter))


def _configs(config: Any) -> Iterator[Any]:
    """Yield the parts of a configuration that say whether embeddings are tied."""
    parts = (getattr(config, name, None) for name in getattr(config, "sub_configs", {}))
    yield from (each for each in (config, *parts) if hasattr(each, "tie_word_embeddings"))


def _model_of(make: Any, folder: Path, merged: Any) -> Any:
    """Build a new model from a folder's configuration; it shares the tensors of the merged model."""
    from slivertune.core.empty_model import make_empty  # imports accelerate, which SFT's deltas do not need

    config = type(merged.config).from_pretrained(folder)
    model = make_empty(make, config, torch.float32)
    model.load_state_dict(merged.state_dict(), assign=True)
    return model.eval()


def _check_room(base: Path, stored: PlainCheckpoint) -> None:
    """Refuse a merge that does not fit in host memory, before the base is loaded in fp32."""
    needed = sum(each.num_bytes // each.dtype.itemsize * 4 for each in stored.tensors.values())
    available = available_host_bytes()
    if available is not None and needed > available:
        raise ValueError(
            f"merging into {base} takes {needed / 2**30:.1f} GiB of host memory for weights in fp32, and "
            f"{available / 2**30:.1f} GiB are free. Free some, or merge on a machine with more"
        )


def _check_dtypes(base: Path, stored: PlainCheckpoint) -> None:
    """Refuse tensors that fp32 can't represent, or whose dtype the sum can't be rounded to."""
    for name, each in stored.tensors.items():
        if each.dtype.is_floating_point and name_of(each.dtype) not in PLAIN_DTYPES:
            raise ValueError(
                f"{base} holds {name!r} in {name_of(each.dtype)}, and adapters merge only into "
                f"{', '.join(PLAIN_DTYPES)}. Name a checkpoint in one of them by --model_name_or_path"
            )


def _round(merged: nn.Module, stored: PlainCheckpoint) -> None:
    """Round each tensor once, to its dtype in the base's files; a new tensor to the dtype with the most bytes."""
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
                    f"{name!r} is beyond the range of {name_of(dtype)}. Use the base in bfloat16 or float32"
                )
            tensor.data = rounded


def _check_files(merged: nn.Module, base: PlainCheckpoint, new: PlainCheckpoint, touched: frozenset[str]) -> None:
    """Compare the written tensors with the sums, and untouched tensors with the base's files."""
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
    """Compare the tensors that transformers loads from a folder with the merged ones."""
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
    """Copy the files that `save_pretrained` does not write: settings of images and sounds, code, a licence."""
    shards = {each.shard for each in stored.tensors.values()}
    for relative in stored.files:
        source, target = stored.folder / relative, output / relative
        is_weight = source in shards or relative.name.endswith(".index.json")
        # The tokenizer may be the adapter's, to which files of the base's would not belong.
        if not is_weight and not target.exists() and not _OF_TOKENIZER.match(relative.name):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)


def _save_tokenizer(folders: tuple[Path, ...], output: Path) -> bool:
    """Save the tokenizer of the first folder that has one; return whether there is one."""
    from transformers import AutoTokenizer

    for folder in folders:
        if any(folder.glob("tokenizer*")) or any(folder.glob("vocab*")):
            AutoTokenizer.from_pretrained(folder).save_pretrained(output)
            return True
    return False
