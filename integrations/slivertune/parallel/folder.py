"""A folder of a method's own in the checkpoints that `accelerator.save_state` writes and `load_state` reads."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from slivertune.aside import folder_aside
from slivertune.manifest import write_manifest
from slivertune.parallel.agreement import world_size

_Kind = TypeVar("_Kind", bound=torch.optim.Optimizer)


def carry_folder(
    accelerator: Any,
    name: str,
    *,
    save: Callable[[Path], None],
    load: Callable[[Path], None],
    is_kept: Callable[[], bool] = lambda: True,
) -> None:
    """Let `accelerator.save_state` and `load_state` carry a folder.

    Args:
        accelerator: `accelerate.Accelerator`.
        name: The folder's name inside a checkpoint.
        save: Writes it.
        load: Reads it; called where it is there.
        is_kept: Whether there is something to write.
    """

    def before_saving(models: Any, weights: Any, output_dir: str) -> None:
        if is_kept():
            save(Path(output_dir) / name)

    def before_loading(models: Any, input_dir: str) -> None:
        if (Path(input_dir) / name).is_dir():
            load(Path(input_dir) / name)

    accelerator.register_save_state_pre_hook(before_saving)
    accelerator.register_load_state_pre_hook(before_loading)


def unwrapped(optimizer: torch.optim.Optimizer, kind: type[_Kind]) -> _Kind:
    """The optimizer itself, out of accelerate's wrapper.

    Args:
        optimizer: What `slivertune.prepare` returned, or what it was given.
        kind: HiFT or SFT.

    Raises:
        TypeError: If it is another optimizer.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(inner, kind):
        raise TypeError(
            f"the state of a {type(inner).__name__} is not {kind.__name__}'s; pass what slivertune.prepare returned"
        )
    return inner


def write_folder_together(target: Path, write: Callable[[Path], None]) -> None:
    """Let every rank write into one folder, which takes its name, with its manifest, when all are done. A collective.

    Args:
        target: The folder; an older one is replaced.
        write: Called by every rank with the folder to write into.

    Raises:
        OSError: On every rank, if one failed; what was at `target` is as before.
    """
    with ExitStack() as opened:
        aside: list[Path | None] = [None]
        opened_here: list[Path] = []
        failure = ""
        try:
            if world_size() == 1 or dist.get_rank() == 0:
                opened_here.append(opened.enter_context(folder_aside(target)))
                aside = [opened_here[0]]
        except OSError as error:
            failure = str(error)
        if world_size() > 1:
            dist.broadcast_object_list(aside, src=0)
        try:
            if aside[0] is not None:
                write(aside[0])
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        _fail_together(target, failure)
        failure = ""
        try:
            if opened_here:
                write_manifest(opened_here[0])
            opened.close()
        except OSError as error:
            failure = str(error)
    _fail_together(target, failure)


def _fail_together(target: Path, failure: str) -> None:
    failures = [failure]
    if world_size() > 1:
        failures = [""] * world_size()
        dist.all_gather_object(failures, failure)
    told = [f"rank {rank}: {each}" for rank, each in enumerate(failures) if each]
    if told:
        raise OSError(f"{target} could not be written ({'; '.join(told)}); it must lie where every rank can write")
