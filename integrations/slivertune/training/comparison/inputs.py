"""Hashes of the files that a run reads, so that a comparison notices when they change between its runs."""

import hashlib
from functools import cache
from pathlib import Path

from slivertune.core.manifest import digests
from slivertune.core.user_path import user_path
from slivertune.training.command_line.parse import TrainArguments
from slivertune.training.data.local_files import FORMATS
from slivertune.training.options.config_file import read_settings

_SUFFIXES = (*FORMATS, ".safetensors", ".bin", ".model", ".jinja")
"""Extensions of the files that are read in a folder of data or of a model."""


def hash_inputs(arguments: TrainArguments, run_file: str | None = None) -> dict[str, str]:
    """Hash the local files of data, model and settings. Costs one read of each, and none while it is not touched.

    Args:
        arguments: Settings of the run.
        run_file: Path of the file that has some of them.

    Returns:
        A hash by path, as typed. Data and models of the hub are left out.
    """
    template = arguments.data.chat_template or ""
    named = (
        *(arguments.data.dataset or ()),
        arguments.data.eval_file,
        arguments.model.model_name_or_path,
        None if "{" in template else template,
    )
    files = {name: _files(user_path(name)) for name in named if name}
    settings = {} if run_file is None else {run_file: _hash_settings(user_path(run_file))}
    return settings | {
        name: _hash(tuple((path, path.stat().st_size, path.stat().st_mtime_ns) for path in paths))
        for name, paths in files.items()
        if paths
    }


def _hash_settings(path: Path) -> str:
    """Hash the settings in a run file, without its comments."""
    settings = sorted((each.key, repr(each.value)) for each in read_settings(path))
    return hashlib.blake2b(repr(settings).encode(), digest_size=16).hexdigest()


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    # A saved dataset has a folder of Arrow files per split.
    found = [*(each for each in path.glob("*") if each.suffix.lower() in _SUFFIXES), *path.rglob("data-*.arrow")]
    return sorted(each for each in found if each.is_file())


@cache
def _hash(files: tuple[tuple[Path, int, int], ...]) -> str:
    """Hash files. Their sizes and times only tell whether to read them again."""
    summary = hashlib.blake2b(digest_size=16)
    paths = [path for path, *_ in files]
    for path, digest in zip(paths, digests(paths), strict=True):
        summary.update(f"{path.name} {digest}\n".encode())
    return summary.hexdigest()
