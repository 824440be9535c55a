"""The backward pass that runs now, and what is to be done when it ends.

torch has no public way to ask for either; both are private interfaces that it uses itself (DDP, FSDP2, checkpointing),
the same from torch 2.11 to 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

NO_BACKWARD = -1
"""In place of a backward's number."""


def running_backward() -> int:
    """The number of the backward pass that this thread runs a part of; `NO_BACKWARD` outside of any."""
    number: int = torch._C._current_graph_task_id()
    return number


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call a function when the backward pass that runs now is over; never if it fails. Only inside of one.

    Functions are called in the order in which they were given, after the last gradient is accumulated.
    """
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(function)
