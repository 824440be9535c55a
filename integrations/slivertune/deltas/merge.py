"""Deltas merged into a plain checkpoint, file by file, and removed from it exactly, to the bit.

The copy's shards are those of the base, byte for byte, except for the touched entries. No model is built, and no tensor
is loaded whole. `sft_undo/base_values.safetensors` in the merged folder keeps the base's bits of the touched entries,
since rounding can't be inverted: 4 bytes per position, and the weight's own bytes. It also has a hash of every file of
the base, with which `unmerge` verifies that it restores the base.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slivertune.core.atomic import atomic_new_folder, check_absent
from slivertune.deltas.additions import Addition, Source, TargetInfo, add_rounded, add_up, read_sources
from slivertune.deltas.beside_weights import TEMPLATE, chat_template, copy_files, template_files
from slivertune.deltas.delta import Overlap, total_overlap
from slivertune.deltas.delta_file import DeltaFile, name_of
from slivertune.deltas.hashes import CHUNK_BYTES
from slivertune.deltas.plain_checkpoint import UNDO_FOLDER, PlainCheckpoint, StoredTensor, open_checkpoint
from slivertune.deltas.sparse_file import DeltaFileError, read_sparse_file, write_sparse_file
from slivertune.deltas.written import check_written

UNDO_FILE = "base_values.safetensors"
"""Name of the file with the base's bits of the touched entries."""
REPORT_FILE = "merged.json"
"""Name of the report: the merged deltas, and the overlap of each tensor."""
VERSION = 2
"""Version of the undo file's format."""
BASE_FILES = "base_files"
"""Name of the folder, beside the undo file, with the base's chat template if the deltas have one of their own."""
_KIND = "slivertune.sft_undo"

Progress = Callable[[str, int, int], None]
"""Function that gets the current stage, the amount done and the total, or 0 of 0 if these are unknown."""


@dataclass(frozen=True, slots=True)
class Merged:
    """Result of a merge."""

    overlap_of: dict[str, Overlap]
    """Overlap of each tensor: touched weights, and those that two or more deltas touch."""
    left_out: list[Path]
    """Files of the base that may hold its weights in other forms, which were not copied."""
    over_codes: list[str]
    """Deltas that were trained over quantised weights, so that the base was not compared with theirs."""
    templates_of: list[str]
    """Deltas with different chat templates, which are not the base's either. A single one took the place of the
    base's."""

    @property
    def overlap(self) -> Overlap:
        """Overlap over all tensors."""
        return total_overlap(self.overlap_of.values())


def merge(
    checkpoint: str | Path,
    deltas: Source | Sequence[Source],
    output: str | Path,
    *,
    allow_quantized_base: bool = False,
    progress: Progress = lambda *_: None,
) -> Merged:
    """Write a copy of a checkpoint with deltas added to its weights.

    Several deltas are summed in fp32, added in fp32 and rounded once. Each tensor is then read back and compared with
    the base's and the sum. The copy appears complete or not at all.

    Args:
        checkpoint: Folder of the base, with safetensors files; never changed.
        deltas: As for `apply`.
        output: Folder to write; must not exist.
        allow_quantized_base: Whether deltas that were trained over a 4-bit model may be added to the 16-bit checkpoint
            from which it was quantised. Results are then close, not equal.
        progress: Function that gets the progress.

    Returns:
        Details of the merge.

    Raises:
        FileExistsError: If `output` exists.
        FileNotFoundError: If the checkpoint or the deltas are missing.
        ValueError: If the checkpoint is quantised, already has merged deltas, or is not the base of the deltas; if a
            file of deltas is damaged or hostile. Nothing is written then.
    """
    checkpoint, output = Path(checkpoint), Path(output)
    check_absent(output)
    base = open_checkpoint(checkpoint)
    if (checkpoint / UNDO_FOLDER).exists():
        raise ValueError(
            f"{checkpoint} has deltas merged already. Remove them first (slivertune unmerge), or merge all of them "
            "into the base at once"
        )
    progress("checking the base", 0, 0)
    files = read_sources(deltas)
    additions = add_up(files, base.tensors, _target_info(checkpoint, allow_quantized_base), hash_base=True)
    _check_copies(base, additions)
    touched_bytes = sum(addition.delta.indices.nbytes + addition.delta.values.nbytes for addition in additions)
    with atomic_new_folder(output, needs_bytes=_size(base) + touched_bytes) as new:
        hashes = _copy(base, new, progress)
        merged: list[tuple[StoredTensor, torch.Tensor, str, str]] = []
        for number, addition in enumerate(additions):
            progress("adding", number, len(additions))
            tensor = base.moved(addition.target, new)
            pretrained, before = tensor.read(addition.delta.indices), addition.sha256 or addition.target.sha256()
            tensor.write(addition.delta.indices, add_rounded(tensor.name, pretrained, addition.delta.values))
            merged.append((tensor, pretrained, before, tensor.sha256()))
        progress("checking", 0, 0)
        check_written(base, open_checkpoint(new), {each.target.name: each.delta for each in additions})
        progress("writing", 0, 0)
        (new / UNDO_FOLDER).mkdir()
        templates = {text: file.source for file in files if (text := _own_template(file, checkpoint)) is not None}
        if len(templates) == 1:
            _replace_template(next(iter(templates)), new)
        fields = {"base_files": hashes, "has_template": len(templates) == 1}
        _write_undo(new / UNDO_FOLDER, fields, files, additions, merged)
    return Merged(
        {addition.target.name: addition.overlap for addition in additions},
        base.left_out,
        over_codes=[file.source for file in files if any(each.is_quantized for each in file.base.values())],
        templates_of=list(templates.values()),
    )


