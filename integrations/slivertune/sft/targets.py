"""Choice of the tensors that SFT trains: weights of matrix products, or the tensors that the user names."""

import math
import re
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from slivertune.core.layers import find_blocks, find_layers, no_blocks
from slivertune.core.parameters import held_parameters, whole_shape
from slivertune.core.torch_internals import BatchNorm
from slivertune.core.typed_command import setting_name
from slivertune.deltas.delta import INDEX_LIMIT
from slivertune.sft.config import DEFAULT_LORA_RANK, SFTConfig
from slivertune.sft.selection import spread_weights
from slivertune.sft.sm3 import matrix_shape

_WITH_HEAD = re.compile(r"For\w*(?:Classification|MultipleChoice|QuestionAnswering)")
"""Classes of transformers whose head is new unless it was fine-tuned."""
_ATTENTION_WEIGHTS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A tensor to train."""

    name: str
    """Name in `model.named_parameters()`."""
    module: nn.Module
    """Module that owns the tensor."""
    attribute: str
    """Name of the tensor in its module."""
    shape: tuple[int, ...]
    """Shape of the dense tensor."""
    num_experts: int = 1
    """Number of experts whose matrices the tensor stacks, or 1 if it belongs to no expert."""
    is_shared: bool = False
    """Whether another module holds the tensor, too."""

    @property
    def parameter(self) -> nn.Parameter:
        """The module's present tensor, or a 4-bit tensor's codes. Some layouts exchange it in every step."""
        found: nn.Parameter = getattr(self.module, self.attribute)
        return found

    @property
    def is_4bit(self) -> bool:
        """Whether the tensor is quantised to 4 bits."""
        return is_4bit(self.parameter)

    @property
    def num_elements(self) -> int:
        """Number of elements of the dense tensor."""
        return math.prod(self.shape)

    def lora_numbers(self, rank: int) -> int:
        """Count the parameters that LoRA would train beside the tensor: rank x (in + out) per expert's matrix."""
        if self.num_experts == 1:
            return rank * sum(matrix_shape(self.shape))
        columns = self.shape[-1]
        return rank * (self.num_elements // columns + self.num_experts * columns)


def is_4bit(parameter: torch.Tensor) -> bool:
    """Return whether a parameter holds bitsandbytes' 4-bit codes, or stands for them in a memory plan."""
    return hasattr(parameter, "quant_state")


def find_targets(model: nn.Module, config: SFTConfig) -> tuple[Target, ...]:
    """Find the tensors to train, each once, in the model's order.

    Args:
        model: The model.
        config: Settings; `targets` and `embeddings` are read.

    Raises:
        ValueError: If a target matches nothing, nothing is left to train, or a tensor can't be trained sparsely.
    """
    names = set(_default_names(model) if config.targets is None else _listed_names(model, config.targets))
    if config.targets is None:
        _say_untrained_head(model)
    if config.embeddings:
        names |= {f"{path}.weight" for path, each in model.named_modules() if isinstance(each, nn.Embedding)}
    chosen = {id(model.get_parameter(name)) for name in names}
    found = [_target(model, name) for name, parameter in model.named_parameters() if id(parameter) in chosen]
    holders = Counter(id(parameter) for _, parameter in held_parameters(model))
    found = [replace(each, is_shared=holders[id(each.parameter)] > 1) for each in found if each.num_elements]
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no weight to train sparsely: no linear layer or expert of its blocks has a "
            "weight that requires a gradient. Name the weights to train with targets=, or unfreeze it"
        )
    for target in found:
        _check(target)
    _say_running_statistics(model)
    return tuple(found)


def count_weights(targets: tuple[Target, ...], config: SFTConfig) -> list[int]:
    """Count the trained weights of each target.

    Args:
        targets: The tensors.
        config: Settings; `density`, `num_weights` or `equivalent_lora_rank` is read.

    Returns:
        Trained weights of each tensor; the share is the same everywhere, up to rounding. If the default rank needs more
        weights than the targets have, it is lowered with a warning. A rank that was set is not lowered.

    Raises:
        ValueError: If the targets have fewer weights than that.
    """
    sizes = [target.num_elements for target in targets]
    if config.density is not None:
        return [max(1, round(config.density * size)) for size in sizes]
    if config.num_weights is not None:
        return spread_weights(sizes, config.num_weights)
    rank = config.equivalent_lora_rank or DEFAULT_LORA_RANK
    one_rank = sum(target.lora_numbers(1) for target in targets)
    if rank * one_rank > sum(sizes) >= one_rank and config.equivalent_lora_rank is None:
        rank = sum(sizes) // one_rank
        warnings.warn(
            f"the default number of weights (as many as LoRA of rank {DEFAULT_LORA_RANK} trains) is larger than the "
            f"{sum(sizes)} of the targets. SFT trains {rank * one_rank} of them, as LoRA of rank {rank} would. "
            "To change that, give density, num_weights or equivalent_lora_rank",
            stacklevel=2,
        )
    if rank * one_rank > sum(sizes):
        raise ValueError(
            f"LoRA of rank {rank} would train {rank * one_rank} numbers, and the targets have {sum(sizes)}. Lower "
            "equivalent_lora_rank, or give density or num_weights"
        )
    return spread_weights(sizes, rank * one_rank)


