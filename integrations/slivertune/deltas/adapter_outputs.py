"""Outputs that verify a merge: of the model for eight tokens, and of each adapted layer by itself.

Each layer is verified separately, because an error in one may be small beside the effect of all others.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from slivertune.core.forward_trace import dummy_batch
from slivertune.deltas.adapter_load import base_name

TOLERANCE = 1e-3
"""Largest difference, as a fraction of the adapter's own effect."""
_ROUNDING = 1e-5
"""Largest difference, as a fraction of the largest output, for fp32 sums in another order over many layers."""
_ROUNDING_OF_LAYER = 1e-6
"""The same of one layer that computes in fp64: its merged weights are sums that are rounded to fp32 (6e-8)."""
_NUM_TOKENS = 8
_MOST_ROWS = 4096
"""Number of an embedding's rows that are compared."""


def choose_inputs(model: Any, tokens: Sequence[int]) -> dict[str, torch.Tensor]:
    """Make inputs for a model: eight different ids, or an image or sound of noise.

    Args:
        model: The base.
        tokens: Ids that must be among the first.
    """
    batch = dict(dummy_batch(model))
    name, config = model.main_input_name, model.config
    if name == "input_features":
        batch[name] = torch.zeros(1, config.num_mel_bins, 2 * config.max_source_positions, dtype=torch.float32)
    elif name == "input_values":
        batch[name] = torch.zeros(1, 4000, dtype=torch.float32)
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    return {name: draw(each.shape) if each.is_floating_point() else _ids(model, tokens) for name, each in batch.items()}


