"""A PEFT LoRA adapter merged into its base: a plain checkpoint that transformers loads without PEFT.

PEFT computes the sums in fp32. The base's tied weights are separated first: otherwise PEFT adds the deltas of all
places to their one shared tensor. The folder gets its name after three checks:

- For eight tokens, the merged weights before rounding give the outputs of the base with the adapter. So does each
  layer by itself.
- Each written tensor, read back, is the sum of the base's and the adapter's files, computed again without PEFT and
  rounded once, or has the bits of the base if nothing was added.
- transformers loads these tensors from the folder, so its configuration ties the right weights.
"""

import gc
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slivertune.core.atomic import atomic_new_folder, check_absent
from slivertune.core.byte_text import format_bytes
from slivertune.core.host_memory import available_host_bytes
from slivertune.deltas.adapter_folder import MODEL_CONFIG, Adapter, is_adapter, read_json
from slivertune.deltas.adapter_load import (
    AdaptedModel,
    LoadedBase,
    load_adapter,
    load_base,
    load_model,
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
from slivertune.deltas.adapter_sums import AdapterSums
from slivertune.deltas.beside_weights import copy_others, differing_settings, tokenizer_files, write_config
from slivertune.deltas.delta_file import PLAIN_DTYPES, name_of
from slivertune.deltas.names import NameIndex
from slivertune.deltas.plain_checkpoint import PlainCheckpoint, open_checkpoint

_OF_TRAINING = frozenset({"quantization_config", "tie_word_embeddings", "use_cache"})
"""Settings of the trained model that a merged one does not need: its own say what its weights are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MergedAdapter:
    """Result of a merge."""

    num_adapted: int
    """Number of weight matrices that a LoRA was added to."""
    replaced: tuple[str, ...]
    """Fully trained modules that replaced the base's, such as a classifier's head."""
    untied: tuple[str, ...]
    """Names of the base's tied weights that are now separate. The new configuration says so."""
    vocabulary: int | None
    """Number of rows that the base's embeddings were resized to, as for the training. None if they were not."""
    not_run: str | None
    """Reason why outputs were not compared. None if they were."""
    has_tokenizer: bool
    random: tuple[str, ...]
    """Names of weights that neither the base nor the adapter has, and that do not affect the outputs."""
    unread: tuple[str, ...]
    """Names of tensors in the base's files that its class has no place for."""
    not_copied: tuple[Path, ...]
    """Files of the base that may hold its weights in other forms."""
    other_settings: tuple[str, ...]
    """Settings of the trained model's configuration, if that was saved, that the new configuration does not have."""


def merge_adapter(adapter: Adapter, base: Path, output: Path) -> MergedAdapter:
    """Write the base with an adapter merged into it. The folder appears complete and checked, or not at all.

    Costs 4 bytes of host memory per weight. If the base's files have another layout than its model, reading the result
    back costs twice the bytes of the base, which is more for a base in fp32.

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
        ValueError: If the base is quantised, an adapter itself, or not the base of this adapter; if the host has not
            enough memory; if the merged model does not equal the base with the adapter. Nothing is written then.
    """
    check_absent(output)
    _check_base(base)
    stored = open_checkpoint(base)
    _check_dtypes(base, stored)
    in_fp32 = _bytes_in(stored, torch.float32)
    what = f"merging into {base} takes {format_bytes(in_fp32)} of host memory for weights in fp32"
    _check_room(in_fp32, what, "Free some")
    with atomic_new_folder(output, needs_bytes=sum(each.num_bytes for each in stored.tensors.values())) as new:
        merged, loaded = _write(adapter, stored, new)
        gc.collect()
        with _naming(adapter, base):
            _check_written(adapter, loaded, stored, open_checkpoint(new))
    return merged


def _write(adapter: Adapter, stored: PlainCheckpoint, new: Path) -> tuple[MergedAdapter, LoadedBase]:
    """Merge in memory, check the outputs, and write the new folder. All models are freed on return."""
    base = stored.folder
    model, loaded = load_base(adapter, stored)
    if loaded.in_another_layout:
        # The last check loads the result and the base. By then the base in fp32 is freed.
        more = 2 * _bytes_in(stored, _dtype_to_load(stored, loaded)) - _bytes_in(stored, torch.float32)
        what = (
            f"{base} stores its tensors in another layout than its model, so the last check takes "
            f"{format_bytes(more)} more of host memory"
        )
        _check_room(more, what, "Save the base by save_pretrained(folder, save_original_format=False), and name that")
    run = _Runs(model, trained_tokens(adapter))
    if run.depend_on(model, loaded.random):
        raise ValueError(
            f"{loaded.random[0]} of a {type(model).__name__} is neither in {base} nor in {adapter.folder}, and "
            "would be random. Save the model that was trained with it, and name its folder by --model_name_or_path"
        )
    adapted = load_adapter(model, loaded.weights, adapter, base)
    run.with_adapter(adapted.model.get_base_model())
    layers = outputs_of_layers(adapted.model.get_base_model(), trained_tokens(adapter))
    num_adapted, replaced = _count(adapted.model)
    with _naming(adapter, base):
        merged, untied = _merge(adapted, loaded.tied)
        write_config(base, merged, new)
        check_layers(layers, merged)
        run.check(_model_of(loaded.model_class, new, merged))
        _round(merged, stored)
        merged.save_pretrained(new)
        write_config(base, merged, new)
        copy_others(stored, adapter.folder, new)
    return MergedAdapter(
        num_adapted=num_adapted,
        replaced=replaced,
        untied=untied,
        vocabulary=adapted.vocabulary,
        not_run=run.not_run,
        has_tokenizer=any(new.glob("tokenizer*")) or bool(tokenizer_files(new)),
        random=loaded.random,
        unread=loaded.unread,
        not_copied=tuple(stored.left_out),
        other_settings=_other_settings(adapter, merged),
    ), loaded


def _other_settings(adapter: Adapter, merged: Any) -> tuple[str, ...]:
    """List what the training set beside the weights, such as a scaling of positions."""
    trained, config = adapter.model_config, merged.config
    if trained is None or trained.get("model_type") != config.model_type:
        return ()
    wanted, found = type(config).from_dict(dict(trained)).to_dict(), config.to_dict()
    names = [name for name in differing_settings(found, wanted) if name not in _OF_TRAINING]
    return tuple(sorted(names))


@contextmanager
def _naming(adapter: Adapter, base: Path) -> Iterator[None]:
    """Name the adapter and the base in errors."""
    try:
        yield
    except (ValueError, RuntimeError, NotImplementedError) as error:
        raise ValueError(f"{adapter.folder} can't be merged into {base}: {error}") from error


class _Runs:
    """Compares outputs of the base, of the base with the adapter, and of the merged weights.

    Args:
        model: The base alone.
        tokens: Tokens that must be among the inputs.
    """

    def __init__(self, model: Any, tokens: list[int]) -> None:
        self.not_run: str | None = None
        """Reason why the model was not run. None if it was."""
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
            try:
                self._adapted = outputs_of(model, self._inputs)
            except AttributeError as error:  # PEFT's wrappers lack some attributes of the modules in them
                self.not_run = f"{type(model).__name__} does not run with the adapter ({error})"

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


def _merge(adapted: AdaptedModel, tied: list[list[str]]) -> tuple[Any, tuple[str, ...]]:
    """Merge in fp32, each place of a tied weight separately. Tie the weights again if all stay equal.

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
    """Build a new model from a folder's configuration. It shares the tensors of the merged model."""
    from slivertune.core.empty_model import make_empty  # imports accelerate, which SFT's deltas do not need

    config = type(merged.config).from_pretrained(folder)
    model = make_empty(make, config, torch.float32)
    model.load_state_dict(merged.state_dict(), assign=True)
    return model.eval()


def _check_room(needed: int, what: str, way_out: str) -> None:
    """Refuse a merge that does not fit in host memory, before that much is loaded."""
    available = available_host_bytes()
    if available is not None and needed > available:
        raise ValueError(f"{what}, and {format_bytes(available)} are free. {way_out}, or merge on a machine with more")


def _bytes_in(stored: PlainCheckpoint, dtype: torch.dtype) -> int:
    """Return the bytes of a checkpoint's weights in a dtype."""
    return sum(each.num_bytes // each.dtype.itemsize * dtype.itemsize for each in stored.tensors.values())


def _dtype_to_load(base: PlainCheckpoint, loaded: LoadedBase) -> torch.dtype:
    """Return the dtype in which tensors in another layout are loaded without rounding."""
    others = {*map(id, loaded.stored.values()), *(id(base.tensors[name]) for name in loaded.unread)}
    dtypes = {each.dtype for each in base.tensors.values() if each.dtype.is_floating_point and id(each) not in others}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


def _check_dtypes(base: Path, stored: PlainCheckpoint) -> None:
    """Refuse tensors that fp32 can't represent, or whose dtype the sum can't be rounded to."""
    for name, each in stored.tensors.items():
        if each.dtype.is_floating_point and name_of(each.dtype) not in PLAIN_DTYPES:
            raise ValueError(
                f"{base} holds {name!r} in {name_of(each.dtype)}, and adapters merge only into "
                f"{', '.join(PLAIN_DTYPES)}. Name a checkpoint in one of them by --model_name_or_path"
            )


def _round(merged: nn.Module, stored: PlainCheckpoint) -> None:
    """Round each tensor once, to its dtype in the base's files, or if it is new to the dtype with the most bytes."""
    index = NameIndex(stored.tensors)
    sizes: Counter[torch.dtype] = Counter()
    for each in stored.tensors.values():
        sizes[each.dtype] += each.num_bytes * each.dtype.is_floating_point
    most = sizes.most_common(1)[0][0]
    saved = set(merged.state_dict())  # names alone, which keep no tensor
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


def _check_written(adapter: Adapter, loaded: LoadedBase, base: PlainCheckpoint, new: PlainCheckpoint) -> None:
    """Compare each tensor of the new files with the sum of the base's and the adapter's files."""
    _check_same_dtypes(loaded, base, new)
    index = NameIndex(new.tensors)
    files = {name: found for name in loaded.names if (found := index.find(name)) is not None}
    # Tensors in another layout can only be read by transformers, and must not be rounded on the way.
    converted = {new.tensors[each].dtype for each in new.tensors.keys() - set(files.values())}
    dtype = "auto" if not converted else torch.float32 if len(converted) > 1 else converted.pop()
    model, report = loaded.model_class.from_pretrained(new.folder, dtype=dtype, output_loading_info=True)
    state = model.state_dict()
    if lost := sorted((state.keys() ^ loaded.names) | set(report["missing_keys"])):
        raise ValueError(f"transformers do not load {lost[0]!r} from the new files. Use the adapter by PEFT instead")
    sums = AdapterSums(model, adapter.config, loaded.weights, loaded.tied)
    reloaded = _state_of(adapter, loaded, base) if loaded.in_another_layout else {}
    for name in sorted(loaded.names.difference(loaded.random)):
        written, origin = state[name], loaded.stored.get(name)
        if name in files and torch.equal((stored := new.tensors[files[name]].load()).to(written.dtype), written):
            # Loaded tensors all have one dtype; stored ones may have several.
            written = stored
        before = reloaded.get(name) if origin is None else origin.load()
        if not sums.is_sum(name, before, written):
            way_out = (
                "Leave tied modules out of the adapter" if any(name in each for each in loaded.tied) else "Merge again"
            )
            raise ValueError(
                f"{name!r}, read back, is not the base's tensor and the adapter's, summed in fp32 and rounded once. "
                f"{way_out}, or use the adapter by PEFT, beside the base"
            )


def _check_same_dtypes(loaded: LoadedBase, base: PlainCheckpoint, new: PlainCheckpoint) -> None:
    """Refuse a new tensor whose dtype is not that of the base's, such as a renamed one among several dtypes."""
    index = NameIndex(base.tensors)
    for name, each in new.tensors.items():
        origin = loaded.stored.get(name) or base.tensors.get(index.find(name) or "")
        if origin is not None and origin.dtype != each.dtype:
            raise ValueError(
                f"{name!r} would be {name_of(each.dtype)}, and {base.folder} stores it in {name_of(origin.dtype)}. "
                "Save the base in one dtype, and name it by --model_name_or_path"
            )


def _state_of(adapter: Adapter, loaded: LoadedBase, base: PlainCheckpoint) -> dict[str, torch.Tensor]:
    """Load the base again for the tensors that its files store in another layout, such as each expert by itself."""
    state = load_model(adapter, base.folder, loaded.weights, _dtype_to_load(base, loaded))[0].state_dict()
    return {name: state[name] for name in loaded.in_another_layout}


def _count(model: Any) -> tuple[int, tuple[str, ...]]:
    from peft.tuners.lora import LoraLayer
    from peft.utils import ModulesToSaveWrapper

    adapted = sum(isinstance(each, LoraLayer) for each in model.modules())
    whole = (name for name, each in model.named_modules() if isinstance(each, ModulesToSaveWrapper))
    return adapted, tuple(name.removeprefix("base_model.model.") for name in whole)
