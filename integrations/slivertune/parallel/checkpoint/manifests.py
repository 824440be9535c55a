"""Manifests of checkpoints that several ranks write. Rank 0 removes a manifest first, writes it last and checks it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from slivertune.core.atomic import atomic_file, explain_write_errors, recover
from slivertune.core.layout import world_size
from slivertune.core.manifest import (
    MANIFEST_NAME,
    DamagedCheckpointError,
    check_whole,
    remove_manifest,
    write_manifest,
)
from slivertune.core.sliver import Sliver
from slivertune.core.user_path import user_path
from slivertune.parallel.accelerate_internals import load_first, prepared_optimizers
from slivertune.parallel.checkpoint.sharded_weights import check_form, holds_sharded_weights, load_sharded_weights
from slivertune.parallel.consistency.heartbeat import gather_objects
from slivertune.parallel.layout import layout_of

_LATEST = "latest"
"""Name of the file in which DeepSpeed names its newest checkpoint."""


def check_together(folder: str | Path) -> None:
    """Refuse an incomplete folder on every rank. This is a collective, and rank 0 reads the files.

    Args:
        folder: A checkpoint, visible to every rank.

    Raises:
        DamagedCheckpointError: On every rank; names the file and the way out.
    """

    def check() -> None:
        recover(Path(folder))
        check_whole(folder)

    _do_on_first(check, DamagedCheckpointError)


def write_together(folder: str | Path, entries: Mapping[str, Any] | None = None) -> None:
    """Write the manifest of a folder that contains only a checkpoint, once all ranks have written. A collective.

    Args:
        folder: The folder, visible to rank 0.
        entries: Additional entries of the manifest.

    Raises:
        OSError: On every rank, if rank 0 could not write.
    """
    gather_objects(None, "completing a checkpoint")  # waits for all ranks
    _do_on_first(lambda: write_manifest(folder, entries), OSError)


@contextmanager
def sealed(folder: str | Path) -> Iterator[None]:
    """Write a checkpoint in the block, and its manifest once the block has succeeded on every rank.

    The manifest lists the files that the block has written, and no older ones. A collective.

    Args:
        folder: The folder that the block writes into.

    Raises:
        OSError: On every rank, if one failed, or rank 0 could not write the manifest; see `failing_together`.
    """
    folder = Path(folder)
    before: dict[Path, tuple[int, int, int]] = {}

    def begin() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        remove_manifest(folder)
        before.update(_stamps(folder))

    _do_on_first(begin, OSError)
    with failing_together(folder), explain_write_errors(folder):
        try:
            yield
        except CheckpointException as error:  # of torch's distributed checkpoints; a BaseException, not an Exception
            raise OSError(
                f"{folder} could not be written ({error}). Name a folder that every rank can write"
            ) from error

    def end() -> None:
        write_manifest(folder, files=[path for path, stamp in _stamps(folder).items() if before.get(path) != stamp])

    _do_on_first(end, OSError)


@contextmanager
def failing_together(target: Path) -> Iterator[None]:
    """Fail on every rank if the block, which writes, fails on one. A collective.

    Args:
        target: File or folder that the block writes.

    Raises:
        OSError: On every rank; names the target and the failed ranks. A rank raises its own error unchanged if the
            error names the target or is no OSError, or if there is only one process.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    own = "" if failure is None else f"{type(failure).__name__}: {failure}"
    messages = gather_objects(own, "saving a checkpoint")
    if failure is not None and (world_size() == 1 or not isinstance(failure, OSError) or str(target) in str(failure)):
        raise failure
    failed = [f"rank {rank}: {each}" for rank, each in enumerate(messages) if each]
    if failed:
        everyone = f"{target} could not be written ({'; '.join(failed)}). Name a folder that every rank can write"
        raise OSError(everyone) from failure


