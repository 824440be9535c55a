"""Outputs that verify a merge: of the model for eight tokens, and of each adapted layer by itself.

Each layer is verified separately, because an error in one may be small beside the effect of all others.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from slivertune.core.dummy_batch import dummy_batch
from slivertune.deltas.adapter_load import base_name

TOLERANCE = 1e-3
"""Largest difference, as a fraction of the adapter's own effect."""
_ROUNDING = 1e-5
"""Smallest limit for a model, as a fraction of the largest output: rounding errors of fp32 over many layers."""
_ROUNDING_OF_LAYER = 1e-6
"""Smallest limit for a layer: rounding errors of merged weights in fp32. Up to 2e-7 were measured for 4,096 inputs."""
_NUM_TOKENS = 8
_MOST_ROWS = 4096
"""Number of an embedding's rows that are compared."""


def choose_inputs(model: Any, tokens: Sequence[int]) -> dict[str, torch.Tensor]:
    """Make inputs for a model: eight different ids, or an image or sound of noise.

    Args:
        model: The base.
        tokens: Ids that must be among the first.
    """
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    inputs = {}
    for name, each in dummy_batch(model).items():
        if each.is_floating_point():
            inputs[name] = draw(each.shape)
        else:  # ids are zeros, and the form of an image is not
            inputs[name] = each if each.any() else _ids(model, tokens)
    return inputs


def _ids(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    rows = int(model.get_input_embeddings().weight.shape[0])
    # Ids of padding, images and the like have special meanings, so they are left out.
    named = [value for name, value in model.config.to_dict().items() if name.endswith("token_id")]
    special = {each for value in named for each in (value if isinstance(value, (list, tuple)) else [value])}
    spread = (each for each in range(0, rows, max(1, rows // (2 * _NUM_TOKENS))) if each not in special)
    return torch.tensor([list(dict.fromkeys((*(each for each in tokens if each < rows), *spread)))[:_NUM_TOKENS]])


@torch.no_grad()
def outputs_of(model: Any, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Run a model. Return its logits, or the first floating-point tensor of its outputs, in fp32."""
    with torch.random.fork_rng(devices=[]):
        # Some models draw random numbers in every forward.
        torch.manual_seed(0)
        found = model(**inputs)
    tensors = (each for each in found.values() if isinstance(each, torch.Tensor) and each.is_floating_point())
    return next(tensors).float()


@dataclass(frozen=True, slots=True)
class LayerOutputs:
    """Inputs of a layer, and its outputs without and with the adapter."""

    inputs: torch.Tensor
    base: torch.Tensor
    adapted: torch.Tensor


@torch.no_grad()
def outputs_of_layers(model: Any, tokens: Sequence[int]) -> dict[str, LayerOutputs]:
    """Run each adapted linear layer, convolution and embedding. Return the outputs by the layer's path in the base.

    Linear layers and convolutions run in fp64.

    Args:
        model: The base with the adapter attached, not merged.
        tokens: Ids that must be among the rows.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    found: dict[str, LayerOutputs] = {}
    layers: list[tuple[str, Any]] = [each for each in model.named_modules() if isinstance(each[1], BaseTunerLayer)]
    for path, layer in layers:
        inputs = _inputs_of_layer(layer.get_base_layer(), tokens)
        if inputs is not None and base_name(path) not in found:
            with _run_on(layer, inputs):
                found[base_name(path)] = LayerOutputs(inputs, layer.get_base_layer()(inputs), layer(inputs))
    return found


def _inputs_of_layer(layer: nn.Module, tokens: Sequence[int]) -> torch.Tensor | None:
    from transformers.pytorch_utils import Conv1D

    if isinstance(layer, nn.Embedding):
        spread = range(0, layer.num_embeddings, -(-layer.num_embeddings // _MOST_ROWS))
        return torch.tensor(sorted({*spread, *(each for each in tokens if each < layer.num_embeddings)}))
    if isinstance(layer, (nn.Linear, Conv1D)):
        num_inputs = layer.nx if isinstance(layer, Conv1D) else layer.in_features
        return torch.randn(_NUM_TOKENS, num_inputs, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    if isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        sizes = [each * (size - 1) + 2 for each, size in zip(layer.dilation, layer.kernel_size, strict=True)]
        draw = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        return draw(1, layer.in_channels, *sizes)
    return None


@contextmanager
def _run_on(layer: nn.Module, inputs: torch.Tensor) -> Iterator[None]:
    """Convert an fp32 layer to fp64 if its inputs are, and back, which changes no value.

    Embeddings stay in fp32. They sum nothing but, with DoRA, the norms over all rows, which are in fp32 in the merge.
    """
    if inputs.is_floating_point():
        layer.double()
    try:
        yield
    finally:
        layer.float()


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
        module = model.get_submodule(path)
        with _run_on(module, layer.inputs):
            found = module(layer.inputs)
        check_outputs(layer.base, layer.adapted, found, where=path, rounding=_ROUNDING_OF_LAYER)


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
        rounding: Smallest limit, as a fraction of the largest output.

    Raises:
        ValueError: If they differ by more than `TOLERANCE` of the adapter's own effect, or by more than `rounding` of
            the largest output if that is more.
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
