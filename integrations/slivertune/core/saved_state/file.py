"""What `torch.save` wrote, read as tensors and plain containers: nothing is executed, and damage has a name."""

import io
from pathlib import Path
from typing import Any

import torch


def describe_damage(place: object, problem: str) -> str:
    """Say that a saved state can't be read, and what to do.

    Args:
        place: The file or folder.
        problem: What is wrong with it.

    Returns:
        The text of an error.
    """
    return (
        f"{place} holds no state that can be read ({problem}); it is damaged or was not written by slivertune, use "
        "another checkpoint"
    )


def load_dictionary(file: Path | io.BytesIO, *, name: str | None = None, mmap: bool = False) -> dict[str, Any]:
    """Read a dictionary of tensors and plain containers onto the host.

    Args:
        file: What `torch.save` wrote.
        name: What errors call it; its path when None.
        mmap: Whether tensors are read when they are needed.

    Raises:
        ValueError: If it is missing, damaged or holds something else: whatever torch's readers fail with.
    """
    try:
        value = torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
        if not isinstance(value, dict):
            raise TypeError(f"a {type(value).__name__} instead of a dictionary")
    except MemoryError:
        raise
    # The readers of pickles and of zip archives raise whatever the bytes make them stumble over.
    except Exception as error:
        place = file if name is None else name
        raise ValueError(describe_damage(place, f"{type(error).__name__}: {str(error)[:200]}")) from error
    return value


def check_loadable(file: Path | io.BytesIO) -> None:
    """Refuse what `torch.load(weights_only=True)` would not read back, while there is still something to save.

    Args:
        file: What `torch.save` has written.

    Raises:
        ValueError: Naming the classes.
    """
    unknown = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    if unknown:
        raise ValueError(
            f"the base optimizer's state holds objects of {', '.join(unknown)}, which torch does not load unless they "
            f"are allowed; call torch.serialization.add_safe_globals([...]) with them when the run starts"
        )
