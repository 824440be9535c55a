"""How long a collective waits: the limit that the user gave the default process group holds for all groups of a run.

Engines make process groups of their own, for which torch takes its defaults of 10 or 30 minutes: DeepSpeed (0.19.8) for
the ranks that share a model out, FSDP2's device meshes where the default group does not fit.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from slivertune.core.torch_internals import (
    default_group,
    default_timeout_of,
    process_groups,
    set_timeout,
    timeout_of,
)


@contextmanager
def keeping_timeout() -> Iterator[None]:
    """Give every process group that is made inside, and in which this rank is, the default group's timeout.

    Groups that were there before keep theirs: the user may have made them. Where the default group itself is made
    inside, with whatever timeout its maker was told, the others follow it.
    """
    before = set(process_groups())
    yield
    if not dist.is_available() or not dist.is_initialized():
        return
    default = default_group()
    timeout = timeout_of(default)
    for group in process_groups():
        if timeout is not None and group is not default and group not in before and timeout_of(group) != timeout:
            set_timeout(group, timeout)


def follow_default_timeout(groups: Iterable[Any]) -> None:
    """Give an engine's process groups the default group's timeout, unless theirs is not torch's own default.

    They may be older than the engine: a model that is born in parts (ZeRO-3) makes them first.

    Args:
        groups: The engine's; None and repetitions among them are passed over.
    """
    default = default_group()
    timeout = timeout_of(default)
    for group in groups:
        if group is None or group is default or timeout is None:
            continue
        if timeout_of(group) == default_timeout_of(group) != timeout:
            set_timeout(group, timeout)
