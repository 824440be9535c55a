"""Atomic writes: files and folders that are written beside their place and renamed, so that nobody meets half of one.

A write is interrupted at any moment (an error, Ctrl-C, SIGKILL) and either the old version or the new one is whole
under the target's name. What a killed process has left behind is removed by the next write of the same target.
"""

from slivertune.core.atomic.errors import explain_write_errors
from slivertune.core.atomic.files import check_absent, folder_aside, new_file, new_folder, write_json
from slivertune.core.atomic.partial import is_partial, recover, sync

__all__ = [
    "check_absent",
    "explain_write_errors",
    "folder_aside",
    "is_partial",
    "new_file",
    "new_folder",
    "recover",
    "sync",
    "write_json",
]
