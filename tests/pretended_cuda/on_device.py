"""Runs functions where CUDA devices are pretended: in a process of its own, which takes case after case."""

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch.distributed as dist

from tests.helpers.ranks import run_ranks
from tests.pretended_cuda.library import NoDeviceError, build

_build_once = cache(build)  # it starts the compiler, to ask for its version


def on_device(function: Callable[..., Any], *args: Any, num_devices: int = 1) -> Any:
    """Run `function(*args)` with pretended CUDA devices; skip the test where there can be none.

    Args:
        function: A module's own function; its result is pickled.
        *args: Picklable.
        num_devices: CUDA devices.

    Returns:
        What it returned.

    Raises:
        RankError: With its traceback.
    """
    require_device()
    return run_ranks(_alone, 1, function, args, num_devices, pretends_cuda=True)[0]


def require_device() -> None:
    """Skip the test where there is no compiler, or torch is built for CUDA."""
    try:
        _build_once()
    except NoDeviceError as error:
        pytest.skip(str(error))


def _alone(rank: int, num_ranks: int, function: Callable[..., Any], args: tuple[Any, ...], num_devices: int) -> Any:
    """As in a script that no launcher has started."""
    from tests.pretended_cuda.torch_cuda import use_devices

    use_devices(num_devices)
    dist.destroy_process_group()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    return function(*args)
