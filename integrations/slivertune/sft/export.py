"""Deltas and pretrained values outside of the optimizer: copies and files."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

from slivertune.deltas.delta import SparseDelta
from slivertune.deltas.delta_file import save_pretrained
from slivertune.deltas.hashes import hash_tensor
from slivertune.deltas.names import name_before
from slivertune.sft.config import SFTConfig
from slivertune.sft.weight import SparseWeight


def copy_deltas(weights: Sequence[SparseWeight]) -> dict[str, SparseDelta]:
    """Copy every tensor's positions and deltas, by parameter name.

    Raises:
        RuntimeError: If other code has set trained entries of the weights since the last step.
    """
    for weight in weights:
        if count := weight.num_foreign():
            raise RuntimeError(
                f"{count} of {weight.num_active} trained entries of {weight.name} were changed outside of "
                "SFT since its last step (load_state_dict of the model, averaged weights), so their deltas "
                "don't describe the model. Restore the weights, load the optimizer's state of the same step, "
                "or go on training: the next step takes them for pretrained ones"
            )
    return {weight.name: weight.delta() for weight in weights}


def copy_base_values(weights: Sequence[SparseWeight]) -> dict[str, torch.Tensor]:
    """Copy the pretrained values at the active positions, by parameter name, without 4-bit weights."""
    found = ((weight.name, weight.base_values()) for weight in weights)
    return {name: values.clone() for name, values in found if values is not None}


def save(
    folder: str | Path,
    model: nn.Module,
    weights: Sequence[SparseWeight],
    config: SFTConfig,
    *,
    writes: bool,
    base_model_name: str | None,
) -> None:
    """Write the deltas, the settings and a hash of each base tensor (a collective if weights are sharded).

    Args:
        folder: Destination folder.
        model: The model.
        weights: Trained tensors of the model.
        config: Settings.
        writes: Whether this rank writes the files.
        base_model_name: Folder or hub id of the base model.

    Raises:
        ValueError: If a delta is not finite.
    """
    names = {weight.name for weight in weights}
    named = model.named_parameters(remove_duplicate=False)
    base: dict[str, torch.Tensor] = {name_before(name, names): parameter for name, parameter in named}
    in_shards = [weight for weight in weights if not weight.pretrained.is_whole]
    for weight in in_shards:
        like = torch.empty(weight.target.shape, dtype=weight.target.parameter.dtype, device="meta")
        base |= {name: like for name, each in base.items() if each is weight.target.parameter}
    hashes = {weight.name: hash_tensor(weight.pretrained.whole()) for weight in in_shards}
    if not writes:
        return
    settings = asdict(config)
    if config.targets is not None:
        settings["targets"] = [each if isinstance(each, str) else each.__name__ for each in config.targets]
    save_pretrained(
        folder,
        copy_deltas(weights),
        config=settings,
        base=base,
        base_values=copy_base_values(weights),
        base_hashes=hashes,
        base_model_name=base_model_name,
    )
