"""The commands `slivertune merge` and `slivertune unmerge`: their checks, progress and printed results."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub
import rich.progress
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

from slivertune.core.atomic import check_absent, recover
from slivertune.core.output_place import check_place
from slivertune.deltas.adapter_folder import is_adapter, open_adapter
from slivertune.deltas.adapter_merge import merge_adapter
from slivertune.deltas.delta_file import DELTA_FILE, load
from slivertune.deltas.merge import REPORT_FILE, Progress, merge, unmerge
from slivertune.deltas.plain_checkpoint import UNDO_FOLDER


def run_merge(deltas: Sequence[str], output: str, *, base: str | None, allow_quantized_base: bool) -> None:
    """Merge deltas, or a LoRA adapter, into a checkpoint and print the result.

    Args:
        deltas: Folders with deltas, or the folder of one adapter.
        output: Folder to write.
        base: Folder of the base or its hub id in the cache; None uses the base that the deltas name.
        allow_quantized_base: As for `merge`.

    Raises:
        ValueError: If the base is unknown, `merge` raises it, or an adapter is not given alone.
        FileNotFoundError: If the base is missing.
        ImportError: If an adapter is given, and PEFT is not installed.
    """
    check_place(Path(output), "--output_dir")
    check_absent(Path(output))
    adapters = [folder for folder in deltas if is_adapter(Path(folder))]
    if adapters:
        if (Path(adapters[0]) / DELTA_FILE).is_file():
            raise ValueError(
                f"{adapters[0]} holds a LoRA adapter and SFT's deltas, and one of them is merged at a time. Move "
                f"{DELTA_FILE} into a folder of its own"
            )
        _merge_one_adapter(adapters[0], deltas, Path(output), base, allow_quantized_base)
        return
    for folder in deltas:
        _check_deltas(Path(folder))
    files = [load(folder) for folder in deltas]
    names = {base} if base else {file.base_model_name for file in files}
    if len(names) != 1 or None in names:
        raise ValueError(
            f"the deltas name {sorted(map(str, names))} as their base. Name the base with --model_name_or_path"
        )
    checkpoint = find_checkpoint(str(names.pop()))
    with _progress() as show:
        merged = merge(checkpoint, files, output, allow_quantized_base=allow_quantized_base, progress=show)
    overlap = merged.overlap
    print(f"{output}: {overlap.num_touched:,} weights of {len(merged.overlap_of)} tensors changed")
    if len(merged.templates_of) == 1:
        print(f"the chat template is that of {merged.templates_of[0]}")
    elif merged.templates_of:
        print(f"the chat template is the base's, since those of {', '.join(merged.templates_of)} differ")
    if merged.over_codes:
        print(
            f"trained over quantised weights: {', '.join(merged.over_codes)}. Results are close, not identical, and it "
            f"was not checked that {checkpoint} is their base"
        )
    if len(files) > 1:
        name, most = max(merged.overlap_of.items(), key=lambda item: item[1].share)
        print(
            f"overlap: {overlap.num_shared:,} weights ({overlap.share:.2%}) are changed by two or more of the "
            f"{len(files)} deltas, most of them in {name} ({most.num_shared:,}, {most.share:.2%}). For each tensor, "
            f"see {Path(output) / UNDO_FOLDER / REPORT_FILE}"
        )
    _tell_not_copied(merged.left_out)


def _tell_not_copied(files: Sequence[Path]) -> None:
    if files:
        print(f"not copied, since they may hold the base's weights: {', '.join(map(str, files))}")


def _check_deltas(folder: Path) -> None:
    """Refuse a path that is no folder of deltas, and suggest the folders of deltas in it."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder. Name one with SFT's deltas or a LoRA adapter")
    within = _within(folder)
    if within and not (folder / DELTA_FILE).is_file():
        meant = " or ".join(map(str, within))
        raise FileNotFoundError(f"{folder} holds neither SFT's deltas nor a LoRA adapter. Did you mean {meant}?")


