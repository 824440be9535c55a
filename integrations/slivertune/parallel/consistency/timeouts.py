"""How long a collective waits: the limit that the user gave the default process group holds for all groups of a run.

Engines make process groups of their own, for which torch takes its defaults of 10 or 30 minutes: DeepSpeed (0.19.8) for
the ranks that share a model out, FSDP2's device meshes where the default group does not fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def timeout_of(group: Any) -> timedelta | None:
    """How long collectives of a process group wait; None if its backend does not tell.

    Args:
        group: The process group.
    """
    for device in group._device_types:
        options = getattr(group._get_backend(torch.device(device)), "options", None)
        timeout = getattr(options, "_timeout", None)
        if timeout is not None:
            return timedelta(seconds=timeout.total_seconds())
    return None


@contextmanager
def keeping_timeout() -> Iterator[None]:
    """Give every process group that is made inside, and in which this rank is, the default group's timeout.

    Groups that were there before keep theirs: the user may have made them. Where the default group itself is made
    inside, with whatever timeout its maker was told, the others follow it.
    """
    before = set(_groups())
    yield
    if not dist.is_available() or not dist.is_initialized():
        return
    default = dist.distributed_c10d._get_default_group()
    timeout = timeout_of(default)
    for group in _groups():
        if timeout is not None and group is not default and group not in before and timeout_of(group) != timeout:
            # There is no public way; torchtitan's own shortening of timeouts uses this one.
            dist.distributed_c10d._set_pg_timeout(timeout, group)


def follow_default_timeout(groups: Iterable[Any]) -> None:
    """Give an engine's process groups the default group's timeout, unless theirs is not torch's own default.

    They may be older than the engine: a model that is born in parts (ZeRO-3) makes them first.

    Args:
        groups: The engine's; None and repetitions among them are passed over.
    """
    default = dist.distributed_c10d._get_default_group()
    timeout = timeout_of(default)
    for group in groups:
        if group is None or group is default or timeout is None:
            continue
        unset = dist.distributed_c10d._get_default_timeout(dist.get_backend(group))
        if timeout_of(group) == unset != timeout:
            dist.distributed_c10d._set_pg_timeout(timeout, group)


def _groups() -> list[Any]:
    if not dist.is_available() or not dist.is_initialized():
        return []
    return list(dist.distributed_c10d._world.pg_map)
