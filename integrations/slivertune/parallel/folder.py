"""A folder of a method's own in the checkpoints that `accelerator.save_state` writes and `load_state` reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

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
