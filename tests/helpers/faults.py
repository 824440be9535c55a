"""Errors and kills injected into the n-th file operation of a block."""

from __future__ import annotations

import builtins
import errno
import io
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import safetensors
import safetensors.torch
import torch

from slivertune.core import atomic

Fault = Callable[[str], BaseException]
"""Given an operation, the error to raise; or never returns."""


def full_disk(what: str) -> OSError:
    # As the kernel says it: a write has no file name.
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def denied(what: str) -> OSError:
    return PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def interrupted(what: str) -> BaseException:
    return KeyboardInterrupt()


def killed(what: str) -> BaseException:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


@dataclass
class Operations:
    """Counts file operations that change something, and lets the one of a given number fail.

    Args:
        fails_at: Its number, from 1; 0 only counts.
        fault: How it fails.
        once: Whether later ones work again; a full disk stays full, but deleting goes on working.
    """

    fails_at: int
    fault: Fault
    once: bool = field(default=True, kw_only=True)
    names: list[str] = field(default_factory=list, init=False)
    is_disk_full: bool = field(default=False, init=False)

    def pass_by(self, name: str) -> None:
        self.names.append(name)
        number = len(self.names)
        if number == self.fails_at or (
            not self.once and 0 < self.fails_at < number and name not in ("unlink", "rmdir")
        ):
            self.is_disk_full = self.fault is full_disk
            raise self.fault(name)


class _File:
    """A file open for writing whose writes are counted."""

    def __init__(self, file: Any, operations: Operations) -> None:
        self._file, self._operations = file, operations

    def write(self, data: Any) -> Any:
        # Half of it has been written when a write fails.
        try:
            self._operations.pass_by("write")
        except BaseException:
            self._file.write(data[: len(data) // 2])
            raise
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _File:
        self._file.__enter__()
        return self

    def __exit__(self, *error: object) -> Any:
        return self._file.__exit__(*error)

    def __iter__(self) -> Any:
        return iter(self._file)


@contextmanager
def counted(operations: Operations, *, can_exchange: bool = True) -> Iterator[None]:
    """Let every file operation of this process pass by `operations`."""
    with ExitStack() as patches:

        def replace(target: Any, name: str, new: Any) -> None:
            patches.enter_context(mock.patch.object(target, name, new))

        for name in ("fsync", "rename", "replace", "mkdir", "chmod", "unlink", "rmdir", "link", "symlink"):
            replace(os, name, _before(getattr(os, name), name, operations))
        for target in (builtins, io):
            replace(target, "open", _opening(io.open if target is io else builtins.open, operations))
        for name in ("serialize_file", "serialize"):
            replace(safetensors.torch, name, _half_written(getattr(safetensors.torch, name), name, operations))
        replace(torch, "save", _half_written(torch.save, "torch.save", operations))
        replace(shutil, "disk_usage", _usage(shutil.disk_usage, operations))
        exchange = _before(atomic.exchange, "exchange", operations)
        replace(atomic, "exchange", exchange if can_exchange else lambda first, second: False)
        yield


def _usage(function: Callable[..., Any], operations: Operations) -> Callable[..., Any]:
    def run(path: Any) -> Any:
        usage = function(path)
        return usage._replace(free=0) if operations.is_disk_full else usage

    return run


def _before(function: Callable[..., Any], name: str, operations: Operations) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        operations.pass_by(name)
        return function(*args, **kwargs)

    return run


def _opening(function: Callable[..., Any], operations: Operations) -> Callable[..., Any]:
    def run(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        # Not what Python itself and the interpreter's caches write.
        if not set(mode) & set("wxa+") or isinstance(file, int):
            return function(file, mode, *args, **kwargs)
        operations.pass_by("open")
        return _File(function(file, mode, *args, **kwargs), operations)

    return run


def _half_written(function: Callable[..., Any], name: str, operations: Operations) -> Callable[..., Any]:
    """Libraries that write by themselves: half of the file is there when they fail, and errors are their own."""

    def run(value: Any, file: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            operations.pass_by(name)
        except OSError as error:
            _write_half(function, value, file, args, kwargs)
            if name == "torch.save":
                raise RuntimeError(
                    "[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534"
                    if operations.is_disk_full
                    else f"[enforce fail at inline_container.cc:747] . open file failed with strerror: {error.strerror}"
                ) from None
            raise safetensors.SafetensorError(
                f"Error while serializing: I/O error: {error.strerror} (os error {error.errno})"
            ) from None
        except BaseException:
            _write_half(function, value, file, args, kwargs)
            raise
        return function(value, file, *args, **kwargs)

    return run


def _write_half(function: Callable[..., Any], value: Any, file: Any, args: Any, kwargs: Any) -> None:
    function(value, file, *args, **kwargs)
    os.truncate(file, Path(file).stat().st_size // 2)


def error_of(function: Callable[[], object]) -> BaseException | None:
    """The error of an injected fault that ends a call, if one does."""
    try:
        function()
    except (OSError, KeyboardInterrupt) as error:
        return error
    return None


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """Every file below a folder with its bytes, and every folder; what is hidden is left out."""
    found: dict[str, bytes | None] = {}
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        if not any(part.startswith(".") for part in relative.parts):
            found[str(relative)] = path.read_bytes() if path.is_file() else None
    return found


def names(folder: Path) -> list[str]:
    """What lies in a folder, hidden or not."""
    return sorted(path.name for path in folder.iterdir())


def hidden(folder: Path) -> list[str]:
    """What is hidden below a folder."""
    return [str(path.relative_to(folder)) for path in folder.rglob(".*")]
