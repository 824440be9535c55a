"""Quantised weights: codes of blocks of 64 elements, with one scale per block.

int8: each element is the nearest of 127 steps of either sign, up to its block's largest absolute value (8.25 bits per
bf16 weight). It needs torch alone. nf4: NormalFloat with double quantisation (4.13 bits; QLoRA, arXiv 2305.14314,
section 3), by bitsandbytes' kernels.

Temporaries are bounded: quantisation reads `_CHUNK` elements of a weight at a time.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from slivertune.core.missing_library import missing_library
from slivertune.core.torch_internals import is_without_data
from slivertune.parked.forms import CodesForm

_BLOCK = 64
"""Elements per scale."""
_SCALES_BLOCK = 256
"""NF4 scales per second-level scale."""
_CHUNK = 2**22
"""Elements quantised at a time, a multiple of `_BLOCK`."""
_CPU_CHUNK = 2**14
"""Elements quantised at a time by bitsandbytes on a CPU, with 64 bytes of temporaries per element."""


class BlockCodes(ABC):
    """Codes of one quantised weight."""

    @abstractmethod
    def dense(self) -> torch.Tensor:
        """Dequantise the weight into a new tensor of its original shape and dtype."""

    @abstractmethod
    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield all stored tensors."""


def quantize(weight: torch.Tensor, form: CodesForm) -> BlockCodes:
    """Quantise a weight on its device.

    Args:
        weight: Weight in bf16 or fp32, any shape, not empty.
        form: Kind of codes.

    Raises:
        ImportError: If nf4's package is not installed.
    """
    return Int8Codes(weight) if form == "int8" else Nf4Codes(weight)


def check_available(form: CodesForm) -> None:
    """Check that the library of a form is installed.

    Raises:
        ImportError: If it is not, with the library's name.
    """
    if form == "nf4":
        _bitsandbytes()


class Int8Codes(BlockCodes):
    """int8 codes in steps of 1/127 of a block's largest absolute value, with scales in the weight's dtype.

    Args:
        weight: Weight to quantise.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self._shape, num_blocks = weight.shape, -(-weight.numel() // _BLOCK)
        self._steps = torch.empty(num_blocks, _BLOCK, dtype=torch.int8, device=weight.device)
        self._scales = torch.empty(num_blocks, 1, dtype=weight.dtype, device=weight.device)
        for start, blocks in _chunks(weight):
            stop = start + len(blocks)
            scales = blocks.abs().amax(1, keepdim=True).div_(127).to(weight.dtype)
            self._scales[start:stop] = scales
            # All steps are 0 if a block is 0 or its scale rounds to 0.
            quotient = blocks.div_(scales.float().clamp_(min=torch.finfo(torch.float32).tiny))
            self._steps[start:stop] = quotient.round_().clamp_(-127, 127)

    def dense(self) -> torch.Tensor:
        """Dequantise the weight: steps times scales, rounded once."""
        flat = (self._steps * self._scales).view(-1)
        return flat[: self._shape.numel()].view(self._shape)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield steps and scales."""
        yield from (self._steps, self._scales)


class Nf4Codes(BlockCodes):
    """4-bit codes of bitsandbytes, with the same bits as its `quantize_4bit(compress_statistics=True)`.

    Args:
        weight: Weight to quantise.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        functional = _bitsandbytes()
        self._codes = torch.empty(-(-weight.numel() // 2), 1, dtype=torch.uint8, device=weight.device)
        scales = torch.empty(-(-weight.numel() // _BLOCK), dtype=torch.float32, device=weight.device)
        flat = weight.detach().reshape(-1)
        # A plan's weights report the CPU as their device, but its operators are a GPU's.
        chunk = _CPU_CHUNK if weight.device.type == "cpu" and not is_without_data() else _CHUNK
        for start in range(0, flat.numel(), chunk):
            codes, state = functional.quantize_4bit(flat[start : start + chunk], blocksize=_BLOCK, quant_type="nf4")
            self._codes[start // 2 : start // 2 + len(codes)] = codes
            scales[start // _BLOCK : start // _BLOCK + state.absmax.numel()] = state.absmax
        mean = scales.mean()
        scales, scales_of_scales = functional.quantize_blockwise(
            scales.sub_(mean), code=_code_of_scales(functional, weight.device), blocksize=_SCALES_BLOCK
        )
        self._state = functional.QuantState(
            absmax=scales,
            shape=weight.shape,
            code=functional.get_4bit_type("nf4", device=weight.device),
            blocksize=_BLOCK,
            quant_type="nf4",
            dtype=weight.dtype,
            offset=mean,
            state2=scales_of_scales,
        )
        self._dequantise = functional.dequantize_4bit

    def dense(self) -> torch.Tensor:
        """Dequantise the weight with bitsandbytes."""
        dense: torch.Tensor = self._dequantise(self._codes, self._state)
        return dense

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield codes, scales, and the constants that quantise the scales."""
        state = self._state
        yield from (self._codes, state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code)


def _chunks(weight: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the index of the first block and an fp32 copy, shape (blocks, `_BLOCK`), of each part of a weight."""
    flat = weight.detach().reshape(-1)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK].to(torch.float32, copy=True)
        yield start // _BLOCK, F.pad(part, (0, -len(part) % _BLOCK)).view(-1, _BLOCK)


def _code_of_scales(functional: Any, device: torch.device) -> torch.Tensor:
    """Return a new code table for the scales. bitsandbytes would cache it for good, and a plan's has no data."""
    if is_without_data():
        return torch.empty(256, dtype=torch.float32, device=device)
    code: torch.Tensor = functional.create_dynamic_map().to(device)
    return code


def _bitsandbytes() -> Any:
    try:
        from bitsandbytes import functional
    except ImportError as error:
        raise ImportError(
            missing_library('the form "nf4"', "bitsandbytes", 'use "int8", which needs no library')
        ) from error
    return functional