def unmerge(checkpoint: str | Path, output: str | Path, *, progress: Progress = lambda *_: None) -> None:
    """Write a copy of a merged checkpoint with the base's bits restored. Its shards are the base's, byte for byte.

    Args:
        checkpoint: Folder that `merge` wrote; never changed.
        output: Folder to write; must not exist.
        progress: Function that gets the progress.

    Raises:
        FileExistsError: If `output` exists.
        FileNotFoundError: If the folder is no merged checkpoint.
        ValueError: If the folder was changed since the merge, or a file is damaged. Nothing is written then.
    """
    checkpoint, output = Path(checkpoint), Path(output)
    check_absent(output)
    merged = open_checkpoint(checkpoint)
    path = checkpoint / UNDO_FOLDER / UNDO_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there, so {checkpoint} can't be unmerged. Name a folder of `merge`")
    undo = read_sparse_file(path, kind=_KIND, version=VERSION, value_key="dtype", finite=False)
    progress("checking", 0, 0)
    for name, said in undo.table.items():
        _check_merged(path, name, said, merged)
    hashes = undo.fields.get("base_files")
    if not isinstance(hashes, dict) or not all(isinstance(each, str) for each in hashes.values()):
        raise DeltaFileError(f"{path}: base_files is no table of names and hashes: the file is damaged. Use the base")
    with atomic_new_folder(output, needs_bytes=_size(merged)) as new:
        found = _copy(merged, new, progress)
        for number, (name, (indices, values)) in enumerate(undo.entries.items()):
            progress("restoring", number, len(undo.entries))
            tensor = merged.moved(merged.tensors[name], new)
            tensor.write(indices, values)
            if tensor.sha256() != undo.table[name].get("base_sha256"):
                raise DeltaFileError(f"{path}: {name!r} is not restored: the file is damaged. Use the base instead")
        progress("checking", 0, 0)
        for name in {str(merged.tensors[name].shard.relative_to(checkpoint)) for name in undo.entries}:
            with (new / name).open("rb") as file:
                found[name] = hashlib.file_digest(file, "sha256").hexdigest()
        if undo.fields.get("has_template") is True:
            _restore_template(checkpoint, new, found)
        _check_files(checkpoint, hashes, found)
        progress("writing", 0, 0)


def _restore_template(checkpoint: Path, new: Path, found: dict[str, str]) -> None:
    """Put the base's chat template in the place of that of the deltas, and hash its files."""
    (new / TEMPLATE).unlink(missing_ok=True)
    found.pop(TEMPLATE, None)
    kept = checkpoint / UNDO_FOLDER / BASE_FILES
    own = template_files(kept)
    copy_files(kept, own, new)
    for file in own:
        found[str(file)] = hashlib.sha256((new / file).read_bytes()).hexdigest()


def _check_copies(base: PlainCheckpoint, additions: Sequence[Addition[StoredTensor]]) -> None:
    """Refuse to change only one of two copies of a tied embedding. transformers would no longer tie them."""
    sums = {addition.target.name: addition.delta for addition in additions}
    for name, delta in sums.items():
        for copy in base.tied_copies(name):
            other = sums.get(copy)
            if other is None or not (
                torch.equal(other.indices, delta.indices) and torch.equal(other.values, delta.values)
            ):
                raise ValueError(
                    f"{base.folder} stores one tied tensor as {name!r} and {copy!r}, and the deltas change them "
                    "differently. Give both the same delta, or say in a copy of its config.json that "
                    "tie_word_embeddings is false"
                )


