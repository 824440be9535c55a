"""Load a checkpoint whose exact weights do not fit on the device: one tensor at a time, from safetensors.

The linear weights of the blocks go to host memory, and are on the device as codes (`quantized_layers`). All other
tensors are loaded exactly.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import nn

from slivertune.core.copy_streams import copy_streams
from slivertune.core.empty_model import make_empty
from slivertune.core.layers import find_blocks
from slivertune.core.refused_pairs import attach_feature
from slivertune.core.setting_checks import check_choice
from slivertune.parked.block_codes import check_available
from slivertune.parked.forms import CodesForm
from slivertune.parked.quantized_layers import hold, linear_modules
from slivertune.parked.quantized_weight import quantized_weight_on
from slivertune.parked.safetensors_files import file_by_tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_quantized(
    model_class: Any,
    name_or_path: str | Path,
    form: CodesForm,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    **config_options: Any,
) -> "PreTrainedModel":
    """Load a model whose blocks are quantised from the beginning, as `park_for_hift` leaves it.

    At no time does the device hold more than embeddings, norms, heads, codes and one more weight. Host memory holds at
    most the exact weights of the blocks (2 bytes per element in bf16) and one more.

    Args:
        model_class: Model class of transformers with `from_pretrained`, such as `AutoModelForCausalLM` or
            `LlamaForCausalLM`.
        name_or_path: Folder with safetensors, or name of a model on the hub.
        form: Kind of codes, `waiting` in `HiFTConfig`.
        dtype: Dtype of the weights: bfloat16 or float32.
        device: Device on which the model computes. A Trainer or `to` may move it later.
        **config_options: Options of `AutoConfig.from_pretrained`.

    Returns:
        Model in evaluation mode; `HiFT` with the same kind as `waiting` trains it.

    Raises:
        ImportError: If the library of the codes is not installed.
        FileNotFoundError: If there are no safetensors.
        TypeError: If `model_class` is not a model class of transformers.
        ValueError: If a weight can't be quantised, or the names in the files are not the model's, with some of them.

    Example:
        >>> model = slivertune.load_quantized(AutoModelForCausalLM, path, "nf4", device="cuda")
        >>> config = slivertune.HiFTConfig(waiting="nf4")
        >>> optimizer = slivertune.HiFT(model, torch.optim.AdamW, config=config, lr=2e-5)
    """
    from transformers import AutoConfig, GenerationConfig  # takes two seconds, which `import slivertune.hift` avoids

    check_choice("form", form, get_args(CodesForm))
    check_available(form)
    folder = _folder_of(name_or_path)
    config = AutoConfig.from_pretrained(folder, **config_options)
    model = make_empty(model_class, config, dtype)
    model.tie_weights()
    files = file_by_tensor(folder)
    _check_names(model, files)
    linear = linear_modules(model, [block for _, block in find_blocks(model)])
    attach_feature(model, "quantised layers", linear.values())
    streams_of = cache(copy_streams)
    for name, tensor in _tensors(folder, files):
        # An exact weight goes to host memory first. The first forward on the device makes codes of it.
        _set_tensor(model, name, tensor.to("cpu" if name in linear else device, dtype))
        if name in linear:
            hold(quantized_weight_on(linear[name], name, form), streams_of)
    model.tie_weights()
    if (folder / "generation_config.json").is_file() and model.can_generate():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.to(device).eval()  # type: ignore[no-any-return]


def _folder_of(name_or_path: str | Path) -> Path:
    folder = Path(name_or_path)
    if folder.is_dir():
        return folder
    return Path(snapshot_download(str(name_or_path), allow_patterns=["*.json", "*.safetensors"]))


def _check_names(model: nn.Module, files: Mapping[str, str]) -> None:
    parameters, present = dict(model.named_parameters(remove_duplicate=False)), model.state_dict().keys()
    known = {id(parameters[name]) for name in files if name in parameters}
    lost = [name for name, parameter in parameters.items() if id(parameter) not in known]
    strange = [name for name in files if name not in present]
    if lost or strange:
        raise ValueError(
            f"the names in the files are not those of {type(model).__name__} (without a tensor: {lost[:3]}; unknown: "
            f"{strange[:3]}). Load it by from_pretrained in host memory, which may convert them, and save it by "
            "save_pretrained(folder, save_original_format=False). Or call slivertune.park_for_hift(model, "
            "config) before it is moved to the device"
        )


def _tensors(folder: Path, files: Mapping[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
    for name in sorted(set(files.values())):
        with safe_open(folder / name, "pt") as file:
            for key in file.keys():  # noqa: SIM118 - a safetensors file is no mapping
                yield key, file.get_tensor(key)


def _set_tensor(model: nn.Module, name: str, value: torch.Tensor) -> None:
    path, _, attribute = name.rpartition(".")
    module = model.get_submodule(path)
    is_parameter = isinstance(getattr(module, attribute), nn.Parameter)
    setattr(module, attribute, nn.Parameter(value) if is_parameter else value)