def seal_states(accelerator: Any) -> None:
    """Let `accelerator.save_state` write a manifest at its end, and `load_state` check it first.

    Args:
        accelerator: `accelerate.Accelerator`; both methods are overridden on this instance.
    """
    if hasattr(accelerator, "_slivertune_sealed"):
        return
    own_save, own_load = accelerator.save_state, accelerator.load_state

    @wraps(own_save)
    def save_state(output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        if accelerator.project_configuration.automatic_checkpoint_naming:
            folder = Path(accelerator.project_dir) / "checkpoints" / f"checkpoint_{accelerator.save_iteration}"
            if folder.exists():
                return own_save(output_dir, *args, **kwargs)  # raises, because the folder exists
            saved = own_save(output_dir, *args, **kwargs)
            write_together(folder)
            return saved
        if output_dir is None:
            return own_save(output_dir, *args, **kwargs)  # its error names the missing argument
        with sealed(output_dir):
            return own_save(output_dir, *args, **kwargs)

    @wraps(own_load)
    def load_state(input_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        folder = _state_folder(accelerator, input_dir)
        if folder is None:
            return own_load(input_dir, *args, **kwargs)  # its error names the missing argument
        check_together(folder)
        check_form(folder, layout_of(accelerator))
        try:
            with _plain_reading(accelerator, folder):
                return own_load(str(folder), *args, **kwargs)
        except FileNotFoundError as error:
            raise DamagedCheckpointError(
                f"{folder} is whole, but lacks a file that this run looks for ({error}). Prepare the same objects "
                "(schedulers, a GradScaler, samplers) as the saved run, in a new process: some are loaded by now"
            ) from error

    accelerator.save_state, accelerator.load_state = save_state, load_state
    accelerator._slivertune_sealed = True


@contextmanager
def _plain_reading(accelerator: Any, folder: Path) -> Iterator[None]:
    """Let `load_state` read a checkpoint of FSDP2's ranks in the block, even if no rank holds a shard.

    Args:
        accelerator: Its hooks read HiFT's and SFT's state.
        folder: The checkpoint.
    """
    if layout_of(accelerator) not in ("single", "ddp") or not holds_sharded_weights(folder):
        yield
        return

    prepared = prepared_optimizers(accelerator)
    optimizers = list(prepared)
    for optimizer in (getattr(each, "optimizer", each) for each in optimizers):
        if not isinstance(optimizer, Sliver):
            raise ValueError(
                f"{folder} has sharded weights. Where weights are whole, only the state of HiFT and SFT can be read "
                f"beside them, not that of {type(optimizer).__name__}. Resume under FSDP2"
            )
        if not (folder / optimizer.method).is_dir():
            raise ValueError(
                f"{folder} has sharded weights and no folder {optimizer.method!r} with the optimizer's state: it was "
                "saved by another method or without slivertune. Resume as it was saved, or start a new run from its "
                "weights"
            )

    def read_weights(models: list[Any], input_dir: str) -> None:
        load_sharded_weights(accelerator.unwrap_model(models[0]), input_dir)
        models.clear()

    hook = accelerator.register_load_state_pre_hook(read_weights)
    load_first(accelerator, hook)  # weights first, then the optimizers that train them
    # FSDP2's optimizer file holds only a placeholder, in a form of its own.
    prepared.clear()
    try:
        yield
    finally:
        prepared.extend(optimizers)
        hook.remove()


def seal_engine(engine: Any) -> None:
    """Let `engine.save_checkpoint` write a manifest at its end, and `load_checkpoint` check it first.

    Args:
        engine: DeepSpeed's engine; both methods are overridden on this instance.
    """
    own_save, own_load = engine.save_checkpoint, engine.load_checkpoint

    @wraps(own_save)
    def save_checkpoint(
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> Any:
        name = f"global_step{engine.global_steps}" if tag is None else str(tag)
        with sealed(Path(save_dir) / name):
            saved = own_save(
                str(save_dir),
                name,
                client_state=dict(client_state or {}),
                save_latest=False,
                exclude_frozen_parameters=exclude_frozen_parameters,
            )

        def point() -> None:
            with atomic_file(Path(save_dir) / _LATEST) as path:
                path.write_text(name, encoding="utf-8")

        if save_latest:
            # After the manifest, so that it always names a complete checkpoint.
            _do_on_first(point, OSError)
        return saved

    @wraps(own_load)
    def load_checkpoint(load_dir: str | Path, tag: str | None = None, *args: Any, **options: Any) -> Any:
        tag = _latest(Path(load_dir)) if tag is None else str(tag)
        if tag is not None:
            check_together(Path(load_dir) / tag)
        return own_load(str(load_dir), tag, *args, **options)

    engine.save_checkpoint, engine.load_checkpoint = save_checkpoint, load_checkpoint


def _state_folder(accelerator: Any, asked: str | None) -> Path | None:
    if asked is not None:
        return user_path(asked)
    if not accelerator.project_configuration.automatic_checkpoint_naming:
        return None
    folders = [each for each in (Path(accelerator.project_dir) / "checkpoints").glob("*_*") if each.is_dir()]
    numbers = {each: each.name.rpartition("_")[2] for each in folders}
    return max((each for each in folders if numbers[each].isdigit()), key=lambda each: int(numbers[each]), default=None)


def _latest(folder: Path) -> str | None:
    """Name DeepSpeed's newest checkpoint. Return None if nothing was saved, which DeepSpeed then reports.

    Raises:
        DamagedCheckpointError: If there are checkpoints, but no record of the newest.
    """
    path = folder / _LATEST
    if path.is_file():
        tag = path.read_text(encoding="utf-8", errors="replace").strip()
        if tag and tag not in (".", "..") and Path(tag).name == tag:
            return tag
        raise DamagedCheckpointError(f"{path} names no folder ({tag!r}). Name one: load_checkpoint(..., tag=...)")
    tags = sorted(each.name for each in folder.iterdir() if each.is_dir()) if folder.is_dir() else []
    if not tags:
        return None
    whole = [tag for tag in tags if (folder / tag / MANIFEST_NAME).is_file()]
    raise DamagedCheckpointError(
        f"{folder} has no file {_LATEST!r}, so its writing was cut short or it is no folder of checkpoints. Name a "
        f"whole one by load_checkpoint(..., tag=...). Tags with a manifest: {whole or 'none'}"
    )


def _stamps(folder: Path) -> dict[Path, tuple[int, int, int]]:
    """Collect inode, time (ns) and size (bytes) of each file. They change if the file is written again."""
    facts = {path: path.stat() for path in folder.rglob("*") if path.is_file()}
    return {path: (each.st_ino, each.st_mtime_ns, each.st_size) for path, each in facts.items()}


def _do_on_first(do: Callable[[], None], kind: type[Exception]) -> None:
    """Run a function on rank 0, and fail on every rank if it fails. This is a collective."""
    failure = ""
    if world_size() == 1 or dist.get_rank() == 0:
        try:
            do()
        except kind as error:
            if world_size() == 1:
                raise
            failure = str(error)
    first = gather_objects(failure, "completing a checkpoint")[0]
    if first:
        raise kind(first)
