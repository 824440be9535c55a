"""A folder of a method's own in the checkpoints that `accelerator.save_state` writes and `load_state` reads."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from slivertune.core.atomic import atomic_folder, explain_write_errors, recover
from slivertune.core.manifest import write_manifest
from slivertune.core.saved_state import StateMismatchError, describe_damage
from slivertune.core.sliver import Sliver
from slivertune.parallel.consistency.heartbeat import guard, world_size

_OF_OTHER_CONTENTS = (
    AttributeError,
    EOFError,
    LookupError,
    OverflowError,
    RecursionError,
    SafetensorError,
    TypeError,
    UnicodeError,
)


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
        recover(Path(input_dir) / name)
        if (Path(input_dir) / name).is_dir():
            load(Path(input_dir) / name)

    accelerator.register_save_state_pre_hook(before_saving)
    accelerator.register_load_state_pre_hook(before_loading)


def unwrapped(optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer] = Sliver) -> Any:
    """The optimizer itself, out of accelerate's wrapper.

    Args:
        optimizer: What `slivertune.prepare` returned, or what it was given.
        kind: What it has to be.

    Raises:
        TypeError: If it is another optimizer.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(inner, kind):
        method = "HiFT's or SFT's" if kind is Sliver else f"{kind.__name__}'s"
        raise TypeError(f"the state of a {type(inner).__name__} is not {method}; pass what slivertune.prepare returned")
    return inner


@contextmanager
def refuse_damage(folder: Path) -> Iterator[None]:
    """Inside, what files of other contents than any of ours make the reading fail with is a ValueError that names them.

    Args:
        folder: What is read.

    Raises:
        StateMismatchError: In place of the errors of torch, safetensors and Python on such contents.
    """
    try:
        yield
    except _OF_OTHER_CONTENTS as error:
        problem = f"{type(error).__name__}: {str(error)[:200]}"
        raise StateMismatchError(describe_damage(folder, problem)) from error


def check_plain(value: Any) -> None:
    """Refuse tensors where plain values belong, whose comparison would fail or give tensors.

    Raises:
        TypeError: If there is one.
    """
    if isinstance(value, torch.Tensor):
        raise TypeError("a tensor instead of a plain value")
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
        check_plain(each)


def check_by_name(value: Any) -> None:
    """Refuse what is no state by name of the weight, of values by key: a tensor there raises errors of many types.

    Raises:
        TypeError: If it is something else.
    """
    each_value = [value, *value.values()] if isinstance(value, dict) else [value]
    for each in each_value:
        if not isinstance(each, dict):
            raise TypeError(f"a {type(each).__name__} instead of a weight's values by name")


def write_folder_together(target: Path, write: Callable[[Path], None]) -> None:
    """Let every rank write into one folder, which takes its name, with its manifest, when all are done. A collective.

    Args:
        target: The folder; an older one is replaced.
        write: Called by every rank with the folder to write into.

    Raises:
        OSError: On every rank, if one failed; what was at `target` is as before.
    """
    with ExitStack() as opened:
        partial_folder: list[Path | None] = [None]
        opened_here: list[Path] = []
        failure = ""
        try:
            if world_size() == 1 or dist.get_rank() == 0:
                opened_here.append(opened.enter_context(atomic_folder(target)))
                partial_folder = [opened_here[0]]
        except OSError as error:
            failure = str(error)
        if world_size() > 1:
            with guard("saving a checkpoint"):
                dist.broadcast_object_list(partial_folder, src=0)
        try:
            if partial_folder[0] is not None:
                with explain_write_errors(target):
                    write(partial_folder[0])
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        _fail_together(target, failure)
        try:
            if opened_here:
                with explain_write_errors(target):
                    write_manifest(opened_here[0])
        except OSError as error:
            failure = str(error)
        # Inside: a folder without its manifest must not take the older one's place.
        _fail_together(target, failure)
        failure = ""
        try:
            opened.close()
        except OSError as error:
            failure = str(error)
    _fail_together(target, failure)


def _fail_together(target: Path, failure: str) -> None:
    failures = [failure]
    if world_size() > 1:
        failures = [""] * world_size()
        with guard("saving a checkpoint"):
            dist.all_gather_object(failures, failure)
    failed = [f"rank {rank}: {each}" for rank, each in enumerate(failures) if each]
    if failed:
        raise OSError(f"{target} could not be written ({'; '.join(failed)}); every rank must be able to write there")