def _target_info(checkpoint: Path, allow_quantized_base: bool) -> TargetInfo:
    return TargetInfo(
        name=str(checkpoint),
        unknown=(
            ". If the checkpoint stores it in another layout, load the model, add the deltas with "
            "slivertune.deltas.apply and save it with save_pretrained"
        ),
        quantized="Deltas merge only into float32, bfloat16 and float16. Merge into the 16-bit checkpoint",
        allow_quantized_base=allow_quantized_base,
        has_copies=True,
    )


def _size(checkpoint: PlainCheckpoint) -> int:
    return sum((checkpoint.folder / file).stat().st_size for file in checkpoint.files)


def _copy(base: PlainCheckpoint, new: Path, progress: Progress) -> dict[str, str]:
    """Copy the files of a checkpoint. Return the SHA-256 of each."""
    total, done = _size(base), 0
    hashes = {}
    for file in base.files:
        (new / file).parent.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256()
        with (base.folder / file).open("rb") as source, (new / file).open("wb") as target:
            while piece := source.read(CHUNK_BYTES):
                target.write(piece)
                digest.update(piece)
                done += len(piece)
                progress("copying", done, total)
        hashes[str(file)] = digest.hexdigest()
    return hashes


def _own_template(file: DeltaFile, base: Path) -> str | None:
    """Return the chat template that was saved with deltas. None if there is none, or it is the base's."""
    template = chat_template(Path(file.source)) if Path(file.source).is_dir() else None
    return None if template == chat_template(base) else template


def _replace_template(template: str, new: Path) -> None:
    """Replace a checkpoint's chat template, and keep its own files for `unmerge`."""
    copy_files(new, (own := template_files(new)), new / UNDO_FOLDER / BASE_FILES)
    for file in own:
        (new / file).unlink()
    (new / TEMPLATE).write_text(template, encoding="utf-8")


def _write_undo(
    folder: Path,
    fields: Mapping[str, Any],
    files: Sequence[DeltaFile],
    additions: Sequence[Addition[StoredTensor]],
    merged: Sequence[tuple[StoredTensor, torch.Tensor, str, str]],
) -> None:
    """Write the undo file and a report.

    Args:
        folder: Folder of both.
        fields: SHA-256 of every file of the base, and whether the chat template is not the base's.
        files: The deltas.
        additions: Sums that were added.
        merged: For each addition, the tensor with the sum, the base's values of the touched entries, and the hashes of
            the base's tensor and of the sum.
    """
    added = [(addition, *pair) for addition, pair in zip(additions, merged, strict=True)]
    write_sparse_file(
        folder / UNDO_FILE,
        kind=_KIND,
        version=VERSION,
        entries={tensor.name: (addition.delta.indices, values) for addition, tensor, values, *_ in added},
        table={
            tensor.name: {
                "shape": list(tensor.shape),
                "dtype": name_of(tensor.dtype),
                "base_sha256": before,
                "merged_sha256": after,
            }
            for _, tensor, _, before, after in added
        },
        fields=fields,
    )
    report = {
        "deltas": [file.source for file in files],
        "tensors": {
            addition.target.name: {
                "num_touched": addition.overlap.num_touched,
                "num_shared": addition.overlap.num_shared,
                "share": addition.overlap.share,
            }
            for addition in additions
        },
    }
    (folder / REPORT_FILE).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def _check_merged(path: Path, name: str, said: dict[str, object], merged: PlainCheckpoint) -> None:
    tensor = merged.tensors.get(name)
    here = None if tensor is None else (tensor.shape, name_of(tensor.dtype))
    if tensor is None or here != (said["shape"], said.get("dtype")):
        raise DeltaFileError(
            f"{path}: {name!r} was {said['shape']} {said.get('dtype')} when it was merged, and is {here or 'absent'} "
            "now. Use the base instead"
        )
    if tensor.sha256() != said.get("merged_sha256"):
        raise DeltaFileError(
            f"{path}: {name!r} was changed since it was merged, so the base can't be restored from it. Use the base"
        )


def _check_files(checkpoint: Path, expected: Mapping[str, str], found: Mapping[str, str]) -> None:
    """Check that the base's files are unchanged. Files that were added since are accepted."""
    for name, sha256 in expected.items():
        if found.get(name) != sha256:
            raise DeltaFileError(
                f"{checkpoint / name} was {'changed' if name in found else 'removed'} since it was merged, so the base "
                "can't be restored. Restore that file, or use the base"
            )
