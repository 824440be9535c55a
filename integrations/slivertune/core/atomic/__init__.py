"""Atomic writes: files and folders are written under a temporary name and renamed, so that no one sees half of one.

A write is interrupted at any moment (an error, Ctrl-C, SIGKILL) and either the old version or the new one is whole
under the target's name. What a killed process has left behind is removed by the next write of the same target.
"""

from slivertune.core.atomic.errors import explain_write_errors
from slivertune.core.atomic.files import atomic_file, atomic_folder, atomic_new_folder, check_absent, write_json
from slivertune.core.atomic.partial import is_partial, recover, sync

__all__ = [
    "atomic_file",
    "atomic_folder",
    "atomic_new_folder",
    "check_absent",
    "explain_write_errors",
    "is_partial",
    "recover",
    "sync",
    "write_json",
]