def _within(folder: Path) -> list[Path]:
    """List a folder's subfolders of deltas and adapters: a run's, or adapters that PEFT saves by name."""
    return sorted(each for each in folder.iterdir() if (each / DELTA_FILE).is_file() or is_adapter(each))


def _merge_one_adapter(
    folder: str, folders: Sequence[str], output: Path, base: str | None, allow_quantized_base: bool
) -> None:
    if len(folders) > 1:
        raise ValueError(f"{folder} is a LoRA adapter, which is merged alone. Name it without the others")
    if allow_quantized_base:
        raise ValueError(
            f"--allow_quantized_base is an option for SFT's deltas, and {folder} is a LoRA adapter. Leave it out"
        )
    adapter = open_adapter(Path(folder))
    name = base or adapter.base_name
    if name is None:
        raise ValueError(f"{folder} does not name its base. Name it with --model_name_or_path")
    revision = adapter.config.get("revision") if name == adapter.base_name else None
    merged = merge_adapter(adapter, find_checkpoint(name, revision), output)
    print(f"{output}: {name} with the LoRA of {folder} added to {merged.num_adapted} matrices")
    if base and adapter.base_name and Path(base).resolve() != Path(adapter.base_name).resolve():
        print(f"not checked: whether {base} has the weights of {adapter.base_name}, the adapter's base")
    if others := _within(Path(folder)):
        print(f"not merged, since they are adapters of other names: {', '.join(map(str, others))}")
    if merged.replaced:
        print(f"replaced, since they were trained whole: {', '.join(merged.replaced)}")
    if merged.untied:
        print(f"untied (tied in the base; tie_word_embeddings is now false): {', '.join(merged.untied)}")
    if merged.vocabulary is not None:
        print(f"the vocabulary was resized to {merged.vocabulary} rows, as in the training")
    if merged.random:
        print(f"random, since the base's files lack them, and not needed for outputs: {', '.join(merged.random)}")
    if merged.unread:
        more = f" and {len(merged.unread) - 1} more" if len(merged.unread) > 1 else ""
        print(f"not copied, since the model's class has no such weights: {merged.unread[0]}{more}")
    _tell_not_copied(merged.not_copied)
    if merged.other_settings:
        print(f"not set, though the trained model's configuration has other values: {', '.join(merged.other_settings)}")
    if merged.not_run is not None:
        print(f"outputs were not compared, tensors were: {merged.not_run}")
    if adapter.was_quantized:
        print(
            "the adapter was trained over quantised weights and added to the unquantised ones: results are close, not "
            "identical"
        )
    if not merged.has_tokenizer:
        print("no tokenizer was saved, since neither the adapter nor the base has one")


def run_unmerge(merged: str, output: str) -> None:
    """Remove deltas from a merged checkpoint and print the result.

    Args:
        merged: Folder that `merge` wrote.
        output: Folder to write.
    """
    check_place(Path(output), "--output_dir")
    check_absent(Path(output))
    with _progress() as show:
        unmerge(merged, output, progress=show)
    print(f"{output}: the base's weights, to the bit")


def find_checkpoint(name: str, revision: str | None = None) -> Path:
    """Find a checkpoint: a folder, or a hub id in the cache.

    Args:
        name: The folder or hub id.
        revision: Revision of a model on the hub; its main branch by default.

    Returns:
        The folder.

    Raises:
        FileNotFoundError: If it is neither.
    """
    recover(Path(name))
    if Path(name).is_dir():
        return Path(name)
    try:
        return Path(huggingface_hub.snapshot_download(name, revision=revision, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError) as error:
        raise FileNotFoundError(
            f"model_name_or_path={name!r} is neither a folder nor a model in the hub's cache. Check the spelling, or "
            "load it first with `hf download`"
        ) from error


@contextmanager
def _progress() -> Iterator[Progress]:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with rich.progress.Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=None)

        def show(stage: str, done: int, total: int) -> None:
            bar.update(task, description=stage, completed=done, total=total or None)

        yield show
