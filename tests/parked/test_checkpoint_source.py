"""Exact weights that stay in the files of a checkpoint, whatever happens to those files."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from slivertune import Ledger, load_quantized, park_layers
from slivertune.parked.checkpoint_source import CheckpointTensor
from slivertune.parked.exact_source import HostCopy
from slivertune.parked.quantized_weight import held_by
from tests.helpers.models import differing, tiny_llama, weights
from tests.parked.test_park import by_hand, loss_of, with_lora

NAME = "base_model.model.model.layers.1.mlp.up_proj.base_layer.weight"


def saved(folder: Path, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Path:
    tiny_llama(dtype, blocks=4).save_pretrained(folder, **options)
    return folder


def loaded(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Any:
    return with_lora(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype))


def sources(model: nn.Module) -> list[type]:
    return [type(held.source) for held in map(held_by, model.modules()) if held is not None]


@pytest.mark.parametrize("shards", [{}, {"max_shard_size": 20_000}], ids=["one file", "several"])
@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_of_a_checkpoint_keep_no_copy_in_memory(
    dtype: torch.dtype, place: Any, shards: Any, tmp_path: Path
) -> None:
    model = loaded(saved(tmp_path, **shards), dtype)
    before, dense = weights(model), by_hand(model, "nf4")
    with Ledger(model) as ledger:
        handle = park_layers(model, form="nf4", place=place)
        assert torch.equal(loss_of(model), loss_of(dense))
        assert place == "host" or ledger.current().host == 0
    assert set(sources(model)) == {CheckpointTensor}
    shown = model.state_dict()
    assert all(torch.equal(shown[name] + 0, value) for name, value in before.items())
    handle.remove()
    assert differing(weights(model), before) == []


def test_a_weight_that_has_changed_since_it_was_loaded_is_copied(tmp_path: Path) -> None:
    model = loaded(saved(tmp_path))
    model.get_parameter(NAME).data[0, 0] += 1
    before = weights(model)
    handle = park_layers(model, form="int8", place="device")
    kinds = sources(model)
    assert kinds.count(HostCopy) == 1 and kinds.count(CheckpointTensor) == len(kinds) - 1 > 0
    handle.remove()
    assert differing(weights(model), before) == []


def test_a_weight_that_is_written_later_is_copied_then(tmp_path: Path) -> None:
    model = loaded(saved(tmp_path))
    new = torch.randn_like(model.get_parameter(NAME))
    handle = park_layers(model, form="int8", place="device")
    loss_of(model)
    for value in (new, new + 1):
        model.get_parameter(NAME).data = value.clone()
        loss_of(model)
        assert torch.equal(model.state_dict()[NAME] + 0, value)
    handle.remove()
    assert torch.equal(model.get_parameter(NAME).detach(), new + 1)


def remove(folder: Path) -> None:
    shutil.rmtree(folder)


def replace(folder: Path) -> None:
    tensors = {name: value * 0 for name, value in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "new")
    (folder / "new").replace(folder / "model.safetensors")


@pytest.mark.parametrize("change", [remove, replace])
def test_a_folder_may_be_removed_or_replaced(change: Any, tmp_path: Path) -> None:
    model = loaded(saved(tmp_path / "base"))
    before = weights(model)
    handle = park_layers(model, form="int8", place="device")
    change(tmp_path / "base")
    handle.remove()
    assert differing(weights(model), before) == []


def test_a_file_that_is_written_in_place_is_an_error_that_names_it(tmp_path: Path) -> None:
    model = loaded(saved(tmp_path))
    handle = park_layers(model, form="int8", place="device")
    loss_of(model)
    path = tmp_path / "model.safetensors"
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\1")
    os.utime(path, (1, 1))
    assert loss_of(model).isfinite(), "the codes are there"
    with pytest.raises(RuntimeError, match=r"safetensors has changed since its weights were parked.*another folder"):
        model.state_dict()[NAME] + 0
    with pytest.raises(RuntimeError, match=r"has changed since"):
        handle.remove()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    handle.remove()  # goes on
    assert not any(each.isnan().any() for each in model.parameters())


def test_a_model_that_came_quantised_gives_up_its_copies(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    model = with_lora(load_quantized(AutoModelForCausalLM, folder, "int8"))
    assert set(sources(model)) == {HostCopy}
    dense = by_hand(loaded(folder), "int8")
    park_layers(model, form="int8", place="device")
    assert set(sources(model)) == {CheckpointTensor}
    assert torch.equal(loss_of(model), loss_of(dense))
