"""What the device of a run is taken to reach: a GPU by its vendor's figures, a CPU as measured here."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from slivertune.planning.cards import EFFICIENCY, Rates, card_here
from slivertune.planning.request import PlanRequest

_MEASURED_SECONDS = 0.1
"""For each rate; the fastest repetition counts, as others compute here as well."""
_MATRIX_SIZE = 512
_COPIED_BYTES = 32 * 2**20
"""More than a core's caches hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RatesHere:
    """Rates, and what to say of them."""

    rates: Rates
    source: str
    """In words."""
    memory_bytes: int | None
    """Of the GPU; None on a CPU."""


def rates_here(device: torch.device, request: PlanRequest) -> RatesHere:
    """The rates that a run is planned by. Takes under a second on a CPU, in as many threads as torch has.

    Args:
        device: Trains.
        request: The run.

    Raises:
        ValueError: If the device is neither a CPU nor a known card.
    """
    in_fp32 = request.precision == "fp32"
    if device.type == "cpu":
        return measured_rates(torch.float32 if in_fp32 else torch.bfloat16)
    if device.type != "cuda":
        raise ValueError(f"the rates of a device {device.type!r} are not known, only those of CUDA devices and CPUs")
    card = card_here()
    if card is None:
        raise ValueError(f"the rates of {torch.cuda.get_device_name()} are not known")
    rates = card.rates(in_fp32=in_fp32)
    source = f"{rates.flops / 1e12:.3g} TFLOP/s, assumed as {EFFICIENCY:.0%} of the peak of a {card.name}"
    return RatesHere(rates=rates, source=source, memory_bytes=card.memory_bytes)


def measured_rates(dtype: torch.dtype) -> RatesHere:
    """Measure matrix products and copies on the CPU, in about a quarter of a second.

    Args:
        dtype: Of the products.
    """
    # Nothing is drawn: a run's random state stays as it is.
    matrix = torch.ones(_MATRIX_SIZE, _MATRIX_SIZE, dtype=dtype)
    product = torch.empty_like(matrix)
    source, target = (torch.zeros(_COPIED_BYTES, dtype=torch.uint8) for _ in range(2))
    with torch.no_grad():
        product_seconds = _fastest(lambda: torch.mm(matrix, matrix, out=product))
        copy_seconds = _fastest(lambda: target.copy_(source))
    flops, bandwidth = 2 * _MATRIX_SIZE**3 / product_seconds, _COPIED_BYTES / copy_seconds
    # A copy reads and writes. What a GPU would fetch over a bus is copied in the same memory here.
    rates = Rates(flops=flops, memory_bandwidth=2 * bandwidth, bus_bandwidth=bandwidth, duplex="half")
    return RatesHere(rates=rates, source=f"{flops / 1e9:.3g} GFLOP/s, measured here", memory_bytes=None)


def _fastest(work: Callable[[], object]) -> float:
    """Seconds of the fastest repetition."""
    fastest, end = float("inf"), time.perf_counter() + _MEASURED_SECONDS
    while True:
        began = time.perf_counter()
        work()
        now = time.perf_counter()
        fastest = min(fastest, now - began)
        if now >= end:
            return fastest
