"""An `Accelerator` on one CPU or pretended device that leaves none of accelerate's global state behind."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate import Accelerator

from tests.helpers.process_state import forget_accelerate


@contextmanager
def one_device(**options: Any) -> Iterator[Accelerator]:
    """Make an accelerator; forget its shared state before and after."""
    with forgotten():
        yield Accelerator(cpu=not pretends_cuda(), **options)


@contextmanager
def forgotten() -> Iterator[None]:
    """Forget accelerate's shared state before and after."""
    forget_accelerate()
    try:
        yield
    finally:
        forget_accelerate()


def pretends_cuda() -> bool:
    """Whether the CUDA devices of this process are pretended."""
    return "tests.pretended_cuda.torch_cuda" in sys.modules
