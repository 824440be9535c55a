"""Turn errors of a write into errors that name the target, the bytes needed and the bytes free.

torch.save says `[enforce fail at inline_container.cc:672]` when a disk is full, safetensors hides the number of the
error in a text, and Python's own error of a full disk has no path.
"""

import errno
import os
import re
import resource
import shutil
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

_PARTIAL = re.compile(r"\..+\.[a-z0-9_]{8}\.partial")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_OF_WRITING = (*_NO_ROOM, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM)
# torch's writer of archives reports that fewer bytes were written than it gave, but no reason.
_TORCH_WRITER = re.compile(r"inline_container\.cc|PytorchStreamWriter")
_STRERROR = re.compile(r"strerror: (.+)")
_NUMBER_OF = {os.strerror(number): number for number in errno.errorcode}
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_SAID = " could not be written: "
_LITTLE_BYTES = 2**20
"""Free bytes below which a short write of unknown cause counts as a full disk."""


def is_partial(path: Path) -> bool:
    """Return whether a path has the name of a hidden folder, which belongs to its writer alone and comes and goes."""
    return _PARTIAL.fullmatch(path.name) is not None


@contextmanager
def explain_write_errors(target: Path, needs_bytes: int | None = None) -> Iterator[None]:
    """Turn errors of a write into an OSError that names the target, the bytes needed and the bytes free.

    Errors from elsewhere (another file, another kind) pass unchanged. So do errors that were explained already, and
    errors inside of another such block, which explains them.

    Args:
        target: The file or folder that is written.
        needs_bytes: Size in bytes, if known.

    Raises:
        OSError: If the write failed. It keeps the error's number, so a PermissionError stays one.
    """
    folder = next((each for each in target.parents if each.is_dir()), target.parent)
    free_bytes = shutil.disk_usage(folder).free
    try:
        yield
    except Exception as error:
        number, reason = _cause(error, target, folder)
        if number is None or any(map(is_partial, target.parents)):
            raise
        raise OSError(number, _explain(number, reason, target, folder, needs_bytes, free_bytes)) from error


def _explain(number: int, reason: str, target: Path, folder: Path, needs_bytes: int | None, free_bytes: int) -> str:
    if number in _NO_ROOM:
        needed = f"more than {free_bytes:,}" if needs_bytes is None else f"{needs_bytes:,}"
        return (
            f"{target}{_SAID}{reason}. It needs {needed} bytes, and {folder} had {free_bytes:,} free. "
            "Free space there (quotas and limits of file sizes count, too), or name another folder"
        )
    return cannot_write(target, reason, target.parent)


def cannot_write(target: Path, reason: str, folder: Path) -> str:
    """Say that a file or folder can't be written, and name the way out.

    Args:
        target: The file or folder that was to be written.
        reason: Reason of the failure.
        folder: Folder in which something has to be made for it.
    """
    return (
        f"{target}{_SAID}{reason}. It needs a folder {folder} in which files can be made, written and renamed. Change "
        "the rights, or name another folder"
    )


def _cause(error: Exception, target: Path, folder: Path) -> tuple[int | None, str]:
    """Return the error's number, if it is one of writing this target, and its text."""
    if isinstance(error, OSError):
        is_ours = error.errno in _OF_WRITING if error.filename is None else _is_near(error.filename, target)
        is_ours = is_ours and _SAID not in str(error)
        where = "" if error.filename is None else f" ({os.fsdecode(error.filename)})"
        return (error.errno if is_ours else None), f"{error.strerror}{where}"
    text = str(error)
    hidden = _OS_ERROR.search(text)
    if isinstance(error, SafetensorError) and text.startswith("Error while serializing") and hidden is not None:
        return int(hidden[1]), os.strerror(int(hidden[1]))
    if isinstance(error, RuntimeError) and _TORCH_WRITER.search(text):
        # torch's writer keeps the file open, and its bytes on the disk, as long as a frame of the errors holds it.
        each: BaseException | None = error
        while each is not None:
            traceback.clear_frames(each.__traceback__)
            each = each.__context__
        match = _STRERROR.search(text)
        number = _number_of_short_write(folder) if match is None else _NUMBER_OF.get(match[1].strip(), errno.EIO)
        return number, f"{os.strerror(number)} (torch.save: {text.splitlines()[0]})"
    return None, text


def _number_of_short_write(folder: Path) -> int:
    if shutil.disk_usage(folder).free < _LITTLE_BYTES:
        return errno.ENOSPC
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return errno.EIO if limit == resource.RLIM_INFINITY else errno.EFBIG


def _is_near(filename: str | bytes | int, target: Path) -> bool:
    """Return whether a path is the target, in it or in its hidden folder, or one of the folders that hold it."""
    if isinstance(filename, int):
        return True
    path, target = Path(os.fsdecode(filename)).absolute(), target.absolute()
    if path.is_relative_to(target) or target.parent.is_relative_to(path):
        return True
    sibling = path.relative_to(target.parent).parts[0] if path.is_relative_to(target.parent) else ""
    return sibling.startswith(f".{target.name}.") and is_partial(Path(sibling))
