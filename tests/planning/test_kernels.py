from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F

from slivertune.core.ledger import Ledger
from slivertune.planning.fake import without_data
from slivertune.planning.kernels import GpuKernels, Kernels, attend, pick_kernel

BATCH, HEADS, LENGTH, SIZE = 2, 4, 40, 16


def inputs(dtype: torch.dtype, key_heads: int = HEADS) -> list[torch.Tensor]:
    shapes = [(BATCH, LENGTH, heads, SIZE) for heads in (HEADS, key_heads, key_heads)]
    return [torch.zeros(shape, dtype=dtype, requires_grad=True).transpose(1, 2) for shape in shapes]


@pytest.mark.parametrize(
    ("dtype", "key_heads", "has_mask", "expected"),
    [
        (torch.bfloat16, HEADS, False, "flash"),
        (torch.bfloat16, 2, False, "flash"),
        (torch.bfloat16, HEADS, True, "efficient"),
        (torch.float32, HEADS, False, "efficient"),
        (torch.float32, 2, False, "math"),
    ],
)
def test_the_kernel_is_the_one_of_a_gpu(dtype: torch.dtype, key_heads: int, has_mask: bool, expected: str) -> None:
    mask = torch.zeros(BATCH, 1, LENGTH, LENGTH, dtype=dtype) if has_mask else None
    query, key, value = inputs(dtype, key_heads)
    assert pick_kernel(query, key, value, mask) == expected


@pytest.mark.parametrize(("dtype", "key_heads", "rows"), [(torch.bfloat16, 2, 40), (torch.float32, HEADS, 64)])
def test_what_is_kept_are_inputs_output_and_logarithms(dtype: torch.dtype, key_heads: int, rows: int) -> None:
    with without_data():
        query, key, value = inputs(dtype, key_heads)
        with Ledger() as ledger:
            before = ledger.current().residual
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=key_heads < HEADS)
            kept = ledger.current().residual - before
    assert out.shape == (BATCH, HEADS, LENGTH, SIZE)
    # The inputs were there before; no scores, which would take LENGTH elements a row.
    assert kept == out.numel() * dtype.itemsize + 4 * BATCH * HEADS * rows


def test_of_the_cpu_it_is_the_cpus_own_which_stores_no_scores_for_shared_keys() -> None:
    kept = {}
    for kernels in get_args(Kernels):
        with without_data(kernels):
            query, key, value = inputs(torch.float32, 2)
            with Ledger() as ledger:
                out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
                kept[kernels] = ledger.current().residual
        del out
    assert kept["cpu"] < BATCH * HEADS * LENGTH * LENGTH * 4 < kept["gpu"]


def test_the_output_is_laid_out_so_that_no_copy_follows() -> None:
    with without_data():
        out = attend(*inputs(torch.bfloat16))
        assert out.transpose(1, 2).is_contiguous()


def test_each_input_gets_a_gradient_of_its_size() -> None:
    with without_data():
        query, key, value = (each.detach().requires_grad_() for each in inputs(torch.bfloat16, 2))
        attend(query, key, value, is_causal=True, enable_gqa=True).sum().backward()
        for each in (query, key, value):
            assert each.grad is not None and each.grad.shape == each.shape


def test_attention_keeps_what_the_cpus_own_kernel_keeps() -> None:
    """The CPU's kernel keeps the same things; it is the one fused kernel that can be run here."""

    def kept(function: Any) -> int:
        query, key, value = (torch.randn(BATCH, HEADS, 64, SIZE, requires_grad=True) for _ in range(3))
        out = function(query, key, value, is_causal=True)
        saved = [getattr(out.grad_fn, name) for name in dir(out.grad_fn) if name.startswith("_saved_")]
        tensors = [each for each in saved if isinstance(each, torch.Tensor)]
        tensors += [each for each in getattr(out.grad_fn, "saved_tensors", ()) if each is not None]
        return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())

    assert kept(attend) == kept(F.scaled_dot_product_attention)


def test_dropout_keeps_one_byte_an_element() -> None:
    with without_data():
        values = torch.zeros(1000, requires_grad=True)
        with Ledger() as ledger:
            before = ledger.current().residual
            out = F.dropout(values, 0.5)
            assert ledger.current().residual - before == out.nbytes + 1000


def test_autocast_computes_norms_and_softmax_in_fp32_as_on_a_gpu() -> None:
    values, weight = torch.zeros(2, 8, dtype=torch.bfloat16), torch.ones(8, dtype=torch.bfloat16)
    with GpuKernels(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert F.layer_norm(values, (8,), weight).dtype == torch.float32
        assert F.softmax(values, -1).dtype == torch.float32
        assert F.linear(values, torch.ones(8, 8)).dtype == torch.bfloat16
    with GpuKernels():
        assert F.layer_norm(values, (8,), weight).dtype == torch.bfloat16
