"""Find the launch presets, the run files, the DeepSpeed configurations and the examples.

A wheel carries `launch/`, `ds_configs/` and `examples/` inside the package. A checkout has them at its top, two folders
above it.
"""

from pathlib import Path

from slivertune.core.suggestions import did_you_mean

_SUFFIX_OF_FOLDER = {"launch": ".yaml", "ds_configs": ".json"}
_EXAMPLE_SUFFIXES = {"launch": (".slurm", ".hostfile"), "examples": (".py", ".ipynb")}
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
    """List the examples by file name: job scripts beside the launch presets, then scripts and notebooks.

    Raises:
        FileNotFoundError: If neither the package nor the checkout around it has a folder of presets or examples.
    """
    return tuple(path.name for path in _find_examples())


def preset_path(name: str) -> Path:
    """Find a preset's file.

    Args:
        name: A file name (`single_gpu_24g.yaml`, `single_gpu_24g.json`) or its stem. A stem that both folders have
            means the launch preset. Examples (`multi_node_zero3.slurm`, `trainer_hift.py`) need their full file name.

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
    examples = _find_examples()
    for path in examples:
        if name == path.name:
            return path
    names = [path.name for path in (*presets, *examples)]
    raise ValueError(f"there is no preset {name!r}. Choose one of {', '.join(names)}{did_you_mean(name, names)}")


def _find_examples() -> list[Path]:
    return [
        path
        for folder, suffixes in _EXAMPLE_SUFFIXES.items()
        for path in sorted(_find_folder(folder).iterdir())
        if path.suffix in suffixes
    ]


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
