"""Weights that FSDP2's ranks have saved, read by one process or by ranks with whole weights (DDP)."""

import warnings
from pathlib import Path

import torch
from torch import nn

from slivertune.core.layout import Layout
from slivertune.core.saved_state import load_dictionary

_SHARDED = "pytorch_model_fsdp_0"
_WHOLE = "pytorch_model_fsdp.bin"
# Prefix under which accelerate stores the model's tensors in torch's distributed checkpoint.
_PREFIX = "model."


def holds_sharded_weights(folder: str | Path) -> bool:
    """Return whether the weights of a checkpoint are in the form that only FSDP reads.

    Args:
        folder: A folder of `accelerator.save_state`, or a Trainer's checkpoint.
    """
    folder = Path(folder)
    is_plain = any((folder / name).is_file() for name in ("model.safetensors", "pytorch_model.bin"))
    return not is_plain and ((folder / _SHARDED).is_dir() or (folder / _WHOLE).is_file())


def check_form(folder: str | Path, layout: Layout) -> None:
    """Refuse a checkpoint whose form a layout can't read, or whose weights it would read without their state.

    Args:
        folder: A folder of `accelerator.save_state`, or a Trainer's checkpoint.
        layout: The layout of this run.

    Raises:
        ValueError: If the layout does not match; names the way out.
    """
    folder = Path(folder)
    # The names that accelerate and the Trainer give to DeepSpeed's folders.
    is_deepspeeds = (folder / "pytorch_model").is_dir() or any(each.is_dir() for each in folder.glob("global_step*"))
    if layout.startswith("zero"):
        if not is_deepspeeds:
            raise ValueError(
                f"{folder} was not saved under DeepSpeed, which reads only its own form. Resume under the layout that "
                "saved it, or start a new run from its weights"
            )
    elif is_deepspeeds:
        raise ValueError(
            f"{folder} was saved under DeepSpeed. Resume at the same stage, with any number of ranks. With HiFT in one "
            "process, you can also load the folder of the ranks' files in it by slivertune.parallel.zero.load_zero"
        )
    elif layout == "fsdp2" and next(folder.glob("pytorch_model_fsdp*"), None) is None:
        raise ValueError(
            f"{folder} has no weights in FSDP's form, and FSDP2 reads no other. Resume in one process or under DDP, or "
            "start a new run from its weights"
        )


def load_sharded_weights(model: nn.Module, folder: str | Path) -> None:
    """Load the weights that FSDP2's ranks have saved into a model with whole weights.

    Args:
        model: The model on any device, not sharded.
        folder: A checkpoint for which `holds_sharded_weights` is true; torch reads its index by `pickle`.

    Raises:
        ValueError: If the checkpoint is of another model.
    """
    folder = Path(folder)
    tensors = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    if (folder / _WHOLE).is_file():
        whole = load_dictionary(folder / _WHOLE)
        _check_names(folder, tensors, set(whole))
        model.load_state_dict(whole, strict=False)
        return
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(folder / _SHARDED)
    saved = reader.read_metadata().state_dict_metadata
    found = {name.removeprefix(_PREFIX) for name in saved if name.startswith(_PREFIX)}
    _check_names(folder, tensors, found)
    for name in found:
        size = getattr(saved[f"{_PREFIX}{name}"], "size", None)
        if size is not None and tuple(size) != tuple(tensors[name].shape):
            raise ValueError(
                f"{folder} has {name} of shape {tuple(size)}, and this model of {tuple(tensors[name].shape)}. Build "
                "the model as the saved run did"
            )
    loaded = {name: tensors[name].detach() for name in found}
    with warnings.catch_warnings():
        # torch warns if there is one process; if there are several, each rank reads the whole checkpoint.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        load({"model": loaded}, storage_reader=reader, no_dist=True)
    for name in found:
        with torch.no_grad():
            tensors[name].copy_(loaded[name])


def _check_names(folder: Path, tensors: dict[str, torch.Tensor], found: set[str]) -> None:
    """Refuse a checkpoint of another model. Tied weights may be saved under only one of their names."""
    reached = {tensors[name].data_ptr() for name in found if name in tensors}
    missing = sorted(name for name, each in tensors.items() if name not in found and each.data_ptr() not in reached)
    unknown = sorted(found - tensors.keys())
    if missing or unknown:
        raise ValueError(
            f"{folder} is of another model: it lacks {missing[:3] or 'nothing'}, and this model has no "
            f"{unknown[:3] or 'others'}. Build the model as the saved run did"
        )
