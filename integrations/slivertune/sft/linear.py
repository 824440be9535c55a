"""SFT's layer form: a linear layer over W + delta, whose weight stays W (SFT, equations 11 and 12).

The gradient of its active weights is computed without the whole dense gradient (SFT, appendix B).
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from slivertune.core.module_hook import ModuleHook, ReadsWeight
from slivertune.core.sized import sized
from slivertune.deltas.delta import read_flat, write_flat
from slivertune.parked.quantized_weight import held_by
from slivertune.sft.config import PhiGradient
from slivertune.sft.gradient_sync import GradientSync
from slivertune.sft.targets import Target
from slivertune.sft.weight import SparseWeight

CHUNK_ROWS = 1024
"""Largest number of rows of the dense gradient that exist together."""


def check_layer_form(target: Target, phi_gradient: PhiGradient) -> None:
    """Check that a target supports the layer form.

    Raises:
        ValueError: If the target is not the weight of a plain or 4-bit linear layer alone, or its gradient can't be
            sampled.
    """
    module, weight = target.module, target.parameter
    if target.attribute != "weight" or not (target.is_4bit or type(module).forward is nn.Linear.forward):
        raise ValueError(
            f"{target.name} belongs to {type(module).__name__}, and the layer form takes weights of nn.Linear and of "
            'bitsandbytes\' Linear4bit. Use form="optimizer" ("auto" beside 4-bit layers), or '
            "leave it out of targets"
        )
    if target.is_shared:
        raise ValueError(
            f"{target.name} belongs to several modules, and the layer form would add its deltas in one of them. Use "
            'form="optimizer", or leave it out of targets'
        )
    if phi_gradient == "sampled" and (target.is_4bit or weight.dtype != torch.float32 or weight.device.type != "cpu"):
        raise ValueError(
            f'phi_gradient="sampled" takes fp32 on a CPU, and {target.name} is {weight.dtype} on {weight.device}. '
            'Use "chunked"'
        )


class DeltaLayer(ReadsWeight):
    """Makes a linear layer compute X (W + delta)^T while its weight W stays frozen.

    Each product adds the deltas to W in place, in fp32 and rounded once, and restores W's bits afterwards. A 4-bit W is
    dequantised into a temporary, and its codes are never written. Only X is saved for the backward.

    Args:
        weight: Weight of the layer; autograd gives its phi a gradient.
        at: Number of the weight among the trained ones.
        gradient_sync: Receiver of each gradient.
        phi_gradient: Method for phi's gradient.
    """

    def __init__(self, weight: SparseWeight, at: int, gradient_sync: GradientSync, phi_gradient: PhiGradient) -> None:
        self.weight = weight
        self._at = at
        self._gradient_sync = gradient_sync
        self._phi_gradient = phi_gradient
        self._is_active = True
        module = weight.target.module
        self._replaced = vars(module).get("forward")
        self._original: Callable[[torch.Tensor], torch.Tensor] = module.forward
        module.forward = self.forward
        # torch.nn.TransformerEncoder evaluates without calling its layers, unless one of their modules has a hook.
        self._hook = module.register_forward_pre_hook(ModuleHook(None))

    def remove(self) -> None:
        """Restore the layer's own forward."""
        self._is_active = False
        self._hook.remove()
        module = self.weight.target.module
        # If another wrapper was put around ours, ours stays and passes calls through.
        if vars(module).get("forward") != self.forward:
            return
        if self._replaced is None:
            del module.forward
        else:
            module.forward = self._replaced

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Compute the layer's output for inputs of shape (..., in)."""
        if not self._is_active:
            return self._original(inputs)
        self.weight.follow(inputs.device)
        bias: Any = self.weight.target.module.bias
        dtype = self._compute_dtype(inputs)
        apply: Callable[..., torch.Tensor] = _Product.apply
        product = apply(inputs.to(dtype), self.weight.phi, None if bias is None else bias.to(dtype), self)
        return product.to(inputs.dtype) if self.weight.target.is_4bit else product

    def _compute_dtype(self, inputs: torch.Tensor) -> torch.dtype:
        device = inputs.device.type
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
        if not self.weight.target.is_4bit:
            return inputs.dtype
        module: Any = self.weight.target.module
        if not module.compute_type_is_set and inputs.dtype in (torch.float32, torch.bfloat16):
            return inputs.dtype
        chosen: torch.dtype = module.compute_dtype or inputs.dtype
        return chosen

    @contextmanager
    def matrix(self, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """Yield W + delta, shape (out, in), and restore W's bits afterwards."""
        phi, indices = self.weight.phi.data, self.weight.indices.long()
        if self.weight.target.is_4bit:
            dense = dequantised(self.weight.target)
            yield _with_sums(dense, indices, dense.take(indices), phi).to(dtype)
            return
        # `.data` leaves W's version unchanged: others may have saved W for their backward, and its bits are restored.
        held = held_by(self.weight.target.module)
        dense = self.weight.target.parameter.data if held is None else held.dense()
        present = read_flat(dense, self.weight.indices)
        # If a layout gathers shards in a lower precision, the entries of W are rounded already.
        base = present if self.weight.kept_base is None else self.weight.kept_base
        try:
            yield _with_sums(dense, indices, base, phi).to(dtype)
        finally:
            write_flat(dense, indices, present)

    def phi_gradient(self, output_gradient: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """Compute the gradient of phi in fp32, and show the dense one to the growth estimators, chunk by chunk."""
        serial = self._gradient_sync.begin()
        active = self.weight.indices
        if self._phi_gradient == "sampled" and not self.weight.estimators:
            return sampled_gradient(output_gradient, inputs, active)
        cuts = self.weight.cuts(chunk_edges(output_gradient.shape[1], inputs.shape[1]))
        if not self.weight.estimators:
            return chunked_gradient(output_gradient, inputs, active, cuts)
        show = partial(self._gradient_sync.show, self._at, active=active, serial=serial)
        return chunked_gradient(output_gradient, inputs, active, cuts, on_chunk=show)


def dequantised(target: Target) -> torch.Tensor:
    """Return a dense copy of a 4-bit weight, shape (out, in), in the dtype before quantisation.

    Raises:
        RuntimeError: If bitsandbytes has repacked the codes for inference on the CPU.
    """
    parameter: Any = target.parameter
    state = parameter.quant_state
    if hasattr(state, "dense_copy"):  # of a memory plan, which has only sizes
        copy: torch.Tensor = state.dense_copy(parameter)
        return copy
    import bitsandbytes.functional

    if getattr(state, "packing_format_for_cpu", False):
        raise RuntimeError(
            f"{target.name} was repacked by bitsandbytes for inference on the CPU. Call model.train() before the first "
            "forward, or load the model again"
        )
    dense: torch.Tensor = bitsandbytes.functional.dequantize_4bit(parameter.data, state)
    return dense.view(target.shape)


def _with_sums(dense: torch.Tensor, indices: torch.Tensor, base: torch.Tensor, phi: torch.Tensor) -> torch.Tensor:
    write_flat(dense, indices, (base.float() + phi).to(dense.dtype))
    return dense


class _Product(torch.autograd.Function):
    """Product Y = X (W + delta)^T + b."""

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, phi: torch.Tensor, bias: torch.Tensor | None, layer: DeltaLayer
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs)
        ctx.layer, ctx.version = layer, layer.weight.version
        with layer.matrix(inputs.dtype) as matrix:
            return F.linear(inputs, matrix, bias)

    @staticmethod
    def backward(ctx: Any, output_gradient: torch.Tensor) -> Any:
        (inputs,) = ctx.saved_tensors
        layer: DeltaLayer = ctx.layer
        if layer.weight.version != ctx.version:
            raise RuntimeError(
                f"the deltas of {layer.weight.name} were updated between a forward and its backward, whose gradient "
                "would be of neither. Call forward, backward and step in this order"
            )
        flat_gradient = output_gradient.reshape(-1, output_gradient.shape[-1])
        input_gradient = phi_gradient = bias_gradient = None
        if ctx.needs_input_grad[0]:
            with layer.matrix(inputs.dtype) as matrix:
                input_gradient = torch.mm(flat_gradient, matrix).view(inputs.shape)
        if ctx.needs_input_grad[1]:
            phi_gradient = layer.phi_gradient(flat_gradient, inputs.reshape(-1, inputs.shape[-1]))
        if ctx.needs_input_grad[2]:
            bias_gradient = flat_gradient.sum(0)
        return input_gradient, phi_gradient, bias_gradient, None


@sized
def chunked_gradient(
    output_gradient: torch.Tensor,
    inputs: torch.Tensor,
    indices: torch.Tensor,
    cuts: Sequence[int],
    on_chunk: Callable[[torch.Tensor, int], None] | None = None,
) -> torch.Tensor:
    """Compute dY^T X some rows at a time, and keep the active entries of each chunk.

    It costs the same products as the dense gradient, and memory for `CHUNK_ROWS` of its rows.

    Args:
        output_gradient: Gradient dY, shape (tokens, out).
        inputs: Inputs X, shape (tokens, in), of the same dtype.
        indices: Sorted flat positions in the (out, in) matrix, int32, shape (n,).
        cuts: Numbers of positions below each of `chunk_edges`.
        on_chunk: Function that gets each flat chunk and the flat position of its first entry.

    Returns:
        Gradient, fp32, shape (n,). It has the bits of the dense gradient's entries, if the matrix product sums each
        entry in an order that does not depend on the number of rows.
    """
    num_columns = inputs.shape[1]
    edges = chunk_edges(output_gradient.shape[1], num_columns)
    gradient = torch.empty(indices.numel(), dtype=torch.float32, device=indices.device)
    buffer = inputs.new_empty(edges[1] // num_columns, num_columns)
    for edge, end, first, last in zip(edges, edges[1:], cuts, cuts[1:], strict=False):
        rows = output_gradient[:, edge // num_columns : end // num_columns]
        chunk = torch.mm(rows.t(), inputs, out=buffer[: rows.shape[1]]).view(-1)
        gradient[first:last] = chunk.index_select(0, indices[first:last] - edge)
        if on_chunk is not None:
            on_chunk(chunk, edge)
    return gradient


def chunk_edges(num_rows: int, num_columns: int) -> tuple[int, ...]:
    """Return the flat positions at which the chunks of a dense gradient begin, and the number of its elements."""
    # All chunks have one size: another kernel would sum a rest of a few rows in another order.
    chunk_rows = math.ceil(num_rows / math.ceil(num_rows / CHUNK_ROWS))
    return tuple(row * num_columns for row in (*range(0, num_rows, chunk_rows), num_rows))


def sampled_gradient(output_gradient: torch.Tensor, inputs: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Compute only the active entries of dY^T X, by one dot product each (SFT, equation 16).

    Args:
        output_gradient: Gradient dY, fp32, shape (tokens, out), on the CPU.
        inputs: Inputs X, fp32, shape (tokens, in), on the CPU.
        indices: Sorted flat positions in the (out, in) matrix, int32, shape (n,).

    Returns:
        Gradient, fp32, shape (n,), summed in another order than in the dense product.
    """
    num_rows, num_columns = output_gradient.shape[1], inputs.shape[1]
    positions = indices.long()
    edges = torch.arange(num_rows + 1, device=indices.device) * num_columns
    with warnings.catch_warnings():
        # torch warns at the first use that its CSR tensors are a beta feature.
        warnings.simplefilter("ignore", UserWarning)
        pattern = torch.sparse_csr_tensor(
            torch.searchsorted(positions, edges),
            positions % num_columns,
            torch.zeros(indices.numel(), dtype=torch.float32, device="cpu"),
            size=(num_rows, num_columns),
            device="cpu",
            check_invariants=False,
        )
        products: torch.Tensor = torch.sparse.sampled_addmm(pattern, output_gradient.t(), inputs, beta=0.0)
        return products.values()