def _default_names(model: nn.Module) -> list[str]:
    if not find_blocks(model, are_needed=False):
        way_out = setting_name("--sft_target_modules", "SFTConfig(targets=[...])")
        raise ValueError(f"{no_blocks(model)}. Name the targets with {way_out}")
    layers = find_layers(model)
    in_blocks = {name for layer in layers if layer.kind == "block" for name in layer.parameter_names}
    parameters = list(model.parameters())
    # PEFT's `prepare_model_for_kbit_training` freezes all weights beside the 4-bit ones.
    others_are_frozen = any(map(is_4bit, parameters)) and not any(each.requires_grad for each in parameters)
    names = []
    for name in _matrix_names(model):
        weight = model.get_parameter(name)
        # Quantised codes never require gradients. They are trained, or refused later.
        is_open = weight.requires_grad or is_4bit(weight) or not weight.is_floating_point() or others_are_frozen
        if name in in_blocks and is_open:
            names.append(name)
    return names


def _say_untrained_head(model: nn.Module) -> None:
    """Warn that the head of a classifier, which may be new, is not trained by default."""
    if not any(_WITH_HEAD.search(type(module).__name__) for module in model.modules()):
        return
    head = {name for layer in find_layers(model) if layer.kind == "head" for name in layer.parameter_names}
    names = [name for name in _matrix_names(model) if name in head and model.get_parameter(name).requires_grad]
    if names:
        targets = setting_name("--sft_target_modules", "SFTConfig(targets=[...])")
        warnings.warn(
            f"SFT trains the linear layers of the blocks, and no weight of the head ({', '.join(names)}). A new head "
            f"stays as it was made: begin with a checkpoint that has a trained one, or name it in {targets}",
            UserWarning,
            stacklevel=5,
        )


def _say_running_statistics(model: nn.Module) -> None:
    """Warn of norms whose statistics follow the batches, since no delta holds these."""
    norms = [
        path
        for path, each in model.named_modules()
        if isinstance(each, BatchNorm) and each.running_mean is not None and each.momentum != 0.0
    ]
    if norms:
        warnings.warn(
            f"{norms[0]}{f' and {len(norms) - 1} more norms' if norms[1:] else ''} will change running statistics in "
            "training, which deltas do not hold: the saved deltas would not give the trained model. Set momentum=0.0 "
            "on these norms, or call eval() on them after each train()",
            UserWarning,
            stacklevel=5,
        )


def _matrix_names(module: nn.Module, path: str = "") -> list[str]:
    """List the names of the weights of matrix products in a module and its submodules."""
    return [
        f"{inner}.{attribute}" if inner else attribute
        for inner, each in module.named_modules(prefix=path)
        for attribute in matrices_of(each)
    ]


def _listed_names(model: nn.Module, targets: Sequence[str | type[nn.Module]]) -> list[str]:
    names = []
    for target in targets:
        shown = repr(target) if isinstance(target, str) else target.__name__
        found = [
            name
            for path, module in model.named_modules()
            if (_ends_with(path, target) if isinstance(target, str) else isinstance(module, target))
            for name in _own(module, path, with_inner=isinstance(target, str))
        ]
        if isinstance(target, str):
            found += [name for name, _ in model.named_parameters(remove_duplicate=False) if _ends_with(name, target)]
        if not found:
            raise ValueError(
                f"targets has {shown}, which matches no module with a weight and no parameter of "
                f"{type(model).__name__}. See model.named_modules() and model.named_parameters()"
            )
        names += found
    return names


def _own(module: nn.Module, path: str, *, with_inner: bool) -> list[str]:
    """List the parameters of a named module to train: its weight, or else the matrices that it multiplies by.

    Args:
        module: The module.
        path: Path of the module.
        with_inner: Whether the matrices of its submodules count, too.
    """
    if isinstance(getattr(module, "weight", None), nn.Parameter):
        return [f"{path}.weight"]
    return _matrix_names(module, path) if with_inner else [f"{path}.{each}" for each in matrices_of(module)]