def _ids(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    rows = int(model.get_input_embeddings().weight.shape[0])
    # Ids of padding, images and the like have special meanings, so they are left out.
    named = [value for name, value in model.config.to_dict().items() if name.endswith("token_id")]
    special = {each for value in named for each in (value if isinstance(value, (list, tuple)) else [value])}
    spread = (each for each in range(0, rows, max(1, rows // (2 * _NUM_TOKENS))) if each not in special)
    return torch.tensor([list(dict.fromkeys((*(each for each in tokens if each < rows), *spread)))[:_NUM_TOKENS]])


@torch.no_grad()
def outputs_of(model: Any, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Run a model; return its logits, or the first floating-point tensor of its outputs, in fp32."""
    with torch.random.fork_rng(devices=[]):
        # Some models draw random numbers in every forward.
        torch.manual_seed(0)
        found = model(**inputs)
    tensors = (each for each in found.values() if isinstance(each, torch.Tensor) and each.is_floating_point())
    return next(tensors).float()


@dataclass(frozen=True, slots=True)
class LayerOutputs:
    """Outputs of a layer without and with the adapter, in fp64."""

    base: torch.Tensor
    adapted: torch.Tensor
    run: Callable[[nn.Module], torch.Tensor]
    """Function that runs the same layer of a model on the same inputs."""


@torch.no_grad()
def outputs_of_layers(model: Any, tokens: Sequence[int]) -> dict[str, LayerOutputs]:
    """Run each adapted layer and each expert of an adapted stack; return the outputs by their path in the base.

    Args:
        model: The base with the adapter attached, not merged.
        tokens: Ids that must be among the rows.

    Raises:
        ValueError: If the adapter changes a layer of another kind, which can't be run by itself.
    """
    from peft.tuners.lora.layer import ParamWrapper
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    found: dict[str, LayerOutputs] = {}
    layers: list[tuple[str, Any]] = [each for each in model.named_modules() if isinstance(each[1], BaseTunerLayer)]
    for path, layer in layers:
        name = base_name(path)
        if isinstance(layer, ParamWrapper):
            found[f"{name}.{layer.parameter_name}"] = _outputs_of_stack(name, layer)
        elif name not in found and not isinstance(layer.get_base_layer(), AuxiliaryTrainingWrapper):  # refused later
            inputs = _inputs_of_layer(layer.get_base_layer(), tokens)
            if inputs is None:
                raise ValueError(
                    f"{name} is a {type(layer.get_base_layer()).__name__}, whose merge can't be checked. Use the "
                    "adapter by PEFT"
                )
            run = partial(_run_layer, name=name, inputs=inputs)
            found[name] = LayerOutputs(_wide(layer.get_base_layer())(inputs), _wide(layer)(inputs), run)
    return found


def _run_layer(model: nn.Module, *, name: str, inputs: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = _wide(model.get_submodule(name))(inputs)
    return output


def _wide(layer: nn.Module) -> nn.Module:
    """Copy a layer to fp64, in which the sums of fp32 weights have no rounding worth mentioning."""
    return copy.deepcopy(layer).double()


def _outputs_of_stack(name: str, layer: Any) -> LayerOutputs:
    """Run each expert of a stack of weights, whether a token is sent to it or not, as a linear layer."""
    (adapter,) = layer.active_adapters
    # Experts lie as (out, in), or as (in, out) in modules that say so to PEFT.
    is_turned = layer.num_experts > 1 and getattr(layer.get_base_layer(), "is_transposed", False)
    inputs = _noise(_NUM_TOKENS, layer.in_features)
    run = partial(_run_stack, name=f"{name}.{layer.parameter_name}", inputs=inputs, is_turned=is_turned)
    base = _products(layer.get_param(), inputs, is_turned=is_turned)
    a, b = (factor[adapter].weight.double() for factor in (layer.lora_A, layer.lora_B))
    rank, num_experts = layer.r[adapter], layer.num_experts
    # Rows of A: the ranks of one expert after those of another; columns of B: the experts of each rank.
    deltas = [
        inputs @ a[expert * rank : (expert + 1) * rank].T @ b[:, expert::num_experts].T for expert in range(num_experts)
    ]
    return LayerOutputs(base, base + layer.scaling[adapter] * torch.stack(deltas), run)


def _run_stack(model: nn.Module, *, name: str, inputs: torch.Tensor, is_turned: bool) -> torch.Tensor:
    return _products(model.get_parameter(name), inputs, is_turned=is_turned)


def _products(weights: torch.Tensor, inputs: torch.Tensor, *, is_turned: bool) -> torch.Tensor:
    stack = weights if weights.ndim == 3 else weights[None]
    return torch.stack([inputs @ (each if is_turned else each.T).double() for each in stack])


def _inputs_of_layer(layer: nn.Module, tokens: Sequence[int]) -> torch.Tensor | None:
    from transformers.pytorch_utils import Conv1D

    if isinstance(layer, nn.Embedding):
        spread = range(0, layer.num_embeddings, -(-layer.num_embeddings // _MOST_ROWS))
        return torch.tensor(sorted({*spread, *(each for each in tokens if each < layer.num_embeddings)}))
    if isinstance(layer, (nn.Linear, Conv1D)):
        return _noise(_NUM_TOKENS, layer.nx if isinstance(layer, Conv1D) else layer.in_features)
    if isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return _noise(_NUM_TOKENS, layer.in_channels, *layer.kernel_size)
    return None


def _noise(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@torch.no_grad()
def check_layers(outputs: Mapping[str, LayerOutputs], model: nn.Module) -> None:
    """Check that each layer of a merged model gives the outputs of the base's layer with the adapter.

    Args:
        outputs: Outputs from `outputs_of_layers`.
        model: The merged model.

    Raises:
        ValueError: If a layer differs; names the first one.
    """
    for path, layer in outputs.items():
        check_outputs(layer.base, layer.adapted, layer.run(model), where=path, rounding=_ROUNDING_OF_LAYER)


def check_outputs(
    base: torch.Tensor,
    adapted: torch.Tensor,
    merged: torch.Tensor,
    *,
    where: str = "the model",
    rounding: float = _ROUNDING,
) -> None:
    """Check that merged weights, before rounding, give the outputs of the base with the adapter.

    Args:
        base: Outputs of the base alone; if the vocabulary was resized since, those of its first tokens.
        adapted: Outputs of the base with the adapter attached.
        merged: Outputs of the merged weights.
        where: Name of the layer or model, for the error.
        rounding: Difference that is allowed in any case, as a fraction of the largest output.

    Raises:
        ValueError: If they differ by more than `TOLERANCE` of the adapter's own effect, and by more than rounding.
    """
    known = min(adapted.shape[-1], base.shape[-1])
    effect = (adapted[..., :known] - base[..., :known]).abs().max()
    difference = (merged - adapted).abs().max()
    limit = max(TOLERANCE * effect, rounding * adapted.abs().max())
    # Written so that NaN fails: a comparison with NaN is false.
    if not difference <= limit:
        raise ValueError(
            f"{where} puts out {float(difference):.3g} more or less than with the adapter beside it. The adapter's own "
            f"effect is {float(effect):.3g}, and {float(limit):.3g} is allowed. Use the adapter by PEFT instead"
        )
