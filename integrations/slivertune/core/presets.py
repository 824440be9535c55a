"""Find the launch presets, the run files and the DeepSpeed configurations.

A wheel carries `launch/` and `ds_configs/` inside the package. A checkout has them at its top, two folders above it.
"""

from pathlib import Path

from slivertune.core.suggestions import did_you_mean

_SUFFIX_OF_FOLDER = {"launch": ".yaml", "ds_configs": ".json"}
_EXAMPLE_SUFFIXES = (".slurm", ".hostfile")
_KEY_OF_ACCELERATE = "\ncompute_environment:"
"""Key in every launch preset, and in no run file, whose keys are options of `slivertune train`."""


def preset_names() -> tuple[str, ...]:
    """List the presets by file name.

    Returns:
        The launch presets and run files (`*.yaml`), then the DeepSpeed configurations (`*.json`), each in alphabetical
        order.

    Raises:
        FileNotFoundError: If neither the package nor the checkout around it has a preset folder.
    """
    return tuple(path.name for path in _find_presets())


def run_file_names() -> tuple[str, ...]:
    """List the presets that `slivertune train` reads as its config file, by file name.

    Raises:
        FileNotFoundError: If neither the package nor the checkout around it has a preset folder.
    """
    return tuple(
        path.name
        for path in _find_presets()
        if path.suffix == ".yaml" and _KEY_OF_ACCELERATE not in path.read_text(encoding="utf-8")
    )


def example_names() -> tuple[str, ...]:
    """List the examples beside the launch presets, such as a job script, by file name.

    Raises:
        FileNotFoundError: If neither the package nor the checkout around it has a preset folder.
    """
    return tuple(sorted(path.name for path in _find_folder("launch").iterdir() if path.suffix in _EXAMPLE_SUFFIXES))


def preset_path(name: str) -> Path:
    """Find a preset's file.

    Args:
        name: A file name (`single_gpu_24g.yaml`, `single_gpu_24g.json`) or its stem. A stem that both folders have
            means the launch preset. Examples beside the presets (`multi_node_zero3.slurm`) need their full file name.

    Returns:
        The absolute path of the file.

    Raises:
        ValueError: If no preset has that name.
        FileNotFoundError: If neither the package nor the checkout around it has a preset folder.
    """
    presets = _find_presets()
    for path in presets:
        if name in (path.name, path.stem):
            return path
    if name in example_names():
        return _find_folder("launch") / name
    names = [*(path.name for path in presets), *example_names()]
    raise ValueError(f"there is no preset {name!r}. Choose one of {', '.join(names)}{did_you_mean(name, names)}")


def _find_presets() -> list[Path]:
    return [
        path
        for folder, suffix in _SUFFIX_OF_FOLDER.items()
        for path in sorted(_find_folder(folder).iterdir())
        if path.suffix == suffix
    ]


def _find_folder(name: str) -> Path:
    package = Path(__file__).resolve().parents[1]
    candidates = (package / name, package.parents[1] / name)
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(
        f"the preset folder {name!r} is at neither {candidates[0]} nor {candidates[1]}. Install slivertune again"
    )
