"""Weights in fewer bits: codes of blocks of 64 elements, each with its own scale.

int8: each element is the nearest of 127 steps either way of its block's largest (8.25 bits a bf16 weight); torch's own
arithmetic, which needs no package. nf4: NormalFloat with double quantisation (4.13 bits; QLoRA, arXiv 2305.14314,
section 3), by bitsandbytes' kernels.

Temporaries are bounded: a weight is read `_CHUNK` elements at a time.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F

from slivertune.core.missing_library import missing_library
from slivertune.core.torch_internals import is_without_data

WaitingForm = Literal["int8", "nf4"]

_BLOCK = 64
"""Elements that share a scale."""
_SCALES_BLOCK = 256
"""NF4's scales that share a scale of their own."""
_CHUNK = 2**22
"""Elements that are quantised at a time, a multiple of `_BLOCK`."""
_CPU_CHUNK = 2**14
"""The same for bitsandbytes' code on a CPU, which takes 64 bytes an element of temporaries."""


class BlockCodes(ABC):
    """A weight in fewer bits."""

    @abstractmethod
    def dense(self) -> torch.Tensor:
        """The weight that the codes stand for, in the shape and dtype that it had; a new tensor."""

    @abstractmethod
    def tensors(self) -> Iterator[torch.Tensor]:
        """All tensors that are kept."""


def quantize(weight: torch.Tensor, form: WaitingForm) -> BlockCodes:
    """Quantise a weight where it lies.

    Args:
        weight: bf16 or fp32, any shape, not empty.
        form: The kind of codes.

    Raises:
        ImportError: If nf4's package is not installed.
    """
    return Int8Codes(weight) if form == "int8" else Nf4Codes(weight)


def check_available(form: WaitingForm) -> None:
    """Refuse a form whose package is not installed.

    Raises:
        ImportError: Naming the library to install.
    """
    if form == "nf4":
        _bitsandbytes()


class Int8Codes(BlockCodes):
    """Steps of a block's largest absolute value over 127; scales in the weight's dtype.

    Args:
        weight: What to quantise.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self._shape, num_blocks = weight.shape, -(-weight.numel() // _BLOCK)
        self._steps = torch.empty(num_blocks, _BLOCK, dtype=torch.int8, device=weight.device)
        self._scales = torch.empty(num_blocks, 1, dtype=weight.dtype, device=weight.device)
        for start, blocks in _chunks(weight):
            stop = start + len(blocks)
            scales = blocks.abs().amax(1, keepdim=True).div_(127).to(weight.dtype)
            self._scales[start:stop] = scales
            # Where a block is 0, or its scale rounds to it, all steps are 0.
            quotient = blocks.div_(scales.float().clamp_(min=torch.finfo(torch.float32).tiny))
            self._steps[start:stop] = quotient.round_().clamp_(-127, 127)

    def dense(self) -> torch.Tensor:
        """The weight: steps times scales, rounded once."""
        flat = (self._steps * self._scales).view(-1)
        return flat[: self._shape.numel()].view(self._shape)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Steps and scales."""
        yield from (self._steps, self._scales)


class Nf4Codes(BlockCodes):
    """bitsandbytes' 4-bit codes, the same bits as those of its `quantize_4bit(compress_statistics=True)`.

    Args:
        weight: What to quantise.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        functional = _bitsandbytes()
        self._codes = torch.empty(-(-weight.numel() // 2), 1, dtype=torch.uint8, device=weight.device)
        scales = torch.empty(-(-weight.numel() // _BLOCK), dtype=torch.float32, device=weight.device)
        flat = weight.detach().reshape(-1)
        # A plan's weights say that they lie on the CPU, and its operators are a GPU's.
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
        """The weight, by bitsandbytes."""
        dense: torch.Tensor = self._dequantise(self._codes, self._state)
        return dense

    def tensors(self) -> Iterator[torch.Tensor]:
        """Codes, scales, and what these are quantised by."""
        state = self._state
        yield from (self._codes, state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code)


def _chunks(weight: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Copies of parts of a weight in fp32, shape (blocks, `_BLOCK`), each with the number of its first block."""
    flat = weight.detach().reshape(-1)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK].to(torch.float32, copy=True)
        yield start // _BLOCK, F.pad(part, (0, -len(part) % _BLOCK)).view(-1, _BLOCK)


def _code_of_scales(functional: Any, device: torch.device) -> torch.Tensor:
    """What bitsandbytes takes by itself, which it would keep for good: a plan's has no data."""
    if is_without_data():
        return torch.empty(256, dtype=torch.float32, device=device)
    code: torch.Tensor = functional.create_dynamic_map().to(device)
    return code


def _bitsandbytes() -> Any:
    try:
        from bitsandbytes import functional
    except ImportError as error:
        raise ImportError(
            missing_library('waiting="nf4"', "bitsandbytes", 'take waiting="int8", which needs nothing')
        ) from error
    return functional