def _ends_with(path: str, end: str) -> bool:
    return path == end or path.endswith(f".{end}")


def _target(model: nn.Module, name: str) -> Target:
    path, _, attribute = name.rpartition(".")
    module, parameter = model.get_submodule(path), model.get_parameter(name)
    # Under ZeRO-3 a parameter's local tensor is empty if its part is elsewhere.
    shape = whole_shape(parameter)
    if is_4bit(parameter):
        state: Any = getattr(parameter, "quant_state", None)
        if state is None:
            raise ValueError(f"{name} is a 4-bit weight that is not quantised yet. Move the model to its device first")
        shape = tuple(state.shape)
    num_experts = matrices_of(module).get(attribute, 1)
    return Target(name=name, module=module, attribute=attribute, shape=shape, num_experts=num_experts)


def _check(target: Target) -> None:
    dtype = target.parameter.dtype
    rules = (
        (
            target.parameter.is_meta,
            (
                "is on the meta device and has no data. Load the model with its weights and without "
                "offloading (accelerate's cpu_offload, disk_offload, a device_map with "
                '"cpu" or "disk"), or name targets that are in memory'
            ),
        ),
        (
            target.num_elements >= INDEX_LIMIT,
            f"has {target.num_elements} elements, and SFT indexes at most 2^31 - 1. Leave it out of targets",
        ),
        (
            isinstance(target.module, nn.Embedding) and target.module.sparse,
            "is an embedding with sparse gradients. Build it with sparse=False",
        ),
        (
            dtype == torch.float16 and not target.is_4bit,
            (
                "is stored in float16, whose range is too small for weights that are trained. Load the model in "
                "bfloat16, or in float32 with fp16 autocast and a GradScaler"
            ),
        ),
        (
            dtype not in (torch.float32, torch.bfloat16) and not target.is_4bit,
            (
                f"is stored as {dtype}. SFT trains fp32 and bf16 weights, and bitsandbytes' 4-bit weights. "
                "Load the model in one of these, or name other targets"
            ),
        ),
    )
    for is_broken, text in rules:
        if is_broken:
            raise ValueError(f"{target.name} {text}")


def matrices_of(module: nn.Module) -> dict[str, int]:
    """Find the parameters by which a module itself, without its submodules, multiplies its inputs.

    * the weight of a linear layer, and the input projections of `nn.MultiheadAttention`;
    * experts: in a module that knows its number of experts, parameters of three dimensions that begin with it, and in a
      class of experts those of two dimensions whose rows are a multiple of it (DBRX);
    * other parameters of three dimensions, such as XLNet's projections, unless one extent is 1 or the module is one of
      torch's own (a convolution is no linear layer).

    Biases, norms, tables and routers, which have one row per expert, are excluded.

    Args:
        module: Any module.

    Returns:
        Number of experts' matrices that each attribute stacks; 1 if it stacks none.
    """
    pytorch_utils: Any = sys.modules.get("transformers.pytorch_utils")
    if isinstance(module, nn.Linear if pytorch_utils is None else (nn.Linear, pytorch_utils.Conv1D)):
        return {"weight": 1} if isinstance(getattr(module, "weight", None), nn.Parameter) else {}
    own = {name: whole_shape(each) for name, each in module.named_parameters(recurse=False)}
    if isinstance(module, nn.MultiheadAttention):
        return {name: 1 for name in own if name in _ATTENTION_WEIGHTS}
    kinds = (kind for kind in type(module).__mro__ if kind is not nn.Module)
    if any(kind.__module__.startswith("torch.nn.modules.") for kind in kinds):
        return {}
    stacked = {name: _num_stacked(module, shape) for name, shape in own.items()}
    return {name: count for name, count in stacked.items() if count}


def _num_stacked(module: nn.Module, shape: tuple[int, ...]) -> int:
    """Count the experts in a parameter, as 1 for a matrix of no expert and 0 for no matrix."""
    values = {value for name, value in vars(module).items() if "experts" in name and type(value) is int}
    num_experts = {value for value in values if value > 0}
    if len(shape) == 3:
        return shape[0] if shape[0] in num_experts else int(min(shape) > 1)
    if len(shape) == 2 and "expert" in type(module).__name__.lower():
        return max((count for count in num_experts if shape[0] > count and shape[0] % count == 0), default=0)
    return 0
